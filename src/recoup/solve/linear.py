"""The linear and integer programming solver, HiGHS, behind three functions: one thread, fixed seed, so that answers repeat."""

from __future__ import annotations

import highspy
import numpy as np
from numpy.typing import NDArray

__all__ = ["COST_SCALE", "MEMORY_SCALE", "Entry", "model_of", "run_integer", "run_relaxed"]

Entry = tuple[list[int], list[float], float]
"""Columns, coefficients and least sum of one row."""

# What the step's time comes to in an objective, and the budget in a memory row: the solver's tolerances are absolute.
COST_SCALE = 1e4
MEMORY_SCALE = 1e3


def model_of(cost: list[float], upper: list[float], integer: list[bool], entries: list[Entry]) -> highspy.HighsLp:
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


def run_integer(
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


def run_relaxed(
    model: highspy.HighsLp, seconds: float
) -> tuple[highspy.HighsModelStatus, NDArray[np.float64] | None, NDArray[np.float64] | None, float]:
    """Status, the optimal point and the duals of its rows (None if there are none), the objective."""
    solver = highspy._Highs()  # pyrefly: ignore[missing-attribute]
    for option, value in (("output_flag", False), ("threads", 1), ("random_seed", 0), ("time_limit", max(seconds, 0.05))):
        solver.setOptionValue(option, value)
    solver.passModel(model)
    solver.run()
    status = solver.getModelStatus()
    if status != highspy.HighsModelStatus.kOptimal:
        return status, None, None, 0.0
    solution = solver.getSolution()
    return status, np.array(solution.col_value), np.array(solution.row_dual), float(solver.getInfo().objective_function_value)
