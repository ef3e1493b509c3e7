"""The trade-off of a job: the least step time for each limit of memory."""

from __future__ import annotations

from dataclasses import dataclass

from recoup.job.job import Job
from recoup.job.plan import quick_plan, shortfall

__all__ = ["Point", "curve"]

_POINTS = 16


@dataclass(frozen=True, slots=True)
class Point:
    """One limit.

    Attributes:
        limit_bytes: what a device may hold.
        peak_bytes: of the plan.
        step_seconds: of the plan.
        relative_time: over that without recomputation.
    """

    limit_bytes: int
    peak_bytes: int
    step_seconds: float
    relative_time: float


def curve(job: Job, points: int = _POINTS) -> tuple[Point, ...]:
    """Plans for limits in equal steps from the least that the job takes to what it takes without recomputation."""
    plain = job.estimate("none")
    least, most = shortfall(job).least_bytes, plain.peak_bytes
    found: list[Point] = []
    for place in range(points):
        limit = least + (most - least) * place // max(points - 1, 1)
        estimate, peak = quick_plan(job, limit)
        if estimate is not None:
            found.append(Point(limit, peak, estimate.step_seconds, estimate.step_seconds / plain.step_seconds))
    return tuple(found)
