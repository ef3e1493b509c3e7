"""The frontier as a picture: the step's peak against its time, one line for each strategy.

Strategies differ by colour, marker and line style at once, so that the picture reads in grey and by the colour blind
(colours: Okabe and Ito, Color Universal Design, 2008). Hollow marks are predicted, filled ones measured.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from recoup.errors import UsageError
from recoup.report.canvas import figure_class, save_figure
from recoup.report.series import Series, series_of
from recoup.units import format_bytes

if TYPE_CHECKING:
    from recoup.solve import FrontierPoint

__all__ = ["frontier_figure"]

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 3)), (0, (1, 1)))
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def frontier_figure(
    points: Sequence[FrontierPoint],
    path: str | os.PathLike[str],
    *,
    title: str,
    measured: Sequence[FrontierPoint] = (),
    unplanned_peak_bytes: int | None = None,
    least_bytes: int | None = None,
) -> None:
    """Draws a frontier into a file (PNG, PDF or SVG by its suffix; 200 dots per inch).

    Args:
        points: predicted points; those that are not feasible are left out.
        path: the file to write.
        title: above the picture.
        measured: points whose measured peak and time are drawn, filled.
        unplanned_peak_bytes: peak of the unplanned step; marked, at relative time 1. By default that of strategy ``none``.
        least_bytes: the least peak that any plan reaches; drawn as a line. By default the least of ``points``.

    Raises:
        MissingExtra: matplotlib is not installed.
        UsageError: no point is feasible, the suffix is not known, or the file cannot be written.
    """
    series = series_of(points)
    if not series:
        raise UsageError("nothing to draw: no point of the frontier is feasible")
    make = figure_class()
    reached = [peak for line in series for _, peak in line.places]
    none = [peak for line in series if line.name == "none" for _, peak in line.places]
    unplanned = unplanned_peak_bytes or max(none or reached)
    least = least_bytes or min(reached)
    factor, unit = next((factor, unit) for factor, unit in _UNITS if unplanned >= factor)
    figure = make(figsize=(8.2, 4.8), layout="constrained")
    axes = figure.add_subplot()
    # The unplanned point stands for strategy "none", which drops nothing.
    for place, line in enumerate(line for line in series if line.name != "none"):
        _draw(axes, line, place, factor, [point for point in measured if point.strategy == line.name])
    _annotate(axes, unplanned / factor, least / factor, format_bytes(unplanned), format_bytes(least))
    _dress(axes, title, unit, bool(measured))
    save_figure(figure, path)


def _draw(axes: Any, line: Series, place: int, factor: int, measured: Sequence[FrontierPoint]) -> None:
    colour, marker, style = _COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)], _LINES[place % len(_LINES)]
    times = [time for time, _ in line.places]
    peaks = [peak / factor for _, peak in line.places]
    optimal = line.name == "optimal"
    if len(line.places) == 1:
        style = "none"
    axes.plot(
        times, peaks, color=colour, linestyle=style, marker=marker, label=line.label, markerfacecolor="white",
        markersize=7, markeredgewidth=1.4, linewidth=2 if optimal else 1.2, zorder=3 if optimal else 2,
    )  # fmt: skip
    seen = [(point.relative_time, point.measured_peak_bytes / factor) for point in measured if point.measured_peak_bytes is not None]
    if seen:
        axes.plot(*zip(*seen, strict=True), color=colour, linestyle="none", marker=marker, markersize=8, zorder=4)


def _annotate(axes: Any, unplanned: float, least: float, unplanned_text: str, least_text: str) -> None:
    axes.plot([1], [unplanned], marker="*", markersize=15, color="black", linestyle="none", zorder=5)
    axes.annotate(f"unplanned {unplanned_text}", (1, unplanned), xytext=(10, 6), textcoords="offset points", fontsize=9, va="bottom")
    axes.axhline(least, color="0.45", linewidth=1, linestyle=(0, (2, 2)), zorder=1)
    axes.annotate(
        f"least feasible {least_text}", (1, least), xycoords=("axes fraction", "data"), xytext=(-4, -4),
        textcoords="offset points", fontsize=9, color="0.25", ha="right", va="top",
    )  # fmt: skip


def _dress(axes: Any, title: str, unit: str, measured: bool) -> None:
    axes.set_title(title, fontsize=12, loc="left")
    axes.set_xlabel("step time relative to the unplanned step")
    axes.set_ylabel(f"peak of the step ({unit})")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.2f}x")
    axes.margins(x=0.08, y=0.12)
    axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    marks = "hollow: predicted\nfilled: measured" if measured else "hollow: predicted"
    place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1), "alignment": "left"}
    axes.legend(title=marks, **place, frameon=False, fontsize=9, title_fontsize=9, handlelength=3)
