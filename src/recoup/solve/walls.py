"""A bound that counts repeats: moments of the backward past which little can be carried.

At a recorded operation some bytes stand whatever a plan decides: those of ``Windows.base``, and the storages that the backward has asked
for and not released, kept or copied. Of what is larger than half of the budget that is left, at most one storage can stand there beside
them, kept, or held for a replay, or as a copy; what is larger than all of it cannot. What the backward asks for later, and what that
is made from, is rebuilt after this *wall*, up to the one storage that stands; and so again after the next one. With

    L(i, u)  the seconds of all replays after wall i, if the large storage u (or none) stands there,

is L(i, u) no less than, for every later wall j, the least over what may stand there, u', of the operations that must be replayed between i
and j for what is asked for in between, and for u' unless that is u, and of L(j, u').
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from recoup.plan import Capabilities
from recoup.simulate.index import Replays
from recoup.solve.windows import Windows

__all__ = ["walls_seconds"]

# So many walls, at each so many storages of which one may stand there, and so many later walls are looked at.
_MOST, _ALONE, _AHEAD = 1000, 200, 30


def walls_seconds(index: Replays, executor: Capabilities, frame: Windows, budget: int) -> float:
    """Seconds that the replays of any plan within the budget take at least."""
    left = budget - _standing(index, frame)
    seconds = index.op_seconds(executor.replay_seconds)
    walls = [_Wall(index, frame, seconds, at, int(left[at])) for at in _tightest(index, left)]
    walls = [wall for wall in walls if len(wall.alone) <= _ALONE]
    for place in reversed(range(len(walls))):
        walls[place].count(walls[place + 1 : place + 1 + _AHEAD])
    return max((min(wall.seconds.values()) for wall in walls), default=0.0)


def _standing(index: Replays, frame: Windows) -> NDArray[np.int64]:
    """Bytes at each operation that stand in every plan."""
    change = np.zeros(index.count + 1, dtype=np.int64)
    for v, spans in frame.rebuilt.items():
        kept_from, kept_until = frame.held[v]
        for start, end in spans:
            start, end = max(start, kept_from), min(end, kept_until, index.count)
            if start < end:
                change[start] += index.bytes[v]
                change[end] -= index.bytes[v]
    return frame.base + np.cumsum(change[: index.count])


def _tightest(index: Replays, left: NDArray[np.int64]) -> list[int]:
    """Of the operations between one unpacking and the next that at which least is left, and of these the tightest; in order."""
    gaps = sorted({min(event.gap, index.count) for event in index.events} | {index.count})
    each = [start + int(left[start:end].argmin()) for start, end in pairwise(gaps) if start < end]
    return sorted(sorted(each, key=lambda at: (int(left[at]), at))[:_MOST])


class _Replayed:
    """The operations that must be replayed after a wall, for more and more."""

    def __init__(self, wall: _Wall, standing: int | None) -> None:
        self.wall, self.standing = wall, standing
        self.rebuilt: set[int] = set()
        self.ops: set[int] = set()
        self.seconds = 0.0

    def ask(self, v: int) -> None:
        """Someone asks for a storage."""
        self.seconds += self._add([v], self.rebuilt, self.ops)

    def holding(self, v: int | None) -> float:
        """Seconds so far, and those for a storage that stands later, if need be as far as its first operation makes it."""
        if v is None or v == self.standing or not self.wall.bars(v):
            return self.seconds
        first = self.wall.index.ops_of[v][0]
        if first in self.ops:
            return self.seconds
        rebuilt, ops = {v}, {first}
        extra = self._add(list(self.wall.index.foreign[first]), rebuilt, ops, self.rebuilt, self.ops)
        return self.seconds + self.wall.op_seconds[first] + extra

    def _add(
        self,
        stack: list[int],
        rebuilt: set[int],
        ops: set[int],
        known: Set[int] = frozenset(),
        done: Set[int] = frozenset(),
    ) -> float:
        """Rebuild these and what they are made from, beside what is known to be; the seconds that it takes."""
        index, total = self.wall.index, 0.0
        while stack:
            v = stack.pop()
            if v in rebuilt or v in known or v == self.standing or not self.wall.bars(v):
                continue
            rebuilt.add(v)
            for op in index.ops_of[v]:
                if op not in ops and op not in done:
                    ops.add(op)
                    total += self.wall.op_seconds[op]
                    stack.extend(index.foreign[op])
        return total


class _Wall:
    """One wall: what cannot stand there, what can alone, and what that leaves to be replayed."""

    def __init__(self, index: Replays, frame: Windows, op_seconds: Sequence[float], at: int, left: int) -> None:
        self.index, self.frame, self.op_seconds, self.at, self.left = index, frame, op_seconds, at, left
        self.events = [event for event in index.events if event.gap > at]
        self._barred: dict[int, bool] = {}
        every = _Replayed(self, None)
        for event in self.events:
            every.ask(event.storage)
        self.alone: list[int | None] = [None, *sorted(v for v in every.rebuilt if index.bytes[v] <= left)]
        self.seconds: dict[int | None, float] = dict.fromkeys(self.alone, 0.0)

    def count(self, later: Sequence[_Wall]) -> None:
        """L of this wall from those of later ones."""
        for standing in self.alone:
            replayed, number, best = _Replayed(self, standing), 0, 0.0
            for until, wall in [*((wall.at, wall) for wall in later), (self.index.count, None)]:
                while number < len(self.events) and self.events[number].gap <= until:
                    replayed.ask(self.events[number].storage)
                    number += 1
                if wall is None:
                    best = max(best, replayed.seconds)
                else:
                    best = max(best, min(replayed.holding(v) + seconds for v, seconds in wall.seconds.items()))
            self.seconds[standing] = best

    def bars(self, v: int) -> bool:
        """Whether a storage that is made before the wall does not stand there anyway, and is too large to do so beside another."""
        found = self._barred.get(v)
        if found is None:
            found = self._barred[v] = self._too_large(v)
        return found

    def _too_large(self, v: int) -> bool:
        index, frame, at = self.index, self.frame, self.at
        if v not in frame.dropping or 2 * index.bytes[v] <= self.left or index.ops_of[v][-1] >= at:
            return False
        alive_until = index.unheld[v] if v in frame.held and index.saves_of[v] else index.dies[v]
        asked = any(start <= at < end for start, end in frame.rebuilt.get(v, ()))
        return bool(at >= alive_until) and not asked
