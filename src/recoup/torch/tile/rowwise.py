"""What can be done to deferred logits without having them: reshapes, casts and cuts of rows, and cross-entropy.

Each handler gets the arguments of one function and answers ``NotImplemented`` where only the values will do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from recoup.torch.tile.deferred import Deferred, Rows, defer
from recoup.torch.tile.loss import cross_entropy

__all__ = ["HANDLERS"]


def _made(rows: Rows, dtype: torch.dtype) -> Deferred:
    return defer(rows, dtype)


def _reshape(logits: Deferred, *shape: Any, **kwargs: Any) -> object:
    wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)) else shape
    if kwargs or not wanted or not all(isinstance(size, int) for size in wanted):
        return NotImplemented
    return _shaped(logits, list(wanted))


def _shaped(logits: Deferred, wanted: list[int]) -> object:
    rows, classes = logits.rows, logits.rows.head.shape[-1]
    if rows.classes_first or len(wanted) < 2:
        return NotImplemented
    if -1 in wanted:
        known = functools.reduce(lambda a, b: a * b, (size for size in wanted if size != -1), 1)
        if wanted.count(-1) > 1 or not known or logits.numel() % known:
            return NotImplemented
        wanted[wanted.index(-1)] = logits.numel() // known
    if wanted[-1] != classes or torch.Size(wanted).numel() != logits.numel():
        return NotImplemented
    lead = wanted[:-1]
    features = rows.features.reshape(*lead, rows.features.shape[-1])
    return _made(rows.derived(features, lambda value: value.reshape(wanted)), logits.dtype)


def _flatten(logits: Deferred, start_dim: int = 0, end_dim: int = -1) -> object:
    sizes = list(logits.shape)
    start, end = start_dim % len(sizes), end_dim % len(sizes)
    if end == len(sizes) - 1 or start > end:
        return NotImplemented
    return _shaped(logits, [*sizes[:start], torch.Size(sizes[start : end + 1]).numel(), *sizes[end + 1 :]])


def _item(logits: Deferred, index: Any) -> object:
    rows = logits.rows
    if rows.classes_first:
        return NotImplemented
    parts = index if isinstance(index, tuple) else (index,)
    if not parts:
        return NotImplemented
    used = 0
    for part in parts:
        if isinstance(part, Tensor) and not isinstance(part, Deferred) and part.dtype in (torch.bool, torch.int64):
            used += part.dim() if part.dtype is torch.bool else 1
        elif isinstance(part, (int, slice)) and not isinstance(part, bool):
            used += 1
        elif not isinstance(part, EllipsisType):
            return NotImplemented
    dims = logits.dim()
    skips = any(isinstance(part, EllipsisType) for part in parts)
    whole = isinstance(parts[-1], slice) and parts[-1] == slice(None)
    # The classes are left alone: not reached, or taken whole.
    if not (used < dims and not skips) and not (whole and used <= dims) and not isinstance(parts[-1], EllipsisType):
        return NotImplemented
    if isinstance(parts[-1], EllipsisType) and used >= dims:
        return NotImplemented
    features = rows.features[index]
    if features.dim() < 2 or features.shape[-1] != rows.features.shape[-1]:
        return NotImplemented
    return _made(rows.derived(features, lambda value: value[index]), logits.dtype)


def _contiguous(logits: Deferred, memory_format: torch.memory_format = torch.contiguous_format) -> object:
    return logits if memory_format is torch.contiguous_format and not logits.rows.classes_first else NotImplemented


def _cast(logits: Deferred, dtype: torch.dtype) -> object:
    if dtype is logits.dtype:
        return logits
    if not dtype.is_floating_point:
        return NotImplemented
    return _made(logits.rows.derived(logits.rows.features, lambda value: value.to(dtype), cast=dtype), dtype)


def _casts_to(dtype: torch.dtype) -> Callable[..., object]:
    return lambda logits, **kwargs: NotImplemented if kwargs else _cast(logits, dtype)


def _to(logits: Deferred, *args: Any, **kwargs: Any) -> object:
    if set(kwargs) - {"dtype", "device", "non_blocking"} or len(args) > 2:
        return NotImplemented
    dtype = kwargs.get("dtype", logits.dtype)
    device = kwargs.get("device", logits.device)
    for argument in args:
        if isinstance(argument, torch.dtype):
            dtype = argument
        elif isinstance(argument, (str, torch.device)):
            device = argument
        else:
            return NotImplemented
    here = torch.device(device)
    same = here.type == logits.device.type and here.index in (None, logits.device.index)
    return _cast(logits, dtype) if same else NotImplemented


def _transpose(logits: Deferred, dim0: int, dim1: int) -> object:
    if logits.dim() != 3 or {dim0 % 3, dim1 % 3} != {1, 2}:
        return NotImplemented
    return _made(logits.rows.derived(logits.rows.features, lambda value: value.transpose(1, 2), turn=True), logits.dtype)


def _permute(logits: Deferred, *dims: Any) -> object:
    order = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    return _transpose(logits, 1, 2) if len(order) == 3 and [dim % 3 for dim in order] == [0, 2, 1] else NotImplemented


HANDLERS: dict[object, Callable[..., object]] = {
    Tensor.view: _reshape,
    Tensor.reshape: _reshape,
    torch.reshape: _reshape,
    Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    Tensor.__getitem__: _item,
    Tensor.contiguous: _contiguous,
    Tensor.float: _casts_to(torch.float32),
    Tensor.double: _casts_to(torch.float64),
    Tensor.half: _casts_to(torch.float16),
    Tensor.bfloat16: _casts_to(torch.bfloat16),
    Tensor.to: _to,
    Tensor.transpose: _transpose,
    torch.transpose: _transpose,
    Tensor.permute: _permute,
    torch.permute: _permute,
    Tensor.mT.__get__: lambda logits: _transpose(logits, 1, 2),  # pyrefly: ignore
    torch.nn.functional.cross_entropy: cross_entropy,
}
