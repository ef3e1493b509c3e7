"""A table of operations priced on a device: seconds of each row, what its collectives cost beyond what hides them.

A collective runs behind nothing, behind the row's own kernels, or behind one of the two products of its backward; what it
takes longer than that is *exposed*. An executor that reorders has a *window*: the collectives of the backward, less what hides in
their own row's data gradient. Gradients of weights fill it first, then recomputation (``recoup.job.dishes``).
"""

from __future__ import annotations

from dataclasses import dataclass

from recoup.cost.device import Device
from recoup.cost.links import collective_seconds
from recoup.cost.roofline import attention_seconds, matmul_seconds, memory_seconds
from recoup.job.shape import Shape
from recoup.job.table import Row, Table, Transfer, Work

__all__ = ["Price", "Prices", "price_table"]


@dataclass(frozen=True, slots=True)
class Price:
    """One row.

    Attributes:
        forward_seconds: kernels and exposed collectives of the forward.
        data_seconds: kernels that make gradients of what it reads.
        weight_seconds: kernels that make gradients of its weights.
        exposed_seconds: collectives of the backward beyond what hides them.
        sent_seconds: of ``forward_seconds`` the exposed collectives.
        window_seconds: collectives of the backward that gradients of weights, or recomputation, can run behind.
    """

    forward_seconds: float
    data_seconds: float
    weight_seconds: float
    exposed_seconds: float
    sent_seconds: float
    window_seconds: float = 0.0

    @property
    def backward_seconds(self) -> float:
        """All of the backward."""
        return self.data_seconds + self.weight_seconds + self.exposed_seconds


@dataclass(frozen=True, slots=True)
class Prices:
    """A table, row by row."""

    rows: tuple[Price, ...]

    @property
    def forward_seconds(self) -> float:
        """The whole forward."""
        return sum(row.forward_seconds for row in self.rows)

    @property
    def backward_seconds(self) -> float:
        """The whole backward."""
        return sum(row.backward_seconds for row in self.rows)

    @property
    def weight_seconds(self) -> float:
        """Gradients of weights alone."""
        return sum(row.weight_seconds for row in self.rows)

    @property
    def exposed_seconds(self) -> float:
        """Exposed collectives of the backward."""
        return sum(row.exposed_seconds for row in self.rows)

    @property
    def window_seconds(self) -> float:
        """Collectives of the backward beyond gradients of weights, which go first: room for recomputation."""
        return max(sum(row.window_seconds for row in self.rows) - self.weight_seconds, 0.0)

    @property
    def sent_seconds(self) -> float:
        """Exposed collectives of the forward."""
        return sum(row.sent_seconds for row in self.rows)


def price_table(table: Table, device: Device, shape: Shape, precision: str) -> Prices:
    """Seconds of each row on a device.

    Raises:
        UsageError: the device does not have the precision.
    """
    return Prices(tuple(_row(row, device, shape, precision) for row in table.rows))


def _row(row: Row, device: Device, shape: Shape, precision: str) -> Price:
    kernels = sum(_work(work, device, precision, shape.kernels.attention_share) for work in row.forward)
    data = sum(_work(work, device, precision, shape.kernels.attention_share) for work in row.data)
    weight = sum(_work(work, device, precision, shape.kernels.attention_share) for work in row.weight)
    sent = sum(_exposed(one, device, shape, {"own": kernels}) for one in row.sends)
    returned = sum(_exposed(one, device, shape, {"own": data + weight, "data": data, "weight": weight}) for one in row.returns)
    # Once an executor reorders, what runs behind gradients of weights is no longer fixed.
    window = sum(_exposed(one, device, shape, {"own": data + weight, "data": data}) for one in row.returns)
    return Price(kernels + sent, data, weight, returned, sent, window)


def _work(work: Work, device: Device, precision: str, share: float) -> float:
    if work.kind == "matmul":
        batch, m, n, k = work.shape
        low = precision if work.low else "bf16"
        seconds = matmul_seconds(device, batch, m, n, k, low, work.accumulate)
        # What runs in fewer bits is first cast: read in two bytes, written in one, both operands.
        return seconds if low == "bf16" else seconds + memory_seconds(device, 3.0 * batch * k * (m + n), 2)
    if work.kind == "memory":
        return memory_seconds(device, work.moved_bytes, work.kernels)
    return attention_seconds(device, work.flops * work.done, work.shape[0], work.kind == "attention_backward", share)


def _exposed(one: Transfer, device: Device, shape: Shape, hiding: dict[str, float]) -> float:
    devices, stride = _group(one, shape)
    seconds = collective_seconds(device, one.kind, one.bytes, devices, stride)
    return max(0.0, seconds - shape.kernels.tensor_hidden_share * hiding.get(one.behind, 0.0)) if one.behind else seconds


def _group(one: Transfer, shape: Shape) -> tuple[int, int]:
    """Devices of a group and their stride: tensor parallelism innermost, then context, data and pipeline."""
    if one.axis == "tensor":
        return shape.tensor, 1
    if one.axis == "context":
        return shape.context, shape.tensor
    return shape.expert, shape.in_expert
