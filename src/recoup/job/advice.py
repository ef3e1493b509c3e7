"""What to change: one thing at a time, each planned anew, ranked by what it buys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec

from recoup.errors import UsageError
from recoup.job.job import Job
from recoup.job.layout import Layout
from recoup.job.plan import quick_plan
from recoup.job.sweep import layouts, sweep
from recoup.units import format_bytes

__all__ = ["Change", "advise", "way_out"]


@dataclass(frozen=True)
class Change:
    """One change of a job.

    Attributes:
        what: the change, as a person reads it.
        job: the changed job.
        fits: whether it has a plan within the limit.
        speedup: tokens a second over those of the unchanged plan (1 is no change); None if either has no plan.
        peak_bytes: of its plan, or the least that it takes.
        step_seconds: of its plan; None if none fits.
    """

    what: str
    job: Job
    fits: bool
    speedup: float | None
    peak_bytes: int
    step_seconds: float | None


def advise(job: Job, limit_bytes: int) -> tuple[Change, ...]:
    """Changes of one thing, those that buy most first: by tokens a second where they fit, then by the bytes that are missing.

    The number of devices, the global batch and the sequence stay as they are.
    """
    before, _ = quick_plan(job, limit_bytes)
    found = [_judged(what, changed, limit_bytes, before.tokens_per_second if before else None) for what, changed in _changes(job)]
    return tuple(
        sorted(found, key=lambda change: (not change.fits, -(change.speedup or 0.0), change.step_seconds or 0.0, change.peak_bytes))
    )


def way_out(job: Job, limit_bytes: int, most: int = 3) -> str:
    """What would make a job fit, in one sentence: single changes, else another layout of its devices, else more devices."""
    changes = advise(job, limit_bytes)
    fitting = sorted((change for change in changes if change.fits), key=lambda change: change.step_seconds or 0.0)
    if fitting:
        return "it fits with " + ", or with ".join(f"{change.what} ({format_bytes(change.peak_bytes)})" for change in fitting[:most])
    devices = job.layout.devices
    for more in (1, 2, 4, 8, 16):
        found = _fastest(job, devices * more, limit_bytes)
        if found is not None:
            where = "the same devices" if more == 1 else f"{devices * more} devices"
            return f"no single change makes it fit; {where} fit it with {found.in_words}"
    return f"no change makes it fit, nor do {devices * 16} devices; take a device with more memory, or shorter sequences"


def _fastest(job: Job, devices: int, limit_bytes: int) -> Layout | None:
    """The fastest of the common layouts of so many devices that fits: micro-batches of one, states sharded."""
    base = msgspec.structs.replace(job.layout, global_batch=max(job.layout.global_batch, devices))
    candidates = [
        layout
        for layout in layouts(job.model, base, devices, job.device, most_micro_batch=1)
        if layout.zero in (1, 3) and layout.schedule == "1f1b" and layout.sequence_parallel == (layout.tensor > 1)
    ]
    found, _ = sweep(job.model, candidates, job.device, job.kernels, job.numbers, limit_bytes=limit_bytes, fixed_bytes=job.fixed_bytes)
    return found[0].layout if found and found[0].fits else None


def _judged(what: str, job: Job, limit: int, before: float | None) -> Change:
    estimate, peak = quick_plan(job, limit)
    if estimate is None:
        return Change(what, job, False, None, peak, None)
    return Change(what, job, True, estimate.tokens_per_second / before if before else None, peak, estimate.step_seconds)


def _changes(job: Job) -> Iterator[tuple[str, Job]]:
    for what, changes in _layout_changes(job):
        try:
            yield what, job.with_layout(**changes)
        except UsageError:
            continue
    for what, changes in _kernel_changes(job):
        try:
            yield what, replace(job, kernels=msgspec.structs.replace(job.kernels, **changes))
        except UsageError:
            continue


def _layout_changes(job: Job) -> Iterator[tuple[str, dict[str, object]]]:
    layout = job.layout
    for field, name in (("tensor", "tensor parallel"), ("pipeline", "pipeline"), ("context", "context parallel")):
        degree = getattr(layout, field)
        sequence = {"sequence_parallel": layout.sequence_parallel and degree * 2 > 1} if field == "tensor" else {}
        if layout.data % 2 == 0:
            yield f"{name} {degree * 2}, data {layout.data // 2}", {field: degree * 2, "data": layout.data // 2, **sequence}
        if degree % 2 == 0:
            less = {"sequence_parallel": layout.sequence_parallel and degree > 2} if field == "tensor" else {}
            if field == "pipeline" and degree == 2:
                less = {"schedule": "1f1b", "chunks": 1}
            yield f"{name} {degree // 2}, data {layout.data * 2}", {field: degree // 2, "data": layout.data * 2, **less}
    if layout.tensor > 1 and not layout.sequence_parallel:
        yield "sequence parallelism", {"sequence_parallel": True}
    for micro in (layout.micro_batch * 2, layout.micro_batch // 2):
        if micro:
            yield f"micro-batch {micro}", {"micro_batch": micro}
    if layout.zero < 3 and layout.data * layout.context > 1:
        yield f"ZeRO stage {layout.zero + 1}", {"zero": layout.zero + 1}
    if layout.zero == 3 and layout.reshard:
        yield "gathered weights kept for the step", {"reshard": False}
    yield from _schedule_changes(job)


def _schedule_changes(job: Job) -> Iterator[tuple[str, dict[str, object]]]:
    layout = job.layout
    if layout.pipeline == 1:
        return
    per = job.model.layers // layout.pipeline
    for chunks in range(2, per + 1):
        if per % chunks == 0 and chunks != layout.chunks:
            yield f"interleaved schedule with {chunks} chunks", {"schedule": "interleaved", "chunks": chunks}
            break
    if layout.schedule == "interleaved":
        yield "1f1b schedule", {"schedule": "1f1b", "chunks": 1}
    if layout.schedule == "1f1b":
        yield "zero-bubble schedule zb-h1", {"schedule": "zb-h1"}


def _kernel_changes(job: Job) -> Iterator[tuple[str, dict[str, object]]]:
    kernels = job.kernels
    if kernels.attention == "explicit":
        yield "fused attention", {"attention": "flash"}
    if kernels.loss != "fused":
        yield "fused loss", {"loss": "fused"}
    if not kernels.offload and job.device.host_bytes_per_second:
        yield "offload of activations to host memory", {"offload": True}
    if not kernels.hide_recompute:
        yield "recomputation behind collectives", {"hide_recompute": True}
    if job.layout.tensor > 1 and not kernels.overlap_tensor:
        yield "asynchronous tensor parallelism", {"overlap_tensor": True}
