"""Memory of a stage: what stands, what micro-batches in flight leave, what is at work at the worst moment.

The peak is at one of two moments: while the head works on the logits (the last stage only), or in the backward of a layer;
all other micro-batches in flight stand meanwhile:

    peak = states + gathered + fixed + sum(held * count * kept) + ends + max(head, working)
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from recoup.job.dishes import Dish
from recoup.job.layout import Layout, Numbers
from recoup.job.shape import Shape
from recoup.job.stages import Parameters, Stage
from recoup.job.table import Table

__all__ = ["Group", "StageMemory", "activation_bytes", "head_bytes", "input_bytes", "stage_memory", "state_bytes"]

_GATHERED_BYTES = 2


@dataclass(frozen=True, slots=True)
class Group:
    """Layers of one kind in one virtual stage that are run one way.

    Attributes:
        kind: of the layers.
        chunk: the virtual stage.
        count: how many layers.
        held: micro-batches of this virtual stage in flight at its fullest.
        way: how each is run.
    """

    kind: str
    chunk: int
    count: int
    held: int
    way: Dish


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on each device of a stage at its peak.

    Attributes:
        weights: of the layers and ends of the stage.
        gradients: accumulated.
        optimizer: its states and the weights that it changes.
        gathered: sharded weights and gradients, whole for a while.
        activations: left by micro-batches in flight, in the layers.
        ends: left by them in the embedding.
        head: last normalization, logits and loss, if the peak is there.
        working: gradients, recomputed copies and scratch, if the peak is there.
        buffers: of the pipeline's messages.
        fixed: context and workspaces that the allocator sees.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    ends: int
    head: int
    working: int
    buffers: int
    fixed: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, item.name) for item in fields(self))

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes by kind, in order."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


def state_bytes(parameters: Parameters, layout: Layout, numbers: Numbers) -> tuple[int, int, int]:
    """Bytes of weights, gradients, and the optimizer's states with its own weights.

    ``zero`` 1 shards the optimizer's, 2 also the gradients, 3 also the weights: dense ones over all replicas, experts over theirs.
    """
    return (
        _shared(parameters, layout, numbers.weight_bytes, layout.zero >= 3),
        _shared(parameters, layout, numbers.gradient_bytes, layout.zero >= 2),
        _shared(parameters, layout, numbers.master_bytes + numbers.optimizer_bytes, layout.zero >= 1),
    )


def _shared(parameters: Parameters, layout: Layout, size: float, sharded: bool) -> int:
    dense, experts = (layout.sharded, layout.expert_sharded) if sharded else (1, 1)
    return round(size * (parameters.dense / dense + parameters.experts / experts))


def activation_bytes(groups: tuple[Group, ...]) -> int:
    """What micro-batches in flight leave in the layers."""
    return sum(group.held * group.count * group.way.kept_bytes for group in groups)


def input_bytes(table: Table, held: int) -> int:
    """What micro-batches in flight leave in the embedding: their words, and the mask of its dropout."""
    return held * table.saved_bytes


def head_bytes(table: Table, shape: Shape) -> int:
    """The most that the head takes for one micro-batch: what enters it, what it makes, and the gathered sequence."""
    gathered = shape.whole_bytes if shape.sequence_parallel else 0
    scratch = max(row.scratch for row in table.rows)
    return table.entering.bytes + gathered + scratch + sum(tensor.bytes for row in table.rows for tensor in row.makes)


def gathered_bytes(shape: Shape, layout: Layout, numbers: Numbers, largest: int, whole: int) -> int:
    """Of sharded states what is whole for a while: weights of two layers, one at work and the next, and the gradients of one.

    Without resharding all weights stay whole. Gradients that are reduced once a step stay whole while micro-batches add to them.
    """
    adding = layout.zero >= 2 and layout.micro_batches > 1 and shape.kernels.gradient_sync == "step"
    gradients = round(numbers.reduced_bytes * whole) if adding else 0
    if layout.zero < 3:
        return gradients
    return gradients + _GATHERED_BYTES * (3 * largest if layout.reshard else whole + largest)


def stage_memory(
    shape: Shape, layout: Layout, numbers: Numbers, stage: Stage, parameters: Parameters, largest: int, groups: tuple[Group, ...],
    input_table: Table, head_table: Table, fixed: int,
) -> StageMemory:  # fmt: skip
    """Bytes of one stage under a choice; ``largest`` are the parameters of its largest unit that is gathered whole."""
    weights, gradients, optimizer = state_bytes(parameters, layout, numbers)
    first_held = sum(group.held for group in groups if group.chunk == 0) // max(sum(group.chunk == 0 for group in groups), 1)
    head = head_bytes(head_table, shape) if stage.last else 0
    working = max((group.way.working_bytes for group in groups), default=0)
    working = max(working, max((group.way.forward_bytes for group in groups), default=0))
    return StageMemory(
        weights=weights, gradients=gradients, optimizer=optimizer,
        gathered=gathered_bytes(shape, layout, numbers, largest, parameters.total),
        activations=activation_bytes(groups),
        ends=input_bytes(input_table, first_held) if stage.first else 0,
        head=head if head > working else 0,
        working=0 if head > working else working,
        buffers=2 * shape.stream_bytes if layout.pipeline > 1 else 0,
        fixed=fixed,
    )  # fmt: skip
