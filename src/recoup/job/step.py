"""Seconds of a step: stages, pipeline, messages between stages and replicas, the optimizer.

    step = pipeline(F_i, B_i, W_i) + exposed gradients and weights + optimizer

with F, B and W of one micro-batch through all of a stage's layers. What replicas exchange hides behind the layers' compute up
to a share of it; the rest is exposed.
"""

from __future__ import annotations

from dataclasses import dataclass

from recoup.cost.device import Device
from recoup.cost.links import collective_seconds
from recoup.cost.roofline import memory_seconds
from recoup.job.layout import Kernels, Layout, Numbers
from recoup.job.memory import Group, state_bytes
from recoup.job.schedule import pipeline_seconds
from recoup.job.shape import Shape
from recoup.job.stages import Parameters, Stage
from recoup.job.workshop import end_of, layer_of

__all__ = ["StageSeconds", "StepSeconds", "stage_seconds", "step_seconds"]


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """One micro-batch through all layers of a stage.

    Attributes:
        forward: seconds of the forward, messages included.
        data: of the backward, all but gradients of weights: recomputation, copies and exposed collectives included.
        weight: of gradients of weights.
        added: of ``data``, what recomputation and copies to the host add.
        flops: of forward and backward, by the usual count, without recomputation.
        replay_flops: of recomputation.
    """

    forward: float
    data: float
    weight: float
    added: float
    flops: int
    replay_flops: int

    @property
    def total(self) -> float:
        """All of it."""
        return self.forward + self.data + self.weight


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of one step.

    Attributes:
        total: of the step.
        compute: of the slowest stage's micro-batches.
        idle: of the pipeline.
        exposed: of exchange between replicas that does not hide.
        optimizer: of the weights' update.
        recompute: of ``compute``, what recomputation and copies add.
    """

    total: float
    compute: float
    idle: float
    exposed: float
    optimizer: float
    recompute: float


def stage_seconds(shape: Shape, layout: Layout, device: Device, precision: str, stage: Stage, groups: tuple[Group, ...]) -> StageSeconds:
    """Seconds of one micro-batch through a stage under a choice."""
    forward = data = weight = added = 0.0
    flops = replayed = 0
    for group in groups:
        layer = layer_of(shape, group.kind, device, precision)
        prices, count = layer.prices, group.count
        forward += count * prices.forward_seconds
        weight += count * prices.weight_seconds
        data += count * (prices.backward_seconds - prices.weight_seconds + group.way.added_seconds)
        added += count * group.way.added_seconds
        flops += count * (layer.table.flops + layer.table.backward_flops)
        replayed += count * group.way.replay_flops
    for which in [*(["input"] if stage.first else []), *(["head"] if stage.last else [])]:
        end = end_of(shape, which, device)
        forward += end.forward_seconds
        data += end.data_seconds
        weight += end.weight_seconds
        flops += end.flops
    message = _message(shape, layout, device)
    return StageSeconds(forward + message, data + message, weight, added, flops, replayed)


def _message(shape: Shape, layout: Layout, device: Device) -> float:
    """Seconds of handing one micro-batch on to the next stage, all chunks together."""
    if layout.pipeline == 1:
        return 0.0
    stride = layout.tensor * layout.context * layout.data
    # Each device of a tensor parallel group sends its part; where the stream is whole, the parts are gathered again.
    part = shape.stream_bytes if shape.sequence_parallel else shape.stream_bytes // layout.tensor
    seconds = collective_seconds(device, "send", part, 1, stride)
    if not shape.sequence_parallel:
        seconds += collective_seconds(device, "all_gather", shape.stream_bytes, layout.tensor)
    return seconds * layout.chunks


def step_seconds(
    shape: Shape, layout: Layout, kernels: Kernels, numbers: Numbers, device: Device, stages: list[StageSeconds],
    parameters: list[Parameters], units: list[int],
) -> StepSeconds:  # fmt: skip
    """Seconds of the whole step; ``parameters`` and ``units`` (layers and ends) by stage."""
    total, idle = pipeline_seconds(
        layout, [one.forward for one in stages], [one.data for one in stages], [one.weight for one in stages]
    )  # fmt: skip
    slowest = max(range(len(stages)), key=lambda place: stages[place].total)
    exposed = max(
        _exchanged(layout, kernels, numbers, device, one, owned, count) for one, owned, count in zip(stages, parameters, units, strict=True)
    )
    update = max(_update(layout, numbers, device, owned) for owned in parameters)
    return StepSeconds(
        total + exposed + update, total - idle, idle, exposed, update, layout.micro_batches * stages[slowest].added
    )  # fmt: skip


def _exchanged(
    layout: Layout, kernels: Kernels, numbers: Numbers, device: Device, one: StageSeconds, owned: Parameters, units: int
) -> float:
    """Exposed seconds of a step's exchange between the replicas of one stage."""
    ways = layout.data * layout.context
    if ways == 1:
        return 0.0
    if layout.zero >= 3:
        return _sharded_exchange(layout, kernels, numbers, device, one, owned, units)
    stride = layout.tensor
    reduced = owned.dense * numbers.reduced_bytes
    kind = "reduce_scatter" if layout.zero else "all_reduce"
    backward = collective_seconds(device, kind, reduced, ways, stride) + _expert_exchange(layout, numbers, device, owned)
    gathered = collective_seconds(device, "all_gather", owned.dense * numbers.weight_bytes, ways, stride) if layout.zero else 0.0
    times = layout.micro_batches if layout.zero == 2 and kernels.gradient_sync == "micro" else 1
    if not kernels.overlap_gradients:
        return times * backward + gathered
    # Gradients leave when they are complete, in the backward of the last micro-batch, or of each one if they are sharded; weights arrive
    # in the first forward.
    share = kernels.hidden_share
    return times * _uncovered(backward, one.data + one.weight, units, share) + _uncovered(gathered, one.forward, units, share)


def _expert_exchange(layout: Layout, numbers: Numbers, device: Device, owned: Parameters) -> float:
    copies = layout.data * layout.context * layout.tensor // (layout.expert * layout.in_expert)
    return collective_seconds(device, "all_reduce", owned.experts * numbers.reduced_bytes, copies, layout.expert * layout.in_expert)


def _sharded_exchange(
    layout: Layout, kernels: Kernels, numbers: Numbers, device: Device, one: StageSeconds, owned: Parameters, units: int
) -> float:
    """With sharded weights: gathered for each forward and backward, gradients scattered; once a step, or for each micro-batch."""
    ways, stride, batches = layout.sharded, layout.tensor, layout.micro_batches
    gather = collective_seconds(device, "all_gather", owned.total * 2.0, ways, stride)
    scatter = collective_seconds(device, "reduce_scatter", owned.total * numbers.reduced_bytes, ways, stride)
    replicas = layout.data * layout.context // ways
    scatter += collective_seconds(device, "all_reduce", owned.total / ways * numbers.reduced_bytes, replicas, stride * ways)
    gathers = batches if layout.reshard else 1
    scatters = batches if kernels.gradient_sync == "micro" else 1
    backward = one.data + one.weight
    # Gradients are made in two bytes; if they travel in more they are written, and read, once more.
    cast = scatters * memory_seconds(device, owned.total * (2 + 2 * numbers.reduced_bytes), units) if numbers.reduced_bytes > 2 else 0.0
    return cast + _sharded_exposed(kernels, layout, gather, scatter, (gathers, scatters), one.forward, backward, units)


def _sharded_exposed(
    kernels: Kernels, layout: Layout, gather: float, scatter: float, often: tuple[int, int], forward: float, backward: float, units: int
) -> float:
    """Exposed seconds of so many gathers (for forward, and for backward where weights were let go of) and scatters."""
    gathers, scatters = often
    again = gather if layout.reshard else 0.0
    if not kernels.overlap_gradients:
        return gathers * (gather + again) + scatters * scatter
    share, both = kernels.hidden_share, min(gathers, scatters)
    exposed = gathers * _uncovered(gather, forward, units, share)
    exposed += both * _uncovered(again + scatter, backward, units, share)
    exposed += (gathers - both) * _uncovered(again, backward, units, share)
    return exposed + (scatters - both) * _uncovered(scatter, backward, units, share)


def _uncovered(exchange: float, compute: float, units: int, share: float) -> float:
    """What of an exchange does not hide: the first or last unit's, and what is longer than the compute it may hide behind."""
    return max(exchange / units, exchange - share * compute) if exchange else 0.0


def _update(layout: Layout, numbers: Numbers, device: Device, owned: Parameters) -> float:
    """The optimizer reads gradients, states and weights and writes states and weights; clipping reads gradients once more."""
    weights, gradients, states = state_bytes(owned, layout, numbers)
    dense = layout.sharded if layout.zero else 1
    moved = 2 * states + weights / (dense if layout.zero < 3 else 1) + 2 * gradients / (dense if layout.zero == 1 else 1)
    return memory_seconds(device, moved, 4)
