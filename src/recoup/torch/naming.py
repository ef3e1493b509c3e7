"""Names of tensors for people: parameters and buffers looked up by address, when an error or a report needs it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

__all__ = ["Namer", "tensor_names"]


def tensor_names(modules: Iterable[torch.nn.Module]) -> Callable[[], dict[int, str]]:
    """A look-up of parameter and buffer names by data address; holds the modules weakly."""
    references = [weakref.ref(module) for module in modules]

    def look() -> dict[int, str]:
        found = [module for reference in references if (module := reference()) is not None]
        return {tensor.data_ptr(): name for module in found for name, tensor in (*module.named_parameters(), *module.named_buffers())}

    return look


class Namer:
    """Names tensors read in one place; asked only when an error needs a name, so that no forward pays for it."""

    __slots__ = ("_names", "_where")

    def __init__(self, names: Callable[[], dict[int, str]], where: str) -> None:
        self._names = names
        self._where = where

    def of(self, tensor: Tensor) -> str:
        """A parameter's or buffer's name and the place, or just the place."""
        pointer = tensor.data_ptr() if tensor.numel() and tensor.layout is torch.strided else 0
        name = self._names().get(pointer)
        return f"{name}, read in {self._where}" if name else f"a tensor read in {self._where}"
