"""Local search for the least peak, through plans with a higher one.

Descent (``recoup.solve.lowering``) ends where no single change lowers the peak. Here a few decisions of the current plan are changed at
random, at times those of a whole stretch of the forward; the result is lowered until it cannot be lowered further, and replaces the
current plan if its peak is no higher than that and an allowance, which falls to nothing over the search: iterated local search
(Lourenço, Martin and Stützle 2003, "Iterated Local Search", Handbook of Metaheuristics, 320-353).

The search is an amount of work with a generator of its own, so that it repeats on any machine.
"""

from __future__ import annotations

import random

from recoup.plan import Capabilities
from recoup.simulate.index import Replays
from recoup.solve.descent import Bench, Judged
from recoup.solve.holds import can_wait
from recoup.solve.lowering import lower_peak, stretch

__all__ = ["shaken"]

_SEED = 1
# How many decisions are changed at once, and how often each kind of change is made: something is kept, held earlier, dropped with all
# that leads up to it within so many operations; else one more is dropped.
_CHANGES = (1, 1, 2, 3)
_KEEP, _HOLD, _STRETCH, _REACHES = 0.35, 0.55, 0.8, (3, 6, 12, 24)
# Simulated plans of one descent; what is so much above the best peak is not worth one; and the allowance at the start.
_REPAIRS, _HOPELESS, _ALLOWANCE = 40, 1.25, 0.02


def shaken(index: Replays, start: Judged, executor: Capabilities, dropping: frozenset[int], work: int) -> Judged:
    """The plan with the least peak that was found, ``start`` if none has a lower one.

    Args:
        index: the step.
        start: a plan.
        executor: what runs it.
        dropping: the storages that may be dropped.
        work: how many operations may be simulated.
    """
    return _Search(index, start, executor, dropping).run(work) if dropping else start


class _Search:
    """One search: the best plan, the current one, the work that is done."""

    def __init__(self, index: Replays, start: Judged, executor: Capabilities, dropping: frozenset[int]) -> None:
        self.index, self.executor, self.dropping = index, executor, dropping
        self.best = self.current = start
        self.bench = Bench(index, executor)
        self.random = random.Random(_SEED)
        self.ordered = sorted(dropping)

    def run(self, work: int) -> Judged:
        """Search until the work is done."""
        while self.bench.spent < work:
            found = self.bench.judge(*self._changed())
            if found.peak_bytes > self.best.peak_bytes * _HOPELESS:
                continue
            found = lower_peak(self.index, found, self.executor, self.dropping, _REPAIRS, judging=self.bench.judge)
            allowance = _ALLOWANCE * max(1 - self.bench.spent / work, 0.0) * self.random.random() ** 2
            if found.peak_bytes <= self.current.peak_bytes * (1 + allowance):
                self.current = found
            if found.peak_bytes < self.best.peak_bytes:
                self.best = self.current = found
        return self.best

    def _changed(self) -> tuple[frozenset[int], dict[int, int]]:
        """The current plan with some decisions changed."""
        recompute, since = set(self.current.recompute), dict(self.current.since)
        for _ in range(self.random.choice(_CHANGES)):
            kind = self.random.random()
            if kind < _KEEP and recompute:
                v = self.random.choice(sorted(recompute))
                recompute.discard(v)
                since.pop(v, None)
            elif kind < _HOLD and since:
                since.pop(self.random.choice(sorted(since)))
            elif kind < _STRETCH and can_wait(self.index):
                dropped, waits = stretch(self.index, self.random.choice(self.ordered), self.random.choice(_REACHES), self.dropping)
                recompute |= dropped
                since |= waits
            elif len(recompute) < len(self.dropping):
                recompute.add(self.random.choice([v for v in self.ordered if v not in recompute]))
        return frozenset(recompute), since
