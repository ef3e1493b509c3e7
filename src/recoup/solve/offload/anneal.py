"""Local search through joint plans over the budget: ``recoup.solve.anneal``, where storages may also be offloaded."""

from __future__ import annotations

import time
from dataclasses import replace

from recoup.plan import Capabilities
from recoup.simulate.offload import Offload
from recoup.solve.anneal import Walk
from recoup.solve.offload.judged import JointJudged, judge_joint
from recoup.solve.offload.moves import Space

__all__ = ["annealed_joint"]

# How often a change is one of what moves; the kinds of these where the plan is over the budget (something that stands there is offloaded,
# a window is made smaller; else something comes to be recomputed or kept) and where it is not (something stays after all, is recomputed,
# is moved in place of recomputing; else a window changes).
_MOVES = 0.35
_OUT, _NARROWER = 0.6, 0.8
_STAYS, _REBUILT, _MOVED = 0.3, 0.5, 0.8


def annealed_joint(
    space: Space, start: JointJudged, executor: Capabilities, budget: int, enough: float, work: int, seconds: float
) -> JointJudged:
    """The fastest plan within the budget that was found, ``start`` if none is faster; see :func:`recoup.solve.anneal.annealed`."""
    return _Joint(space, start, executor, budget).run(enough, work, time.perf_counter() + seconds)


class _Joint(Walk[JointJudged]):
    """The search where storages are kept, recomputed or offloaded."""

    def __init__(self, space: Space, start: JointJudged, executor: Capabilities, budget: int) -> None:
        super().__init__(space.index, start, executor, space.dropping, budget)
        self.space = space
        self.offload: Offload | None = None

    def changed(self) -> JointJudged:
        found = self.current.found
        recompute, since, self.offload = set(found.recompute), dict(found.since), found.offload
        if self.random.random() >= _MOVES:
            self.change(recompute, since)
        elif self.current.peak_over:
            self._relieve_by_moves(recompute, since)
        else:
            self._hasten_by_moves(recompute, since)
        away = self._away() - recompute
        if self.offload is not None and away != self.offload.storages:
            self.offload = replace(self.offload, storages=away)
        return judge_joint(self.index, frozenset(recompute), self.executor, since, self.offload)

    def differs(self, v: int) -> bool:
        return super().differs(v) or (v in self.current.found.offloaded) != (v in self.best.offloaded)

    def adopt(self, storages: list[int], recompute: set[int], since: dict[int, int]) -> None:
        super().adopt(storages, recompute, since)
        self._put((self._away() - set(storages)) | (self.best.offloaded & set(storages)))

    def _away(self) -> frozenset[int]:
        return self.offload.storages if self.offload is not None else frozenset()

    def _put(self, storages: frozenset[int]) -> bool:
        """Let just these be offloaded, if they have a place."""
        moving = self.space.offloading(self.offload, storages)
        if moving is None:
            return False
        self.offload = moving
        return True

    def _relieve_by_moves(self, recompute: set[int], since: dict[int, int]) -> None:
        """Less at a moment that is over the budget: something there is offloaded, less moves at once, or something does not move."""
        run, moment, kind = self.current.found.run, self.over_moment(), self.random.random()
        recorded, copies = run.live(moment)
        here = [v for v in (*recorded, *copies) if v in self.space.movable]
        inside, outside = [v for v in here if v not in self._away()], [v for v in here if v in self._away()]
        if kind < _OUT and inside:
            self._out(self.by_bytes(inside), recompute, since)
        elif kind < _NARROWER and self.offload is not None:
            self._window("write" if moment.at < self.index.turn else "read", -1)
        elif outside:
            v = self.by_bytes(outside)
            if v in self.dropping and self.random.random() < 0.5:
                recompute.add(v)
            else:
                self._put(self._away() - {v})

    def _hasten_by_moves(self, recompute: set[int], since: dict[int, int]) -> None:
        """Less on the link, less recomputed in its place, or other windows."""
        kind, away = self.random.random(), sorted(self._away())
        if kind < _REBUILT and away:
            v = self.random.choice(away)
            if kind < _STAYS or v not in self.dropping:
                self._put(self._away() - {v})
            else:
                recompute.add(v)
        elif kind < _MOVED:
            storages = [v for v in sorted(recompute) if v in self.space.movable] or sorted(self.space.movable - self._away())
            if storages:
                self._out(self.by_bytes(storages), recompute, since)
        else:
            self._window(self.random.choice(("write", "read")), self.random.choice((-1, 1)))

    def _out(self, v: int, recompute: set[int], since: dict[int, int]) -> None:
        if self._put(self._away() | {v}):
            recompute.discard(v)
            since.pop(v, None)

    def _window(self, direction: str, step: int) -> None:
        change = self.space.windowed(self.current.found, direction, step)
        if change is not None:
            self.offload = change.offload
