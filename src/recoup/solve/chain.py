"""The optimal schedule of a chain: which boundaries are held, from when, and how each segment is run the last time.

Segments 0..n-1 are run forward, their backwards from the last to the first. *Stage t* lasts from the end of the backward of t+1 to
that of t; stage -1 is the step's own forward. A *boundary* is what enters a segment. What is held stays so until the backward of its
segment is over (a persistent schedule); a way is held from its segment's last forward, along with the boundaries on both sides. With
m bytes free beside all that is held, the held boundary s included, the least seconds of replays are

    C(s, t, m)  for the backward of t..s, if s is the last boundary held and forwards are replays at stage t: the least of
      s == t        way.seconds, of a way that keeps nothing
      hold a way    forward_s + C(s+1, t, m - kept - input_{s+1}) + way.seconds, if forward_bytes_s - input_s + kept + base_t <= m
      checkpoint j  forward_s + ... + forward_{j-1} + C(j, t, m - input_j) + C(s, j-1, m), s < j <= t, if each of these plus base_t <= m:
                    forward_bytes_s - input_s, and forward_bytes_k for s < k < j (what enters k passes by, so nobody charged it)
    T(s, m)     for that of n-1..s, if forwards are the step's own: the same over T(s+1, .) and T(j, .) in place of C(s+1, t, .) and
                C(j, t, .), with forwards free and unconditional, and any way for s == n-1

where a way needs working_bytes - input_s + base_s <= m: boundary s is charged by whoever made it available, and a segment's own
figures include it again. A budget of M bytes gives T(0, M - input_0).

Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains" (2019, arXiv:1911.13214), whose
rotor has two ways a segment, keep everything and keep nothing; menus of more ways as in H-Rockmate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from recoup.errors import UsageError

__all__ = ["ChainTable", "Schedule", "Segment", "Walk", "Way", "stages_walk"]

_NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a segment's last forward and its backward.

    Attributes:
        kept_bytes: held from the segment's last forward until its backward, the entering boundary excluded.
        working_bytes: most bytes during its backward of all that is this segment's, the entering boundary and what it kept included.
        seconds: of the replays in its own backward.
    """

    kept_bytes: int
    working_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Segment:
    """One link of a chain.

    Attributes:
        input_bytes: the boundary that enters it; what holding it as a checkpoint costs.
        forward_seconds: replaying it once for its output, holding nothing.
        forward_bytes: most bytes during such a replay, the entering boundary and the output included.
        base_bytes: what stands anyway from when the backward reaches it (gradients so far, ...).
        ways: how its last forward and its backward can be run; at least one keeps nothing.
    """

    input_bytes: int
    forward_seconds: float
    forward_bytes: int
    base_bytes: int
    ways: tuple[Way, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A persistent schedule; stages are -1 for the step's own forward, t for from when the backward reaches segment t.

    Attributes:
        seconds: added by all replays.
        ways: the way of each segment.
        ways_since: the stage from which the way's kept bytes are held; the segment's own if it keeps nothing.
        boundaries_since: the stage from which the boundary that enters each segment is held; -1 for segment 0.
    """

    seconds: float
    ways: tuple[int, ...]
    ways_since: tuple[int, ...]
    boundaries_since: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Walk:
    """What a schedule does: the peak of its stages n-1..0, its added seconds, the replays of each segment's forward."""

    peak_bytes: int
    seconds: float
    replays: tuple[int, ...]


def stages_walk(segments: Sequence[Segment], schedule: Schedule) -> Walk:
    """A schedule, run stage by stage.

    Raises:
        UsageError: it holds what no forward makes then, or a way without the boundary that enters its segment.
    """
    n, ways = len(segments), [segment.ways[way] for segment, way in zip(segments, schedule.ways, strict=True)]
    # The step's own forward is stage n here; a way that keeps nothing is never held.
    boundaries = [n if since < 0 else since for since in schedule.boundaries_since]
    held = [-1 if not way.kept_bytes else n if since < 0 else since for way, since in zip(ways, schedule.ways_since, strict=True)]
    unmade = sum(0 <= since < n for since in boundaries + held)
    standing = sum(segments[s].input_bytes * (boundaries[s] == n) + ways[s].kept_bytes * (held[s] == n) for s in range(n))
    peak, seconds, replays = 0, sum(way.seconds for way in ways), [0] * n
    for t in reversed(range(n)):
        base, first = segments[t].base_bytes, max((s for s in range(t + 1) if boundaries[s] > t), default=0)
        for s in range(first, t):
            entering = segments[s].input_bytes * (boundaries[s] >= t)
            kept = ways[s].kept_bytes * (held[s] == t)
            peak = max(peak, base + standing - entering + segments[s].forward_bytes + kept)
            standing += kept + segments[s + 1].input_bytes * (boundaries[s + 1] == t)
            seconds += segments[s].forward_seconds
            unmade -= (held[s] == t) + (boundaries[s + 1] == t)
            replays[s] += 1
        standing -= segments[t].input_bytes + ways[t].kept_bytes
        peak = max(peak, base + standing + ways[t].working_bytes)
    if unmade or any(boundaries[s] < held[s] for s in range(n)):
        raise UsageError("the schedule holds what is not made at that stage, or a way without the boundary before it")
    return Walk(peak, seconds, tuple(replays))


class ChainTable:
    """The optimal schedules of a chain for all budgets, from one table of C and T.

    Column 0 is no memory, column c > 0 is ``floor + (c - 1) * unit`` free bytes; no backward takes less than the floor. Equal sub-chains
    share a row: n segments make up to n^2 / 2 rows in n^3 / 6 vector operations, n equal ones 2 n rows in n^2.

    Args:
        segments: the chain, in forward order.
        most_bytes: the largest budget of interest.
        levels: columns from the floor to that; several for each segment, since each size that is held is rounded.
        rounding: ``up`` counts sizes as too large, so that schedules fit; ``down`` as too small, so that seconds are lower bounds.

    Raises:
        UsageError: there are no segments or levels, or the rounding is another.
    """

    def __init__(self, segments: Sequence[Segment], most_bytes: int, levels: int = 500, rounding: str = "up") -> None:
        if not segments or levels < 1 or rounding not in ("up", "down"):
            raise UsageError(f"a table needs segments, levels and rounding up or down, not {len(segments)}, {levels} and {rounding!r}")
        self._segments, self._most_bytes, self._up = tuple(segments), most_bytes, rounding == "up"
        self._inputs = [segment.input_bytes for segment in segments]
        self._forward_bytes = np.array([segment.forward_bytes for segment in segments])
        self._forward_seconds = np.array([segment.forward_seconds for segment in segments])
        self._kept = [np.array([way.kept_bytes for way in segment.ways]) for segment in segments]
        self._way_seconds = [np.array([way.seconds for way in segment.ways]) for segment in segments]
        self._backward = [np.array([w.working_bytes for w in one.ways]) + (one.base_bytes - one.input_bytes) for one in segments]
        self._floor = int(min(needs.min() for needs in self._backward))
        span = max(most_bytes - self._inputs[0] - self._floor, 0)
        self._unit = max(-(-span // levels), 1)
        # Division rounds down what is held and what is free: one of them is to be rounded up.
        self._more_held, self._more_free = (self._unit - 1, 0) if self._up else (0, self._unit - 1)
        self._columns = np.arange(-(-span // self._unit) + 2)
        # Beside the stages there is n for the step's own forward, whose peak is no concern of the schedule.
        self._bases = [*(segment.base_bytes for segment in segments), -_NEVER]
        self._rows, spans = _shapes(segments)
        self._seconds, self._entered = np.full((2, len(spans), len(self._columns)), np.inf)
        for row, (s, t) in enumerate(spans):
            self._seconds[row] = self._choices(s, t, slice(None)).min(axis=0)
            self._entered[row] = self._seconds[row, self._less(np.array(self._inputs[s]))]

    @property
    def most_bytes(self) -> int:
        """The largest budget that the table is made for."""
        return self._most_bytes

    @property
    def least_bytes(self) -> int | None:
        """The least budget with finite seconds; None if the table ends before it."""
        first = int(np.isfinite(self._seconds[-1]).argmax())
        return self._inputs[0] + self._floor + (first - 1) * self._unit - self._more_free if first else None

    def seconds(self, budget_bytes: int) -> float:
        """Seconds added within a budget, infinite if nothing fits: reached or beaten by ``schedule``, or a lower bound if rounded down."""
        if budget_bytes > self._most_bytes and not self._up:
            return float(sum(seconds.min() for seconds in self._way_seconds))
        return float(self._seconds[-1, self._column(budget_bytes - self._inputs[0])])

    def schedule(self, budget_bytes: int) -> Schedule | None:
        """A schedule within a budget, from a table rounded up; None if nothing fits. What rounding takes from one choice, the next has."""
        assert self._up, "the choices of a table that is rounded down need not fit"
        if self.seconds(budget_bytes) == np.inf:
            return None
        n = len(self._segments)
        ways, ways_since, boundaries_since = [0] * n, [*range(n)], [-1] * n
        left = [(0, n, budget_bytes - self._inputs[0])]
        while left:
            s, t, free = left.pop()
            since, menu, column = t if t < n else -1, self._segments[s].ways, self._column(free)
            choice = int(self._choices(s, t, slice(column, column + 1)).argmin())
            j, kept = s + 1 + max(choice - len(menu), 0), 0
            if choice < len(menu):
                kept = menu[choice].kept_bytes
                ways[s], ways_since[s] = choice, since if kept else s
            else:
                left.append((s, j - 1, free))
            if j <= min(t, n - 1):
                boundaries_since[j] = since
                left.append((j, t, free - kept - self._inputs[j]))
        found = Schedule(0.0, tuple(ways), tuple(ways_since), tuple(boundaries_since))
        return replace(found, seconds=stages_walk(self._segments, found).seconds)

    def _choices(self, s: int, t: int, at: slice) -> NDArray[np.float64]:
        """Seconds of each first choice for (s, t) in some columns: the ways of s, then the checkpoints s+1 and on."""
        kept, seconds, last = self._kept[s], self._way_seconds[s][:, None], min(t, len(self._segments) - 1)
        needs, count = self._needs(s, t), len(kept)
        found = np.empty((len(needs), len(self._columns[at])))
        found[:count] = seconds
        if s < last:
            advance = np.cumsum(self._forward_seconds[s:last]) * (t == last)
            after = self._less((kept + self._inputs[s + 1])[:, None], at)
            found[:count] += self._seconds[self._rows[s + 1, t], after] + advance[0]
            found[count:] = self._entered[self._rows[s + 1 : last + 1, t], at] + self._seconds[self._rows[s, s:last], at]
            found[count:] += advance[:, None]
        found[self._columns[at] < 1 + np.maximum(-((self._floor - needs) // self._unit), 0)[:, None]] = np.inf
        return found

    def _needs(self, s: int, t: int) -> NDArray[np.int64]:
        """The free bytes that each first choice for (s, t) takes by itself, whatever follows."""
        kept, last = self._kept[s], min(t, len(self._segments) - 1)
        if s == last:
            return np.where((kept == 0) | (t > last), self._backward[s], _NEVER)
        forwards = np.append(self._forward_bytes[s] - self._inputs[s], self._forward_bytes[s + 1 : last]) + self._bases[t]
        passing = np.maximum.accumulate(forwards)
        return np.append(np.maximum(self._backward[s], passing[0] + kept), passing)

    def _less(self, held: NDArray[np.int64], at: slice = slice(None)) -> NDArray[np.int64]:
        """The columns that are left of some when so many bytes are held."""
        return np.maximum(self._columns[at] - (held + self._more_held) // self._unit, 0)

    def _column(self, free: int) -> int:
        """The column of so many free bytes."""
        return min(max((free - self._floor + self._more_free) // self._unit + 1, 0), len(self._columns) - 1)


def _shapes(segments: Sequence[Segment]) -> tuple[NDArray[np.int32], list[tuple[int, int]]]:
    """The row of each sub-problem (s, t), and one (s, t) of each row; rows need none after them, and T(0, .) is the last."""
    n, numbers, spans = len(segments), {}, []
    rows, shapes = np.zeros((n, n + 1), dtype=np.int32), [-1] * n
    kinds = [segments.index(segment) for segment in segments]
    for length in range(n):
        for s in range(n - length):
            # Sub-chains are equal if they are without their last segments, and these are.
            shapes[s] = rows[s, s + length] = numbers.setdefault((shapes[s], kinds[s + length]), len(spans))
            if shapes[s] == len(spans):
                spans.append((s, s + length))
    rows[:, n] = len(spans) + np.arange(n)[::-1]
    return rows, spans + [(s, n) for s in reversed(range(n))]
