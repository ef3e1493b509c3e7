"""The chain in a step: where its forward can be cut so that little crosses, and what each segment makes.

A storage *crosses* a cut if it is made before and read after it. Storages that outlive every block and a sixth of the
forward (attention masks, the skips of a U-Net, what a decoder reads of its encoder) are set apart: they would cross
everywhere. The forward is cut where nothing but one storage crosses, and where the crossing bytes have a clear minimum.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recoup.plan import Capabilities
from recoup.simulate.index import Replays
from recoup.solve.choice import droppable
from recoup.solve.segments import segments

__all__ = ["Chain", "chain_of"]

_THROUGH = 6
_CLEAR = 0.6
_MOST = 128


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """A forward, cut into segments.

    Attributes:
        cuts: the operation that each segment begins with, then the end of the forward.
        entering: for each segment the droppable storages that cross into it.
        inner: for each segment the other droppable storages that it makes, those that live through the step excepted.
        reached: for each segment the gap at which the backward first asks for something that it, or one before it, saved.
        asked: for each segment the droppable storages whose first unpacking is its own, in the order of the backward.
    """

    cuts: tuple[int, ...]
    entering: tuple[frozenset[int], ...]
    inner: tuple[frozenset[int], ...]
    reached: tuple[int, ...]
    asked: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.inner)

    def ops(self, segment: int) -> range:
        """The forward operations of a segment; those of the backward may lie between them."""
        return range(self.cuts[segment], self.cuts[segment + 1])


def chain_of(index: Replays, executor: Capabilities) -> Chain:
    """The finest chain of at most 128 segments."""
    dropping = droppable(index, executor)
    last = _last_reads(index)
    through = _through(index, last)
    # What can neither be kept by autograd nor for a replay is no checkpoint: nothing may be cut where it crosses.
    fleeting = {v for v in dropping if not (executor.keeps_unsaved or index.saves_of[v])}
    cuts = _cuts(index, last, through, fleeting)
    cuts = _thinned(cuts, _MOST)
    made = [bisect_right(cuts, index.ops_of[v][0]) - 1 if index.ops_of[v] else -1 for v in range(len(index.bytes))]
    entering: list[set[int]] = [set() for _ in cuts[:-1]]
    inner: list[set[int]] = [set() for _ in cuts[:-1]]
    for v in sorted(dropping - through):
        ends = bisect_right(cuts, last[v]) - 1
        if ends > made[v]:
            for segment in range(made[v] + 1, min(ends, len(inner) - 1) + 1):
                entering[segment].add(v)
        else:
            inner[made[v]].add(v)
    return _with_stages(index, cuts, entering, inner, dropping)


def _last_reads(index: Replays) -> list[int]:
    """For each storage the last operation of the forward that reads or writes it; -1 if there is none."""
    last = [-1] * len(index.bytes)
    for op in index.graph.ops:
        if op.phase == "forward":
            for v in (*index.reads[op.id], *op.mutates):
                last[v] = op.id
    return last


def _through(index: Replays, last: list[int]) -> frozenset[int]:
    forward = [op.id for op in index.graph.ops if op.phase == "forward"]
    place = {op: number for number, op in enumerate(forward)}
    blocks = max((len(ops) for ops in segments(index.graph)), default=0) if index.graph.blocks else 0
    long = max(len(forward) // _THROUGH, blocks + blocks // 4, 2)
    return frozenset(
        v for v, ops in enumerate(index.ops_of) if ops and ops[0] in place and last[v] in place and place[last[v]] - place[ops[0]] > long
    )


def _cuts(index: Replays, last: list[int], through: frozenset[int], fleeting: set[int]) -> list[int]:
    """Where to cut: the first operation of each segment, and one past the last operation of the forward."""
    forward = [op.id for op in index.graph.ops if op.phase == "forward"]
    size = np.zeros(index.count + 1, dtype=np.int64)
    count = np.zeros(index.count + 1, dtype=np.int64)
    barred = np.zeros(index.count + 1, dtype=np.int64)
    for v, ops in enumerate(index.ops_of):
        if ops and v not in through and last[v] > ops[0] and index.is_activation[v]:
            # It crosses every cut after its maker and before its last reader, cuts being named by the operation after them.
            size[ops[0] + 1] += index.bytes[v]
            size[last[v] + 1] -= index.bytes[v]
            count[ops[0] + 1] += 1
            count[last[v] + 1] -= 1
            if v in fleeting:
                barred[ops[0] + 1] += 1
                barred[last[v] + 1] -= 1
    crossing, several, barring = np.cumsum(size), np.cumsum(count), np.cumsum(barred)
    cuts = _minima(forward, crossing, several, barring)
    return [forward[0], *cuts, forward[-1] + 1] if forward else [0, 0]


def _minima(forward: list[int], crossing: NDArray[np.int64], several: NDArray[np.int64], barring: NDArray[np.int64]) -> list[int]:
    """Cuts that one storage crosses, and clear minima of the crossing bytes that cost no more than the cuts around them."""
    cuts: list[int] = []
    single: list[bool] = []
    highest = 0
    for number, op in enumerate(forward[1:], 1):
        here = int(crossing[op])
        highest = max(highest, here)
        following = int(crossing[forward[number + 1]]) if number + 1 < len(forward) else here
        if not barring[op] and (several[op] == 1 or (here <= following and here <= _CLEAR * highest)):
            cuts.append(op)
            single.append(bool(several[op] == 1))
            highest = here
    return [cut for place, cut in enumerate(cuts) if single[place] or crossing[cut] <= _around(cuts, single, crossing, place)]


def _around(cuts: list[int], single: list[bool], crossing: NDArray[np.int64], place: int) -> float:
    """What the nearest cuts on both sides that one storage crosses let pass, and a quarter more; no limit without any."""
    before = next((cuts[other] for other in range(place - 1, -1, -1) if single[other]), None)
    after = next((cuts[other] for other in range(place + 1, len(cuts)) if single[other]), None)
    passing = [int(crossing[cut]) for cut in (before, after) if cut is not None]
    return 1.25 * max(passing) if passing else float("inf")


def _thinned(cuts: list[int], most: int) -> list[int]:
    """Every k-th cut, so that there are no more segments than wanted."""
    inside = cuts[1:-1]
    step = -(-(len(inside) + 1) // most)
    return [cuts[0], *inside[step - 1 :: step], cuts[-1]]


def _with_stages(index: Replays, cuts: list[int], entering: list[set[int]], inner: list[set[int]], dropping: frozenset[int]) -> Chain:
    n = len(inner)
    reached, asked, seen = [index.count] * n, [[] for _ in range(n)], set()  # type: ignore[var-annotated]
    for event in index.events:
        packed = index.graph.saves[event.save].packed_at - 1
        segment = min(max(bisect_right(cuts, packed) - 1, 0), n - 1)
        for after in range(segment, n):
            if reached[after] <= event.gap:
                break
            reached[after] = event.gap
        if event.storage in dropping and event.storage not in seen:
            seen.add(event.storage)
            asked[segment].append(event.storage)
    return Chain(
        tuple(cuts), tuple(frozenset(found) for found in entering), tuple(frozenset(found) for found in inner),
        tuple(reached), tuple(tuple(found) for found in asked),
    )  # fmt: skip
