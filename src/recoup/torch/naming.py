"""Names of tensors for people: parameters and buffers looked up by address, when an error or a report needs it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

__all__ = ["LazyName", "tensor_names"]


def tensor_names(modules: Iterable[torch.nn.Module]) -> Callable[[], dict[int, str]]:
    """A look-up of parameter and buffer names by data address; holds the modules weakly."""
    references = [weakref.ref(module) for module in modules]

    def look() -> dict[int, str]:
        found = [module for reference in references if (module := reference()) is not None]
        return {tensor.data_ptr(): name for module in found for name, tensor in (*module.named_parameters(), *module.named_buffers())}

    return look


class LazyName:
    """What to call a tensor, worked out only if an error needs it."""

    __slots__ = ("_names", "_pointer", "_where")

    def __init__(self, names: Callable[[], dict[int, str]], where: str, tensor: Tensor) -> None:
        self._names = names
        self._where = where
        self._pointer = tensor.data_ptr() if tensor.numel() and tensor.layout is torch.strided else 0

    def __str__(self) -> str:
        name = self._names().get(self._pointer)
        return f"{name}, read in {self._where}" if name else f"a tensor read in {self._where}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)
