"""Which operations of a recorded step belong to which module call, in the forward and in the backward, and which to a loss.

A node of autograd's graph has a number, counted up in the forward; in the backward its operations run under it. So the
numbers that a module call has used tell its operations of the backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from recoup.torch.private import below_backward, current_node, next_node
from recoup.torch.recorder import Recorder
from recoup.torch.tile.rowwise import HANDLERS
from recoup.torch.views import is_plain

__all__ = ["Loss", "Span", "SpanRecorder"]

_CROSS_ENTROPY = torch.nn.functional.cross_entropy


class Range(NamedTuple):
    """Operations, saves and autograd nodes from one moment of the forward to another."""

    ops: range
    saves: range
    nodes: range


@dataclass(slots=True)
class Span:
    """One call of a module with one tensor of rows in and one out.

    Attributes:
        path: of the module.
        call: how many calls of it came before.
        depth: how many module calls are around it.
        rows: of the input.
        source: the storage of the input.
        result: the storage of the output.
        range: what ran in it.
    """

    path: str
    call: int
    depth: int
    rows: int = 0
    source: int = -1
    result: int = -1
    range: Range = field(default_factory=lambda: Range(range(0), range(0), range(0)))


class Loss(NamedTuple):
    """A head's call, and the functions that led from it to a cross-entropy."""

    head: Span
    ranges: tuple[Range, ...]


class SpanRecorder(Recorder):
    """Records a step, and with it ``spans``, ``losses``, and for each operation of the backward its node (``nodes``)."""

    def __init__(self, model: torch.nn.Module, clock: Any) -> None:
        super().__init__(model, clock)
        self.spans: list[Span] = []
        self.losses: list[Loss] = []
        self.nodes: list[int] = []
        self.chains: dict[int, tuple[weakref.ref[Tensor], Loss]] = {}
        self._depth = 0

    def record(self, step: Callable[[], object]) -> None:
        """Run the step once and write it down."""

        with _Functions(self):
            super().record(step)

    def run(self, func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run one operation and write it down, with its node."""
        before = len(self.ops)
        result = super().run(func, args, kwargs)
        if len(self.ops) > before:
            self.nodes.append(current_node())
        return result

    def here(self) -> tuple[int, int, int]:
        """The moment: operations, saves and nodes so far."""
        return len(self.ops), len(self.saves), next_node()

    def _around(self, path: str, inner: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        if below_backward() or not torch.is_grad_enabled():
            return super()._around(path, inner, *args, **kwargs)
        span = Span(path, self._calls[path], self._depth)

        def spanned(*args: object, **kwargs: object) -> object:
            begin = self.here()
            result = inner(*args, **kwargs)
            self._note(span, begin, args, kwargs, result)
            return result

        self._depth += 1
        try:
            return super()._around(path, spanned, *args, **kwargs)
        finally:
            self._depth -= 1

    def _note(self, span: Span, begin: tuple[int, int, int], args: tuple[object, ...], kwargs: dict[str, object], result: object) -> None:
        whole = args[0] if len(args) == 1 and not kwargs else None
        if not _is_rows(whole) or not _is_rows(result):
            return
        assert isinstance(whole, Tensor)
        assert isinstance(result, Tensor)
        if whole.shape[:-1] != result.shape[:-1]:
            return
        source, made = self._known(whole, "outside", ""), self._known(result, "outside", "")
        if source is None or made is None or source is made or not result.is_contiguous():
            return
        span.rows, span.source, span.result, span.range = whole.shape[:-1].numel(), source.id, made.id, between(begin, self.here())
        self.spans.append(span)
        # The innermost call that made it: what is around that may be anything.
        if self.chain_of(result) is None:
            self.chains[id(result)] = (weakref.ref(result), Loss(span, (span.range,)))

    def chain_of(self, tensor: object) -> Loss | None:
        """The head that a tensor comes from by reshapes, casts and cuts alone."""
        known = self.chains.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None


class _Functions(TorchFunctionMode):
    """Follows tensors from heads to cross-entropies."""

    def __init__(self, recorder: SpanRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func not in HANDLERS:
            return func(*args, **kwargs)
        recorder = self.recorder
        chain = recorder.chain_of(args[0] if args else kwargs.get("input"))
        begin = recorder.here()
        result = func(*args, **kwargs)
        if chain is not None and isinstance(result, Tensor):
            longer = Loss(chain.head, (*chain.ranges, between(begin, recorder.here())))
            if func is _CROSS_ENTROPY:
                recorder.losses.append(longer)
            elif recorder.chain_of(result) is None:
                recorder.chains[id(result)] = (weakref.ref(result), longer)
        return result


def between(begin: tuple[int, int, int], end: tuple[int, int, int]) -> Range:
    """What ran from one moment to another."""
    return Range(*(range(first, last) for first, last in zip(begin, end, strict=True)))


def _is_rows(value: object) -> bool:
    return (
        isinstance(value, Tensor) and is_plain(value) and value.is_floating_point() and value.dim() >= 2 and value.shape[:-1].numel() >= 2
    )
