"""A module as it stands at a call, to run again in the backward: a copy of the module objects around the same tensors.

A recomputed call must see what the forward saw: by then other parameters may hang in the module (``functional_call``),
and other flags may be set (``eval()``). Since it is the copy that runs, the module itself is never touched, whatever other
threads do with it meanwhile. Writes in place to the tensors are autograd's to find: all of them are saved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["Standing", "is_replaced"]

_SLOT = "_compiled_call_impl"


class Standing:
    """What one module and all below it are at a call.

    Attributes:
        call: runs the copy.
        parameters: the distinct parameters.
        buffers: the distinct buffers.
    """

    __slots__ = ("_places", "buffers", "call", "parameters")

    def __init__(self, module: torch.nn.Module) -> None:
        copies: dict[int, torch.nn.Module] = {}
        self.call: Callable[..., object] = _copied(module, copies)._call_impl
        self._places: list[tuple[dict[str, Any], str, Tensor]] = []
        parameters: dict[int, Tensor] = {}
        buffers: dict[int, Tensor] = {}
        for copy in copies.values():
            self._note(copy._parameters, parameters)
            self._note(copy._buffers, buffers)
        self.parameters = list(parameters.values())
        self.buffers = list(buffers.values())

    def _note(self, table: Mapping[str, Tensor | None], found: dict[int, Tensor]) -> None:
        for name, tensor in table.items():
            if tensor is not None:
                self._places.append((table, name, tensor))  # type: ignore[arg-type]
                found[id(tensor)] = tensor

    @contextmanager
    def with_tensors(self, instead: Mapping[int, Tensor]) -> Generator[None]:
        """The copy with other tensors in place of some (by ``id``), for as long as this is open."""
        try:
            for table, name, tensor in self._places:
                table[name] = instead.get(id(tensor), tensor)
            yield
        finally:
            for table, name, tensor in self._places:
                table[name] = tensor


def is_replaced(module: torch.nn.Module) -> bool:
    """Whether calls of the module run something else than its own ``forward``, such as a compiled one."""
    slot = module.__dict__.get(_SLOT)
    if isinstance(slot, functools.partial) and len(slot.args) > 1:
        slot = slot.args[1]  # what an interception stands around
    return isinstance(module, torch.jit.ScriptModule) or (slot is not None and slot != module._call_impl)


def _copied(module: torch.nn.Module, copies: dict[int, torch.nn.Module]) -> torch.nn.Module:
    """A module object of its own for each in the tree, with the same attributes and tensors."""
    known = copies.get(id(module))
    if known is not None:
        return known
    copy = module.__class__.__new__(module.__class__)
    own = module.__dict__.copy()
    own["_parameters"] = dict(module._parameters)
    own["_buffers"] = dict(module._buffers)
    slot = own.pop(_SLOT, None)
    copy.__dict__ = own
    copies[id(module)] = copy
    own["_modules"] = {name: None if child is None else _copied(child, copies) for name, child in module._modules.items()}
    if isinstance(slot, functools.partial):
        # Whoever stands around the module's calls stands around the copy's too.
        own[_SLOT] = functools.partial(slot.func, slot.args[0], copy._call_impl)
    return copy
