"""A planned job as a picture: memory of each stage by kind, and the trade-off of memory against time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from recoup.job.curve import Point
from recoup.job.plan import JobPlan
from recoup.report.canvas import figure_class, save_figure

__all__ = ["job_figure"]

# Okabe and Ito, Color Universal Design, 2008, with hatches, so that the picture reads in grey.
_STYLES = {
    "weights": ("#0072B2", ""), "gradients": ("#56B4E9", ""), "optimizer": ("#999999", ""), "gathered": ("#0072B2", "//"),
    "activations": ("#D55E00", ""), "ends": ("#D55E00", "//"), "head": ("#CC79A7", ""), "working": ("#E69F00", ""),
    "buffers": ("#000000", ""), "fixed": ("#DDDDDD", ""),
}  # fmt: skip
_GIB = 2**30


def job_figure(plan: JobPlan, points: Sequence[Point], path: str | os.PathLike[str]) -> None:
    """Draws memory by stage on the left, and the trade-off curve with the named recipes on the right.

    Raises:
        MissingExtra: matplotlib is not installed.
        UsageError: the suffix is not known, or the file cannot be written.
    """
    figure = figure_class()(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    job = plan.job
    figure.suptitle(f"{job.model.name} on {job.layout.devices} {job.device.name}", x=0.01, ha="left", fontsize=12)
    _stages(left, plan)
    _curve(right, plan, points)
    save_figure(figure, path)


def _stages(axes: Any, plan: JobPlan) -> None:
    memory = plan.estimate.memory
    places = list(range(len(memory)))
    below = [0.0] * len(memory)
    for kind, (colour, hatch) in _STYLES.items():
        sizes = [one.by_kind[kind] / _GIB for one in memory]
        # What is thinner than a line would only clutter the legend.
        if max(sizes) < 0.002 * plan.limit_bytes / _GIB:
            continue
        axes.bar(places, sizes, bottom=below, width=0.8, color=colour, hatch=hatch, edgecolor="white", linewidth=0.4, label=kind)
        below = [low + size for low, size in zip(below, sizes, strict=True)]
    limit = plan.limit_bytes / _GIB
    axes.axhline(limit, color="black", linewidth=1.2, linestyle=(0, (4, 2)))
    axes.annotate(
        f"limit {limit:.0f} GiB", (1, limit), xycoords=("axes fraction", "data"), xytext=(-2, 3), textcoords="offset points", ha="right"
    )
    axes.set_ylim(0, max(limit, *below) * 1.12)
    axes.set_title("memory of a device by stage of the pipeline", fontsize=10, loc="left")
    axes.set_xlabel("stage")
    axes.set_ylabel("GiB")
    axes.set_xticks(places if len(places) <= 16 else places[:: max(len(places) // 8, 1)])
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8, reverse=True)
    axes.spines[["top", "right"]].set_visible(False)


def _curve(axes: Any, plan: JobPlan, points: Sequence[Point]) -> None:
    axes.plot(
        [point.step_seconds for point in points], [point.peak_bytes / _GIB for point in points], color="#0072B2", marker="o",
        markerfacecolor="white", markersize=5, linewidth=1.8, label="plans",
    )  # fmt: skip
    for (name, found), (colour, marker) in zip(plan.named.items(), (("#000000", "*"), ("#D55E00", "s"), ("#009E73", "^")), strict=True):
        axes.plot([found.step_seconds], [found.peak_bytes / _GIB], color=colour, marker=marker, markersize=9, linestyle="none", label=name)
    axes.plot(
        [plan.estimate.step_seconds], [plan.estimate.peak_bytes / _GIB], color="#0072B2", marker="o", markersize=9, linestyle="none",
        label="this plan",
    )  # fmt: skip
    axes.axhline(plan.limit_bytes / _GIB, color="black", linewidth=1.2, linestyle=(0, (4, 2)), label="limit")
    axes.set_title("memory against time of a step", fontsize=10, loc="left")
    axes.set_xlabel("seconds of a step")
    axes.set_ylabel("GiB on the fullest device")
    axes.margins(x=0.1, y=0.12)
    axes.set_ylim(bottom=0)
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
