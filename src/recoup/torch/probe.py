"""Probes: a few elements of a dropped tensor, noted in the forward and compared when it has been rebuilt.

The static gear replays with the numbers of an earlier step. Should one of them have changed where no guard looks, the
rebuilt tensor differs, and the probe raises in the backward, before any weight moves. On CPU the elements are read
straight from memory (about a microsecond a tensor); elsewhere they are copied on the device.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from recoup.torch.views import Layout

__all__ = ["Probe", "probe_of", "read_probe", "same_probe"]

_INTEGERS = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64, 16: ctypes.c_uint64}


class Probe(NamedTuple):
    """Where to look in a tensor: element offsets from its first element, and the integer to read there as raw bits."""

    middle: int
    last: int
    integer: type[ctypes.c_uint8 | ctypes.c_uint16 | ctypes.c_uint32 | ctypes.c_uint64]
    element_bytes: int


def probe_of(layout: Layout) -> Probe | None:
    """The probe of a layout: an element near the middle and the last one; None for an empty tensor."""
    count = layout.size.numel()
    if count == 0:
        return None
    size = layout.dtype.itemsize
    return Probe(_offset(count * 4 // 7, layout), _offset(count - 1, layout), _INTEGERS[size], size)


def _offset(place: int, layout: Layout) -> int:
    offset = 0
    for size, stride in zip(reversed(layout.size), reversed(layout.stride), strict=True):
        place, index = divmod(place, size)
        offset += index * stride
    return offset


def read_probe(tensor: Tensor, probe: Probe | None) -> object:
    """The elements at those offsets, as bits; on other devices than CPU small copies."""
    if probe is None:
        return None
    if tensor.is_cpu:
        base = tensor.data_ptr()
        integer, size = probe.integer, probe.element_bytes
        return integer.from_address(base + probe.middle * size).value, integer.from_address(base + probe.last * size).value
    start = tensor.storage_offset()
    return [tensor.as_strided((1,), (1,), start + offset).clone() for offset in (probe.middle, probe.last)]


def same_probe(noted: object, found: object) -> bool:
    """Whether two probes of one tensor agree bit for bit."""
    if isinstance(noted, list) and isinstance(found, list):
        return all(torch.equal(left.view(torch.uint8), right.view(torch.uint8)) for left, right in zip(noted, found, strict=True))
    return noted == found
