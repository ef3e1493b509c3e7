"""Search for joint plans over one link: starts near the linear program, repairs, single changes, then changes through worse plans.

All limits are amounts of work, counted in simulated operations, so that the same step, budget and link give the same plan on any
machine; the time limit only cuts the search short.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import log2

from recoup.plan import Capabilities
from recoup.simulate.offload import Offload, puts_of
from recoup.solve.descent import SIMULATION_OVERHEAD, has_room
from recoup.solve.holds import can_wait
from recoup.solve.offload.anneal import annealed_joint
from recoup.solve.offload.every import every_plan
from recoup.solve.offload.judged import JointJudged, judge_joint
from recoup.solve.offload.moves import Change, Space, lowering, windows_of
from recoup.solve.offload.moving import within_cap
from recoup.solve.offload.relax import relaxed_choices

__all__ = ["Search", "everything_out"]

_SEED = 1
# So many starts are repaired, fewer where a simulation costs much: near a least peak those that end best do not look it at first.
_STARTS, _FEWEST_STARTS, _START_WORK = 7, 3, 3_000_000
# The window that is tried first, as a power of two of the largest storage that can move.
_LIKELY = 1.4
_CROSSED, _REPAIRS, _SWEEP, _CUTS = 3, 120, 60, 8
_CHANGES, _SHORT_REPAIRS, _IMPROVEMENTS = (1, 1, 2, 3), 20, 5
_WORK, _PER_DECISION, _ALLOWANCES = 300_000, 12, (0.02, 0.005)
_HOPELESS = 0.05
# Local search in plans over the budget: from which gap on, and at which with all its work; up to how many decisions; and that work.
_OPEN, _WIDE_OPEN, _MANY, _ANNEALED, _ANNEALED_PER_DECISION = 0.015, 0.03, 800, 4_000_000, 60


class Search:
    """One search: the best plan that fits, and all that was tried.

    Args:
        space: what can be chosen.
        executor: what runs it.
        budget: the peak allowed, in bytes.
        enough: seconds of a step with which the search is content.
        remaining: what is left of the time to search, in seconds.
    """

    def __init__(self, space: Space, executor: Capabilities, budget: int, enough: float, remaining: Callable[[], float]) -> None:
        self.space, self.index, self.executor, self.budget = space, space.index, executor, budget
        self.enough, self.remaining = enough, remaining
        self.best: JointJudged | None = None
        self.spent = 0
        self.random = random.Random(_SEED)
        self.base = self.index.base_seconds
        self.op_seconds = self.index.op_seconds(executor.replay_seconds)

    # -- stages

    def start(self, deep: Callable[[], Iterable[JointJudged]] = tuple) -> None:
        """Plans near the linear programs of all windows, crossed with ``deep`` ones; the best of them repaired and improved."""
        found: dict[object, JointJudged] = {}
        recomputing = bool(self.space.dropping)
        for window in self._windows():
            if self.late() or self.content():
                break
            for one in relaxed_choices(
                self.index, self.executor, self.space.moving, self.space.link, window, self.space.cap, self.budget, self.remaining,
                recomputing,
            ):  # fmt: skip
                self.offer(one)
                found[one.joint_key] = one
        starts = sorted(found.values(), key=self._promise)[:_CROSSED]
        if not self.content():
            for other in deep():
                for one in self._crossings(starts, other):
                    self.offer(one)
                    found[one.joint_key] = one
        for one in sorted(found.values(), key=self._promise)[: self._starts()]:
            if not self.content():
                self.polish(one)

    def _starts(self) -> int:
        """How many starts are repaired."""
        affordable = _START_WORK // ((_REPAIRS + _SWEEP) * (SIMULATION_OVERHEAD + self.index.count))
        return min(max(affordable, _FEWEST_STARTS), _STARTS)

    def _windows(self) -> list[int]:
        """The sizes of windows, those first that give good plans most often."""
        sizes = [size for size in windows_of(self.space.moving) if size]
        return sorted(sizes, key=lambda size: abs(log2(size / self.space.moving.largest) - _LIKELY))

    def polish(self, found: JointJudged) -> None:
        """Offer a choice, made to fit and improved."""
        if not self.fits(found):
            found = self.lowered(found, _REPAIRS)
        if self.offer(found) and not self.content():
            self.offer(self._swept(found))

    def _crossings(self, starts: Iterable[JointJudged], other: JointJudged) -> list[JointJudged]:
        """Plans that treat what is saved early as ``other`` does, and what is saved late as the starts do.

        The early layers come last in the backward, where all gradients stand: there a plan may have to rebuild more than once,
        of which the linear program knows nothing, while the link serves the rest.
        """
        order = [gap for gap, _ in puts_of(self.index.graph, self.space.movable)]
        cuts = sorted({order[len(order) * place // _CUTS] for place in range(1, _CUTS)}) if order else []
        return [self._crossed(start, other, cut) for start in starts for cut in cuts if not self.late()]

    def _crossed(self, late: JointJudged, early: JointJudged, cut: int) -> JointJudged:
        first = {v: self.index.graph.saves[saves[0]].packed_at for v, saves in enumerate(self.index.saves_of) if saves}

        def is_late(v: int) -> bool:
            # What autograd does not save goes with the operation that makes it.
            return first.get(v, int(self.index.born[v])) >= cut

        recompute = frozenset(v for v in late.recompute if is_late(v)) | frozenset(v for v in early.recompute if not is_late(v))
        since = {v: moment for v, moment in early.since.items() if not is_late(v)}
        away = frozenset(v for v in late.offloaded if is_late(v)) | frozenset(v for v in early.offloaded if not is_late(v))
        moving = replace(late.offload, storages=away) if late.offload is not None else None
        return self.judge(Change(recompute, since, moving))

    def exchange(self) -> None:
        """Local search through worse plans from the best one on."""
        decisions = len(self.space.movable | self.space.dropping)
        begun, work = self.spent, min(_WORK, _PER_DECISION * decisions * (SIMULATION_OVERHEAD + self.index.count))
        for number, allowance in enumerate(_ALLOWANCES, 1):
            if self.best is not None:
                self._round(self.best, allowance, begun + work * number // len(_ALLOWANCES))

    def anneal(self) -> None:
        """Local search through plans over the budget, the longer the more there may be to gain; then once more within it."""
        decisions = len(self.space.movable | self.space.dropping)
        if self.best is None or decisions > _MANY or not (can_wait(self.index) and self.executor.rebuilds_again):
            return
        open_share = (self.best.step_seconds - self.enough) / self.base
        if open_share <= _OPEN:
            return
        most = min(_ANNEALED, _ANNEALED_PER_DECISION * decisions * (SIMULATION_OVERHEAD + self.index.count))
        work = int(most * min(open_share / _WIDE_OPEN, 1.0))
        self.offer(annealed_joint(self.space, self.best, self.executor, self.budget, self.enough, work, self.remaining()))
        self.exchange()

    def enumerate(self) -> None:
        """Every plan of a step that is small enough for that."""
        for changes in every_plan(self.space, self.executor):
            if self.late():
                break
            for change in changes:
                if not self.offer(self.judge(change)):
                    break  # wider windows take more

    def lowered(self, found: JointJudged, tries: int, enough: int | None = None) -> JointJudged:
        """The choice changed until its peak is no more than ``enough`` (the budget), or cannot be lowered."""
        limit = self.budget if enough is None else enough
        while tries > 0 and found.peak_bytes > limit and not self.late():
            better = None
            for change in lowering(self.space, found):
                tries -= 1
                other = self.judge(change)
                if (other.peak_bytes, other.step_seconds) < (found.peak_bytes, found.step_seconds):
                    better = other
                    break
                if tries <= 0:
                    break
            if better is None:
                break
            found = better
        return found

    # -- what they share

    def judge(self, change: Change) -> JointJudged:
        """A change, simulated."""
        found = judge_joint(self.index, change.recompute, self.executor, change.since, change.offload)
        self.spent += found.work
        return found

    def fits(self, found: JointJudged) -> bool:
        """Whether a choice is within the budget, and what it offloads has its place."""
        return found.peak_bytes <= self.budget and (self.space.cap is None or found.offloaded_bytes <= self.space.cap)

    def offer(self, found: JointJudged) -> bool:
        """Take a plan if it fits and is better; says whether it fits."""
        if not self.fits(found):
            return False
        if self.best is None or _rank(found) < _rank(self.best):
            self.best = found
        return True

    def content(self) -> bool:
        """Whether the best plan is good enough."""
        return self.best is not None and self.best.step_seconds <= self.enough

    def late(self) -> bool:
        """Whether the time to search is over."""
        return self.remaining() <= 0

    def _promise(self, found: JointJudged) -> tuple[bool, float, int]:
        """Plans that fit first, then by time and what they are over the budget, as if it cost as much of the time to be rid of."""
        over = max(found.peak_bytes - self.budget, 0) / max(self.budget, 1)
        return over > 0.1, found.step_seconds + over * self.base, found.peak_bytes

    def _cost(self, found: JointJudged) -> dict[int, float]:
        """What each dropped storage may cost: its replays, or its time on the link as far as the step waits for that."""
        times = Counter(found.run.replayed.ops)
        cost = {v: sum(self.op_seconds[op] * times[op] for op in self.index.ops_of[v] if op in times) for v in found.recompute}
        transfers = found.run.transfers
        if transfers is not None:
            link = self.space.link
            busy = sum(move.end_seconds - move.start_seconds for move in transfers.moves)
            waited = transfers.stall_seconds / (busy or 1.0)
            cost.update(dict.fromkeys(found.offloaded, self.executor.replay_seconds))
            for move in transfers.moves:
                seconds = move.end_seconds - move.start_seconds
                cost[move.storage] += seconds * waited + link.drag_seconds(seconds)
        return cost

    def _swept(self, found: JointJudged) -> JointJudged:
        """Single changes for the better, the dearest storages first: kept where there is room, or gone the other way; other windows."""
        cost = self._cost(found)
        changes: list[Callable[[JointJudged], Change | None]] = []
        for direction in ("write", "read"):
            changes.extend(_window_change(self.space, direction, step) for step in (1, -1))
        tries = _SWEEP
        for v in sorted(cost, key=lambda v: (-cost[v], v))[:_SWEEP]:
            changes.extend(self._for_the_better(v))
        for change in changes:
            if tries <= 0 or self.late():
                break
            made = change(found)
            if made is None:
                continue
            tries -= 1
            other = self.judge(made)
            if self.fits(other) and _rank(other) < _rank(found):
                found = other
        return found

    def _for_the_better(self, v: int) -> Iterable[Callable[[JointJudged], Change | None]]:
        def keep(found: JointJudged) -> Change | None:
            dropped = v in found.recompute or v in found.offloaded
            return self.space.kept(found, v) if dropped and has_room(self.index, found, v, self.budget) else None

        def other(found: JointJudged) -> Change | None:
            if v in found.recompute:
                return self.space.offloaded(found, v)
            return self.space.recomputed(found, v) if v in found.offloaded else None

        return keep, other

    def _round(self, current: JointJudged, allowance: float, work: int) -> None:
        """From a plan on, with an allowance that falls to nothing as the work done comes to ``work``."""
        begun = self.spent
        while self.spent < work and not self.content() and not self.late():
            found = self._changed(current)
            if not self.fits(found):
                found = self.lowered(found, _SHORT_REPAIRS)
            if not self.fits(found):
                continue
            if found.step_seconds < current.step_seconds + _HOPELESS * self.base:
                found = self._improved(found)
            left = max(work - self.spent, 0) / max(work - begun, 1)
            if found.step_seconds < current.step_seconds + allowance * self.base * left * self.random.random() ** 2:
                current = found
            self.offer(found)

    def _changed(self, current: JointJudged) -> JointJudged:
        """The current plan with some decisions changed."""
        found = current
        for _ in range(self.random.choice(_CHANGES)):
            change = self._drawn_change(found)
            if change is not None:
                found = self.judge(change)
        return found

    def _drawn_change(self, found: JointJudged) -> Change | None:
        space, kind, cost = self.space, self.random.random(), self._cost(found)
        dropped = sorted(cost)
        if kind < 0.1:
            return space.windowed(found, self.random.choice(("write", "read")), self.random.choice((-1, 1)))
        if kind < 0.65 and dropped:
            v = self._drawn(dropped, [cost[u] for u in dropped])
            if kind < 0.35:
                return space.kept(found, v)
            return space.offloaded(found, v) if v in found.recompute else space.recomputed(found, v)
        kept = sorted((space.movable | space.dropping) - found.recompute - found.offloaded)
        if not kept:
            return None
        v = self._drawn(kept, [float(self.index.bytes[u]) for u in kept])
        first, second = space.offloaded, space.recomputed
        if self.random.random() < 0.4:
            first, second = second, first
        return first(found, v) or second(found, v)

    def _drawn(self, storages: Sequence[int], weights: Sequence[float]) -> int:
        least = (sum(weights) or 1.0) / len(weights) * 0.05
        return self.random.choices(storages, [weight + least for weight in weights])[0]

    def _improved(self, found: JointJudged) -> JointJudged:
        """A few single changes for the better."""
        for _ in range(_IMPROVEMENTS):
            cost = self._cost(found)
            storages = [v for v in sorted(cost) if has_room(self.index, found, v, self.budget)]
            if found.since and self.random.random() < 0.3:
                v = self.random.choice(sorted(found.since))
                since = {u: moment for u, moment in found.since.items() if u != v}
                change: Change | None = Change(found.recompute, since, found.offload)
            elif storages:
                change = self.space.kept(found, self._drawn(storages, [cost[v] for v in storages]))
            else:
                change = self.space.windowed(found, self.random.choice(("write", "read")), 1)
            if change is None:
                continue
            other = self.judge(change)
            if self.fits(other) and other.step_seconds < found.step_seconds:
                found = other
        return found


def _window_change(space: Space, direction: str, step: int) -> Callable[[JointJudged], Change | None]:
    return lambda found: space.windowed(found, direction, step)


def _rank(found: JointJudged) -> tuple[float, int, int]:
    return found.step_seconds, found.peak_bytes, found.offloaded_bytes


def everything_out(space: Space, executor: Capabilities) -> JointJudged:
    """All that can move moved, as far as there is place for it, with the smallest windows."""
    chosen = within_cap(space.index, space.link, space.cap, space.moving.storages)
    return judge_joint(space.index, frozenset(), executor, offload=Offload(chosen, space.link, 0, 0))
