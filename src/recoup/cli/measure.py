"""Measures points of a frontier: solves them again, applies the plans, and meters the peak and the time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from statistics import median
from typing import TYPE_CHECKING

from recoup.cli.console import Progress
from recoup.cli.workload import Workload

if TYPE_CHECKING:
    from recoup.graph.step import StepGraph
    from recoup.solve import FrontierPoint

__all__ = ["choose_points", "measure_points"]

_ROUNDS = 7
# The static gear learns from three live steps.
_LEARNING_STEPS = 4


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
    workload: Workload,
    graph: StepGraph,
    points: Sequence[FrontierPoint],
    count: int,
    progress: Progress | None,
    allow: Sequence[str] = (),
) -> tuple[FrontierPoint, ...]:
    """The chosen points with measured peak, measured median seconds, and their ratio to the unplanned step timed beside it."""
    from recoup.solve import solve
    from recoup.torch import apply, measure_peak

    model, step = workload.model, workload.step
    chosen = choose_points(points, count)
    measured = []
    for place, point in enumerate(chosen):
        if progress is not None:
            progress(place, len(chosen), f"{point.strategy} {place + 1}")
        budget_bytes = point.budget_bytes or point.predicted_peak_bytes
        plan = solve(graph, budget_bytes, strategy=point.strategy, gear=point.gear, allow=allow if point.tiles else ())
        applied = apply(model, plan)
        with applied:
            for _ in range(_LEARNING_STEPS):
                step()
            peak_bytes = measure_peak(step, model)
        seconds, unplanned_seconds = _side_by_side(step, applied)
        measured.append(
            dataclasses.replace(point, measured_peak_bytes=peak_bytes, step_seconds=seconds, relative_time=seconds / unplanned_seconds)
        )
    return tuple(measured)


def _side_by_side(step: Callable[[], object], applied: AbstractContextManager[object]) -> tuple[float, float]:
    """Median seconds of the planned and of the unplanned step, in alternating rounds."""
    from recoup.torch import time_step

    planned, unplanned = [], []
    for _ in range(_ROUNDS):
        unplanned.append(time_step(step, 1))
        with applied:
            planned.append(time_step(step, 1))
    return median(planned), median(unplanned)
