"""Does a plan keep its promise? Predicted and measured peak, gradients and time, at three budgets for each workload.

    python -m benchmarks.budgets --workloads gpt2,resnet

The budgets are 75 % and 50 % of the unplanned peak, and 1.05 times the least peak for which a plan was found.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from rich.table import Table

from benchmarks.measuring import Advance, arguments, chosen_workloads, mebibytes, progress_bar, ratio, sizes, write
from benchmarks.workloads import load
from recoup.errors import InfeasibleBudget
from recoup.graph import StepGraph
from recoup.plan.capabilities import LIVE, STATIC
from recoup.simulate import simulate
from recoup.solve import least_peak, solve
from recoup.torch import record
from recoup.verify import Check, verify

__all__ = ["Row", "main"]

SHARES = {"75%": 0.75, "50%": 0.50}
LEAST = "1.05 x least"


@dataclass(frozen=True, slots=True)
class Row:
    """One budget of one workload.

    Attributes:
        workload, budget: names.
        budget_bytes: the budget.
        unplanned_peak_bytes: measured.
        least_bytes: the least simulated peak of any plan that was found, over both gears.
        gear: that the solver chose, '' if nothing fits.
        predicted_peak_bytes, measured_peak_bytes: of the planned step.
        accuracy: measured over predicted peak.
        gradients_equal: bit for bit; None if nothing fits.
        verified: all checks of ``recoup.verify`` held.
        gap: how far the plan can be from the optimum.
        predicted_relative_time, relative_time: of the planned over the unplanned step, simulated and measured.
        solve_seconds: the solver's.
        note: what failed, or why there is no plan.
    """

    workload: str
    budget: str
    budget_bytes: int
    unplanned_peak_bytes: int
    least_bytes: int
    gear: str = ""
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    accuracy: float | None = None
    gradients_equal: bool | None = None
    verified: bool | None = None
    gap: float | None = None
    predicted_relative_time: float | None = None
    relative_time: float | None = None
    solve_seconds: float | None = None
    note: str = ""


def gradients_equal(checks: Iterable[Check]) -> bool:
    """Whether the gradients were compared and are the same bit for bit (not merely as close as two unplanned runs)."""
    found = [check for check in checks if check.name.startswith("gradients")]
    return bool(found) and all(check.passed and "differ" not in check.detail for check in found)


def measure(name: str, options: argparse.Namespace, advance: Advance) -> list[Row]:
    """The rows of one workload."""
    model, step = load(name, tiny=options.tiny, **sizes(options))
    advance(f"{name}: recording")
    graph = record(step, model=model, name=name)
    advance(f"{name}: least peak")
    least_bytes = min(least_peak(graph, executor)[0] for executor in (LIVE, STATIC))
    unplanned_bytes = simulate(graph).peak_bytes
    budgets = {label: int(share * unplanned_bytes) for label, share in SHARES.items()} | {LEAST: int(1.05 * least_bytes)}
    rows = []
    for label, budget_bytes in budgets.items():
        advance(f"{name}: {label}")
        rows.append(one_budget(Row(name, label, budget_bytes, unplanned_bytes, least_bytes), graph, model, step))
    return rows


def one_budget(row: Row, graph: StepGraph, model: torch.nn.Module, step: Callable[[], object]) -> Row:
    """The row with its plan solved, run and verified."""
    try:
        plan = solve(graph, row.budget_bytes)
    except InfeasibleBudget as error:
        short = (
            f"below the least feasible, {mebibytes(error.least_bytes)} MiB ({error.least_bytes / row.unplanned_peak_bytes:.0%} of the peak)"
        )
        return replace(row, note=short)
    result = verify(model, step, plan)
    failed = [f"{check.name}: {check.detail}" for check in result.checks if not check.passed]
    return replace(
        row,
        unplanned_peak_bytes=result.unplanned_peak_bytes or row.unplanned_peak_bytes,
        gear=plan.gear,
        predicted_peak_bytes=plan.peak_bytes,
        measured_peak_bytes=result.peak_bytes,
        accuracy=None if result.peak_bytes is None else result.peak_bytes / plan.peak_bytes,
        gradients_equal=gradients_equal(result.checks),
        verified=result.passed,
        gap=plan.gap,
        predicted_relative_time=plan.step_seconds / plan.unplanned_step_seconds,
        relative_time=result.relative_time,
        solve_seconds=plan.solve_seconds,
        note="; ".join(failed) or ("drops nothing" if plan.drops_nothing else ""),
    )


def rows_table(rows: Iterable[Row]) -> Table:
    """All rows."""
    table = Table(title="Plans at three budgets; peaks in MiB, times relative to the unplanned step")
    for header in ("workload", "budget"):
        table.add_column(header)
    for header in (
        "unplanned",
        "budget MiB",
        "predicted",
        "measured",
        "meas/pred",
        "gradients",
        "gear",
        "gap",
        "pred time",
        "time",
        "solve s",
    ):
        table.add_column(header, justify="right")
    table.add_column("note")
    last = ""
    for row in rows:
        if last and row.workload != last:
            table.add_section()
        equal = {None: "-", True: "bitwise", False: "DIFFER"}[row.gradients_equal]
        peaks = map(mebibytes, (row.unplanned_peak_bytes, row.budget_bytes, row.predicted_peak_bytes, row.measured_peak_bytes))
        times = map(ratio, (row.gap, row.predicted_relative_time, row.relative_time, row.solve_seconds))
        accuracy = "-" if row.accuracy is None else f"{row.accuracy:.4f}"
        first = "" if row.workload == last else row.workload
        table.add_row(first, row.budget, *peaks, accuracy, equal, row.gear or "-", *times, row.note)
        last = row.workload
    return table


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark and prints its table."""
    parser = arguments(__doc__ or "")
    options = parser.parse_args(argv)
    names = chosen_workloads(options)
    with progress_bar(len(names) * (3 + len(SHARES))) as advance:
        rows = [row for name in names for row in measure(name, options, advance)]
    write(options, rows, [rows_table(rows)])


if __name__ == "__main__":
    main()
