"""What a step may change, found and put back, so that steps can be repeated from one state.

Covered: parameters, buffers and gradients by value and by identity; the training flag, numbers and tensors among the
attributes of modules and of objects of the step's own package that it names; tensors that the step's code names; plain values
and tensors in the step's own closure; whatever has ``state_dict`` and ``load_state_dict`` (optimizers, schedulers,
gradient scalers); the default generators of PyTorch, Python and NumPy, and generator objects found in the same places.

Not covered: attributes that a step sets for the first time, flags and text among them; iterators and data loaders
without a state dict; counters in global variables; contents of lists and dictionaries other than tensors; files; other
processes.
"""

from __future__ import annotations

import copy
import functools
import random
import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, Self, TypeGuard, final

import numpy as np
import torch

from recoup.errors import CaptureError

__all__ = ["PLAIN", "Snapshot", "as_bytes", "find_state", "generator_states", "own_attributes", "reachable", "same_bits"]

PLAIN = (bool, int, float, complex, str, bytes, type(None))
_COUNTED = (int, float, complex, torch.Tensor)
_OF_TORCH = frozenset(vars(torch.nn.Module())) - {"training"}
_CODE = (types.FunctionType, types.MethodType, functools.partial)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


@final
class Snapshot:
    """The state that a step starts from, to be restored any number of times; as a context, restored on leaving.

    It holds one copy of all it covers: about the bytes of parameters, buffers, gradients, optimizer state and of the
    tensors that the step names. Values are written back in place, and only where they differ, so that every reference
    to a tensor stays good.
    """

    def __init__(self, parts: tuple[_Part, ...]) -> None:
        self._parts = parts

    @classmethod
    def take(cls, model: torch.nn.Module, step: Callable[..., object]) -> Snapshot:
        """Copies the state of ``model`` and of what ``step`` names.

        Raises:
            CaptureError: the state dict of an object that the step names cannot be copied.
        """
        found = find_state(step, model)
        modules = [module for item in found if isinstance(item, torch.nn.Module) for module in item.modules()]
        holders: dict[int, object] = {id(module): module for module in modules}
        reached = reachable(step)
        home = _package(step)
        holders.update((id(item), item) for item in reached if _is_own(item, home) and not isinstance(item, _CODE))
        tensors = [item for item in reached if isinstance(item, torch.Tensor)]
        generators = [item for item in found if isinstance(item, _GENERATORS)]
        parts: list[_Part] = [_Attributes(holder) for holder in holders.values()]
        parts.append(_Cells(step))
        parts.append(_Values([*_tensors_of(modules), *tensors]))
        parts.extend(_Stateful(item) for item in found if _is_stateful(item))
        parts.append(_Generators(generators))
        return cls(tuple(parts))

    def restore(self) -> None:
        """Puts everything back as it was when the snapshot was taken."""
        for part in self._parts:
            part.restore()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()


def find_state(step: Callable[..., object], model: torch.nn.Module) -> tuple[object, ...]:
    """What a step may change besides plain tensors: modules (the model first), stateful objects, generator objects.

    Stateful is what has both ``state_dict`` and ``load_state_dict``.
    """
    found: dict[int, object] = {id(model): model}
    inside = {id(module) for module in model.modules()}
    for item in reachable(step):
        if isinstance(item, torch.nn.Module):
            if id(item) not in inside:
                found[id(item)] = item
                inside.update(id(module) for module in item.modules())
        elif isinstance(item, _GENERATORS) or _is_stateful(item):
            found[id(item)] = item
    for root in [item for item in found.values() if isinstance(item, torch.nn.Module)]:
        for module in root.modules():
            found.update((id(value), value) for value in vars(module).values() if isinstance(value, _GENERATORS))
    return tuple(found.values())


def generator_states(generators: Iterable[object] = ()) -> dict[str, object]:
    """States of the default generators of PyTorch (CPU, and CUDA once it is in use), Python and NumPy, then of ``generators``."""
    states: dict[str, object] = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    if torch.cuda.is_initialized():
        states.update((f"cuda:{index}", state) for index, state in enumerate(torch.cuda.get_rng_state_all()))
    states.update((f"generator {place}", _get_generator(generator)) for place, generator in enumerate(generators))
    return states


def own_attributes(holder: object) -> dict[str, object]:
    """An object's own plain values and tensors, by name; of a module, not those that ``torch.nn.Module`` keeps for itself."""
    hidden = _OF_TORCH if isinstance(holder, torch.nn.Module) else frozenset()
    return {name: value for name, value in vars(holder).items() if name not in hidden and isinstance(value, (*PLAIN, torch.Tensor))}


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype, device and bits; NaN equals NaN of the same bits, 0 differs from -0."""
    if left.shape != right.shape or left.dtype != right.dtype or left.device != right.device or left.layout != right.layout:
        return False
    if left.is_meta:
        return True
    if left.layout == torch.sparse_coo:
        left, right = left.detach().coalesce(), right.detach().coalesce()
        return same_bits(left.indices(), right.indices()) and same_bits(left.values(), right.values())
    if left.layout != torch.strided or left.is_quantized:
        return torch.equal(left.detach(), right.detach())
    return torch.equal(as_bytes(left), as_bytes(right))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in order, as bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Not reshape: one element counts as contiguous whatever its stride, and keeps it.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


class _Part(ABC):
    @abstractmethod
    def restore(self) -> None: ...


@final
class _Values(_Part):
    """Values of tensors and of their gradients, and which tensor each gradient is."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        distinct = {id(tensor): tensor for tensor in tensors}
        self._values = [(tensor, tensor.detach().clone()) for tensor in distinct.values()]
        # Held weakly: a step that lets go of its old gradients must free them while it is recorded, as it does otherwise.
        self._grads = [(tensor, _Gradient.of(tensor.grad)) for tensor in distinct.values() if tensor.is_leaf]

    def restore(self) -> None:
        for tensor, grad in self._grads:
            tensor.grad = None if grad is None else grad.restored()
        with torch.no_grad():
            for tensor, value in self._values:
                if not same_bits(tensor, value):
                    tensor.copy_(value)


@final
class _Gradient:
    """A gradient's value, and the tensor it was if that is still alive."""

    def __init__(self, grad: torch.Tensor) -> None:
        self._alive = weakref.ref(grad)
        self._value = grad.detach().clone()

    @classmethod
    def of(cls, grad: torch.Tensor | None) -> _Gradient | None:
        return None if grad is None else cls(grad)

    def restored(self) -> torch.Tensor:
        """The same tensor with the same value, or a new one with that value if nobody holds the old one."""
        grad = self._alive()
        if grad is None:
            grad = self._value.clone()
            self._alive = weakref.ref(grad)
        elif not same_bits(grad, self._value):
            with torch.no_grad():
                grad.copy_(self._value)
        return grad


@final
class _Attributes(_Part):
    """Which parameters, buffers, plain values and tensors an object has under which name."""

    def __init__(self, holder: object) -> None:
        self._holder = holder
        self._own = own_attributes(holder)
        self._tables = [(table, dict(table)) for table in _tables(holder)]

    def restore(self) -> None:
        for table, saved in self._tables:
            table.clear()
            table.update(saved)
        # Flags and new attributes stay: a library that sets one up on its first call would set it up again.
        vars(self._holder).update(
            {
                name: value
                for name, value in self._own.items()
                if name == "training" or (isinstance(value, _COUNTED) and not isinstance(value, bool))
            }
        )


@final
class _Cells(_Part):
    """Plain values and tensors in the step's closure, which ``nonlocal`` can rebind."""

    def __init__(self, step: Callable[..., object]) -> None:
        while isinstance(step, functools.partial):
            step = step.func
        self._cells = [(cell, _content(cell)) for cell in getattr(step, "__closure__", None) or ()]

    def restore(self) -> None:
        for cell, value in self._cells:
            if isinstance(value, (*PLAIN, torch.Tensor)):
                cell.cell_contents = value


class _HasState(Protocol):
    def state_dict(self) -> dict[str, object]: ...
    def load_state_dict(self, state_dict: dict[str, object], /) -> object: ...


@final
class _Stateful(_Part):
    """An object's own state dict, copied."""

    def __init__(self, item: _HasState) -> None:
        self._item = item
        try:
            self._state = copy.deepcopy(item.state_dict())
        except (TypeError, RuntimeError) as error:
            raise CaptureError(f"cannot copy the state of a {type(item).__name__} that the step uses: {error}") from error

    def restore(self) -> None:
        # A copy each time: optimizers take the given tensors as their own and go on to write into them.
        self._item.load_state_dict(copy.deepcopy(self._state))


@final
class _Generators(_Part):
    """States of the default generators and of generator objects."""

    def __init__(self, generators: Iterable[object]) -> None:
        self._found = [(generator, _get_generator(generator)) for generator in generators]
        self._torch, self._python, self._numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        for generator, state in self._found:
            _set_generator(generator, state)


def _get_generator(generator: Any) -> object:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)
    return generator.get_state() if isinstance(generator, np.random.RandomState) else generator.getstate()


def _set_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, (torch.Generator, np.random.RandomState)):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = copy.deepcopy(state)
    else:
        generator.setstate(state)


def _is_stateful(item: object) -> TypeGuard[_HasState]:
    if isinstance(item, (type, types.ModuleType, torch.nn.Module)):
        return False
    return callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))


def _tables(holder: object) -> list[dict[str, Any]]:
    return [holder._parameters, holder._buffers] if isinstance(holder, torch.nn.Module) else []


def _tensors_of(modules: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    for module in modules:
        yield from (tensor for table in _tables(module) for tensor in table.values() if tensor is not None)
        yield from (value for value in own_attributes(module).values() if isinstance(value, torch.Tensor))


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a name not yet bound
        return cell


def reachable(step: Callable[..., object]) -> tuple[object, ...]:
    """The objects that a step's code names, each once.

    These are closure cells, defaults, arguments of ``functools.partial``, attributes of an object whose method it is,
    and globals that its code names; the same for functions and objects of the step's own package found among them,
    and the items of lists, tuples, dicts and sets one level deep. What other packages' objects hold is not searched.
    """
    found: dict[int, object] = {}
    todo: list[object] = [step]
    home = _package(step)
    while todo:
        item = todo.pop()
        for child in _named_by(item):
            for value in (child, *_items(child)):
                if id(value) in found or value is None:
                    continue
                found[id(value)] = value
                if _is_own(value, home):
                    todo.append(value)
    return tuple(found.values())


def _is_own(value: object, home: str) -> bool:
    """Whether a function, or an object with attributes, was written in the package that the step is from."""
    if isinstance(value, (type, types.ModuleType, torch.nn.Module, torch.Tensor)) or not hasattr(value, "__dict__"):
        return False
    return _package(value) == home


def _package(value: object) -> str:
    while isinstance(value, functools.partial):
        value = value.func
    return str(getattr(value, "__module__", "")).partition(".")[0]


def _named_by(item: object) -> Iterator[object]:
    """What a function, method, partial or callable object names directly."""
    if isinstance(item, functools.partial):
        yield from (item.func, *item.args, *item.keywords.values())
        yield from _named_by(item.func)
    elif isinstance(item, types.MethodType):
        yield item.__self__
        yield from vars(item.__self__).values() if hasattr(item.__self__, "__dict__") else ()
        yield from _named_by(item.__func__)
    elif isinstance(item, types.FunctionType):
        yield from (_content(cell) for cell in item.__closure__ or ())
        yield from item.__defaults__ or ()
        yield from (item.__kwdefaults__ or {}).values()
        yield from (item.__globals__[name] for name in sorted(_names(item.__code__)) if name in item.__globals__)
    elif not isinstance(item, torch.nn.Module) and hasattr(item, "__dict__"):
        yield from vars(item).values()
        if callable(item) and isinstance(type(item).__call__, types.FunctionType):
            yield from _named_by(type(item).__call__)


def _names(code: types.CodeType) -> set[str]:
    """Global names of a code object and of the functions defined inside it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _items(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple, set)):
        yield from value
