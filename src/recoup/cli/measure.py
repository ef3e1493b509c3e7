"""Measures points of a frontier: solves them again, applies the plans, and meters the peak and the time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from recoup.cli.console import Progress
from recoup.cli.workload import Workload

if TYPE_CHECKING:
    from recoup.graph.step import StepGraph
    from recoup.solve import FrontierPoint

__all__ = ["choose_points", "measure_points"]

_REPEATS = 5


def choose_points(points: Sequence[FrontierPoint], count: int) -> tuple[FrontierPoint, ...]:
    """``count`` feasible points that drop something, spread evenly over the peaks of ``optimal`` (of all strategies if it is not there)."""
    feasible = {(point.strategy, point.predicted_peak_bytes): point for point in points if point.feasible}.values()
    planned = [point for point in feasible if point.relative_time > 1] or list(feasible)
    optimal = [point for point in planned if point.strategy == "optimal"] or planned
    ordered = sorted(optimal, key=lambda point: point.predicted_peak_bytes)
    if count >= len(ordered):
        return tuple(ordered)
    if count == 1:
        return (ordered[len(ordered) // 2],)
    return tuple(ordered[round(place * (len(ordered) - 1) / (count - 1))] for place in range(count))


def measure_points(
    workload: Workload, graph: StepGraph, points: Sequence[FrontierPoint], count: int, progress: Progress | None
) -> tuple[FrontierPoint, ...]:
    """The chosen points with measured peak, measured median seconds, and their ratio to the unplanned step timed beside it."""
    from recoup.solve import solve
    from recoup.torch import apply, measure_peak, time_step

    model, step = workload.model, workload.step
    chosen = choose_points(points, count)
    measured = []
    before_seconds = time_step(step, _REPEATS)
    for place, point in enumerate(chosen):
        if progress is not None:
            progress(place, len(chosen), f"{point.strategy} {place + 1}")
        budget_bytes = point.budget_bytes or point.predicted_peak_bytes
        plan = solve(graph, budget_bytes, strategy=point.strategy, gear=point.gear)
        with apply(model, plan):
            peak_bytes = measure_peak(step, model)
            seconds = time_step(step, _REPEATS)
        after_seconds = time_step(step, _REPEATS)
        # Other load on the machine only ever adds time, so the faster of the two neighbours is nearer the truth.
        unplanned_seconds = min(before_seconds, after_seconds)
        before_seconds = after_seconds
        measured.append(
            dataclasses.replace(point, measured_peak_bytes=peak_bytes, step_seconds=seconds, relative_time=seconds / unplanned_seconds)
        )
    return tuple(measured)
