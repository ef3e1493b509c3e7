"""How far a step in tiles is from the exact one, beside how far the step without tiles is: the exact one is the same step in float64.

Tiles change the order in which sums are taken, so bits may differ; neither order is the right one. What can be asked is that
the tiled step is about as near to the exact values as the plain one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from recoup.torch.state import find_state, same_bits
from recoup.torch.traits import traits_of, written_tensors

__all__ = ["compared_with_exact", "in_float64"]

_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_FACTOR = 2.0
_UNITS = 8.0
# An entry much smaller than the others of its kind, such as a gradient that is zero but for rounding, need not have more digits than they.
_SMALL = 1e-3
# Where the float64 step is that far from the plain one, it has taken another course (another route, other random numbers).
_ASTRAY = 1e-2
_APART_UNITS = 256.0


@contextmanager
def in_float64(model: torch.nn.Module, step: Callable[[], object]) -> Generator[None]:
    """Steps that run inside are computed in float64: parameters and buffers hold doubles, and so does every result.

    Values that stood before stand again at the end.
    """
    modules = [item for item in find_state(step, model) if isinstance(item, torch.nn.Module)]
    tensors = {id(tensor): tensor for module in modules for tensor in (*module.parameters(), *module.buffers())}
    before = [(tensor, tensor.data, tensor.grad) for tensor in tensors.values() if tensor.dtype in _NARROW]
    try:
        for tensor, data, grad in before:
            tensor.grad = None
            tensor.data = data.double()
            tensor.grad = None if grad is None else grad.double()
        with _Float64():
            yield
    finally:
        for tensor, data, grad in before:
            tensor.grad = None
            tensor.data = data
            tensor.grad = grad


class _Float64(TorchDispatchMode):
    """Every operation reads narrow floats as doubles and gives doubles; what is written in place keeps its own type."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        traits = traits_of(func)
        if traits.view or traits.bookkeeping:
            return func(*args, **kwargs)
        wide: dict[int, tuple[Tensor, Tensor]] = {}

        def widened(leaf: object) -> object:
            if isinstance(leaf, Tensor) and leaf.dtype in _NARROW and leaf.layout is torch.strided:
                return wide.setdefault(id(leaf), (leaf, leaf.double()))[1]
            return torch.float64 if leaf in _NARROW else leaf

        written = written_tensors(traits, args, kwargs)
        result = func(*tree_map(widened, args), **tree_map(widened, kwargs))
        back = {id(other): leaf for leaf, other in wide.values()}
        for leaf in written:
            if id(leaf) in wide:
                leaf.copy_(wide[id(leaf)][1])
        return tree_map(lambda leaf: back.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf, result)


def compared_with_exact(
    plain: Mapping[str, object], planned: Mapping[str, object], exact: Mapping[str, object], off: Mapping[str, float]
) -> tuple[bool, str]:
    """Whether the entries that differ are no further from the exact ones than twice as far as the plain ones, and the numbers.

    Args:
        plain: what the step leaves behind without a plan.
        planned: with it.
        exact: in float64.
        off: the entries that differ, with the largest difference.
    """
    broken = next((name for name, apart in off.items() if math.isinf(apart) or not isinstance(plain.get(name), (Tensor, float))), None)
    if broken is not None:
        return False, f"{broken!r} differs by more than the order of sums can"
    largest = max((_scale(value) for value in exact.values()), default=0.0)
    worst = ("", 0.0, 0.0)
    for name in off:
        one, other, true = _wide(plain[name]), _wide(planned[name]), _wide(exact.get(name, plain[name]))
        eps = torch.finfo(_dtype(plain[name])).eps
        scale = max(_scale(true), _SMALL * largest, torch.finfo(torch.float64).tiny)
        own, tiled, apart = _far(one, true, scale), _far(other, true, scale), _far(one, other, scale)
        if not own <= max(_ASTRAY, 16 * eps):
            if not apart <= _APART_UNITS * eps:
                return False, f"{name!r}: {apart:.2g} from the plain step, and the float64 step, {own:.2g} from it, took another course"
        elif not tiled <= _FACTOR * own + _UNITS * eps:
            return (
                False,
                f"{name!r}: relative error against float64 {tiled:.2g}, without tiles {own:.2g}; allowed is {_FACTOR:.0f} times that",
            )
        if tiled >= worst[1]:
            worst = (name, tiled, own)
    return True, (
        f"{len(off)} of {len(plain)} differ by the order of sums; largest relative error against float64 {worst[1]:.2g} ({worst[0]!r}),"
        f" without tiles {worst[2]:.2g} there"
    )


def _far(left: Tensor, right: Tensor, scale: float) -> float:
    if left.shape != right.shape:
        return math.inf
    if same_bits(left, right) or not left.numel():
        return 0.0
    return float((left - right).abs().max()) / scale


def _scale(value: object) -> float:
    wide = _wide(value) if isinstance(value, (Tensor, float)) else None
    return float(wide.abs().max()) if wide is not None and wide.numel() else 0.0


def _wide(value: object) -> Tensor:
    return (value.detach().to_dense() if isinstance(value, Tensor) else torch.tensor(value)).double()


def _dtype(value: object) -> torch.dtype:
    return value.dtype if isinstance(value, Tensor) and value.is_floating_point() else torch.float64
