"""A layer as a table of operations: what each makes, saves, computes, moves and sends, on one device, for one micro-batch.

Sizes are already divided by the parallel degrees: a row is what one device does. Bytes saved follow Korthikanti et al. 2022
(arXiv:2205.05198, section 4) where an operation appears there, and the kernels' own code where it does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Row", "Table", "Tensor", "Transfer", "Work"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One result: its name within the layer, and its bytes on one device."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Work:
    """What one kernel, or some like it, do.

    Attributes:
        kind: which efficiency counts.
        flops: operations by the usual count, all together: attention counts the whole square.
        done: share of them that is really done: half of causal attention.
        accumulate: whether a product adds to a gradient in four bytes.
        moved_bytes: read and written, all together; 0 for products, whose shape says it.
        shape: (batch, m, n, k) of a product; (rows,) of attention.
        kernels: how many.
        low: whether a product may run in a lower precision (linear layers, not attention).
    """

    kind: Literal["matmul", "attention", "attention_backward", "memory"]
    flops: int = 0
    moved_bytes: int = 0
    shape: tuple[int, ...] = ()
    kernels: int = 1
    low: bool = False
    done: float = 1.0
    accumulate: bool = False

    @classmethod
    def product(cls, batch: int, m: int, n: int, k: int, low: bool = False) -> Work:
        """``batch`` products of (m, k) and (k, n)."""
        return cls("matmul", 2 * batch * m * n * k, 0, (batch, m, n, k), low=low)

    @classmethod
    def gradient(cls, batch: int, m: int, n: int, k: int, low: bool = False) -> Work:
        """Products that make the gradient of weights, added to what other micro-batches gave."""
        return cls("matmul", 2 * batch * m * n * k, 0, (batch, m, n, k), low=low, accumulate=True)

    @classmethod
    def moving(cls, moved_bytes: float, kernels: int = 1) -> Work:
        """Element-wise kernels."""
        return cls("memory", 0, int(moved_bytes), (), kernels)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective.

    Attributes:
        kind: as in ``recoup.cost.links``.
        bytes: the whole, unsharded size.
        axis: which devices take part: ``tensor``, ``expert`` or ``context``.
        behind: what runs meanwhile: nothing, the product that makes the data gradient, or that of the weight gradient,
            or the row's own kernels.
    """

    kind: str
    bytes: int
    axis: Literal["tensor", "expert", "context"]
    behind: Literal["", "data", "weight", "own"] = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One operation.

    Attributes:
        name: unique in the layer.
        module: path within the layer, as ``attention``.
        reads: names of what it reads; ``x`` is what enters the layer.
        makes: what it makes.
        saves: names of what its backward reads.
        forward: kernels of the forward.
        data: kernels of the backward that make gradients of what it reads.
        weight: kernels of the backward that make gradients of its weights.
        sends: collectives of the forward.
        returns: collectives of the backward.
        weights: parameters on this device that are split by tensor (or expert) parallelism.
        whole: parameters that every device of the tensor parallel group has.
        experts: whether ``weights`` are experts', whose replicas are fewer.
        random: whether it draws random numbers.
        scratch: bytes of the backward, beside results and gradients.
    """

    name: str
    module: str
    reads: tuple[str, ...]
    makes: tuple[Tensor, ...]
    saves: tuple[str, ...] = ()
    forward: tuple[Work, ...] = ()
    data: tuple[Work, ...] = ()
    weight: tuple[Work, ...] = ()
    sends: tuple[Transfer, ...] = ()
    returns: tuple[Transfer, ...] = ()
    weights: int = 0
    whole: int = 0
    experts: bool = False
    random: bool = False
    scratch: int = 0


@dataclass(frozen=True, slots=True)
class Table:
    """A layer's operations in the order in which they run.

    Attributes:
        kind: of the layer.
        entering: what enters it, saved by its first operation.
        rows: its operations; the last one makes what leaves.
    """

    kind: str
    entering: Tensor
    rows: tuple[Row, ...]
    outside: tuple[Tensor, ...] = field(default=())

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Everything made, by name, and what enters."""
        made = {tensor.name: tensor for row in self.rows for tensor in row.makes}
        return {self.entering.name: self.entering, **{tensor.name: tensor for tensor in self.outside}, **made}

    @property
    def saved(self) -> tuple[str, ...]:
        """Names of all that the backward reads, each once, in order."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row.saves))

    @property
    def saved_bytes(self) -> int:
        """Bytes that one micro-batch leaves in the layer when nothing is recomputed."""
        tensors = self.tensors
        return sum(tensors[name].bytes for name in self.saved if name not in {tensor.name for tensor in self.outside})

    @property
    def flops(self) -> int:
        """Operations of the forward."""
        return sum(work.flops for row in self.rows for work in row.forward)

    @property
    def backward_flops(self) -> int:
        """Operations of the backward."""
        return sum(work.flops for row in self.rows for work in (*row.data, *row.weight))
