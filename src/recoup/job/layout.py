"""How a job is laid out: parallel degrees, pipeline schedule, batches, kernels, numbers; checked against the model once."""

from __future__ import annotations

from typing import Literal

import msgspec

from recoup.errors import UsageError
from recoup.job.model import Model

__all__ = ["SCHEDULES", "Kernels", "Layout", "Numbers", "check_layout"]

Schedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"]
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2")


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parallel degrees, schedule and batches.

    Attributes:
        tensor: devices that share each layer's products.
        sequence_parallel: whether what tensor parallelism leaves whole is split along the sequence.
        context: devices that share each sequence, attention included.
        pipeline: stages.
        schedule: of the pipeline.
        chunks: virtual stages of each device, with ``interleaved``.
        group: how many micro-batches a virtual stage sees before the next one does; 0 for ``pipeline``.
        data: replicas; with ``zero`` they share states.
        expert: devices that share the routed experts (within ``data * context``).
        expert_tensor: tensor parallel degree inside an expert; 0 for ``tensor``.
        zero: 0 nothing, 1 optimizer states, 2 also gradients, 3 also weights sharded over ``data * context`` (3 is FSDP).
        shard: over how many replicas states are sharded; 0 for all.
        reshard: with ``zero`` 3, whether gathered weights are let go of after the forward; if not they stay for the whole step.
        micro_batch: sequences that one device sees at once.
        global_batch: sequences of one step, all replicas together.
        sequence: tokens of a sequence.
        edge_layers: layers of the first and of the last part (stage, or virtual stage), if they are not to have as many as the others.
    """

    tensor: int = 1
    sequence_parallel: bool = False
    context: int = 1
    pipeline: int = 1
    schedule: Schedule = "1f1b"
    chunks: int = 1
    group: int = 0
    data: int = 1
    expert: int = 1
    expert_tensor: int = 0
    zero: Literal[0, 1, 2, 3] = 0
    shard: int = 0
    reshard: bool = True
    micro_batch: int = 1
    global_batch: int = 1
    sequence: int = 2048
    edge_layers: tuple[int, int] | None = None

    @property
    def devices(self) -> int:
        """Devices of the whole job."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def micro_batches(self) -> int:
        """Micro-batches that each pipeline sees in a step, the last one perhaps smaller."""
        return -(-self.global_batch // (self.micro_batch * self.data))

    @property
    def grouped(self) -> int:
        """Micro-batches that a virtual stage sees before the next one does."""
        return self.group or self.pipeline

    @property
    def sharded(self) -> int:
        """How many devices share the states that ``zero`` shards."""
        return self.shard or self.data * self.context

    @property
    def in_expert(self) -> int:
        """Tensor parallel degree inside an expert."""
        return self.expert_tensor or self.tensor

    @property
    def expert_sharded(self) -> int:
        """How many devices share the states of one expert."""
        return max(self.sharded * self.tensor // (self.expert * self.in_expert), 1)

    @property
    def in_words(self) -> str:
        """The layout as a person reads it."""
        parts = [f"data {self.data}", f"tensor {self.tensor}{' with sequence parallelism' if self.sequence_parallel else ''}"]
        if self.context > 1:
            parts.append(f"context {self.context}")
        if self.pipeline > 1:
            parts.append(f"pipeline {self.pipeline} {self.schedule}{f' of {self.chunks} chunks' if self.chunks > 1 else ''}")
        if self.expert > 1:
            parts.append(f"expert {self.expert}")
        if self.zero:
            parts.append(f"ZeRO {self.zero}")
        parts.append(f"micro-batch {self.micro_batch} of {self.global_batch} sequences of {self.sequence} tokens")
        return ", ".join(parts)


class Kernels(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which kernels run.

    Attributes:
        attention: ``flash`` keeps no square, ``explicit`` keeps the probabilities.
        fused_activation: the activation of the feed-forward network is one kernel that saves its input alone.
        loss: ``fused`` works in place on logits of two bytes, ``inplace`` on a copy in four (Megatron-LM's), ``compiled`` makes copy and
            exponent in four each, ``plain`` copy, logarithm and gradient (``torch.nn.functional.cross_entropy``).
        expert_copies: copies of each token that permuting them for their experts and back leaves, beside those that the experts' products
            and the weighing read: 0 if permutation is fused.
        fused_elementwise: chains of element-wise kernels run as one (``torch.compile``, hand-written fusions).
        fused_rope: rotary embedding is one kernel.
        fused_projections: queries, keys and values are one product, and so are both halves of a gated network.
        overlap_tensor: products overlap the collectives of tensor parallelism in the forward too (asynchronous tensor parallelism).
        overlap_gradients: gradients are reduced, and sharded weights gathered, while the layers compute.
        gradient_sync: ``micro`` reduces sharded gradients for every micro-batch, ``step`` once a step, until when they stand whole.
        tensor_hidden_share: share of a product that a collective of tensor parallelism beside it hides behind: both want the same
            memory and some of the same cores.
        hidden_share: share of the layers' compute that exchange between replicas hides behind (0.35: what MPT's rows on H100 gave).
        attention_share: share of the device's efficiency of fused attention that this kernel reaches (older ones less).
        offload: whether activations may wait in host memory.
        hide_recompute: recomputation runs while a collective of the backward does (an executor that reorders, as Recoup's can).
    """

    attention: Literal["flash", "explicit"] = "flash"
    fused_activation: bool = True
    loss: Literal["fused", "inplace", "compiled", "plain"] = "inplace"
    expert_copies: int = 0
    fused_elementwise: bool = True
    fused_rope: bool = True
    fused_projections: bool = True
    overlap_tensor: bool = False
    overlap_gradients: bool = True
    gradient_sync: Literal["micro", "step"] = "micro"
    tensor_hidden_share: float = 0.8
    hidden_share: float = 0.35
    attention_share: float = 1.0
    offload: bool = False
    hide_recompute: bool = False


class Numbers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bytes of each parameter's states, and the precision of products.

    Attributes:
        precision: of matrix products, ``bf16`` or ``fp8``; activations are kept in two bytes either way.
        scaling: of fp8 operands, by ``tensor`` or by ``row``.
        weight_bytes: of the weights that the layers compute with.
        gradient_bytes: of the gradients that are accumulated.
        master_bytes: of the weights that the optimizer changes, where they are others.
        optimizer_bytes: of the optimizer's own states (Adam: two of four bytes; Muon and momentum: one).
        reduced_bytes: of a gradient on its way between replicas.
    """

    precision: Literal["bf16", "fp8"] = "bf16"
    scaling: Literal["tensor", "row"] = "tensor"
    weight_bytes: float = 2
    gradient_bytes: float = 4
    master_bytes: float = 4
    optimizer_bytes: float = 8
    reduced_bytes: float = 4

    @property
    def product(self) -> str:
        """What products run in, by the name of its efficiency."""
        return self.precision if self.precision == "bf16" else f"{self.precision}_{self.scaling}"

    @property
    def all_bytes(self) -> float:
        """Bytes of one parameter with all its states, unsharded."""
        return self.weight_bytes + self.gradient_bytes + self.master_bytes + self.optimizer_bytes


def check_layout(model: Model, layout: Layout) -> None:
    """Passes if the layout splits the model evenly.

    Raises:
        UsageError: it does not; the message names the field and the valid values.
    """
    for field in ("tensor", "context", "pipeline", "chunks", "data", "expert", "micro_batch", "global_batch", "sequence"):
        if getattr(layout, field) < 1:
            raise UsageError(f"layout field `{field}` must be at least 1, got {getattr(layout, field)}")
    _check_tensor(model, layout)
    _check_pipeline(model, layout)
    _check_experts(model, layout)
    _check_batches(layout)


def _check_tensor(model: Model, layout: Layout) -> None:
    if layout.sequence_parallel and layout.tensor == 1:
        raise UsageError("layout field `sequence_parallel` needs `tensor` above 1: there is nothing to split along the sequence")
    _divides(layout.tensor, "tensor", model.heads, "model heads")
    if model.kv % layout.tensor and layout.tensor % model.kv:
        raise UsageError(f"layout field `tensor`: {layout.tensor} must divide model kv_heads {model.kv}, or be a multiple of it")
    _divides(layout.tensor, "tensor", model.feed_forward, "model ffn")
    if layout.sequence % (layout.context * (2 if layout.context > 1 else 1) * (layout.tensor if layout.sequence_parallel else 1)):
        raise UsageError(
            f"layout field `sequence`: {layout.sequence} is not split evenly by context {layout.context}"
            f" (two parts each) and tensor {layout.tensor}; take a multiple"
        )


def _check_pipeline(model: Model, layout: Layout) -> None:
    if layout.schedule not in SCHEDULES:
        raise UsageError(f"layout field `schedule`: {layout.schedule!r} is none of {', '.join(SCHEDULES)}")
    if layout.chunks > 1 and layout.schedule != "interleaved":
        raise UsageError(f"layout field `chunks`: {layout.chunks} virtual stages need `schedule` interleaved, not {layout.schedule}")
    if layout.schedule == "interleaved" and layout.chunks < 2:
        raise UsageError("layout field `chunks` must be at least 2 with `schedule` interleaved")
    if layout.chunks > 1 and layout.pipeline == 1:
        raise UsageError("layout field `chunks` needs `pipeline` above 1")
    parts = layout.pipeline * layout.chunks
    if layout.edge_layers is not None:
        middle = model.layers - sum(layout.edge_layers)
        if parts < 3 or min(layout.edge_layers) < 0 or middle < 0 or middle % (parts - 2):
            raise UsageError(
                f"layout field `edge_layers`: {layout.edge_layers} does not leave {model.layers} layers to be split evenly over"
                f" {max(parts - 2, 0)} other parts"
            )
        return
    _divides(parts, "pipeline * chunks", model.layers, "model layers")


def _check_experts(model: Model, layout: Layout) -> None:
    if layout.expert == 1:
        return
    if not model.experts:
        raise UsageError(f"layout field `expert`: {layout.expert} devices cannot share experts, the model has none (model field `experts`)")
    _divides(layout.expert, "expert", model.experts, "model experts")
    whole = layout.data * layout.context * layout.tensor
    if whole % (layout.expert * layout.in_expert):
        raise UsageError(f"layout field `expert`: expert * expert_tensor {layout.expert * layout.in_expert} must divide {whole} devices")


def _check_batches(layout: Layout) -> None:
    if layout.global_batch < layout.data:
        raise UsageError(f"layout field `global_batch`: {layout.global_batch} sequences are too few for {layout.data} replicas")
    if layout.global_batch % layout.data:
        raise UsageError(f"layout field `global_batch`: {layout.global_batch} is no multiple of data {layout.data}")
    if layout.pipeline > 1 and layout.global_batch % (layout.data * layout.micro_batch):
        raise UsageError(
            f"layout field `micro_batch`: {layout.micro_batch} does not divide a replica's {layout.global_batch // layout.data} sequences"
        )
    if layout.group and (layout.chunks == 1 or layout.group < layout.pipeline):
        raise UsageError(f"layout field `group`: {layout.group} must be at least pipeline {layout.pipeline}, with `chunks` above 1")
    if layout.chunks > 1 and layout.micro_batches % layout.grouped:
        raise UsageError(
            f"layout field `group`: interleaving needs a multiple of group (or pipeline) {layout.grouped}, not {layout.micro_batches}"
            " micro-batches; change global_batch"
        )


def _divides(divisor: int, field: str, whole: int, name: str) -> None:
    if whole % divisor:
        valid = [n for n in range(1, min(whole, 512) + 1) if whole % n == 0]
        raise UsageError(f"layout field `{field}`: {divisor} does not divide {name} {whole}; valid values: {', '.join(map(str, valid))}")
