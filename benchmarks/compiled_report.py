"""The rows of ``benchmarks.compiled`` as tables and as a figure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.measuring import mebibytes, ratio

__all__ = ["Row", "compiled_figure", "curve_table", "read_rows", "summary_table"]

_STYLES = {"stock": {"color": "#D55E00", "marker": "s", "linestyle": "--"}, "recoup": {"color": "#0072B2", "marker": "o", "linestyle": "-"}}

_WRONG = 1e-3
"""Gradients further off than this, relative to their largest element, are not those of another order of additions."""


@dataclass(frozen=True, slots=True)
class Row:
    """One way to compile one workload.

    Attributes:
        workload, kernels: names.
        variant: ``keep all``, ``stock`` or ``recoup``.
        setting: the stock ratio, or which budget.
        budget_bytes, predicted_peak_bytes: Recoup's.
        measured_peak_bytes: of the whole step.
        step_seconds: median of the rounds.
        spread: distance of the quartiles over the median.
        relative_time: ``step_seconds`` over that of the step that keeps all.
        compile_seconds: the first two steps less two medians.
        solve_seconds, pricing_seconds: Recoup's share of it.
        bitwise_equal: whether the loss and every gradient have the bits of the step that keeps all.
        loss_equal: whether the loss has the bits of that step's; if so, the forward drew the same random numbers.
        gradient_difference: the largest difference of an element over the largest element, of all parameters.
        gap: how far the plan can be from the optimum.
        note: why there is no number.
    """

    workload: str
    kernels: str
    variant: str
    setting: str
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    step_seconds: float | None = None
    spread: float | None = None
    relative_time: float | None = None
    compile_seconds: float | None = None
    solve_seconds: float = 0.0
    pricing_seconds: float = 0.0
    bitwise_equal: bool | None = None
    loss_equal: bool | None = None
    gradient_difference: float | None = None
    gap: float | None = None
    note: str = ""


def read_rows(paths: Iterable[Path]) -> list[Row]:
    """The rows of JSON files that the benchmark wrote."""
    return [Row(**row) for path in paths for row in json.loads(path.read_text())["rows"]]


def gradients(row: Row) -> str:
    """What became of the gradients, in words."""
    if row.bitwise_equal is None:
        return "-"
    return "equal" if row.bitwise_equal else f"differ by {row.gradient_difference:.0e}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def curve_table(rows: Sequence[Row]) -> Table:
    """Every row."""
    table = Table(title="Peak, time, compilation and gradients; time is relative to the step that keeps all")
    for header in ("workload", "kernels", "variant"):
        table.add_column(header)
    for header in ("budget MiB", "predicted MiB", "measured MiB", "time", "spread", "compile s", "solve s", "price s"):
        table.add_column(header, justify="right")
    table.add_column("gradients")
    table.add_column("note")
    last = ("", "")
    for row in rows:
        if last != (row.workload, row.kernels):
            table.add_section()
        last = (row.workload, row.kernels)
        peaks = map(mebibytes, (row.budget_bytes, row.predicted_peak_bytes, row.measured_peak_bytes))
        own = (_seconds(row.solve_seconds), _seconds(row.pricing_seconds)) if row.variant != "stock" else ("-", "-")
        cells = (*peaks, ratio(row.relative_time), ratio(row.spread), _seconds(row.compile_seconds), *own)
        note = "OVER BUDGET" if (row.budget_bytes or 0) and (row.measured_peak_bytes or 0) > (row.budget_bytes or 0) else row.note
        table.add_row(row.workload, row.kernels, f"{row.variant} {row.setting}".strip(), *cells, gradients(row), note)
    return table


def summary_table(rows: Sequence[Row]) -> Table:
    """Recoup at the measured peak of each stock point: time over time, compilation over compilation at ratio 1."""
    table = Table(title="Recoup at the measured peak of each stock point (below 1: Recoup is faster, or lower)")
    for header in ("workload", "kernels", "stock ratio"):
        table.add_column(header)
    for header in ("stock MiB", "time / stock's", "stock's peak / peak at its time", "measured / predicted", "compile / stock's at 1"):
        table.add_column(header, justify="right")
    for stock in (row for row in rows if row.variant == "stock"):
        same = [row for row in rows if (row.workload, row.kernels) == (stock.workload, stock.kernels)]
        own = next((row for row in same if row.variant == "recoup" and row.setting == f"at stock {stock.setting}"), None)
        first = next((row for row in same if row.variant == "stock" and row.setting == "1"), None)
        if own is None or own.note:
            cells = ["does not fit" if own else "-", ratio(_lower(stock, same)), "-", "-"]
        else:
            cells = [
                ratio(_over(own.step_seconds, stock.step_seconds)),
                ratio(_lower(stock, same)),
                ratio(_over(own.measured_peak_bytes, own.predicted_peak_bytes)),
                ratio(_over(own.compile_seconds, first.compile_seconds if first else None)),
            ]
        table.add_row(stock.workload, stock.kernels, stock.setting, mebibytes(stock.measured_peak_bytes), *cells)
    return table


def _lower(stock: Row, rows: Sequence[Row]) -> float | None:
    """How many times lower than the stock peak is the lowest of Recoup's peaks that takes no more time; None if there is none."""
    allowed = stock.step_seconds or 0.0
    peaks = [row.measured_peak_bytes for row in rows if row.variant == "recoup" and (row.step_seconds or float("inf")) <= allowed]
    return _over(stock.measured_peak_bytes, min((peak for peak in peaks if peak is not None), default=None))


def _over(value: float | None, other: float | None) -> float | None:
    return value / other if value is not None and other else None


def compiled_figure(rows: Sequence[Row], path: Path) -> None:
    """Both curves of each workload and kind of kernels: relative time over relative peak."""
    from matplotlib.figure import Figure

    pairs = list(dict.fromkeys((row.workload, row.kernels) for row in rows))
    columns = min(len(pairs), 3)
    lines = -(-len(pairs) // columns)
    figure = Figure(figsize=(4.2 * columns + 0.4, 3.4 * lines + 0.3), layout="constrained")
    for place, (workload, kernels) in enumerate(pairs, start=1):
        axes = figure.add_subplot(lines, columns, place)
        _draw(axes, [row for row in rows if (row.workload, row.kernels) == (workload, kernels)])
        axes.set_title(f"{workload}, {'Inductor' if kernels == 'inductor' else 'ATen kernels'}", fontsize=11, loc="left")
        axes.set_xlabel("peak, relative to keeping all")
        axes.set_ylabel("time, relative to keeping all")
    figure.savefig(path, dpi=160)


def _draw(axes: Any, rows: Sequence[Row]) -> None:
    whole = next(row.measured_peak_bytes for row in rows if row.variant == "keep all")
    assert whole is not None
    axes.plot([1], [1], marker="*", markersize=13, color="black", linestyle="none", label="keep all")
    for variant, style in _STYLES.items():
        measured = [row for row in rows if row.variant == variant and row.measured_peak_bytes is not None]
        places = [((row.measured_peak_bytes or 0) / whole, row.relative_time) for row in measured]
        if variant == "recoup":
            places.sort()  # the stock curve stays in the order of its ratios, and so shows where a lower one has the higher peak
        if places:
            axes.plot(*zip(*places, strict=True), label=variant, linewidth=1.4, markersize=6, **style)
        wrong = [((row.measured_peak_bytes or 0) / whole, row.relative_time) for row in measured if (row.gradient_difference or 0) > _WRONG]
        if wrong:
            axes.plot(*zip(*wrong, strict=True), marker="x", color="black", linestyle="none", markersize=11, label="wrong gradients")
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
