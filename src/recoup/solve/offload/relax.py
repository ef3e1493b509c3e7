"""Choices near the relaxed program: solve it, round, simulate, teach it what the simulator saw, again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from recoup.cost import OffloadLink
from recoup.plan import Capabilities
from recoup.simulate.index import Replays
from recoup.simulate.offload import Offload
from recoup.solve.offload.judged import JointJudged, judge_joint
from recoup.solve.offload.moving import Moving, within_cap
from recoup.solve.offload.program import JointProgram, Point, joint_windows
from recoup.solve.program import Row
from recoup.solve.rows import Rows, spread

__all__ = ["relaxed_choices"]

_ROUNDS, _ROWS_ROUNDS = 5, 6
_PARTLY = 0.02


class _Relaxed:
    """The program of one link and window, its rows, and what simulations taught of them."""

    def __init__(
        self, index: Replays, executor: Capabilities, moving: Moving, link: OffloadLink, window: int, cap: int | None, recomputing: bool
    ) -> None:
        self.index, self.link, self.window = index, link, window
        frame = joint_windows(index, executor, moving.storages, recomputing)
        self.program = JointProgram(index, executor, frame, moving, link, window, cap)
        self.rows = Rows(index, frame)
        self.taught: NDArray[np.int64] = np.zeros(index.count, dtype=np.int64)
        self.rows.add_proven(frame.needed, frozenset(), 0)
        self.rows.add_proven(frozenset(), frame.needed, 0)

    def point(self, budget: int, seconds: Callable[[], float]) -> Point | None:
        """The optimal point, rows added until it violates none."""
        point = None
        for _ in range(_ROWS_ROUNDS):
            rows = [Row(row.at, row.fixed + int(self.taught[row.at]), row.kept, row.copied, False) for row in self.rows.proven.values()]
            if seconds() <= 0:
                break
            found = self.program.point(rows, budget, seconds())
            if found is None:
                return point
            point = found
            if not self._refine(point, budget):
                break
        return point

    def _refine(self, point: Point, budget: int) -> int:
        recompute, away = self.rounded(point)
        needed = self.program.windows.needed
        gone = (recompute | away) & needed
        profile = self.rows.profile((needed - gone) | point.held, gone) + self.taught
        profile = profile + self.program.allowance(away)
        return self._add(spread(profile, budget))

    def _add(self, moments: list[int]) -> int:
        """Rows for those of these operations that have none yet; how many those are."""
        fresh = [at for at in moments if at not in self.rows.proven]
        self.rows.add_rows(fresh)
        return len(fresh)

    def rounded(self, point: Point) -> tuple[frozenset[int], frozenset[int]]:
        """What is dropped even partly is dropped, by the way that it mostly goes."""
        away = frozenset(v for v, part in point.offload.items() if part > _PARTLY and part >= point.recompute.get(v, 0.0))
        recompute = frozenset(v for v, part in point.recompute.items() if part > _PARTLY and v not in away)
        return recompute, away

    def teach(self, found: JointJudged, budget: int) -> int:
        """Where the simulated step holds more than the program thought, and is over the budget."""
        needed = self.program.windows.needed
        gone = (found.recompute | found.offloaded) & needed
        thought = self.rows.profile(needed - gone, gone) + self.program.allowance(found.offloaded)
        more = np.maximum(found.run.bytes_at - thought, 0)
        over = spread(found.run.bytes_at, budget)
        self.taught = np.where(found.run.bytes_at > budget, np.maximum(self.taught, more), self.taught)
        self._add(over)
        return len(over)


def relaxed_choices(
    index: Replays,
    executor: Capabilities,
    moving: Moving,
    link: OffloadLink,
    window: int,
    cap: int | None,
    budget: int,
    seconds: Callable[[], float],
    recomputing: bool = True,
) -> Iterator[JointJudged]:
    """Simulated choices for one window, each from a program that knows what the ones before taught; the last may fit.

    Args:
        index: the step.
        executor: what runs it.
        moving: what can move.
        link: over which it moves.
        window: bytes of both windows.
        cap: bytes that may wait on the target.
        budget: the peak allowed, in bytes.
        seconds: what is left of the time to search.
        recomputing: whether recomputation is a choice too.
    """
    relaxed = _Relaxed(index, executor, moving, link, window, cap, recomputing)
    for _ in range(_ROUNDS):
        point = relaxed.point(budget, seconds)
        if point is None:
            return
        recompute, away = relaxed.rounded(point)
        away = within_cap(index, link, cap, sorted(away, key=lambda v: (-point.offload[v], v)))
        found = judge_joint(index, recompute, executor, offload=Offload(away, link, window, window))
        yield found
        if found.peak_bytes <= budget or not relaxed.teach(found, budget) or seconds() <= 0:
            return
