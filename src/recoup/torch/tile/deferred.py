"""Logits that are not there yet: a tensor that stands for a head's result until somebody wants its values.

Autograd sees an ordinary tensor with a node of its own, so whatever is done with it, gradients find their way. Reshapes,
casts and cuts along the rows stay deferred: the head is token-wise, so they are done to its input. Cross-entropy runs in
pieces (``loss``). Everything else gets the true values, by a plain call of the head, made once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from recoup.errors import ReplayMismatch, UsageError
from recoup.torch.tile.module import ModuleRegion
from recoup.torch.tile.pieces import Region, gradients

__all__ = ["Deferred", "Head", "HeadRegion", "Rows", "defer"]

Apart = Callable[[], AbstractContextManager[object]]
Handler = Callable[..., object]
_PROPERTIES = (
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "grad", "output_nr", "itemsize", "nbytes",
    "is_cuda", "is_cpu", "is_sparse", "is_sparse_csr", "is_quantized", "is_meta", "is_nested", "is_mkldnn", "is_mps", "is_xpu",
    "_version", "_backward_hooks", "_grad", "name", "retains_grad", "is_xla", "is_vulkan", "is_ipu", "is_mtia", "is_maia",
)  # fmt: skip
_METHODS = (
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "get_device", "is_floating_point",
    "is_complex", "is_signed", "is_contiguous", "is_conj", "is_neg", "is_inference", "register_hook", "retain_grad", "__hash__", "__len__",
    "register_post_accumulate_grad_hook", "_is_view",
)  # fmt: skip
_METADATA = frozenset(
    [getattr(Tensor, name).__get__ for name in _PROPERTIES if hasattr(Tensor, name)]
    + [getattr(Tensor, name) for name in _METHODS if hasattr(Tensor, name)]
)


class HeadRegion(Region):
    """A head's call, and the casts that came after it."""

    def __init__(self, call: ModuleRegion, casts: tuple[torch.dtype, ...]) -> None:
        self.name, self.module, self.tiles = call.name, call.module, call.tiles
        self.standing, self.autocast = call.standing, call.autocast
        self.call = call
        self.casts = casts

    def run(self, rows: Tensor, start: int) -> Tensor:
        """Logits of these rows."""
        result = self.call.run(rows, start)
        for dtype in self.casts:
            result = result.to(dtype)
        return result


class Head:
    """One call of a vocabulary projection that has been put off.

    Attributes:
        call: how it runs for some rows.
        features: its whole input; values only.
        shape: of the whole result.
        apart: entered around what Recoup runs itself, so that nothing of it is taken for the model's.
        told: called with a reason where the values are asked for after all.
        tiled: called where a loss runs in pieces, with its region and its rows.
    """

    def __init__(
        self,
        call: ModuleRegion,
        features: Tensor,
        shape: torch.Size,
        apart: Apart,
        told: Callable[[str], None],
        tiled: Callable[[Region, Tensor], None],
    ) -> None:
        self.call = call
        self.features = features.detach()
        self.shape = shape
        self.apart = apart
        self.told = told
        self.tiled = tiled
        self.whole: Tensor | None = None
        self._versions = [(tensor, tensor._version) for tensor in (self.features, *call.tensors)]
        # Aliases of what has been handed out, by who it stood for: a write in place to one of them is not seen by the others.
        self._handed: list[tuple[int, Tensor, int]] = []

    def values(self) -> Tensor:
        """The head's result, as a plain call gives it; computed once."""
        if self.whole is None:
            self.demand_unchanged()
            with self.apart(), torch.no_grad():
                self.whole = self.call.run(self.features.reshape(-1, self.features.shape[-1]), 0).view(self.shape)
        return self.whole

    def demand_unchanged(self) -> None:
        """Passes if what the head reads is what it was when it was called.

        Raises:
            ReplayMismatch: weights or input have been written since.
        """
        if any(tensor._version != version for tensor, version in self._versions):
            raise ReplayMismatch(
                f"the result of {self.call.name} is asked for after its weights or its input were written in place, as an optimizer does;"
                " its loss runs in tiles, so nobody has computed it. Read it before that, or leave it out of the plan's tiles."
            )

    def handed(self, number: int, plain: Tensor) -> None:
        """Somebody has the values of a member of the family."""
        self._handed.append((number, plain.detach(), plain._version))

    def demand_unwritten(self, number: int) -> None:
        """Passes unless another member of the family was written in place.

        Raises:
            UsageError: one was, and this one would have to show it.
        """
        if any(other != number and plain._version != version for other, plain, version in self._handed):
            raise UsageError(
                f"the result of {self.call.name} was written in place through a view; with its loss in tiles views do not share memory."
                " Write out of place, or leave it out of the plan's tiles."
            )


class Rows:
    """What a deferred tensor stands for: the head's result for some features, cast, and perhaps with the classes in place 1.

    Attributes:
        head: the call.
        features: the head's input for just these rows, differentiable: ``(*leading, features)``.
        casts: dtypes that the result is cast to, in order.
        classes_first: whether the classes are dimension 1, as cross-entropy wants them where there are more dimensions than two.
        value: the values, once somebody has asked.
    """

    __slots__ = ("casts", "classes_first", "derive", "features", "head", "parent", "value")

    def __init__(
        self,
        head: Head,
        features: Tensor,
        casts: tuple[torch.dtype, ...] = (),
        classes_first: bool = False,
        parent: Rows | None = None,
        derive: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.head = head
        self.features = features
        self.casts = casts
        self.classes_first = classes_first
        self.parent = parent
        self.derive = derive
        self.value: Tensor | None = None

    @property
    def region(self) -> HeadRegion:
        """How the rows are computed."""
        return HeadRegion(self.head.call, self.casts)

    def values(self) -> Tensor:
        """The values, without a graph: the head's own, taken through the same reshapes, casts and cuts."""
        if self.value is None:
            if self.parent is None:
                self.value = self.head.values()
            else:
                assert self.derive is not None
                with self.head.apart(), torch.no_grad():
                    self.value = self.derive(self.parent.values())
        return self.value

    def derived(self, features: Tensor, derive: Callable[[Tensor], Tensor], *, cast: torch.dtype | None = None, turn: bool = False) -> Rows:
        """What a reshape, a cut, a cast or a turn of the last two dimensions makes of it."""
        casts = self.casts if cast is None else (*self.casts, cast)
        return Rows(self.head, features, casts, self.classes_first != turn, self, derive)


class _Stand(torch.autograd.Function):
    """From features to the tensor that stands for the logits; the gradient is that of the tiled call."""

    @staticmethod
    def forward(ctx: Any, rows: Rows, dtype: torch.dtype, features: Tensor, *tensors: Tensor) -> Tensor:  # type: ignore[override]
        ctx.region, ctx.classes_first = rows.region, rows.classes_first
        ctx.save_for_backward(features, *tensors)
        shape = [*features.shape[:-1], rows.head.shape[-1]]
        if rows.classes_first:
            shape[1], shape[2] = shape[2], shape[1]
        return torch.Tensor._make_wrapper_subclass(Deferred, shape, dtype=dtype, device=features.device)  # pyrefly: ignore

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        features, *tensors = ctx.saved_tensors
        if ctx.classes_first:
            grad = grad.transpose(1, 2)
        flat = features.reshape(-1, features.shape[-1])
        found = gradients(ctx.region, flat, tensors, ctx.needs_input_grad[2:], grad.reshape(-1, grad.shape[-1]), None)
        return (None, None, None if found[0] is None else found[0].view(features.shape), *found[1:])


class Deferred(Tensor):
    """Stands for logits; see the module's text."""

    rows: Rows

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., object], types: Sequence[type], args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA:
                return func(*args, **kwargs)
            handler = _handlers().get(func)
            first = args[0] if args else kwargs.get("input")
            if handler is not None and isinstance(first, Deferred) and first.rows.value is None:
                first.rows.head.demand_unwritten(id(first.rows))
                result = handler(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            args, kwargs = tree_map(lambda leaf: _plain(leaf, func), (args, kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override]
        cls, func: Callable[..., object], types: Sequence[type], args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        # Whoever comes here came past __torch_function__: below autograd values are enough.
        args, kwargs = tree_map(lambda leaf: leaf.rows.values() if isinstance(leaf, Deferred) else leaf, (args, kwargs or {}))
        return func(*args, **kwargs)


def defer(rows: Rows, dtype: torch.dtype) -> Deferred:
    """The tensor that stands for these rows."""
    made = _Stand.apply(rows, dtype, rows.features, *rows.head.call.tensors)
    made.rows = rows  # pyrefly: ignore
    return made  # pyrefly: ignore


def _plain(leaf: object, func: object) -> object:
    """The values as a plain tensor that autograd knows as an alias of the deferred one."""
    if not isinstance(leaf, Deferred):
        return leaf
    rows = leaf.rows
    rows.head.demand_unwritten(id(rows))
    if rows.value is None:
        rows.head.told(f"{getattr(func, '__name__', func)} asks for its values")
    plain = torch.ops.aten.alias.default(leaf)
    rows.head.handed(id(rows), plain)
    return plain


def _handlers() -> dict[object, Handler]:
    from recoup.torch.tile.rowwise import HANDLERS  # makes deferred tensors, so it imports this module

    return HANDLERS
