"""A module's tensors, flags and numbers as they stand at a call, to be put back while the call runs again in the backward.

A recomputed call must see what the forward saw: other parameters may hang in the module by then (``functional_call``),
other flags may be set (``eval()``). Writes in place to the tensors are autograd's to find: all of them are saved.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["Standing"]

_PLAIN = (bool, int, float, str, type(None))
_MISSING = object()


class Standing:
    """What one module and all below it hold, by table and name.

    Attributes:
        parameters: the distinct parameters.
        buffers: the distinct buffers.
    """

    __slots__ = ("_flags", "_tensors", "buffers", "parameters")

    def __init__(self, module: torch.nn.Module) -> None:
        self._tensors: list[tuple[dict[str, Any], str, Tensor]] = []
        self._flags: list[tuple[dict[str, object], dict[str, object]]] = []
        parameters: dict[int, Tensor] = {}
        buffers: dict[int, Tensor] = {}
        for part in module.modules():
            for table, found in ((part._parameters, parameters), (part._buffers, buffers)):
                for name, tensor in table.items():
                    if tensor is not None:
                        self._tensors.append((table, name, tensor))
                        found[id(tensor)] = tensor
            table = part.__dict__
            self._flags.append((table, {name: value for name, value in table.items() if isinstance(value, _PLAIN)}))
        self.parameters = list(parameters.values())
        self.buffers = list(buffers.values())

    @contextmanager
    def restored(self, instead: Mapping[int, Tensor]) -> Generator[None]:
        """The module as it stood, with other tensors in place of some (by ``id``); afterwards as it is now."""
        undo: list[tuple[dict, str, object]] = []
        try:
            for table, name, tensor in self._tensors:
                wanted = instead.get(id(tensor), tensor)
                if table.get(name, _MISSING) is not wanted:
                    undo.append((table, name, table.get(name, _MISSING)))
                    table[name] = wanted
            for table, flags in self._flags:
                for name, value in flags.items():
                    now = table.get(name, _MISSING)
                    if now is not value and now != value:
                        undo.append((table, name, now))
                        table[name] = value
            yield
        finally:
            for table, name, value in reversed(undo):
                if value is _MISSING:
                    del table[name]
                else:
                    table[name] = value
