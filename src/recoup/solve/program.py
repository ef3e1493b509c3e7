"""The whole step as a mixed integer program.

For a storage v that the backward unpacks, ``R_v`` is 1 if it is recomputed and 0 if it is kept. Other activations have
``K_u`` (held for a replay) beside ``R_u``. An operation that rebuilds v is replayed, ``r_o >= R_v``, and then each
activation that it reads must be there, ``K_u + R_u >= r_o``. A module call with a replayed operation pays for capturing
all its operations, ``f >= r_o``. The least time of the replays is sought. Memory enters as one row for each moment that
can bind: the bytes that the decisions put there stay within the budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np
from numpy.typing import NDArray

from recoup.plan import Capabilities
from recoup.simulate.index import Replays
from recoup.solve.linear import COST_SCALE, MEMORY_SCALE, Entry, model_of, run_integer, run_relaxed
from recoup.solve.windows import Windows

__all__ = ["Program", "Row", "Solution"]

_PEAK_WEIGHT = 1e4
_PARTLY = 1e-6


@dataclass(frozen=True, slots=True)
class Row:
    """Memory at one moment: ``fixed + sum(kept[v] K_v) + sum(copied[v] R_v)``, in bytes.

    ``proven`` rows hold for every plan; the others are estimates that a simulation taught.
    """

    at: int
    fixed: int
    kept: tuple[int, ...]
    copied: tuple[int, ...]
    proven: bool


@dataclass(frozen=True, slots=True)
class Solution:
    """What the program says.

    Attributes:
        recompute: the storages with ``R = 1``, and saved ones that are neither kept nor needed; None if there is no solution.
        held: the storages with ``K = 1``.
        bound: proven least objective (seconds of replays, or bytes of peak).
        infeasible: whether it is proven that no choice satisfies the rows.
        prices: of a relaxed program, for each row the seconds that one more byte of budget would save there.
    """

    recompute: frozenset[int] | None
    held: frozenset[int]
    bound: float
    infeasible: bool
    prices: tuple[float, ...] = ()


class Program:
    """The columns and structural rows of one step, to be solved under varying memory rows.

    ``given`` are storages that are there for replays without anybody deciding so.
    """

    def __init__(self, index: Replays, executor: Capabilities, frame: Windows, given: frozenset[int] = frozenset()) -> None:
        self.index, self.executor, self.windows, self.given = index, executor, frame, given
        self.cost: list[float] = []
        self.integer: list[bool] = []
        self.upper: list[float] = []
        self.recompute: dict[int, int] = {}
        self.hold: dict[int, int] = {}
        self.replay: dict[int, int] = {}
        self.entries: list[Entry] = []
        self.frames: dict[tuple[str, int], int] = {}
        self.scale = COST_SCALE / max(index.base_seconds, 1e-12)
        for v in sorted(frame.dropping):
            self.recompute[v] = self._column(0.0, True)
        for u in sorted(frame.optional):
            if executor.keeps_unsaved or index.saves_of[u]:
                self.hold[u] = self._column(0.0, True)
        self._structure()

    def _column(self, cost: float, integer: bool) -> int:
        self.cost.append(cost)
        self.integer.append(integer)
        self.upper.append(1.0)
        return len(self.cost) - 1

    def _structure(self) -> None:
        for op in sorted({op for v in self.recompute for op in self.index.ops_of[v]}):
            mine = [v for v in self.index.own[op] if v in self.recompute and op in self.index.ops_of[v]]
            column = self._replay_column(op, mine)
            self._inputs(op, mine, column)
            self._capture(op, column)
        for v in self.windows.optional:
            if v in self.hold and v in self.recompute:
                # Kept and recomputed at once buys nothing.
                self.entries.append(([self.hold[v], self.recompute[v]], [-1.0, -1.0], -1.0))

    def _capture(self, op: int, column: int) -> None:
        """What ``column`` decides on captures the module call of an operation."""
        frame = self.index.frame_of[op]
        size = self.index.frame_ops.get(frame, 0)
        if self.executor.capture_seconds and size:
            if frame not in self.frames:
                self.frames[frame] = self._column(self.executor.capture_seconds * size * self.scale, False)
            self.entries.append(([self.frames[frame], column], [1.0, -1.0], 0.0))

    def _replay_column(self, op: int, mine: list[int]) -> int:
        seconds = (self.index.graph.ops[op].seconds + self.executor.replay_seconds) * self.scale
        if len(mine) == 1:
            column = self.recompute[mine[0]]
            self.cost[column] += seconds
        else:
            column = self._column(seconds, False)
            self.entries.extend(([column, self.recompute[v]], [1.0, -1.0], 0.0) for v in mine)
        self.replay[op] = column
        return column

    def _inputs(self, op: int, mine: list[int], column: int) -> None:
        for u in self.index.reads[op]:
            if not self.index.is_activation[u] or u in self.windows.needed or u in self.given:
                # One that the backward unpacks is either kept or rebuilt, so it is there.
                continue
            if self.index.saves_of[u] and u not in self.windows.dropping:
                continue
            askers = [v for v in mine if v != u]
            if not askers:
                continue
            # An operation that also writes u asks for it only on behalf of its other results.
            asker = column if u not in self.index.own[op] else self.recompute[askers[0]]
            sources = [found[u] for found in (self.hold, self.recompute) if u in found]
            if not sources:
                self.upper[asker] = 0.0
            elif asker not in sources:
                self.entries.append(([*sources, asker], [*([1.0] * len(sources)), -1.0], 0.0))

    def _memory(self, row: Row) -> tuple[dict[int, float], int]:
        """A row's coefficients in bytes by column, and its constant."""
        found: dict[int, float] = {}
        fixed = row.fixed
        for v in row.kept:
            count = self.index.bytes[v]
            if v in self.hold:
                found[self.hold[v]] = found.get(self.hold[v], 0.0) + count
            elif v in self.windows.needed:
                fixed += count
                for column in self._gone(v):
                    found[column] = found.get(column, 0.0) - count
        for v in row.copied:
            for column in self._gone(v):
                found[column] = found.get(column, 0.0) + self.index.bytes[v]
        return {column: value for column, value in found.items() if value}, fixed

    def _gone(self, v: int) -> tuple[int, ...]:
        """The columns that say that a storage is dropped and comes back."""
        return (self.recompute[v],) if v in self.recompute else ()

    def solve(self, rows: list[Row], budget: int | None, seconds: float, tolerance: float = 0.0, nodes: int = 20000) -> Solution:
        """The least time within the budget, or for ``budget=None`` the least peak (ties by time).

        ``tolerance`` is the relative optimality gap at which the search may stop: of the step's time, or of the peak.
        """
        cost, upper = list(self.cost), list(self.upper)
        peak: list[int] = []
        if budget is None:
            peak = [len(cost)]
            total = sum(cost) or 1.0
            cost = [value / total for value in cost]
            cost.append(_PEAK_WEIGHT)
            upper.append(highspy.kHighsInf)
        entries, unit = self._limited(rows, budget or 0)
        if peak:
            count = len(self.entries)
            entries[count:] = [([*columns, *peak], [*values, 1.0], limit) for columns, values, limit in entries[count:]]
        model = model_of(cost, upper, [*self.integer, *([False] * len(peak))], entries)
        stop = tolerance * (COST_SCALE if budget is not None else MEMORY_SCALE * _PEAK_WEIGHT)
        status, values, dual = run_integer(model, seconds, stop, nodes)
        bound = dual / self.scale if budget is not None else (dual - 1.0) / _PEAK_WEIGHT / unit
        if status == highspy.HighsModelStatus.kInfeasible:
            return Solution(None, frozenset(), bound, True)
        if values is None:
            return Solution(None, frozenset(), bound, False)
        return Solution(self._dropped(values), frozenset(u for u, column in self.hold.items() if values[column] > 0.5), bound, False)

    def relaxed(self, rows: list[Row], budget: int, seconds: float) -> Solution:
        """The linear relaxation: a bound on the seconds, and its point with all that is partly recomputed recomputed."""
        entries, unit = self._limited(rows, budget)
        status, values, duals, objective = run_relaxed(model_of(self.cost, self.upper, [False] * len(self.cost), entries), seconds)
        if status == highspy.HighsModelStatus.kInfeasible:
            return Solution(None, frozenset(), 0.0, True)
        if values is None or duals is None:
            return Solution(None, frozenset(), 0.0, False)
        held = frozenset(u for u, column in self.hold.items() if values[column] > 1 - _PARTLY)
        # In the program a row reads: what is saved is at least what is over; its dual is the cost of one unit more over.
        prices = tuple(float(dual) * unit / self.scale for dual in duals[len(self.entries) :])
        return Solution(self._dropped(values, _PARTLY), held, objective / self.scale, False, prices)

    def _limited(self, rows: list[Row], budget: int) -> tuple[list[Entry], float]:
        """The structural rows and those of a budget, and what a byte counts in them."""
        memory = [self._memory(row) for row in rows]
        unit = MEMORY_SCALE / max(max((fixed for _, fixed in memory), default=1), budget, 1)
        limits = [([*found], [-value * unit for value in found.values()], (fixed - budget) * unit) for found, fixed in memory]
        return [*self.entries, *limits], unit

    def priced(self, price: float, seconds: float = 10.0) -> frozenset[int] | None:
        """What to drop where there is no limit, but each kept byte costs ``price`` seconds; None if no answer came in time."""
        cost = list(self.cost)
        for v, column in self.recompute.items():
            if v not in self.hold:
                cost[column] -= price * self.scale * self.index.bytes[v]
        for v, column in self.hold.items():
            cost[column] += price * self.scale * self.index.bytes[v]
        _, values, _ = run_integer(model_of(cost, self.upper, self.integer, self.entries), seconds, COST_SCALE * 1e-5, 2000)
        return None if values is None else self._dropped(values)

    def _dropped(self, values: NDArray[np.float64], least: float = 0.5) -> frozenset[int]:
        chosen = {v for v, column in self.recompute.items() if values[column] > least}
        # Saved, never unpacked, and not held: dropping it costs no time.
        idle = [v for v in self.recompute if v in self.windows.optional and self.index.saves_of[v] and v in self.hold]
        chosen |= {v for v in idle if values[self.hold[v]] < 1 - least}
        return frozenset(chosen)
