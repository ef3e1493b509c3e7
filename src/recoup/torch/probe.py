"""Probes: a few elements of a dropped tensor, noted in the forward and compared when it has been rebuilt.

The static gear replays with the numbers of an earlier step. Should one of them have changed where no guard looks, the
rebuilt tensor differs, and the probe raises in the backward, before any weight moves. On CPU the elements are read
straight from memory (about a microsecond a tensor); elsewhere they are copied on the device.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from recoup.torch.views import Layout

__all__ = ["Offsets", "probe_offsets", "read_probe", "same_probe"]

Offsets = tuple[int, ...]
"""Element offsets, relative to the first element of the tensor."""

_INTEGERS = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64, 16: ctypes.c_uint64}
_PROBES = 4


def probe_offsets(layout: Layout) -> Offsets:
    """Offsets of up to four elements spread over a tensor; none for an empty one."""
    count = layout.size.numel()
    if count == 0:
        return ()
    places = sorted({(count - 1) * number // (_PROBES - 1) for number in range(_PROBES)})
    return tuple(_offset(place, layout) for place in places)


def _offset(place: int, layout: Layout) -> int:
    offset = 0
    for size, stride in zip(reversed(layout.size), reversed(layout.stride), strict=True):
        place, index = divmod(place, size)
        offset += index * stride
    return offset


def read_probe(tensor: Tensor, offsets: Offsets) -> object:
    """The elements at those offsets, as bits; on other devices than CPU a small copy."""
    if tensor.device.type == "cpu":
        size = tensor.element_size()
        integer = _INTEGERS[size]
        base = tensor.data_ptr()
        return [integer.from_address(base + offset * size).value for offset in offsets]
    start = tensor.storage_offset()
    return [tensor.as_strided((1,), (1,), start + offset).clone() for offset in offsets]


def same_probe(noted: object, found: object) -> bool:
    """Whether two probes of one tensor agree bit for bit."""
    assert isinstance(noted, list)
    assert isinstance(found, list)
    if noted and isinstance(noted[0], Tensor):
        return all(torch.equal(left.view(torch.uint8), right.view(torch.uint8)) for left, right in zip(noted, found, strict=True))
    return noted == found
