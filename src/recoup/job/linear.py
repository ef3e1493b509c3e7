"""Rows that every kind of layer has: linear layers split by columns or rows, normalization, the residual stream."""

from __future__ import annotations

from dataclasses import replace

from recoup.job.shape import Shape
from recoup.job.table import Row, Tensor, Transfer, Work

__all__ = ["by_columns", "by_rows", "norm", "residual"]


def norm(shape: Shape, name: str, reads: str, module: str) -> Row:
    """A normalization of the residual stream: reads and writes it once.

    Its backward reads twice and writes once, and adds that to the gradient that comes along the stream, as much again.
    """
    stream = shape.stream_bytes
    kernels = 1 if shape.kernels.fused_elementwise else 4
    traffic = 1 if shape.kernels.fused_elementwise else 2.5
    return Row(
        name, module, (reads,), (Tensor(name, stream),), (reads,),
        forward=(Work.moving(2 * stream * traffic, kernels),), data=(Work.moving((3 * traffic + 3) * stream, kernels + 1),),
        whole=shape.norm_weights,
    )  # fmt: skip


def by_columns(shape: Shape, name: str, module: str, reads: str, widths: dict[str, int], inner: int = 0) -> list[Row]:
    """A linear layer whose outputs are split: (tokens, hidden) into ``widths`` columns on this device.

    The forward gathers the sequence if it is split; the backward gathers it again behind the data gradient, and reduces
    (or scatters) that behind the weight gradient. Projections that are not fused are a row each, of which the first gathers and
    reduces for all, and add up their data gradients.
    """
    if len(widths) == 1 or shape.kernels.fused_projections:
        return [_columns(shape, name, module, reads, widths, inner or shape.model.hidden)]
    rows = [_columns(shape, f"{name}_{key}", module, reads, {key: size}, inner or shape.model.hidden) for key, size in widths.items()]
    adding = Work.moving(6 * shape.tokens * (inner or shape.model.hidden))
    return [rows[0], *(replace(row, sends=(), returns=(), data=(*row.data, adding)) for row in rows[1:])]


def _columns(shape: Shape, name: str, module: str, reads: str, widths: dict[str, int], hidden: int) -> Row:
    """One product of the stream with columns that are split."""
    width = sum(widths.values())
    sends, returns = _entering(shape, 2 * shape.tokens * hidden)
    bias = width if shape.model.bias else 0
    return Row(
        name, module, (reads,), tuple(Tensor(key, 2 * shape.tokens * size) for key, size in widths.items()), (reads,),
        forward=(Work.product(1, shape.tokens, width, hidden, low=True),),
        data=(Work.product(1, shape.tokens, hidden, width, low=True),),
        weight=(Work.gradient(1, hidden, width, shape.tokens, low=True), *_bias(bias, 2 * shape.tokens * width)),
        sends=sends, returns=returns, weights=hidden * width + bias,
    )  # fmt: skip


def by_rows(shape: Shape, name: str, module: str, reads: str, width: int) -> Row:
    """A linear layer whose inputs are split: (tokens, width) into the residual stream, reduced over the group."""
    hidden, whole = shape.model.hidden, shape.whole_bytes
    behind = "own" if shape.kernels.overlap_tensor else ""
    sends: tuple[Transfer, ...] = ()
    returns: tuple[Transfer, ...] = ()
    if shape.tensor > 1:
        sends = (Transfer("reduce_scatter" if shape.sequence_parallel else "all_reduce", whole, "tensor", behind),)
        returns = (Transfer("all_gather", whole, "tensor", behind),) if shape.sequence_parallel else ()
    return Row(
        name, module, (reads,), (Tensor(name, shape.stream_bytes),), (reads,),
        forward=(Work.product(1, shape.tokens, hidden, width, low=True),),
        data=(Work.product(1, shape.tokens, width, hidden, low=True),),
        weight=(Work.gradient(1, width, hidden, shape.tokens, low=True), *_bias(shape.model.bias, shape.stream_bytes)),
        sends=sends, returns=returns, weights=hidden * width, whole=hidden if shape.model.bias else 0,
    )  # fmt: skip


def residual(shape: Shape, name: str, module: str, stream: str, branch: str) -> Row:
    """A branch joins the residual stream, after dropout if there is any, whose mask takes one byte an element."""
    size = shape.stream_bytes
    mask = size // 2 if shape.model.hidden_dropout else 0
    makes = (Tensor(name, size), Tensor(f"{name}_mask", mask)) if mask else (Tensor(name, size),)
    return Row(
        name, module, (stream, branch), makes, (f"{name}_mask",) if mask else (),
        forward=(Work.moving(3 * size + mask),), data=(Work.moving((2 if mask else 3) * size + mask),), random=bool(mask),
    )  # fmt: skip


def _bias(wanted: int, size: int) -> tuple[Work, ...]:
    """The gradient of a bias is a sum over tokens: it reads the gradient once more."""
    return (Work.moving(size),) if wanted else ()


def _entering(shape: Shape, whole: int) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
    """Collectives before a column-split layer, and in its backward."""
    if shape.tensor == 1:
        return (), ()
    if not shape.sequence_parallel:
        return (), (Transfer("all_reduce", whole, "tensor", "weight"),)
    sends = (Transfer("all_gather", whole, "tensor", "own" if shape.kernels.overlap_tensor else ""),)
    return sends, (Transfer("all_gather", whole, "tensor", "data"), Transfer("reduce_scatter", whole, "tensor", "weight"))
