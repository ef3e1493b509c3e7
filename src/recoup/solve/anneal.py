"""Local search that goes through plans over the budget, where plans rebuild more than once.

Searches that keep to the budget do not get from one good schedule to another: all that lies between is over it. Here bytes over the
budget cost seconds instead, and the price goes up while the current plan is over the budget and down while it is within, so that
the search crosses the limit again and again (strategic oscillation, Glover 1977, "Heuristics for integer programming using surrogate
constraints", Decision Sciences 8, 156-166). Single decisions are changed at random, over the budget mostly those that relieve a moment
that is over it, at times as the best plan so far decides them, which is within the budget; else those that cost most seconds. A plan that
is worse by less than an allowance is gone on from; the allowance falls to nothing over the search (threshold accepting, as in
``recoup.solve.exchange``). In the last part the price only goes up.

The search is an amount of work with a generator of its own, so that it repeats on any machine.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Generic, TypeVar

import numpy as np

from recoup.plan import Capabilities
from recoup.simulate.index import Replays
from recoup.simulate.result import Moment
from recoup.solve.descent import Judged, judge
from recoup.solve.holds import first_asks, last_ask

__all__ = ["Walk", "annealed"]

_SEED = 1
# The allowance at the start, relative to the step, at most and for all storages that can be dropped together; and at the end, relative
# to that at the start. On the average it is a third of that, since it is drawn.
_ALLOWANCE, _ALL_ALLOWANCES, _LEAST = 0.03, 5.0, 0.01
# The price of a byte at the start, if the budget cost the step.
_PRICE = 1.0
# By how much the logarithm of the price changes over all of the work, up or down; and up alone in the last part of it.
_PACE, _SQUEEZE, _LAST = 20.0, 100.0, 0.25
# How often, over the budget, a moment that is over it is relieved, and how often the worst one.
_RELIEVES, _WORST = 0.75, 0.5
# How often what stands there is decided as in the best plan; in the last part of the work, how often of these times all that is made
# near it in the forward is, and within how many operations.
_ADOPTS, _REGIONS, _REACHES = 0.2, 0.15, (10, 20, 40)
# The kinds of changes that relieve: copies are held later, something is dropped (else a copy is kept from the start).
_DELAYS, _DROPS, _ALL_AT_ONCE = 0.5, 0.9, 0.15
# The other kinds: something is kept, held earlier, held later (else dropped); how often something else is dropped as well.
_KEEPS, _EARLIER, _LATER, _SWAPS = 0.35, 0.75, 0.9, 0.25
# Into how many stretches the step is cut for the bytes over the budget that are charged beside those at the peak.
_STRETCHES = 20
_CRUMB = 1e-9

Found = TypeVar("Found", bound=Judged)


def annealed(
    index: Replays, start: Judged, executor: Capabilities, dropping: frozenset[int], budget: int, enough: float, work: int, seconds: float
) -> Judged:
    """The fastest plan within the budget that was found, ``start`` if none is faster.

    Args:
        index: the step: one call of the model, one backward pass.
        start: a plan within the budget.
        executor: what runs it; one that rebuilds more than once.
        dropping: the storages that may be dropped.
        budget: the peak allowed, in bytes.
        enough: seconds of a step with which the search is content.
        work: how many operations may be simulated.
        seconds: of wall clock, after which the search stops wherever it is.
    """
    return _Alone(index, start, executor, dropping, budget).run(enough, work, time.perf_counter() + seconds)


class _Place(Generic[Found]):
    """A plan on the way, and what is looked up in it again and again."""

    def __init__(self, index: Replays, found: Found, dropping: frozenset[int], op_seconds: Sequence[float], budget: int) -> None:
        self.index, self.found, self._dropping, self._op_seconds = index, found, dropping, op_seconds
        over = np.maximum(found.run.bytes_at - budget, 0)
        self.peak_over = max(found.peak_bytes - budget, 0)
        # Bytes over the budget at the peak, and those of all moments.
        self.over_bytes = self.peak_over + float(over.sum()) * _STRETCHES / max(len(over), _STRETCHES)

    @cached_property
    def times(self) -> Counter[int]:
        """How often each operation is replayed."""
        return Counter(self.found.run.replayed.ops)

    @cached_property
    def kept(self) -> list[int]:
        """What could be dropped."""
        return sorted(self._dropping - self.found.recompute)

    @cached_property
    def dropped(self) -> tuple[list[int], list[float]]:
        """What is dropped, with the seconds of its replays, summed up along the list."""
        return self._weighed(sorted(self.found.recompute), 0)

    @cached_property
    def waiting(self) -> tuple[list[int], list[float]]:
        """What waits, with the seconds of its replays beyond the first."""
        return self._weighed(sorted(self.found.since), 1)

    def _weighed(self, storages: list[int], beyond: int) -> tuple[list[int], list[float]]:
        seconds, times = self._op_seconds, self.times
        weights = (sum(seconds[op] * max(times[op] - beyond, 0) for op in self.index.ops_of[v]) + _CRUMB for v in storages)
        return storages, list(accumulate(weights))


class Walk(ABC, Generic[Found]):
    """One search: the best plan within the budget, the current one, the price of a byte over it.

    Attributes:
        best: within the budget.
        current: where the walk is.
        price: seconds for each byte over the budget.
        spent: operations that were simulated.
        last: whether the price only goes up.
    """

    def __init__(self, index: Replays, start: Found, executor: Capabilities, dropping: frozenset[int], budget: int) -> None:
        self.index, self.executor, self.dropping, self.budget = index, executor, dropping, budget
        self.random = random.Random(_SEED)
        self.op_seconds = index.op_seconds(executor.replay_seconds)
        self.made = {v: index.ops_of[v][0] for v in sorted(dropping)}
        self.asks, self.never = first_asks(index), len(index.events)
        self.best, self.current = start, self._place(start)
        self.price = _PRICE * index.base_seconds / max(budget, 1)
        self.spent, self.last = 0, False

    def run(self, enough: float, work: int, deadline: float) -> Found:
        """Search until the work is done, the time is over or the best plan is good enough."""
        most = self.index.base_seconds * min(_ALLOWANCE, _ALL_ALLOWANCES / max(len(self.dropping), 1))
        while self.spent < work and self.best.step_seconds > enough and time.perf_counter() < deadline:
            left, before = 1 - self.spent / work, self.spent
            found = self.changed()
            self.spent += found.work
            if found.peak_bytes <= self.budget and found.step_seconds < self.best.step_seconds:
                self.best = found
            allowance = most * max(left * left * left, _LEAST) * self.random.random() ** 2
            place = self._place(found)
            if self._cost(place) < self._cost(self.current) + allowance:
                self.current = place
            self.last, done = left < _LAST, (self.spent - before) / work
            if self.current.peak_over:
                self.price *= 1 + (_SQUEEZE if self.last else _PACE) * done
            elif not self.last:
                self.price /= 1 + _PACE * done
        return self.best

    def _cost(self, place: _Place[Found]) -> float:
        return place.found.step_seconds + self.price * place.over_bytes

    def _place(self, found: Found) -> _Place[Found]:
        return _Place(self.index, found, self.dropping, self.op_seconds, self.budget)

    @abstractmethod
    def changed(self) -> Found:
        """The current plan with a decision changed, at times two, simulated."""

    # -- changes

    def change(self, recompute: set[int], since: dict[int, int]) -> None:
        """Change a decision, at times two, in place."""
        if self.current.peak_over and self.random.random() < _RELIEVES:
            self._relieve(recompute, since)
        else:
            self._hasten(recompute, since)

    def over_moment(self) -> Moment:
        """A moment at which the current plan is over the budget, often the worst one."""
        run = self.current.found.run
        if self.random.random() < _WORST:
            return run.moment(int(run.bytes_at.argmax()))
        return run.moment(int(self.random.choice(np.flatnonzero(run.bytes_at > self.budget))))

    def _relieve(self, recompute: set[int], since: dict[int, int]) -> None:
        """Less at a moment that is over the budget."""
        run, moment = self.current.found.run, self.over_moment()
        recorded, copied = run.live(moment)
        now = last_ask(self.index, run, moment)
        copies = [v for v in dict.fromkeys(copied) if v in recompute]
        early = [v for v in copies if self.asks.get(v, self.never) > now]
        standing = [v for v in recorded if v in self.dropping and v not in recompute]
        kind = self.random.random()
        if self.random.random() < _ADOPTS and (others := self._others([*standing, *copies])):
            self.adopt(others, recompute, since)
        elif early and kind < _DELAYS:
            self._delay(early, now, since)
        elif standing and kind < _DROPS:
            v = self.by_bytes(standing)
            recompute.add(v)
            since[v] = self.random.choice((0, now + 1, self.asks.get(v, self.never)))
        elif copies:
            v = self.random.choice(copies)
            recompute.discard(v)
            since.pop(v, None)

    def differs(self, v: int) -> bool:
        """Whether the best plan decides a storage otherwise than the current one."""
        here, best = self.current.found, self.best
        return (v in here.recompute) != (v in best.recompute) or here.since.get(v) != best.since.get(v)

    def _others(self, storages: list[int]) -> list[int]:
        """Of what stands there, or is made near it in the forward, one or all that the best plan within the budget decides otherwise."""
        made = self.made
        if storages and self.last and self.random.random() < _REGIONS:
            middle, reach = made[self.by_bytes(storages)], self.random.choice(_REACHES)
            storages = [v for v in made if abs(made[v] - middle) <= reach]
        found = [v for v in storages if self.differs(v)]
        return found if len(found) < 2 or self.random.random() < 0.5 else [self.by_bytes(found)]

    def adopt(self, storages: list[int], recompute: set[int], since: dict[int, int]) -> None:
        """Decide these as the best plan does: it is within the budget."""
        for v in storages:
            recompute.discard(v)
            since.pop(v, None)
            if v in self.best.recompute:
                recompute.add(v)
            if v in self.best.since:
                since[v] = self.best.since[v]

    def _delay(self, early: list[int], now: int, since: dict[int, int]) -> None:
        """Hold one of these copies, or all, only from the next moment on, or from a later one."""
        if self.random.random() < _ALL_AT_ONCE:
            since.update(dict.fromkeys(early, now + 1))
            return
        v = self.by_bytes(early)
        last = max(self.asks.get(v, self.never), now + 1)
        since[v] = now + 1 if self.random.random() < 0.7 else self.random.randint(now + 1, last)

    def by_bytes(self, storages: list[int]) -> int:
        """One of them, large ones most often."""
        return self.random.choices(storages, [self.index.bytes[v] + 1 for v in storages])[0]

    def _hasten(self, recompute: set[int], since: dict[int, int]) -> None:
        """Fewer replays, most often; or room elsewhere for them."""
        kind, here = self.random.random(), self.current
        if kind < _KEEPS and recompute:
            v = self._drawn(*here.dropped)
            recompute.discard(v)
            since.pop(v, None)
        elif _KEEPS <= kind < _EARLIER and since:
            self._earlier(self._drawn(*here.waiting), since)
        elif _EARLIER <= kind < _LATER and recompute:
            v = self.random.choice(here.dropped[0])
            now = since.get(v, 0)
            since[v] = self.random.randint(now, max(self.asks.get(v, self.never), now))
        elif here.kept:
            self._drop(recompute, since)
        if here.kept and self.random.random() < _SWAPS:
            self._drop(recompute, since)

    def _earlier(self, v: int, since: dict[int, int]) -> None:
        """Hold copies that wait from the first rebuild on, from a moment that others wait for, or from any that is earlier."""
        now = since.pop(v)
        if self.random.random() < 0.4:
            return
        others = [moment for moment in since.values() if moment < now]
        since[v] = self.random.choice(others) if others and self.random.random() < 0.7 else self.random.randint(0, max(now - 1, 0))

    def _drop(self, recompute: set[int], since: dict[int, int]) -> None:
        v = self.random.choice(self.current.kept)
        recompute.add(v)
        since[v] = self.random.choice((0, self.random.randint(0, self.never), self.asks.get(v, self.never)))

    def _drawn(self, storages: list[int], weights: list[float]) -> int:
        return self.random.choices(storages, cum_weights=weights)[0]


class _Alone(Walk[Judged]):
    """The search where storages are kept or recomputed."""

    def changed(self) -> Judged:
        recompute, since = set(self.current.found.recompute), dict(self.current.found.since)
        self.change(recompute, since)
        return judge(self.index, frozenset(recompute), self.executor, since)
