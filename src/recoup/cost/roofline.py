"""Seconds of a kernel by a roofline: the longer of computing and moving, each at a stated efficiency, plus its start.

    seconds = max(operations / (peak * efficiency), bytes / (bandwidth * efficiency)) + kernel_seconds

Efficiencies depend on the kind and size of the work (``recoup.cost.device``), and each says where it comes from.
"""

from __future__ import annotations

from recoup.cost.device import Device

__all__ = ["attention_seconds", "matmul_seconds", "memory_seconds"]


def matmul_seconds(device: Device, batch: int, m: int, n: int, k: int, precision: str = "bf16", accumulate: bool = False) -> float:
    """Seconds of ``batch`` products of (m, k) and (k, n), two bytes each; ``2 * batch * m * n * k`` operations.

    With ``accumulate`` they add to results in four bytes. Products are in ``bf16``,
    ``fp8_tensor`` or ``fp8_row`` (how operands are scaled).

    Raises:
        UsageError: the device does not have this precision.
    """
    if not batch * m * n * k:
        return 0.0
    outputs = float(batch) * m * n
    shape = device.matmul
    efficiency = shape.ceiling * outputs / (outputs + shape.half_outputs) * k / (k + shape.half_depth)
    efficiency *= shape.accumulating if accumulate else 1.0
    if precision != "bf16":
        efficiency *= shape.fp8_row if precision == "fp8_row" else shape.fp8_tensor
    computing = 2.0 * outputs * k / (device.rate(precision.partition("_")[0]) * efficiency)
    moving = batch * (2 * (m * k + k * n) + (8 if accumulate else 2) * m * n) / device.memory_bytes_per_second
    return max(computing, moving) + device.kernel_seconds


def attention_seconds(device: Device, operations: float, rows: float, backward: bool = False, share: float = 1.0) -> float:
    """Seconds of fused attention: operations really done, over ``rows`` = batch * heads * queries.

    ``share`` is that of the device's efficiency which the kernel reaches.
    """
    if not operations:
        return 0.0
    curve = device.attention.backward if backward else device.attention.forward
    return operations / (device.rate("bf16") * curve.at(rows) * share) + device.kernel_seconds


def memory_seconds(device: Device, moved_bytes: float, kernels: int = 1) -> float:
    """Seconds of element-wise kernels that read and write so many bytes together."""
    if not moved_bytes:
        return 0.0
    return (
        moved_bytes / (device.memory_bytes_per_second * device.memory_efficiency.at(moved_bytes / kernels))
        + kernels * device.kernel_seconds
    )
