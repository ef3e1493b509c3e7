"""The audit of token-wise calls: the very executor that a plan would use, beside the plain call, values and gradients compared.

Splitting may pick other kernels and adds up weight gradients in another order, so results need not have the same bits: they
must agree to a small multiple of the dtype's precision, and the largest difference is noted. Pieces of several sizes are
run with the allocator watched, since only that tells what a piece needs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from recoup.errors import RecoupError
from recoup.graph.tiled import piece_rows
from recoup.graph.tiles import Sample
from recoup.torch.interception import Interception
from recoup.torch.meter import meter_for
from recoup.torch.state import own_attributes, same_bits
from recoup.torch.tile.module import demand_fit, run_module
from recoup.torch.tile.pieces import Region, Unfit, tiled_call

__all__ = ["Verdict", "allowed", "apart", "audit_call", "intercepted", "sampled"]

_PIECES = 3
_SIZES = (2, 4, 8, 16, 32, 64, 128, 256)
_ROWS = 8  # smaller pieces are not worth measuring
# Two orders of one sum differ by a few units in the last place of the largest partial sum; a call that mixes rows by far more.
_UNITS = 64
_NARROW_UNITS = 8


class Verdict:
    """What the audit found: why the call may not run in tiles ('' if it may), the largest relative difference, measured pieces."""

    __slots__ = ("error", "reason", "samples")

    def __init__(self, reason: str = "", error: float = 0.0, samples: tuple[Sample, ...] = ()) -> None:
        self.reason = reason
        self.error = error
        self.samples = samples


def audit_call(
    path: str,
    module: torch.nn.Module,
    inner: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    narrowest: torch.dtype | None = None,
) -> Verdict:
    """Run the call plainly and in pieces, and compare. Counters of modules count on; the caller puts them back.

    ``narrowest`` is the narrowest dtype that the call computes in, where that is not the one of its results.
    """
    try:
        whole = demand_fit(module, args, kwargs)
    except Unfit as reason:
        return Verdict(str(reason))
    state = _State(module)
    try:
        plain = _outcome(lambda rows: inner(rows), module, whole)
        reason = state.changed()
        if reason:
            return Verdict(reason)
        region: list[Region] = []
        split = _outcome(lambda rows: run_module(path or "the model", module, _PIECES, (rows,), {}, region.append), module, whole)
        samples = sampled(region[0], whole.detach().reshape(-1, whole.shape[-1]))
    except (Unfit, RecoupError) as error:
        return Verdict(str(error))
    except Exception as error:  # whatever a module raises when it is given a part of its rows
        return Verdict(f"it fails on a part of its rows: {type(error).__name__}: {error}")
    worst = 0.0
    for (name, one), (_, other) in zip(plain, split, strict=True):
        found, limit = apart(one, other), allowed(one, narrowest)
        if found > limit:
            return Verdict(f"a part of its rows gives another {name} than the whole: {found:.1e} apart, {limit:.1e} is allowed")
        worst = max(worst, found)
    return Verdict("", worst, samples)


def sampled(region: Region, rows: Tensor, kept_bytes: int = 0) -> tuple[Sample, ...]:
    """Bytes that pieces of several sizes need, two of each size run alone; ``kept_bytes`` more for each row of the whole."""
    count, found = rows.shape[0], {}
    meter = meter_for(rows.device)
    for tiles in _SIZES:
        size = piece_rows(count, tiles)
        if size in found or (found and size < _ROWS):
            continue
        pair = copy.copy(region)
        pair.tiles = 2
        some = rows[: 2 * size].detach().requires_grad_()
        made: list[Tensor] = []
        with torch.enable_grad():
            forward = meter.peak_above(lambda pair=pair, some=some, made=made: made.append(tiled_call(pair, some)))
        result = made.pop()
        wanted = [some, *(parameter for parameter in region.standing.parameters if parameter.requires_grad)]
        grads: list[Tensor | None] = []
        incoming = torch.ones_like(result)
        backward = meter.peak_above(
            lambda result=result, wanted=wanted, incoming=incoming, grads=grads: grads.extend(
                torch.autograd.grad(result, wanted, incoming, retain_graph=True, allow_unused=True)
            )
        )
        own = sum(grad.untyped_storage().nbytes() for grad in grads if grad is not None)
        extra = kept_bytes * count
        found[size] = Sample(size, max(forward - result.untyped_storage().nbytes(), 0) + extra, max(backward - own, 0) + extra)
    return tuple(found[size] for size in sorted(found, reverse=True))


@contextmanager
def intercepted(model: torch.nn.Module, around: Callable[..., object]) -> Generator[None]:
    """All calls of the model's modules go through ``around`` meanwhile."""
    interception = Interception(model, around)
    try:
        yield
    finally:
        interception.remove()


class _State:
    """What a call must not change: its modules' own numbers and tensors, its buffers, the generators."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.parts = list(module.modules())
        self.before = [_copied(own_attributes(part)) for part in self.parts]
        self.buffers = [(name, buffer, buffer._version) for name, buffer in module.named_buffers()]

    def changed(self) -> str:
        """What the call has changed, '' if nothing."""
        for part, before in zip(self.parts, self.before, strict=True):
            after = own_attributes(part)
            for name in dict.fromkeys([*before, *after]):
                if not _same(before.get(name), after.get(name)):
                    return f"it changes the attribute {name!r} of a {type(part).__name__}"
        for name, buffer, version in self.buffers:
            if buffer._version != version:
                return f"it writes the buffer {name!r}"
        return ""


def _copied(values: dict[str, object]) -> dict[str, object]:
    return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in values.items()}


def _same(left: object, right: object) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return same_bits(left, right)
    return left is right or (type(left) is type(right) and left == right)


def _outcome(call: Callable[[Tensor], object], module: torch.nn.Module, whole: Tensor) -> list[tuple[str, Tensor | None]]:
    """Result and gradients, by name."""
    rows = whole.detach().requires_grad_()
    version = rows._version
    with torch.enable_grad():
        result = call(rows)
    if not isinstance(result, Tensor) or not result.requires_grad:
        raise Unfit("it gives no tensor with a gradient")
    if rows._version != version:
        raise Unfit("it writes its input in place")
    names = ["input", *(name for name, parameter in module.named_parameters() if parameter.requires_grad)]
    wanted = [rows, *(parameter for parameter in module.parameters() if parameter.requires_grad)]
    grads = torch.autograd.grad(result, wanted, _incoming(result), allow_unused=True)
    return [("result", result.detach()), *((f"gradient of {name}", grad) for name, grad in zip(names, grads, strict=True))]


def _incoming(result: Tensor) -> Tensor:
    """Some gradient, the same each time, drawn from no generator."""
    return torch.arange(result.numel(), device=result.device, dtype=torch.float32).mul_(2.399963).cos_().to(result.dtype).view(result.shape)


def apart(one: Tensor | None, other: Tensor | None) -> float:
    """The largest difference, relative to the largest value of ``one``."""
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    if one.shape != other.shape or one.dtype is not other.dtype:
        return float("inf")
    if same_bits(one, other):
        return 0.0
    scale = float(one.abs().max())
    apart = float((one.double() - other.double()).abs().max())
    return apart / scale if scale > 0 and apart == apart else float("inf")


def allowed(one: Tensor | None, narrowest: torch.dtype | None = None) -> float:
    """What the order of sums may make of it, relative to the largest value, where it is computed in a narrower dtype perhaps."""
    if one is None:
        return 0.0
    dtype = narrowest or one.dtype
    return (_NARROW_UNITS if dtype in (torch.bfloat16, torch.float16) else _UNITS) * torch.finfo(dtype).eps
