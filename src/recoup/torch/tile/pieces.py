"""A function of rows, run in pieces: one opaque operation for autograd that saves its input alone.

The forward runs the pieces without a graph, each into its place in the output. The backward runs each piece again with a
graph, takes its gradients, and lets the piece go before the next one. Gradients of parameters add up piece by piece, in
float32 where the parameters are narrower: the order of sums is all in which they differ from the untiled ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from recoup.errors import ReplayMismatch, UsageError
from recoup.graph.tiled import piece_rows
from recoup.torch.capture import default_generator
from recoup.torch.probe import probe_of, read_probe, same_probe
from recoup.torch.tile.standing import Standing
from recoup.torch.views import layout_of

__all__ = ["Autocast", "Region", "TiledCall", "Unfit", "gradients", "tiled_call"]


class Unfit(Exception):
    """This call cannot run in pieces; the text says why. Never leaves this package."""


class Autocast:
    """The autocast settings of a moment, to be entered again; casts of weights are not cached: a piece must not see another's."""

    __slots__ = ("_states",)

    def __init__(self, device: str) -> None:
        kinds = dict.fromkeys(("cpu", device))
        self._states = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds if _can_autocast(kind)]

    @contextmanager
    def entered(self) -> Generator[None]:
        """Autocast as it was."""
        if not any(enabled or torch.is_autocast_enabled(kind) for kind, enabled, _ in self._states):
            yield
            return
        with ExitStack() as stack:
            for kind, enabled, dtype in self._states:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield


def _can_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


class Region(ABC):
    """One call of a token-wise function: what to run for some of its rows.

    Attributes:
        name: what errors call it.
        module: whose parameters and buffers it reads.
        tiles: in how many pieces it runs.
        others: further tensors that it reads, without gradients.
    """

    others: tuple[Tensor, ...] = ()

    def __init__(self, name: str, module: torch.nn.Module, tiles: int, device: torch.device) -> None:
        self.name = name
        self.module = module
        self.tiles = tiles
        self.standing = Standing(module)
        self.autocast = Autocast(device.type)

    @property
    def tensors(self) -> list[Tensor]:
        """All that it reads besides its rows: parameters, buffers, others."""
        return [*self.standing.parameters, *self.standing.buffers, *self.others]

    @abstractmethod
    def run(self, rows: Tensor, start: int) -> Tensor:
        """The function of ``rows`` (of shape ``(n, features)``), which are the call's rows from ``start`` on: ``(n, ...)``."""


def tiled_call(region: Region, rows: Tensor) -> Tensor:
    """The region on all rows, in pieces, with gradients to ``rows`` and to the module's parameters.

    Raises:
        Unfit: a piece drew random numbers (the generator is put back) or did not give one row for each of its own.
        UsageError: the region writes its input in place.
    """
    return TiledCall.apply(region, rows, *region.tensors)  # pyrefly: ignore


class TiledCall(torch.autograd.Function):
    """See the module's text. Arguments: the region, the rows, then the parameters and buffers that it reads."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, region: Region, rows: Tensor, *tensors: Tensor) -> Tensor:  # type: ignore[override]
        """All pieces without a graph."""
        result, ctx.probes = _forward(region, rows)  # type: ignore[attr-defined]
        ctx.region = region  # type: ignore[attr-defined]
        ctx.save_for_backward(rows, *tensors)
        return result

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Each piece again, with a graph; differentiably, and then whole, where gradients of gradients are asked for."""
        rows, *tensors = ctx.saved_tensors  # type: ignore[attr-defined]
        needs = ctx.needs_input_grad[1:]  # type: ignore[attr-defined]
        region: Region = ctx.region  # type: ignore[attr-defined]
        return (None, *gradients(region, rows, tensors, needs, grad, ctx.probes))  # type: ignore[attr-defined]


def gradients(
    region: Region, rows: Tensor, tensors: list[Tensor], needs: tuple[bool, ...], grad: Tensor, probes: list[object] | None
) -> list[Tensor | None]:
    """For ``rows`` and each of ``tensors``, the gradient where it is needed.

    Args:
        region: what ran.
        rows: what it ran on.
        tensors: its parameters, buffers and others, as saved.
        needs: for the rows and each tensor, whether its gradient is asked for.
        grad: of the result.
        probes: what the forward noted of its pieces; None to check nothing.

    Raises:
        ReplayMismatch: the region is not what it was in the forward.
    """
    if torch.is_grad_enabled():
        return _differentiable(region, rows, tensors, needs, grad)
    return _backward(region, rows, needs, grad, probes)


def _forward(region: Region, rows: Tensor) -> tuple[Tensor, list[object]]:
    """The whole result, and for each piece the bits of a few of its elements."""
    count, version = rows.shape[0], rows._version
    size = piece_rows(count, region.tiles)
    generator = default_generator(rows.device)
    before = generator.get_state()
    result: Tensor | None = None
    probes: list[object] = []
    plain = rows.detach()
    for start in range(0, count, size):
        piece = region.run(plain[start : start + size], start)
        if result is None:
            result = piece.new_empty((count, *piece.shape[1:]))
        result[start : start + size] = piece
        probes.append(_probed(piece))
        del piece
    if plain._version != version:
        raise UsageError(f"{region.name} writes its input in place, so it cannot run in tiles; leave it out of the plan's tiles")
    if not torch.equal(before, generator.get_state()):
        generator.set_state(before)
        raise Unfit("it draws random numbers")
    assert result is not None
    return result, probes


def _probed(piece: Tensor) -> object:
    return read_probe(piece, probe_of(layout_of(piece)))


def _backward(region: Region, rows: Tensor, needs: tuple[bool, ...], grad: Tensor, probes: list[object] | None) -> list[Tensor | None]:
    count, size = rows.shape[0], piece_rows(rows.shape[0], region.tiles)
    sums = [_Sum(parameter) if needed else None for parameter, needed in zip(region.standing.parameters, needs[1:], strict=False)]
    instead = {id(one.of): one.leaf for one in sums if one is not None}
    # What needs no gradient must not get one, and what is no parameter of this module must not be reached.
    for parameter, one in zip(region.standing.parameters, sums, strict=True):
        if one is None and parameter.requires_grad:
            instead[id(parameter)] = parameter.detach()
    allowed = {id(one.leaf) for one in sums if one is not None}
    rows_grad = torch.empty_like(rows, memory_format=torch.contiguous_format) if needs[0] else None
    with region.standing.with_tensors(instead):
        for number, start in enumerate(range(0, count, size)):
            piece = rows[start : start + size].detach().requires_grad_(needs[0])
            with torch.enable_grad():
                result = region.run(piece, start)
            if probes is not None and not same_probe(probes[number], _probed(result.detach())):
                raise ReplayMismatch(
                    f"{region.name}, run in tiles: rows from {start} on, run again in the backward, are not what the forward had: a"
                    " number or a branch of the module changed in between. No weight has moved; leave it out of the plan's tiles."
                )
            if result.requires_grad:
                if not start:
                    _demand_known_leaves(region, result, {*allowed, id(piece)})
                torch.autograd.backward(result, grad[start : start + size])
            del result
            if rows_grad is not None:
                rows_grad[start : start + size] = 0 if piece.grad is None else piece.grad
            del piece
    return [rows_grad, *(None if one is None else one.total() for one in sums), *(None for _ in (*region.standing.buffers, *region.others))]


class _Sum:
    """A parameter's gradient over the pieces; ``leaf`` stands for the parameter meanwhile."""

    __slots__ = ("leaf", "of", "wide")

    def __init__(self, parameter: Tensor) -> None:
        self.of = parameter
        self.leaf = parameter.detach().requires_grad_()
        self.wide: Tensor | None = None
        if parameter.dtype in (torch.bfloat16, torch.float16):
            self.wide = torch.zeros_like(parameter, dtype=torch.float32)
            self.leaf.register_post_accumulate_grad_hook(self._widen)

    def _widen(self, leaf: Tensor) -> None:
        assert self.wide is not None
        assert leaf.grad is not None
        self.wide.add_(leaf.grad)
        leaf.grad = None

    def total(self) -> Tensor | None:
        """The sum, in the parameter's dtype; None if no piece reached the parameter. May be asked for once."""
        if self.wide is not None:
            total, self.wide = self.wide.to(self.of.dtype), None
            return total
        total, self.leaf.grad = self.leaf.grad, None
        return total


def _demand_known_leaves(region: Region, result: Tensor, allowed: set[int]) -> None:
    """Gradients that would go anywhere but to the rows and the module's own parameters would be lost."""
    stack, seen = [result.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in allowed:
            raise ReplayMismatch(
                f"{region.name} runs in tiles, but its result depends on a tensor of shape {list(variable.shape)} that takes"
                " gradients and is neither its input nor one of its parameters. No weight has moved; leave it out of the plan's tiles."
            )
        stack.extend(following for following, _ in node.next_functions)


def _differentiable(region: Region, rows: Tensor, tensors: list[Tensor], needs: tuple[bool, ...], grad: Tensor) -> list[Tensor | None]:
    """The gradients as a graph of their own, for double backward: one whole call, as it would have been without tiles."""
    instead = {id(old): new for old, new in zip(region.tensors, tensors, strict=True)}
    inputs = [rows, *tensors]
    wanted = [tensor for tensor, needed in zip(inputs, needs, strict=True) if needed]
    with region.standing.with_tensors(instead):
        result = region.run(rows, 0)
    if not wanted or not result.requires_grad:
        return [None] * len(inputs)
    found = iter(torch.autograd.grad(result, wanted, grad, create_graph=True, allow_unused=True))
    return [next(found) if needed else None for needed in needs]
