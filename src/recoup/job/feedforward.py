"""Feed-forward networks as rows: dense, gated, and mixtures of experts."""

from __future__ import annotations

from typing import Literal

from recoup.job.linear import by_columns, by_rows, norm, residual
from recoup.job.shape import Shape
from recoup.job.table import Row, Tensor, Transfer, Work

__all__ = ["dense_rows", "expert_rows"]


def dense_rows(shape: Shape, entering: str = "joined") -> list[Row]:
    """Rows of a dense branch: normalize, widen, activate, narrow, join."""
    width = shape.model.feed_forward // shape.tensor
    return [
        norm(shape, "norm2", entering, "mlp"),
        *_network(shape, "mlp", "norm2", width, "fc", "act", "down"),
        residual(shape, "y", "mlp", entering, "down"),
    ]


def expert_rows(shape: Shape, entering: str = "joined") -> list[Row]:
    """Rows of a mixture of experts: route, send tokens to experts, compute, send back, weigh and join.

    Tokens are taken to be spread evenly. ``tokens * experts_per_token`` copies are permuted, sent (all to all) and computed;
    the copies that come back are kept, since the gradient of the router's weights reads them.
    """
    model = shape.model
    rows = [norm(shape, "norm2", entering, "mlp"), _router(shape)]
    rows += [_dispatch(shape), *_experts(shape), _combine(shape)]
    branch = "combined"
    if model.shared_ffn:
        rows += _network(shape, "mlp.shared", "norm2", model.shared_ffn // shape.tensor, "shared_fc", "shared_act", "shared_down")
        size = shape.stream_bytes
        rows.append(
            Row(
                "summed", "mlp", ("combined", "shared_down"), (Tensor("summed", size),), forward=(Work.moving(3 * size),),
            )
        )  # fmt: skip
        branch = "summed"
    rows.append(residual(shape, "y", "mlp", entering, branch))
    return rows


def _network(shape: Shape, module: str, reads: str, width: int, fc: str, act: str, down: str) -> list[Row]:
    if shape.model.gated:
        gate, up = f"{fc}_gate", f"{fc}_up"
        first = by_columns(shape, fc, module, reads, {gate: width, up: width})
        middle = _gated(shape, module, gate, up, act, 2 * shape.tokens * width)
    else:
        first = by_columns(shape, fc, module, reads, {f"{fc}_wide": width})
        middle = [_activation(module, f"{fc}_wide", act, 2 * shape.tokens * width)]
    return [*first, *middle, by_rows(shape, down, module, act, width)]


def _activation(module: str, reads: str, name: str, size: int) -> Row:
    return Row(
        name, module, (reads,), (Tensor(name, size),), (reads,), forward=(Work.moving(2 * size),), data=(Work.moving(3 * size),)
    )  # fmt: skip


def _gated(shape: Shape, module: str, gate: str, up: str, name: str, size: int) -> list[Row]:
    """``silu(gate) * up``: one kernel that saves both, or two of which the first one's result is saved too."""
    if shape.kernels.fused_activation:
        return [
            Row(
                name, module, (gate, up), (Tensor(name, size),), (gate, up),
                forward=(Work.moving(3 * size),), data=(Work.moving(5 * size),),
            )
        ]  # fmt: skip
    silu = f"{name}_silu"
    return [
        Row(silu, module, (gate,), (Tensor(silu, size),), (gate,), forward=(Work.moving(2 * size),), data=(Work.moving(3 * size),)),
        Row(
            name, module, (silu, up), (Tensor(name, size),), (silu, up),
            forward=(Work.moving(3 * size),), data=(Work.moving(6 * size, 2),),
        ),
    ]  # fmt: skip


def _router(shape: Shape) -> Row:
    model, tokens = shape.model, shape.local
    logits = 4 * tokens * model.experts
    return Row(
        "router", "mlp", ("norm2",), (Tensor("routing", logits), Tensor("probabilities", logits)), ("norm2", "probabilities"),
        forward=(Work.product(1, tokens, model.experts, model.hidden), Work.moving(6 * logits, 8)),
        data=(Work.product(1, tokens, model.hidden, model.experts), Work.moving(4 * logits, 6)),
        weight=(Work.gradient(1, model.hidden, model.experts, tokens),), whole=model.hidden * model.experts,
    )  # fmt: skip


def _copies(shape: Shape) -> int:
    """Copies of tokens that this device's experts see."""
    return shape.local * shape.model.experts_per_token * shape.in_expert


def _moves(shape: Shape, behind: Literal["", "own"] = "") -> tuple[Transfer, ...]:
    size = 2 * shape.local * shape.model.experts_per_token * shape.model.hidden
    moves: list[Transfer] = []
    if shape.expert > 1:
        moves.append(Transfer("all_to_all", size, "expert", behind))
    if shape.in_expert > 1:
        moves.append(Transfer("all_gather", size * shape.in_expert, "tensor", behind))
    return tuple(moves)


def _dispatch(shape: Shape) -> Row:
    size = 2 * _copies(shape) * shape.model.hidden
    left = size * shape.kernels.expert_copies
    makes = (Tensor("dispatched", size), Tensor("permuted", left)) if left else (Tensor("dispatched", size),)
    return Row(
        "dispatched", "mlp", ("norm2", "routing"), makes, ("routing", "permuted") if left else ("routing",),
        forward=(Work.moving(4 * size, 4),), data=(Work.moving(4 * size, 4),), sends=_moves(shape), returns=_moves(shape),
    )  # fmt: skip


def _experts(shape: Shape) -> list[Row]:
    model, copies = shape.model, _copies(shape)
    here = model.experts // shape.expert
    each, width = max(copies // here, 1), model.expert_width // shape.in_expert
    wide = width * (2 if model.gated else 1)
    names = ("expert_gate", "expert_up") if model.gated else ("expert_wide",)
    size = 2 * copies * width
    bias = here * (wide + model.hidden) if model.bias else 0
    first = Row(
        "expert_fc", "mlp.experts", ("dispatched",), tuple(Tensor(name, size) for name in names), ("dispatched",),
        forward=(Work.product(here, each, wide, model.hidden, low=True),),
        data=(Work.product(here, each, model.hidden, wide, low=True),),
        weight=(Work.gradient(here, model.hidden, wide, each, low=True),), weights=here * model.hidden * wide + bias, experts=True,
    )  # fmt: skip
    if model.gated:
        middle = _gated(shape, "mlp.experts", "expert_gate", "expert_up", "expert_act", size)
    else:
        middle = [_activation("mlp.experts", "expert_wide", "expert_act", size)]
    last = Row(
        "expert_down", "mlp.experts", ("expert_act",), (Tensor("expert_down", 2 * copies * model.hidden),), ("expert_act",),
        forward=(Work.product(here, each, model.hidden, width, low=True),),
        data=(Work.product(here, each, width, model.hidden, low=True),),
        weight=(Work.gradient(here, width, model.hidden, each, low=True),), weights=here * width * model.hidden, experts=True,
    )  # fmt: skip
    return [first, *middle, last]


def _combine(shape: Shape) -> Row:
    copies, stream = 2 * _copies(shape) * shape.model.hidden, shape.stream_bytes
    return Row(
        "combined", "mlp", ("expert_down", "probabilities"), (Tensor("combined", stream),), ("expert_down", "probabilities"),
        forward=(Work.moving(3 * copies + stream, 4),), data=(Work.moving(4 * copies, 4),), sends=_moves(shape), returns=_moves(shape),
    )  # fmt: skip
