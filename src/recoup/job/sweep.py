"""Many layouts of one model: every way to split it over so many devices, planned, the fastest first.

What a layer costs depends on few of a layout's numbers, so that layers are solved once for each of these and thousands of
layouts share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import msgspec

from recoup.cost.device import Device
from recoup.errors import UsageError
from recoup.job.job import Job
from recoup.job.layout import Kernels, Layout, Numbers
from recoup.job.model import Model
from recoup.job.plan import quick_plan

__all__ = ["Outcome", "layouts", "sweep"]

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One layout.

    Attributes:
        layout: which.
        fits: whether a plan fits.
        peak_bytes: of the fullest stage's device: of the plan, or the least that it takes.
        step_seconds: of the plan; infinite if none fits.
        tokens_per_second: of the whole job; 0 if none fits.
        mfu: model FLOPs utilization; 0 if none fits.
        added_share: of the slowest stage's seconds, what recomputation and copies add.
    """

    layout: Layout
    fits: bool
    peak_bytes: int
    step_seconds: float
    tokens_per_second: float
    mfu: float
    added_share: float


def layouts(model: Model, base: Layout, devices: int, device: Device, most_micro_batch: int = 8) -> Iterator[Layout]:
    """Every layout of so many devices that splits the model evenly: degrees, sequence parallelism, schedules, micro-batches, sharding.

    ``base`` gives sequence, global batch and what is not varied.
    """
    inner = device.links[0].devices or devices
    tensors = [n for n in _divisors(devices) if n <= min(inner, model.heads)]
    for tensor, pipeline, context in product(tensors, _divisors(devices), _powers(min(devices, 16))):
        if devices % (tensor * pipeline * context) or pipeline > model.layers:
            continue
        data = devices // (tensor * pipeline * context)
        experts = [n for n in _divisors(model.experts) if n <= data * context * tensor] if model.experts else [1]
        for sequence_parallel, zero, micro, expert, (schedule, chunks) in product(
            (False, True), (0, 1, 2, 3), _powers(most_micro_batch), experts, _schedules(model, pipeline)
        ):
            if zero and data * context == 1:
                continue
            yield msgspec.structs.replace(
                base, tensor=tensor, pipeline=pipeline, context=context, data=data, sequence_parallel=sequence_parallel, zero=zero,
                micro_batch=micro, expert=expert, schedule=schedule, chunks=chunks, reshard=pipeline == 1, edge_layers=None,
            )  # fmt: skip


def sweep(
    model: Model, candidates: Sequence[Layout], device: Device, kernels: Kernels, numbers: Numbers, *, limit_bytes: int | None = None,
    fixed_bytes: int = 0, progress: Progress | None = None,
) -> tuple[list[Outcome], int]:  # fmt: skip
    """Plans each layout; the fastest first, those that do not fit last, nearest first. Also says how many do not split the model."""
    limit = device.memory_bytes - device.reserved_bytes if limit_bytes is None else limit_bytes
    found: list[Outcome] = []
    refused = 0
    for place, layout in enumerate(candidates):
        if progress is not None and place % 64 == 0:
            progress(place, len(candidates), f"{len(found)} planned")
        try:
            job = Job(model, layout, device, kernels, numbers, fixed_bytes)
        except UsageError:
            refused += 1
            continue
        found.append(_outcome(job, limit))
    if progress is not None:
        progress(len(candidates), len(candidates), "done")
    found.sort(key=lambda item: (not item.fits, -item.tokens_per_second, item.peak_bytes))
    return found, refused


def _outcome(job: Job, limit: int) -> Outcome:
    estimate, least = quick_plan(job, limit)
    if estimate is None:
        return Outcome(job.layout, False, least, float("inf"), 0.0, 0.0, 0.0)
    slowest = max(estimate.stages, key=lambda one: one.total)
    return Outcome(
        job.layout, True, estimate.peak_bytes, estimate.step_seconds, estimate.tokens_per_second, estimate.mfu,
        slowest.added / slowest.total,
    )  # fmt: skip


def _divisors(whole: int) -> list[int]:
    return [n for n in range(1, whole + 1) if whole % n == 0]


def _powers(most: int) -> list[int]:
    return [1 << n for n in range(most.bit_length()) if 1 << n <= most]


def _schedules(model: Model, pipeline: int) -> list[tuple[str, int]]:
    if pipeline == 1:
        return [("1f1b", 1)]
    chunks = [n for n in _divisors(model.layers // pipeline) if n > 1] if model.layers % pipeline == 0 else []
    return [("1f1b", 1), ("zb-h1", 1), *(("interleaved", n) for n in chunks[:3])]
