"""Local search that goes through worse plans: keep something after all, make room for it elsewhere, take what is nearly as good.

Greedy descent (``recoup.solve.descent``) ends where no single change helps. Here a few decisions are changed at once, at random, those
that cost most seconds most often: a dropped storage is kept, one that waits is held from the first rebuild on, or a kept one is dropped.
What no longer fits is lowered at its peak until it does; then single changes for the better follow. The result replaces the current plan
if it is faster than that plan and an allowance, which falls to nothing over the search: threshold accepting (Dueck and Scheuer 1990,
"Threshold accepting", Journal of Computational Physics 90, 161-175).

The search is an amount of work with a generator of its own, so that it repeats on any machine.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping

from recoup.plan import Capabilities
from recoup.simulate.index import Replays
from recoup.solve.descent import Bench, Judged, has_room
from recoup.solve.lowering import lower_peak

__all__ = ["exchanged"]

_SEED = 1
# How many decisions are changed at once, and how often each kind of change is made.
_CHANGES = (1, 1, 2)
_KEEP, _HOLD = 0.4, 0.8
_REPAIRS, _IMPROVEMENTS = 25, 6
# What is so much slower than the current plan is not improved further; the allowance at the start of each round; relative to the step.
_HOPELESS, _ALLOWANCES = 0.1, (0.03, 0.01, 0.003)
_CRUMB = 1e-9


def exchanged(
    index: Replays, start: Judged, executor: Capabilities, dropping: frozenset[int], budget: int, enough: float, work: int, seconds: float
) -> Judged:
    """The fastest plan within the budget that was found, ``start`` if none is faster.

    Args:
        index: the step.
        start: a plan within the budget.
        executor: what runs it.
        dropping: the storages that may be dropped.
        budget: the peak allowed, in bytes.
        enough: seconds of a step with which the search is content.
        work: how many operations may be simulated.
        seconds: of wall clock, after which the search stops wherever it is.
    """
    return _Exchange(index, start, executor, dropping, budget, work).run(enough, time.perf_counter() + seconds)


class _Exchange:
    """One search: the best plan, the current one, the work that is done."""

    def __init__(self, index: Replays, start: Judged, executor: Capabilities, dropping: frozenset[int], budget: int, work: int) -> None:
        self.index, self.executor, self.dropping, self.budget, self.work = index, executor, dropping, budget, work
        self.best = self.current = start
        self.bench = Bench(index, executor)
        self.random = random.Random(_SEED)
        self.op_seconds = index.op_seconds(executor.replay_seconds)

    def run(self, enough: float, deadline: float) -> Judged:
        """Search until the work is done, the time is over or the best plan is good enough."""
        for number, allowance in enumerate(_ALLOWANCES, 1):
            self.current = self.best
            self._round(allowance, self.work * number // len(_ALLOWANCES), enough, deadline)
        return self.best

    def _round(self, allowance: float, work: int, enough: float, deadline: float) -> None:
        """From the best plan on, with an allowance that falls to nothing as the work done comes to ``work``."""
        begun = self.bench.spent
        while self.bench.spent < work and self.best.step_seconds > enough and time.perf_counter() < deadline:
            found = self.bench.judge(*self._changed())
            if found.peak_bytes > self.budget:
                found = lower_peak(self.index, found, self.executor, self.dropping, _REPAIRS, self.budget, self.bench.judge)
            if found.peak_bytes > self.budget:
                continue
            if found.step_seconds < self.current.step_seconds + _HOPELESS * self.index.base_seconds:
                found = self._improved(found)
            left = max(work - self.bench.spent, 0) / max(work - begun, 1)
            if found.step_seconds < self.current.step_seconds + allowance * self.index.base_seconds * left * self.random.random() ** 2:
                self.current = found
            if found.step_seconds < self.best.step_seconds:
                self.best = found

    def _changed(self) -> tuple[frozenset[int], dict[int, int]]:
        """The current plan with some decisions changed."""
        recompute, since = set(self.current.recompute), dict(self.current.since)
        times = Counter(self.current.run.replayed.ops)
        for _ in range(self.random.choice(_CHANGES)):
            kind = self.random.random()
            if kind < _KEEP and recompute:
                v = self._drawn(sorted(recompute), times, 0)
                recompute.discard(v)
                since.pop(v, None)
            elif _KEEP <= kind < _HOLD and since:
                since.pop(self._drawn(sorted(since), times, 1))
            elif len(recompute) < len(self.dropping):
                recompute.add(self.random.choice(sorted(self.dropping - recompute)))
        return frozenset(recompute), since

    def _drawn(self, storages: list[int], times: Mapping[int, int], beyond: int) -> int:
        """One of them, those most often that are replayed for most seconds, the first ``beyond`` times not counted."""
        weights = [sum(self.op_seconds[op] * max(times.get(op, 0) - beyond, 0) for op in self.index.ops_of[v]) + _CRUMB for v in storages]
        return self.random.choices(storages, weights)[0]

    def _improved(self, found: Judged) -> Judged:
        """Single changes for the better: something held earlier, or kept where there is room."""
        for _ in range(_IMPROVEMENTS):
            times = Counter(found.run.replayed.ops)
            if found.since and self.random.random() < 0.5:
                v = self._drawn(sorted(found.since), times, 1)
                other = self.bench.judge(found.recompute, {u: moment for u, moment in found.since.items() if u != v})
            else:
                storages = [v for v in sorted(found.recompute) if has_room(self.index, found, v, self.budget)]
                if not storages:
                    continue
                other = self.bench.judge(found.recompute - {self._drawn(storages, times, 0)}, found.since)
            if other.peak_bytes <= self.budget and other.step_seconds < found.step_seconds:
                found = other
        return found
