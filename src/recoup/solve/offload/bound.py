"""A proven lower bound on the time of every joint plan over one link, whatever its windows.

The linear program of ``Movables`` with rows that hold for every plan: what is kept stands in memory, what is recomputed or offloaded
does so at least from when it is asked for until it is released, and from the first put to the end of the forward so do the transfers'
buffers. Each offload costs one fetch. In a step of one backward pass the link is counted too. Let ``out`` be bytes that a plan saves
at a moment by offloading: they have been written by then, and have yet to be read before they are asked for, so that

    out <= write rate (seconds until then + late)        out <= read rate (seconds from then to the last unpacking + late)

where ``late`` is what the plan's replays and stalls add to the step, no more than its whole objective. Each storage is asked for at
its own time; that, latencies, and that reads queue behind writes are left out, which can only lower the bound.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from operator import itemgetter

import highspy
import numpy as np

from recoup.cost import OffloadLink
from recoup.plan import Capabilities
from recoup.simulate.index import Replays
from recoup.simulate.offload import offloadable, puts_of
from recoup.solve.linear import model_of, run_relaxed
from recoup.solve.offload.moving import Moving
from recoup.solve.offload.program import Movables, joint_windows
from recoup.solve.program import Row
from recoup.solve.rows import Rows

__all__ = ["bound_seconds"]

_ROUNDS = 8
_PARTLY = 1e-6
_UNBOUNDED = highspy.kHighsInf


class _Bound(Movables):
    """The program with what the link can carry until and from each row's moment."""

    def __init__(
        self, index: Replays, executor: Capabilities, link: OffloadLink, moving: Moving, cap: int | None, recomputing: bool
    ) -> None:
        storages = sorted(offloadable(index))
        super().__init__(index, executor, joint_windows(index, executor, storages, recomputing), storages, link, cap)
        self.clock = moving.clock
        self.last = float(moving.clock[min(index.events[-1].gap, index.count)]) if index.events else 0.0
        self.asked = {v: self.windows.rebuilt[v][0][0] for v in storages}
        self.puts = puts_of(index.graph, frozenset(storages))
        self.out = self._chained(v for _, v in self.puts) if link.staging_bytes else []
        self.carried = len(index.graph.backwards) <= 1
        # What the plan adds to the step, in the objective's unit: at most all that the objective counts.
        self.late = self._column(0.0, False)
        self.upper[self.late] = _UNBOUNDED
        self.stall = self._column(1.0, False)
        self.upper[self.stall] = _UNBOUNDED
        columns = [column for column, cost in enumerate(self.cost) if cost]
        self.entries.append(([*columns, self.late], [*(self.cost[column] for column in columns), -1.0], 0.0))

    def _memory(self, row: Row) -> tuple[dict[int, float], int]:
        """In the forward the transfers' buffers stand from the first put on; when they go a plan decides."""
        found, fixed = super()._memory(row)
        place = bisect_right(self.puts, row.at, key=itemgetter(0)) if self.out and row.at < self.index.turn else 0
        if place:
            found[self.out[place - 1]] = float(self.link.staging_bytes)
        return found, fixed

    def least(self, rows: list[Row], budget: int, seconds: float) -> tuple[float, frozenset[int] | None]:
        """The objective in seconds, and what is dropped even partly; infinite if nothing fits."""
        cost, upper = list(self.cost), list(self.upper)
        memory = [self._memory(row) for row in rows]
        unit = 1e3 / max(max((fixed for _, fixed in memory), default=1), budget, 1)
        entries = list(self.entries)
        for row, (found, fixed) in zip(rows, memory, strict=True):
            away = [v for v in row.kept if v in self.offload and row.at < self.asked[v]] if self.carried else []
            if away:
                # In memory stands what is kept or offloaded, less what the link can have carried: `out` takes the place of O_v.
                out = len(cost)
                cost.append(0.0)
                upper.append(_UNBOUNDED)
                for v in away:
                    column = self.offload[v]
                    found[column] = found.get(column, 0.0) + self.index.bytes[v]
                found[out] = -1.0 / unit
                entries.append(([*(self.offload[v] for v in away), out], [*(self.index.bytes[v] * unit for v in away), -1.0], 0.0))
                entries.extend(self._carried(row.at, out, unit))
            found = {column: value for column, value in found.items() if value}
            entries.append(([*found], [-value * unit for value in found.values()], (fixed - budget) * unit))
        status, values, _, objective = run_relaxed(model_of(cost, upper, [False] * len(cost), entries), seconds)
        if status == highspy.HighsModelStatus.kInfeasible:
            return float("inf"), None
        if values is None:
            return 0.0, None
        dropped = [v for decided in (self.recompute, self.offload) for v, column in decided.items() if values[column] > _PARTLY]
        return objective / self.scale, frozenset(dropped)

    def _carried(self, at: int, out: int, unit: float) -> list[tuple[list[int], list[float], float]]:
        entries = []
        # An operation's own seconds count for both sides: a transfer may run beside it.
        before = float(self.clock[min(at + 1, self.index.count)])
        after = max(self.last - float(self.clock[at]), 0.0)
        for rate, seconds in ((self.link.write_bytes_per_second, before), (self.link.read_bytes_per_second, after)):
            factor = rate * unit
            entries.append(([out, self.late], [-1.0 / factor * self.scale, 1.0], -seconds * self.scale))
        return entries


def bound_seconds(
    index: Replays,
    executor: Capabilities,
    moving: Moving,
    link: OffloadLink,
    cap: int | None,
    budget: int,
    floor: float,
    seconds: Callable[[], float],
    recomputing: bool = True,
) -> float:
    """Seconds that every plan within the budget takes at least; infinite if none fits.

    Args:
        index: the step.
        executor: what runs it.
        moving: what can move.
        link: over which it moves.
        cap: bytes that may wait on the target.
        budget: the peak allowed, in bytes.
        floor: what every step takes that drops anything.
        seconds: what is left of the time to search.
        recomputing: whether recomputation is a choice too.
    """
    program = _Bound(index, executor, link, moving, cap, recomputing)
    rows = Rows(index, program.windows)
    needed = program.windows.needed
    rows.add_proven(needed, frozenset(), budget)
    rows.add_proven(frozenset(), needed, budget)
    best = 0.0
    for _ in range(_ROUNDS):
        if seconds() <= 0:
            break
        least, dropped = program.least(list(rows.proven.values()), budget, seconds())
        best = max(best, least)
        if dropped is None:
            break
        if not rows.add_proven(needed - dropped, dropped & needed, budget):
            break
    return floor + best if np.isfinite(best) else float("inf")
