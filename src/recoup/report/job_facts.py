"""A planned job as data, for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import msgspec

from recoup.job.advice import Change
from recoup.job.curve import Point
from recoup.job.job import Estimate
from recoup.job.memory import Group
from recoup.job.plan import JobPlan
from recoup.job.stages import Stage, total_parameters
from recoup.job.sweep import Outcome

__all__ = ["changes_facts", "curve_facts", "layer_ranges", "plan_facts", "sweep_facts"]


def plan_facts(plan: JobPlan) -> dict[str, Any]:
    """The plan: what was asked, what it takes, what each stage does, and the named recipes beside it."""
    job, estimate = plan.job, plan.estimate
    return {
        "model": msgspec.to_builtins(job.model),
        "parameters": total_parameters(job.model),
        "active_parameters": total_parameters(job.model, active=True),
        "layout": msgspec.to_builtins(job.layout),
        "kernels": msgspec.to_builtins(job.kernels),
        "numbers": msgspec.to_builtins(job.numbers),
        "device": job.device.name,
        "devices": job.layout.devices,
        "limit_bytes": plan.limit_bytes,
        **_figures(estimate),
        "gap": plan.gap,
        "seconds": {
            "compute": estimate.step.compute, "idle": estimate.step.idle, "exposed_exchange": estimate.step.exposed,
            "optimizer": estimate.step.optimizer, "of_which_recompute": estimate.step.recompute,
        },
        "stages": [
            {
                "stage": stage.index, "parameters": job.parameters[stage.index].total, "peak_bytes": memory.total, "bytes": memory.by_kind,
                "micro_batch_seconds": seconds.total, "layers": layer_ranges(stage, groups),
            }
            for stage, memory, seconds, groups in zip(job.stages, estimate.memory, estimate.stages, estimate.groups, strict=True)
        ],
        "named": {name: _figures(found) | {"fits": found.peak_bytes <= plan.limit_bytes} for name, found in plan.named.items()},
    }  # fmt: skip


def _figures(estimate: Estimate) -> dict[str, Any]:
    return {
        "peak_bytes": estimate.peak_bytes, "step_seconds": estimate.step_seconds, "tokens_per_second": estimate.tokens_per_second,
        "tokens_per_second_per_device": estimate.tokens_per_second / estimate.job.layout.devices, "mfu": estimate.mfu, "hfu": estimate.hfu,
        "dollars_per_billion_tokens": estimate.dollars_per_billion_tokens,
    }  # fmt: skip


def layer_ranges(stage: Stage, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """What a stage does with each range of its layers, in order."""
    places = dict(enumerate(stage.starts))
    found: list[dict[str, Any]] = []
    for group in groups:
        first = places[group.chunk]
        places[group.chunk] += group.count
        found.append(
            {
                "first": first, "last": first + group.count - 1, "kind": group.kind, "micro_batches_held": group.held,
                "recompute": sorted(group.way.recompute), "offload": sorted(group.way.offload), "kept_bytes": group.way.kept_bytes,
                "working_bytes": group.way.working_bytes, "added_seconds": group.way.added_seconds,
            }
        )  # fmt: skip
    return found


def changes_facts(changes: Sequence[Change]) -> list[dict[str, Any]]:
    """Changes, the best first."""
    return [
        {
            "change": change.what, "fits": change.fits, "speedup": change.speedup, "peak_bytes": change.peak_bytes,
            "step_seconds": change.step_seconds,
        }
        for change in changes
    ]  # fmt: skip


def curve_facts(points: Sequence[Point]) -> list[dict[str, Any]]:
    """The trade-off curve."""
    return [
        {
            "limit_bytes": point.limit_bytes, "peak_bytes": point.peak_bytes, "step_seconds": point.step_seconds,
            "relative_time": point.relative_time,
        }
        for point in points
    ]  # fmt: skip


def sweep_facts(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Layouts, the fastest first."""
    return [
        {
            "layout": msgspec.to_builtins(item.layout), "fits": item.fits, "peak_bytes": item.peak_bytes,
            "step_seconds": item.step_seconds if isfinite(item.step_seconds) else None, "tokens_per_second": item.tokens_per_second,
            "mfu": item.mfu, "added_share": item.added_share,
        }
        for item in outcomes
    ]  # fmt: skip
