"""Simulated choices, and local search that keeps more where there is room."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from recoup.plan import Capabilities
from recoup.simulate.index import Replays
from recoup.simulate.judge import ALWAYS, Run
from recoup.solve.choice import runnable
from recoup.solve.holds import first_asks, held_from
from recoup.solve.strategy import Choice

__all__ = [
    "SIMULATION_OVERHEAD",
    "Bench",
    "Judged",
    "has_room",
    "hold_more",
    "judge",
    "judge_choice",
    "keep_more",
    "tries_for",
]


SIMULATION_OVERHEAD = 150
"""What simulating a plan takes beside its operations, counted in these."""

# How many operations local search may simulate at a time, and within which limits that many plans.
_SIMULATED_OPS = 80_000
_FEWEST, _MOST = 4, 240


def tries_for(found: Judged) -> int:
    """How many plans like this one local search may simulate: an amount of work, so that results repeat on any machine."""
    return min(max(_SIMULATED_OPS // max(found.run.index.count + len(found.run.replayed.ops), 1), _FEWEST), _MOST)


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """A choice with its simulated peak and time; ``since`` are the moments of ``recoup.solve.holds``."""

    recompute: frozenset[int]
    peak_bytes: int
    step_seconds: float
    run: Run
    since: Mapping[int, int] = field(default_factory=dict)

    @property
    def choice(self) -> Choice:
        """This, as a strategy answers."""
        return Choice(self.recompute, held_from=self.run.held_from)

    @property
    def work(self) -> int:
        """What simulating this took, counted in operations."""
        return SIMULATION_OVERHEAD + self.run.index.count + len(self.run.replayed.ops)

    @property
    def key(self) -> tuple[frozenset[int], tuple[tuple[int, int], ...]]:
        """What tells two choices apart."""
        return self.recompute, tuple(sorted(self.run.held_from.items()))


def judge(index: Replays, recompute: frozenset[int], executor: Capabilities, since: Mapping[int, int] = ALWAYS) -> Judged:
    """The choice, made runnable, and simulated."""
    chosen = runnable(index, recompute, executor)
    waits = {v: moment for v, moment in since.items() if v in chosen}
    run = Run(index, chosen, held_from(index, chosen, waits))
    return Judged(chosen, int(run.bytes_at.max(initial=0)), run.seconds(executor), run, waits)


class Bench:
    """Where a search has its choices simulated, and the work counted.

    Attributes:
        spent: operations that were simulated.
    """

    def __init__(self, index: Replays, executor: Capabilities) -> None:
        self.index, self.executor = index, executor
        self.spent = 0

    def judge(self, recompute: frozenset[int], since: Mapping[int, int]) -> Judged:
        """The choice, made runnable, and simulated."""
        found = judge(self.index, recompute, self.executor, since)
        self.spent += found.work
        return found


def judge_choice(index: Replays, choice: Choice, executor: Capabilities) -> Judged:
    """A strategy's answer, simulated, with its moments as solvers count them."""
    asks, never = first_asks(index), len(index.events)
    return judge(index, choice.recompute, executor, {v: asks.get(u, never) for v, u in choice.held_from.items()})


def keep_more(index: Replays, start: Judged, executor: Capabilities, budget: int, seconds: float, tries: int) -> Judged:
    """Keep dropped storages after all, dearest first, while the simulated peak stays within the budget; stops after ``seconds``."""
    best, deadline = start, time.perf_counter() + seconds
    for v in sorted(start.recompute, key=lambda v: (-_saved_seconds(index, v), v)):
        if v not in best.recompute or not has_room(index, best, v, budget):
            continue
        tries -= 1
        if tries < 0 or time.perf_counter() > deadline:
            break
        found = judge(index, best.recompute - {v}, executor, best.since)
        if found.peak_bytes <= budget and found.step_seconds < best.step_seconds:
            best = found
    return best


def hold_more(index: Replays, start: Judged, executor: Capabilities, budget: int, seconds: float, tries: int) -> Judged:
    """Hold copies earlier that wait, those first that are rebuilt again most dearly, while the simulated peak stays within the budget."""
    best, deadline = start, time.perf_counter() + seconds
    wasted = _rebuilt_again(index, start.run)
    for v in sorted(start.since, key=lambda v: (-wasted.get(v, 0.0), v)):
        tries -= 1
        if tries < 0 or time.perf_counter() > deadline:
            break
        if v in best.since:
            found = judge(index, best.recompute, executor, {u: moment for u, moment in best.since.items() if u != v})
            if found.peak_bytes <= budget and found.step_seconds < best.step_seconds:
                best = found
    return best


def _rebuilt_again(index: Replays, run: Run) -> dict[int, float]:
    """Seconds that each storage's operations are replayed for beyond the first time."""
    count: dict[int, int] = {}
    for op in run.replayed.ops:
        count[op] = count.get(op, 0) + 1
    return {v: sum(index.graph.ops[op].seconds * (count[op] - 1) for op in index.ops_of[v] if op in count) for v in run.recompute}


def _saved_seconds(index: Replays, v: int) -> float:
    return sum(index.graph.ops[op].seconds for op in index.ops_of[v])


def has_room(index: Replays, best: Judged, v: int, budget: int) -> bool:
    """Whether the bytes of a storage fit while it is held and no copy of it is alive yet."""
    start = int(index.unheld[v])
    made = min((copy.gap for copy in best.run.replayed.copies if copy.storage == v), default=index.count)
    end = min(int(index.dies[v]), made) if index.saves_of[v] else made
    if end <= start:
        return True
    return int(best.run.bytes_at[start:end].max(initial=0)) + index.bytes[v] <= budget
