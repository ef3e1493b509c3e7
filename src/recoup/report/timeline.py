"""A planned step as a picture over its seconds: bytes alive above, what the link, the replays and the waiting take below.

Lanes differ by place, colour and hatch, so that the picture reads in grey and by the colour blind (colours: Okabe and Ito, Color
Universal Design, 2008).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from recoup.report.canvas import figure_class, save_figure
from recoup.report.lanes import Lane, lanes_of, merged
from recoup.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from recoup.graph import StepGraph
    from recoup.plan import Plan
    from recoup.simulate import Course, Timeline

__all__ = ["timeline_figure"]

_LANES = {"writes": ("#009E73", ""), "reads": ("#0072B2", ""), "replays": ("#E69F00", ""), "waits": ("#D55E00", "////")}
_PLANNED, _UNPLANNED, _BUDGET = "#0072B2", "0.55", "#D55E00"
_BYTES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
# Shares of the picture's width: what is nearer together is drawn as one, and what is shorter is drawn that long.
_APART, _SHORTEST = 2e-4, 8e-4
_UNPLACED_SHOWN = 5e-3


def timeline_figure(graph: StepGraph, plan: Plan, timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Draws a timeline into a file (PNG, PDF or SVG by its suffix; 200 dots per inch).

    Raises:
        MissingExtra: matplotlib is not installed.
        UsageError: the suffix is not known, or the file cannot be written.
    """
    make = figure_class()
    lanes = lanes_of(graph, timeline)
    total = max(timeline.step_seconds, timeline.unplanned_step_seconds)
    second, unit = next(((factor, unit) for factor, unit in _SECONDS if total >= factor), _SECONDS[-1])
    below = 0.34 * len(lanes) + 0.15
    figure = make(figsize=(10, 4.4 + (below if lanes else 0.0)), layout="constrained")
    above, lower = figure.add_subplot(), None
    if lanes:
        above.remove()
        above, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3.4, below))
    _bytes(above, plan, timeline, second)
    if lower is not None:
        _lanes(lower, lanes, total, second)
        lower.axvline(timeline.planned.backward_seconds / second, color="0.3", linewidth=0.9, linestyle=(0, (4, 3)))
    _dress(above, lower, f"{graph.name}: {plan.strategy} plan, {plan.gear} gear", total / second, unit)
    _unplaced([axes for axes in (above, lower) if axes is not None], timeline, second)
    above.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, frameon=False, fontsize=9, borderaxespad=0.2)
    save_figure(figure, path)


def _bytes(axes: Any, plan: Plan, timeline: Timeline, second: float) -> None:
    size, unit = next((size, unit) for size, unit in _BYTES if timeline.unplanned.peak_bytes >= size or size == 1)
    axes.set_ylabel(f"bytes alive ({unit})")
    for course, colour, name, seconds in (
        (timeline.unplanned, _UNPLANNED, "unplanned", timeline.unplanned_step_seconds),
        (timeline.planned, _PLANNED, "planned", timeline.step_seconds),
    ):
        label = f"{name}: peak {format_bytes(course.peak_bytes)}, {format_seconds(seconds)}"
        _course(axes, course, colour, label, second, size)
    if plan.budget_bytes:
        label = f"budget {format_bytes(plan.budget_bytes)}"
        axes.axhline(plan.budget_bytes / size, color=_BUDGET, linewidth=1.3, linestyle=(0, (6, 3)), zorder=4, label=label)
    peak = timeline.planned
    axes.plot(
        [peak.peak_seconds / second], [peak.peak_bytes / size], marker="v", markersize=8, color=_PLANNED, markeredgecolor="white",
        linestyle="none", zorder=6, label="planned peak",
    )  # fmt: skip
    boundary = peak.backward_seconds / second
    axes.axvline(boundary, color="0.3", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    for text, side, offset in (("forward", "right", -5), ("backward", "left", 5)):
        axes.annotate(
            text, (boundary, 0.0), xycoords=("data", "axes fraction"), xytext=(offset, 5), textcoords="offset points",
            ha=side, va="bottom", fontsize=9, color="0.2",
        )  # fmt: skip


def _course(axes: Any, course: Course, colour: str, label: str, second: float, size: int) -> None:
    """Bytes at each operation hold from the end of the one before, so that replays and waiting between the two are in."""
    edges = np.concatenate([course.reached_seconds, course.end_seconds[-1:]]) / second
    axes.stairs(course.bytes_at / size, edges, color=colour, linewidth=1.5, label=label, baseline=None, zorder=3)
    axes.stairs(course.bytes_at / size, edges, color=colour, alpha=0.12, fill=True, zorder=2)


def _lanes(axes: Any, lanes: tuple[Lane, ...], total: float, second: float) -> None:
    for place, lane in enumerate(reversed(lanes)):
        colour, hatch = _LANES[lane.key]
        spans = merged(lane.spans, _APART * total)
        bars = [(start / second, max(end - start, _SHORTEST * total) / second) for start, end in spans]
        axes.broken_barh(bars, (place - 0.32, 0.64), facecolor=colour, hatch=hatch, edgecolor="white" if hatch else colour, linewidth=0.0)
        axes.annotate(
            lane.text, (1, place), xycoords=("axes fraction", "data"), xytext=(6, 0), textcoords="offset points",
            fontsize=8.5, color="0.2", va="center", annotation_clip=False,
        )  # fmt: skip
    axes.set_yticks(range(len(lanes)), [lane.name for lane in reversed(lanes)], fontsize=9)
    axes.set_ylim(-0.6, len(lanes) - 0.4)
    axes.tick_params(axis="y", length=0)


def _unplaced(axes: list[Any], timeline: Timeline, second: float) -> None:
    """What the simulator charges to the step as a whole stands at its end, so that the picture is as long as the step."""
    if timeline.unplaced_seconds < _UNPLACED_SHOWN * timeline.step_seconds:
        return
    label = f"hooks and drag, spread over the step: {format_seconds(timeline.unplaced_seconds)}"
    for place, one in enumerate(axes):
        one.axvspan(
            timeline.planned.placed_seconds / second, timeline.step_seconds / second, facecolor="0.95", edgecolor="0.7", hatch="..",
            linewidth=0, zorder=0, label="" if place else label,
        )  # fmt: skip


def _dress(above: Any, lower: Any, title: str, total: float, unit: str) -> None:
    above.set_title(title, fontsize=12, loc="left", pad=38)  # above two rows of the legend
    above.set_xlim(0, total * 1.005)
    above.set_ylim(0, above.get_ylim()[1] * 1.04)
    for axes in (above, lower):
        if axes is not None:
            axes.grid(axis="both" if axes is above else "x", color="0.9", linewidth=0.8)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
    (above if lower is None else lower).set_xlabel(f"time in the simulated step ({unit})")
