"""Tensors as views on storages: taking the layout off a tensor and laying it onto another storage."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recoup.graph.step import View

__all__ = ["Layout", "anchor", "fitted", "is_plain", "lay", "layout_of", "tensors_in", "to_view"]


class Layout(NamedTuple):
    """Size, stride and offset in elements, and the dtype: all that makes a strided tensor of a storage."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


def layout_of(tensor: Tensor) -> Layout:
    """The layout of a strided tensor."""
    return Layout(tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype)


def to_view(tensor: Tensor) -> View:
    """The layout as the graph writes it down."""
    return View(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), str(tensor.dtype).removeprefix("torch."))


def lay(base: Tensor, layout: Layout) -> Tensor:
    """A new tensor of that layout on the storage of ``base``; never ``base`` itself, never with a gradient."""
    if base.dtype is layout.dtype:
        if base.shape == layout.size and base.stride() == layout.stride and base.storage_offset() == layout.offset:
            return base.detach()
        return base.as_strided(layout.size, layout.stride, layout.offset)
    empty = torch.empty(0, dtype=layout.dtype, device=base.device)
    return empty.set_(base.untyped_storage(), layout.offset, layout.size, layout.stride)


def fitted(base: Tensor, layout: Layout) -> Tensor:
    """``base`` itself if it has that layout, else a new tensor on its storage; for reading only."""
    if (
        base.shape == layout.size
        and base.stride() == layout.stride
        and base.dtype is layout.dtype
        and base.storage_offset() == layout.offset
    ):
        return base
    return lay(base, layout)


def anchor(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    """A tensor of bytes that spans a storage."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is just a layout on a storage: no subclass, no sparse or quantised layout, no lazy conjugate."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def tensors_in(value: object) -> list[Tensor]:
    """The tensors among an operator's arguments or results, in order, lists looked into."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    return []
