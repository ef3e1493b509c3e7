"""The sizes that one device sees of one layer: what a table of operations is made from."""

from __future__ import annotations

from dataclasses import dataclass

from recoup.job.layout import Kernels, Layout
from recoup.job.model import Model

__all__ = ["Shape"]


@dataclass(frozen=True, slots=True)
class Shape:
    """A model on one device for one micro-batch; equal shapes have equal tables.

    Attributes:
        model: the whole model.
        kernels: which kernels run.
        tensor: tensor parallel degree.
        sequence_parallel: whether the residual stream is split along the sequence.
        context: context parallel degree.
        expert: devices that share the experts.
        in_expert: tensor parallel degree inside an expert.
        batch: sequences of the micro-batch.
        sequence: tokens of a sequence, before any split.
    """

    model: Model
    kernels: Kernels
    tensor: int
    sequence_parallel: bool
    context: int
    expert: int
    in_expert: int
    batch: int
    sequence: int

    @classmethod
    def of(cls, model: Model, kernels: Kernels, layout: Layout) -> Shape:
        """The shape under a layout."""
        return cls(
            model, kernels, layout.tensor, layout.sequence_parallel, layout.context, layout.expert, layout.in_expert,
            layout.micro_batch, layout.sequence,
        )  # fmt: skip

    @property
    def queries(self) -> int:
        """Tokens of one sequence on this device."""
        return self.sequence // self.context

    @property
    def tokens(self) -> int:
        """Tokens that the layer's products see."""
        return self.batch * self.queries

    @property
    def local(self) -> int:
        """Tokens of the residual stream on this device."""
        return self.tokens // self.tensor if self.sequence_parallel else self.tokens

    @property
    def stream_bytes(self) -> int:
        """The residual stream on this device."""
        return 2 * self.local * self.model.hidden

    @property
    def whole_bytes(self) -> int:
        """The residual stream of all devices of the tensor parallel group, if each has a part."""
        return 2 * self.tokens * self.model.hidden

    @property
    def heads(self) -> int:
        """Query heads on this device."""
        return self.model.heads // self.tensor

    @property
    def kv(self) -> int:
        """Key and value heads on this device; some are copies if there are fewer than devices."""
        return max(self.model.kv // self.tensor, 1)

    @property
    def norm_weights(self) -> int:
        """Parameters of one normalization."""
        return self.model.hidden * (2 if self.model.norm == "layernorm" else 1)
