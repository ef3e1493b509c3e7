"""The strategy ``hierarchy``: the step as a chain of segments, a menu for each kind of segment, one table for all budgets.

Storages may come back, go, and come back again, as deep as the table finds it worth. What the chain does not see (storages
that live through it, moments of the forward) the simulator does: where its peak is over the budget, the table is asked for
a tighter schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recoup.errors import UsageError
from recoup.plan import Capabilities
from recoup.simulate.index import Replays, replays
from recoup.solve.chain import ChainTable, Schedule, Segment
from recoup.solve.cuts import Chain, chain_of
from recoup.solve.descent import Judged, judge
from recoup.solve.holds import can_wait
from recoup.solve.menu import Dish, menus
from recoup.solve.strategy import Choice, Problem, needed_budget
from recoup.solve.windows import Windows, windows

__all__ = ["Hierarchy", "Links", "chain_budget", "links_of"]

_LEVELS = 400
_TRIES = 7
_SHRINK = 0.7
_CACHE_KEY = "_recoup_links"


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """The best schedule of the step's chain of segments within the budget."""

    name: str = "hierarchy"
    takes_budgets: bool = True

    def choose(self, problem: Problem) -> Choice:
        """The schedule that the simulator finds within the budget; the least peak if there is none.

        Raises:
            UsageError: there is no budget, or the step is no single chain of one forward and one backward.
        """
        budget = chain_budget(problem, self.name)
        links = links_of(replays(problem.graph), problem.executor)
        return (links.within(budget) or links.least()).choice


def chain_budget(problem: Problem, name: str) -> int:
    """The budget of a problem, for a strategy that needs one and a step that is one chain.

    Raises:
        UsageError: there is no budget, or the step is no single chain of one forward and one backward.
    """
    budget = needed_budget(problem, name)
    if not can_wait(replays(problem.graph)):
        calls, passes = problem.graph.root_calls, len(problem.graph.backwards)
        raise UsageError(f"the strategy {name!r} is for one chain; this step has {calls} calls of the model and {passes} backward passes")
    return budget


class Links:
    """The chain of a step for one executor: its segments, their menus, and the table of all schedules."""

    def __init__(self, index: Replays, executor: Capabilities, frame: Windows, dishes: list[list[Dish]] | None = None) -> None:
        self.index, self.executor, self.frame = index, executor, frame
        self.chain = chain_of(index, executor)
        base = _base(index, frame, self.chain)
        self.dishes = menus(index, executor, frame, self.chain, base) if dishes is None else dishes
        self.most_bytes = judge(index, frozenset(), executor).peak_bytes
        self.segments = [self._segment(segment, int(base[segment])) for segment in range(len(self.chain))]
        self.tables: dict[int, ChainTable] = {}

    def _segment(self, segment: int, base_bytes: int) -> Segment:
        seconds, peak = _forward(self.index, self.executor, self.chain, segment)
        entering = sum(self.index.bytes[v] for v in self.chain.entering[segment])
        return Segment(entering, seconds, peak, base_bytes, tuple(dish.way for dish in self.dishes[segment]))

    def table(self, most_bytes: int) -> ChainTable:
        """A table that reaches to a budget; budgets of one size share it."""
        most = self.most_bytes + self.most_bytes // 4
        while most * _SHRINK > max(most_bytes, self.index.graph.resident_bytes):
            most = int(most * _SHRINK)
        if most not in self.tables:
            self.tables[most] = ChainTable(self.segments, most, _LEVELS)
        return self.tables[most]

    def within(self, budget: int) -> Judged | None:
        """The fastest plan of the table that the simulator finds within the budget; None if none fits.

        The table neither sees all nor is exact, so it is asked for more or less than the budget until the simulated peaks close in on it.
        """
        best: Judged | None = None
        low, asked, high = 0, budget, budget + budget // 4
        table = self.table(high)
        for _ in range(_TRIES):
            schedule = table.schedule(asked)
            found = None if schedule is None else self.judged(schedule)
            if found is None or found.peak_bytes <= budget:
                low = asked
                if found is not None and (best is None or _rank(found) < _rank(best)):
                    best = found
            else:
                high = asked
            if high - low <= budget // 1000:
                break
            asked = (low + high) // 2
        return best

    def least(self) -> Judged:
        """The least simulated peak among the table's schedules."""
        best = judge(self.index, frozenset(), self.executor)
        most = self.table(0).most_bytes
        while (least := self.table(most).least_bytes) is None and most < self.most_bytes:
            most = int(most / _SHRINK) + 1
        if least is None:
            return best
        table = self.table(int(least * 1.1))
        for share in (1.0, 1.02, 1.05, 1.1):
            schedule = table.schedule(int(least * share))
            if schedule is not None:
                best = min(best, self.judged(schedule), key=lambda found: (found.peak_bytes, found.step_seconds))
        return best

    def judged(self, schedule: Schedule) -> Judged:
        """A schedule as a plan, simulated."""
        chain, index = self.chain, self.index
        starts = self._starts()
        recompute: set[int] = set()
        since: dict[int, int] = {}
        for segment, (way, stage) in enumerate(zip(schedule.ways, schedule.ways_since, strict=True)):
            dish = self.dishes[segment][way]
            nested = stage >= 0
            for v in chain.inner[segment]:
                if v in dish.dropped:
                    recompute.add(v)
                    since[v] = dish.since.get(v, starts[segment])
                elif nested:
                    recompute.add(v)
                    since[v] = starts[stage]
        for segment, stage in enumerate(schedule.boundaries_since):
            if stage >= 0:
                for v in chain.entering[segment]:
                    recompute.add(v)
                    since[v] = min(since.get(v, starts[stage]), starts[stage])
        return judge(index, frozenset(recompute), self.executor, since)

    def _starts(self) -> list[int]:
        """For each segment the number of the event with which its stage begins."""
        events = self.index.events
        starts, place = [len(events)] * len(self.chain), 0
        for segment in reversed(range(len(self.chain))):
            while place < len(events) and events[place].gap < self.chain.reached[segment]:
                place += 1
            starts[segment] = place
        return starts


def _rank(found: Judged) -> tuple[float, int]:
    return found.step_seconds, found.peak_bytes


def _base(index: Replays, frame: Windows, chain: Chain) -> NDArray[np.int64]:
    """The bytes that stand when each stage begins, whatever the chain decides."""
    deciding = {v for segment in range(len(chain)) for v in (*chain.inner[segment], *chain.entering[segment])}
    base = np.array([int(frame.base_across[min(gap, len(frame.base_across) - 1)]) for gap in chain.reached], dtype=np.int64)
    for v, (start, end) in frame.held.items():
        if v not in deciding and index.saves_of[v]:
            base += [index.bytes[v] if start < gap < end else 0 for gap in chain.reached]
    return base


def _forward(index: Replays, executor: Capabilities, chain: Chain, segment: int) -> tuple[float, int]:
    """Seconds and peak bytes of replaying a segment once for what it hands on."""
    wanted = set(chain.entering[segment + 1] if segment + 1 < len(chain) else ()) & _made_by(index, chain, segment)
    outputs, stack = set(wanted), list(wanted)
    while stack:
        for u in index.inputs_of[stack.pop()]:
            if u in chain.inner[segment] and u not in wanted:
                wanted.add(u)
                stack.append(u)
    ops = sorted({op for v in wanted for op in index.ops_of[v]})
    reads: dict[int, int] = {}
    for op in ops:
        for u in index.foreign[op]:
            reads[u] = reads.get(u, 0) + 1
    live = peak = sum(index.bytes[v] for v in chain.entering[segment])
    seconds = 0.0
    for op in ops:
        seconds += index.graph.ops[op].seconds + executor.replay_seconds
        live += index.produced_bytes[op]
        peak = max(peak, live + int(index.scratch[op]))
        live -= sum(index.bytes[v] for v in index.produced[op] if v not in wanted)
        for u in index.foreign[op]:
            reads[u] -= 1
            if not reads[u] and u in wanted and u not in outputs:
                live -= index.bytes[u]
    return seconds, peak


def _made_by(index: Replays, chain: Chain, segment: int) -> set[int]:
    return {v for op in chain.ops(segment) for v in index.produced[op]}


def links_of(index: Replays, executor: Capabilities) -> Links:
    """The chain of a step for one executor, made on first use and kept on the graph."""
    cache: dict[Capabilities, Links] = index.graph.__dict__.setdefault(_CACHE_KEY, {})
    if executor not in cache:
        cache[executor] = Links(index, executor, windows(index, executor))
    return cache[executor]
