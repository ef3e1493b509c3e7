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
from recoup.solve.windows import Windows

__all__ = ["Program", "Row", "Solution"]

Entry = tuple[list[int], list[float], float]
"""Columns, coefficients and least sum of one row."""

_COST_SCALE = 1e4
_MEMORY_SCALE = 1e3
_PEAK_WEIGHT = 1e4


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
    """

    recompute: frozenset[int] | None
    held: frozenset[int]
    bound: float
    infeasible: bool


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
        self.scale = _COST_SCALE / max(index.base_seconds, 1e-12)
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
        frames: dict[tuple[str, int], int] = {}
        for op in sorted({op for v in self.recompute for op in self.index.ops_of[v]}):
            mine = [v for v in self.index.own[op] if v in self.recompute and op in self.index.ops_of[v]]
            column = self._replay_column(op, mine)
            self._inputs(op, mine, column)
            frame = self.index.frame_of[op]
            size = self.index.frame_ops.get(frame, 0)
            if self.executor.capture_seconds and size:
                if frame not in frames:
                    frames[frame] = self._column(self.executor.capture_seconds * size * self.scale, False)
                self.entries.append(([frames[frame], column], [1.0, -1.0], 0.0))
        for v in self.windows.optional:
            if v in self.hold and v in self.recompute:
                # Kept and recomputed at once buys nothing.
                self.entries.append(([self.hold[v], self.recompute[v]], [-1.0, -1.0], -1.0))

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
                found[self.recompute[v]] = found.get(self.recompute[v], 0.0) - count
        for v in row.copied:
            if v in self.recompute:
                found[self.recompute[v]] = found.get(self.recompute[v], 0.0) + self.index.bytes[v]
        return {column: value for column, value in found.items() if value}, fixed

    def solve(self, rows: list[Row], budget: int | None, seconds: float, tolerance: float = 0.0, nodes: int = 20000) -> Solution:
        """The least time within the budget, or for ``budget=None`` the least peak (ties by time).

        ``tolerance`` is the relative optimality gap at which the search may stop: of the step's time, or of the peak.
        """
        memory = [self._memory(row) for row in rows]
        largest = max((fixed for _, fixed in memory), default=1)
        unit = _MEMORY_SCALE / max(largest, budget or 1, 1)
        cost, upper, entries = list(self.cost), list(self.upper), list(self.entries)
        peak: list[int] = []
        if budget is None:
            peak = [len(cost)]
            total = sum(cost) or 1.0
            cost = [value / total for value in cost]
            cost.append(_PEAK_WEIGHT)
            upper.append(highspy.kHighsInf)
        for coefficients, fixed in memory:
            limit = fixed * unit if budget is None else (fixed - budget) * unit
            entries.append(([*coefficients, *peak], [*(-value * unit for value in coefficients.values()), *([1.0] * len(peak))], limit))
        model = _model(cost, upper, [*self.integer, *([False] * len(peak))], entries)
        stop = tolerance * (_COST_SCALE if budget is not None else _MEMORY_SCALE * _PEAK_WEIGHT)
        status, values, dual = _run(model, seconds, stop, nodes)
        bound = dual / self.scale if budget is not None else (dual - 1.0) / _PEAK_WEIGHT / unit
        if status == highspy.HighsModelStatus.kInfeasible:
            return Solution(None, frozenset(), bound, True)
        if values is None:
            return Solution(None, frozenset(), bound, False)
        return Solution(self._dropped(values), frozenset(u for u, column in self.hold.items() if values[column] > 0.5), bound, False)

    def priced(self, price: float, seconds: float = 10.0) -> frozenset[int] | None:
        """What to drop where there is no limit, but each kept byte costs ``price`` seconds; None if no answer came in time."""
        cost = list(self.cost)
        for v, column in self.recompute.items():
            if v not in self.hold:
                cost[column] -= price * self.scale * self.index.bytes[v]
        for v, column in self.hold.items():
            cost[column] += price * self.scale * self.index.bytes[v]
        _, values, _ = _run(_model(cost, self.upper, self.integer, self.entries), seconds, _COST_SCALE * 1e-5, 2000)
        return None if values is None else self._dropped(values)

    def _dropped(self, values: NDArray[np.float64]) -> frozenset[int]:
        chosen = {v for v, column in self.recompute.items() if values[column] > 0.5}
        # Saved, never unpacked, and not held: dropping it costs no time.
        idle = [v for v in self.recompute if v in self.windows.optional and self.index.saves_of[v] and v in self.hold]
        chosen |= {v for v in idle if values[self.hold[v]] < 0.5}
        return frozenset(chosen)


def _model(cost: list[float], upper: list[float], integer: list[bool], entries: list[Entry]) -> highspy.HighsLp:
    """Minimise ``cost x`` with ``0 <= x <= upper`` and each entry's ``sum >= limit``."""
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(cost), len(entries)
    lp.col_cost_ = np.array(cost, dtype=np.float64)
    lp.col_lower_ = np.zeros(len(cost))
    lp.col_upper_ = np.array(upper, dtype=np.float64)
    lp.row_lower_ = np.array([limit for _, _, limit in entries], dtype=np.float64)
    lp.row_upper_ = np.full(len(entries), highspy.kHighsInf)
    lengths = np.cumsum([0, *(len(columns) for columns, _, _ in entries)])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = lengths.astype(np.int32)
    lp.a_matrix_.index_ = np.array([column for columns, _, _ in entries for column in columns], dtype=np.int32)
    lp.a_matrix_.value_ = np.array([value for _, values, _ in entries for value in values], dtype=np.float64)
    lp.integrality_ = [highspy.HighsVarType.kInteger if whole else highspy.HighsVarType.kContinuous for whole in integer]
    return lp


def _run(
    model: highspy.HighsLp, seconds: float, stop: float, nodes: int
) -> tuple[highspy.HighsModelStatus, NDArray[np.float64] | None, float]:
    """Status, values of the best solution found (None if there is none), proven bound on the objective."""
    # The plain binding: the wrapper class above it prints a banner when it is made.
    solver = highspy._Highs()  # pyrefly: ignore[missing-attribute]
    for option, value in (
        ("output_flag", False), ("threads", 1), ("random_seed", 0), ("time_limit", max(seconds, 0.05)), ("mip_max_nodes", nodes),
        ("mip_abs_gap", max(stop, 1e-9)), ("mip_rel_gap", 0.0), ("mip_feasibility_tolerance", 1e-7), ("primal_feasibility_tolerance", 1e-7),
    ):  # fmt: skip
        solver.setOptionValue(option, value)
    solver.passModel(model)
    solver.run()
    status = solver.getModelStatus()
    info = solver.getInfo()
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    values = np.array(solver.getSolution().col_value) if found else None
    dual = info.mip_dual_bound
    return status, values, float(dual) if np.isfinite(dual) else 0.0
