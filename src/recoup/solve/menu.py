"""The menu of a segment: ways to run its last forward and its backward, each with bytes kept, bytes at work, and seconds.

Identical segments are solved once: one of each kind is looked at, all of them in the same programs and simulations. A
price on each kept byte, swept from high to low, gives the choices of what to keep; holding copies later gives those that
need less room in the backward. What a way costs is read off a simulation, never off the program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from recoup.plan import Capabilities
from recoup.simulate.index import Replays
from recoup.simulate.judge import Run
from recoup.solve.chain import Way
from recoup.solve.cuts import Chain
from recoup.solve.descent import judge
from recoup.solve.holds import can_wait, first_asks, last_ask
from recoup.solve.program import Program
from recoup.solve.windows import Windows

__all__ = ["Dish", "menus"]

_PRICES = 10
_DELAYS = 16


@dataclass(frozen=True, slots=True, eq=False)
class Dish:
    """A way of one segment, and what it stands for there.

    Attributes:
        way: its bytes and seconds.
        dropped: the segment's own storages that it recomputes.
        since: for some of them the moment from which on copies are held; the others are held from the segment's own stage.
    """

    way: Way
    dropped: frozenset[int]
    since: Mapping[int, int] = field(default_factory=dict)


def menus(index: Replays, executor: Capabilities, frame: Windows, chain: Chain, base: NDArray[np.int64]) -> list[list[Dish]]:
    """For each segment its ways; ``base`` are the bytes that stand when its stage begins, whatever is chosen."""
    kinds = _kinds(index, chain)
    heads = sorted(set(kinds))
    kitchen = _Kitchen(index, executor, frame, chain, base, heads)
    for recompute in _choices(index, executor, frame, chain, heads):
        kitchen.cook(recompute, {})
    kitchen.delay()
    return [_moved(index, chain, kitchen.dishes(kind), kind, segment) for segment, kind in enumerate(kinds)]


def _kinds(index: Replays, chain: Chain) -> list[int]:
    """For each segment the first one that does the same on storages of the same sizes."""
    first: dict[object, int] = {}
    return [first.setdefault(_fingerprint(index, chain, segment), segment) for segment in range(len(chain))]


def _fingerprint(index: Replays, chain: Chain, segment: int) -> object:
    names: dict[int, object] = {v: ("in", place) for place, v in enumerate(sorted(chain.entering[segment]))}
    lines = []
    for op in chain.ops(segment):
        recorded = index.graph.ops[op]
        if recorded.phase != "forward":
            continue
        read = tuple(names.get(v, ("far", index.bytes[v], index.graph.storages[v].kind)) for v in index.reads[op])
        for v in index.produced[op]:
            names[v] = len(names)
        made = tuple((index.bytes[v], v in chain.inner[segment], len(index.saves_of[v]), v in index.unpacked) for v in index.produced[op])
        lines.append((recorded.target, recorded.constants, read, made, int(index.scratch[op])))
    return tuple(lines)


def _choices(index: Replays, executor: Capabilities, frame: Windows, chain: Chain, heads: list[int]) -> list[frozenset[int]]:
    """What to drop in the segments looked at: everything, nothing, and the best at each of several prices of a kept byte."""
    own = frozenset().union(*(chain.inner[segment] for segment in heads))
    entering = frozenset().union(*(chain.entering[segment] for segment in heads))
    found = [frozenset[int](), own]
    held = [v for v in sorted(own & frozenset(frame.held)) if index.bytes[v]]
    if not held:
        return found
    program = Program(index, executor, replace(frame, dropping=frame.dropping & own, optional=frame.optional & own), given=entering)
    rates = [sum(index.graph.ops[op].seconds + executor.replay_seconds for op in index.ops_of[v]) / index.bytes[v] for v in held]
    low, high = np.quantile(rates, 0.05), np.quantile(rates, 0.95) * 4
    if not low > 0:
        low = high / 1e4 or 1e-12
    for price in np.geomspace(max(high, low * 1.01), low / 2, _PRICES):
        recompute = program.priced(float(price))
        if recompute is not None and recompute not in found:
            found.append(recompute)
    return found


class _Kitchen:
    """Simulates choices in the segments looked at, everything else kept, and gathers what each way costs."""

    def __init__(
        self, index: Replays, executor: Capabilities, frame: Windows, chain: Chain, base: NDArray[np.int64], heads: list[int]
    ) -> None:
        self.index, self.executor, self.chain, self.base, self.heads = index, executor, chain, base, heads
        self.deciding = np.zeros(len(index.bytes), dtype=bool)
        self.deciding[[v for segment in range(len(chain)) for v in (*chain.inner[segment], *chain.entering[segment])]] = True
        self.found: dict[int, list[Dish]] = {segment: [] for segment in heads}

    def dishes(self, segment: int) -> list[Dish]:
        """The ways worth having: none that another one beats in bytes kept, bytes at work and seconds."""
        kept: list[Dish] = []
        for dish in sorted(self.found[segment], key=lambda dish: _figures(dish.way)):
            # Whoever beats it comes before it.
            if not any(all(a <= b for a, b in zip(_figures(other.way), _figures(dish.way), strict=True)) for other in kept):
                kept.append(dish)
        return kept

    def cook(self, recompute: frozenset[int], since: Mapping[int, int]) -> Run:
        """Simulate one choice and note a way of each segment."""
        index, chain = self.index, self.chain
        found = judge(index, recompute, self.executor, since)
        run = found.run
        seconds: dict[int, float] = {}
        for op, gap in zip(run.replayed.ops, run.replayed.gaps, strict=True):
            segment = self._stage(gap)
            seconds[segment] = seconds.get(segment, 0.0) + index.graph.ops[op].seconds + self.executor.replay_seconds
        for segment in self.heads:
            dropped = found.recompute & chain.inner[segment]
            captured = {index.frame_of[op] for v in dropped for op in index.ops_of[v]}
            extra = self.executor.capture_seconds * sum(index.frame_ops.get(frame, 0) for frame in captured)
            own = {v: moment for v, moment in since.items() if v in dropped}
            way = Way(self._kept(run, segment, dropped), self._working(run, segment), seconds.get(segment, 0.0) + extra)
            self.found[segment].append(Dish(way, dropped, own))
        return run

    def delay(self) -> None:
        """From everything dropped on, hold what stands at each segment's peak later and later."""
        if not can_wait(self.index):
            return
        everything = frozenset().union(*(self.chain.inner[segment] for segment in self.heads))
        since: dict[int, int] = {}
        for _ in range(_DELAYS):
            run = self.cook(everything, since)
            later = {v: moment for segment in self.heads for v, moment in self._later(run, segment).items()}
            if not later:
                break
            since.update(later)

    def _later(self, run: Run, segment: int) -> dict[int, int]:
        """The copies that stand at the peak of a segment's stage before anyone asks for them, and the next moment."""
        start, end = self._span(segment)
        if start >= end:
            return {}
        moment = run.moment(start + int(run.bytes_at[start:end].argmax()))
        asks, now = first_asks(self.index), last_ask(self.index, run, moment)
        own = self.chain.inner[segment]
        early = [v for v in run.live(moment)[1] if v in own and asks.get(v, len(self.index.events)) > now and run.held_from.get(v) != v]
        early.sort(key=lambda v: (-self.index.bytes[v], v))
        return dict.fromkeys(early[: max(len(early) // 2, 1)], now + 1)

    def _stage(self, gap: int) -> int:
        return next((segment for segment in self.heads if self._span(segment)[0] <= gap < self._span(segment)[1]), -1)

    def _span(self, segment: int) -> tuple[int, int]:
        """The operations of a segment's stage."""
        start = self.chain.reached[segment]
        return start, self.chain.reached[segment - 1] if segment else self.index.count

    def _kept(self, run: Run, segment: int, dropped: frozenset[int]) -> int:
        gap = self.chain.reached[segment]
        return sum(self.index.bytes[v] for v in self.chain.inner[segment] if v not in dropped and run.ends[v] > gap)

    def _working(self, run: Run, segment: int) -> int:
        """The most bytes of a stage, less what stands anyway and what other segments keep."""
        start, end = self._span(segment)
        if start >= end:
            return 0
        index = self.index
        others = self.deciding.copy()
        others[[*self.chain.inner[segment], *self.chain.entering[segment]]] = False
        change = np.zeros(index.count + 2, dtype=np.int64)
        chosen = np.flatnonzero(others & (run.ends > start) & (index.born < end))
        np.add.at(change, np.maximum(index.born[chosen], 0), index.size[chosen])
        np.add.at(change, np.maximum(run.ends[chosen], np.maximum(index.born[chosen], 0)), -index.size[chosen])
        standing = np.cumsum(change)[start:end]
        return int((run.bytes_at[start:end] - standing).max()) - int(self.base[segment])


def _figures(way: Way) -> tuple[int, int, float]:
    return way.kept_bytes, way.working_bytes, way.seconds


def _moved(index: Replays, chain: Chain, dishes: list[Dish], kind: int, segment: int) -> list[Dish]:
    """The ways of one segment for another of its kind: storages and moments by their places."""
    if kind == segment:
        return dishes
    twin = dict(zip(_in_order(index, chain, kind), _in_order(index, chain, segment), strict=True))
    shift = _first_event(index, chain, segment) - _first_event(index, chain, kind)
    return [
        Dish(dish.way, frozenset(twin[v] for v in dish.dropped), {twin[v]: moment + shift for v, moment in dish.since.items()})
        for dish in dishes
    ]


def _in_order(index: Replays, chain: Chain, segment: int) -> list[int]:
    return [v for op in chain.ops(segment) for v in index.produced[op] if v in chain.inner[segment]]


def _first_event(index: Replays, chain: Chain, segment: int) -> int:
    asks = first_asks(index)
    return min((asks[v] for v in chain.asked[segment]), default=0)
