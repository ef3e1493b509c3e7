"""The rows of ``benchmarks.offload`` as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.measuring import mebibytes, ratio
from recoup.cost import OffloadLink
from recoup.units import format_bytes, format_seconds

__all__ = ["FAST", "JOINT", "MOVES", "RECOMPUTES", "Row", "arithmetic_table", "link_text", "peaks_table", "removed", "times_table"]

RECOMPUTES, MOVES, JOINT, FAST = "recompute only", "offload only", "joint", "joint, fast link"
"""The plans; the last one, over a link that hides everything, is simulated and not run."""


@dataclass(frozen=True, slots=True)
class Row:
    """One plan of one workload at one budget.

    Attributes:
        workload, budget, plan: names.
        budget_bytes: the budget.
        unplanned_peak_bytes: measured.
        unplanned_seconds: median of the unplanned step in the rounds of this run.
        recorded_seconds: of the unplanned step when it was recorded, which simulated times are relative to.
        forward_seconds: of it until the backward begins.
        least_out_seconds, least_back_seconds: what the bytes that the budget is short of the unplanned peak occupy the link.
        link: figures of the link, '' for none.
        gear: that the solver chose, '' if nothing fits.
        gap: how far the simulated time can be from the least.
        predicted_peak_bytes, measured_peak_bytes: of the planned step, buffers of transfers included.
        gradients_equal: bit for bit, and all else that ``recoup.verify`` compares; None where the plan was not run.
        offloaded_bytes: what the plan moves out and back.
        link_seconds: what that occupies the link, both ways, by its measured figures.
        predicted_stall_seconds, measured_stall_seconds: what a step waits for the link.
        predicted_relative_time, relative_time: over the unplanned step, simulated and measured.
        spread: distance of the quartiles of the measured time over its median.
        note: what failed, or why there is no plan.
    """

    workload: str
    budget: str
    plan: str
    budget_bytes: int
    unplanned_peak_bytes: int
    recorded_seconds: float
    forward_seconds: float
    least_out_seconds: float
    least_back_seconds: float
    link: str = ""
    unplanned_seconds: float | None = None
    gear: str = ""
    gap: float | None = None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    gradients_equal: bool | None = None
    offloaded_bytes: int = 0
    link_seconds: float = 0.0
    predicted_stall_seconds: float | None = None
    measured_stall_seconds: float | None = None
    predicted_relative_time: float | None = None
    relative_time: float | None = None
    spread: float | None = None
    note: str = ""


def removed(rows: Sequence[Row], row: Row, *, simulated: bool) -> float | None:
    """The share of the time that recomputation alone adds at this budget which this plan does not take; None if it adds none."""
    alone = next((one for one in rows if (one.workload, one.budget, one.plan) == (row.workload, row.budget, RECOMPUTES)), None)
    if alone is None or row.plan == RECOMPUTES:
        return None
    before, after = (alone.predicted_relative_time, row.predicted_relative_time) if simulated else (alone.relative_time, row.relative_time)
    if before is None or after is None or before <= 1:
        return None
    return (before - after) / (before - 1)


def peaks_table(rows: Sequence[Row]) -> Table:
    """Every plan: peaks and bits."""
    table = _table("Plans at a directory; peaks in MiB", "workload", "budget", "plan", ">budget MiB", ">predicted", ">measured",
                   ">meas/pred", ">gradients", ">gear", ">moved MiB", "note")  # fmt: skip
    for row in _sectioned(table, rows):
        equal = {None: "-", True: "bitwise", False: "DIFFER"}[row.gradients_equal]
        peaks = map(mebibytes, (row.budget_bytes, row.predicted_peak_bytes, row.measured_peak_bytes))
        off = _over(row.measured_peak_bytes, row.predicted_peak_bytes)
        cells = ("-" if off is None else f"{off:.4f}", equal, row.gear or "-", mebibytes(row.offloaded_bytes) if row.gear else "-")
        table.add_row(row.workload, row.budget, row.plan, *peaks, *cells, row.note)
    return table


def times_table(rows: Sequence[Row]) -> Table:
    """Every plan that was found: times over the unplanned step, and what it takes off the time that recomputing alone adds."""
    title = "Times over the unplanned step; 'gone' is of the time that recomputing alone adds at that budget"
    table = _table(title, "workload", "budget", "plan", ">time", ">spread", ">simulated", ">time/sim", ">gap", ">wait", ">sim wait",
                   ">gone", ">sim gone")  # fmt: skip
    for row in _sectioned(table, [row for row in rows if row.gear]):
        off = _over(row.relative_time, row.predicted_relative_time)
        times = (*map(ratio, (row.relative_time, row.spread, row.predicted_relative_time, off)), _percent(row.gap))
        waits = (_seconds(row.measured_stall_seconds), _seconds(row.predicted_stall_seconds))
        shares = (_share(removed(rows, row, simulated=False)), _share(removed(rows, row, simulated=True)))
        table.add_row(row.workload, row.budget, row.plan, *times, *waits, *shares)
    return table


def arithmetic_table(rows: Iterable[Row]) -> Table:
    """Whether the link can carry the bytes within the step: what must leave by any plan, and what each plan moves."""
    title = "Can the link carry it? Seconds on the link over those of the unplanned step, as recorded"
    table = _table(title, "workload", "budget", "what moves", ">bytes", ">out", ">back", ">both", ">forward", ">step", ">both / step",
                   "within the step")  # fmt: skip
    for row in rows:
        if row.plan == RECOMPUTES:
            short = row.unplanned_peak_bytes - row.budget_bytes
            both = row.least_out_seconds + row.least_back_seconds
            cells = (format_bytes(short), format_seconds(row.least_out_seconds), format_seconds(row.least_back_seconds))
            title = "peak less budget"
        elif row.offloaded_bytes and row.plan != FAST:
            both, title, cells = row.link_seconds, f"by {row.plan}", (format_bytes(row.offloaded_bytes), "", "")
        else:
            continue
        step = row.recorded_seconds
        ends = (format_seconds(both), format_seconds(row.forward_seconds), format_seconds(step), ratio(_over(both, step)))
        table.add_row(row.workload, row.budget, title, *cells, *ends, "yes" if both <= step else "no")
    return table


def link_text(link: OffloadLink) -> str:
    """A link's figures in words."""
    shared = ", one transfer at a time" if link.shared else ""
    rates = f"out {format_bytes(link.write_bytes_per_second)}/s, back {format_bytes(link.read_bytes_per_second)}/s"
    calls = f"latency {format_seconds(link.latency_seconds)}, call {format_seconds(link.call_seconds)}"
    rest = f"{calls}, drag {link.drag:.1%}, buffers {format_bytes(link.staging_bytes)}"
    return f"{link.target} at {link.where}: {rates}, {rest}{shared}; {link.provenance}"


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading.removeprefix(">"), justify="right" if heading.startswith(">") else "left")
    return table


def _sectioned(table: Table, rows: Iterable[Row]) -> Iterator[Row]:
    """The rows, with a line before each workload and budget but the first."""
    last = None
    for row in rows:
        if last is not None and last != (row.workload, row.budget):
            table.add_section()
        last = row.workload, row.budget
        yield row


def _over(value: float | None, other: float | None) -> float | None:
    return None if value is None or not other else value / other


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)
