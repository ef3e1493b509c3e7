"""What an operation costs, alone and inside of a fused loop.

Inductor runs chains of pointwise operations as one loop: a value that only such operations read is never written. So a
pointwise operation costs its arithmetic, and of memory only what it reads from elsewhere: no launch, no write. From the time
of its ATen kernel, which does one of everything,

    fused = max(kernel - launch - (read + written) / bandwidth, 0) + read from elsewhere / bandwidth

with launch and bandwidth measured on this machine. A reduction in a loop keeps the time of its kernel.

What cannot be run alone costs what moving its bytes does, launch + (read + written) / bandwidth: the memory side of a roofline
(Williams, Waterman and Patterson 2009, "Roofline", Communications of the ACM 52(4), 65-76), so that no operation counts as free.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import fx

from recoup.torch.compiled.interfaces import concrete, no_modes
from recoup.torch.compiled.loops import is_pointwise
from recoup.torch.compiled.traced import tensors_of
from recoup.torch.timing import least_seconds, synchronizer

__all__ = ["Price", "by_bytes", "in_a_loop"]

_PROBE_BYTES = 8 * 2**20
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Price:
    """What one run of an operation takes: seconds, bytes above its inputs and outputs, and where that comes from."""

    seconds: float
    scratch_bytes: int
    provenance: Literal["measured", "modelled"] = "measured"


def in_a_loop(node: fx.Node, alone: Price) -> Price:
    """The price of a loop's operation, from that of its kernel alone."""
    if not is_pointwise(node):
        return Price(alone.seconds, 0, alone.provenance)
    tensors = tensors_of(node)
    launch, per_byte = _kernel(str(tensors[0].device))
    read, written = _read_and_written(node)
    elsewhere = sum(_bytes(tensor) for argument in node.all_input_nodes if not is_pointwise(argument) for tensor in tensors_of(argument))
    arithmetic = max(alone.seconds - launch - (read + written) * per_byte, 0.0)
    return Price(min(arithmetic + elsewhere * per_byte, alone.seconds), 0, "modelled")


def by_bytes(node: fx.Node) -> Price:
    """The price of an operation that cannot be run alone: what it reads and writes, and a launch."""
    tensors = tensors_of(node) or [tensor for argument in node.all_input_nodes for tensor in tensors_of(argument)]
    if not tensors:
        return Price(0.0, 0, "modelled")
    launch, per_byte = _kernel(str(tensors[0].device))
    return Price(launch + sum(_read_and_written(node)) * per_byte, 0, "modelled")


def _read_and_written(node: fx.Node) -> tuple[int, int]:
    read = sum(_bytes(tensor) for argument in node.all_input_nodes for tensor in tensors_of(argument))
    return read, sum(_bytes(tensor) for tensor in tensors_of(node))


def _bytes(tensor: torch.Tensor) -> int:
    """What a loop over the tensor reads of it: each element once, however it is broadcast."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= concrete(size) if concrete(stride) else 1
    return count * tensor.element_size()


@cache
def _kernel(device: str) -> tuple[float, float]:
    """Seconds to launch a kernel, and seconds for each byte that one reads or writes."""
    with no_modes():
        small, large = torch.zeros(1, device=device), torch.zeros(_PROBE_BYTES // 4, device=device)
        target = torch.empty_like(large)
        wait = synchronizer(device)
        launch = least_seconds(lambda: small.neg_(), _REPEATS, wait)
        return launch, max(least_seconds(lambda: target.copy_(large), _REPEATS, wait) - launch, 0.0) / (2 * _PROBE_BYTES)
