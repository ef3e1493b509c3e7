"""Attention as rows: queries, keys and values, the core by either kernel, the way back to the residual stream.

Explicit attention keeps the probabilities (two bytes), with dropout also a mask (one byte) and what is left (two bytes):
the ``5 a s / h`` of Korthikanti et al. 2022. Fused attention (Dao et al. 2022, arXiv:2205.14135) keeps its inputs, its result
and one number a row; its backward computes 2.5 times what the forward does.
"""

from __future__ import annotations

from dataclasses import replace

from recoup.job.linear import by_columns, by_rows, norm, residual
from recoup.job.shape import Shape
from recoup.job.table import Row, Tensor, Transfer, Work

__all__ = ["attention_rows"]

# The backward of fused attention computes the scores again: five products where two of the forward count for four.
_AGAIN = 1.25


def attention_rows(shape: Shape, entering: str = "x", module: str = "attention", memory: str = "", causal: bool = True) -> list[Row]:
    """Rows of one attention branch; ``memory`` names an encoder's result to attend to instead of the own stream."""
    prefix = "cross_" if memory else ""
    rows = [norm(shape, f"{prefix}norm1", entering, module)]
    names = {key: f"{prefix}{key}" for key in ("q", "k", "v")}
    rows += _projections(shape, module, f"{prefix}norm1", memory, names)
    value_head = shape.model.head
    if shape.model.rope and not memory:
        rows.append(_rope(shape, module, names))
        names |= {"q": "q_rope", "k": "k_rope"}
    core = _explicit if shape.kernels.attention == "explicit" else _fused
    rows += core(shape, module, names, prefix, causal)
    rows.append(by_rows(shape, f"{prefix}out", module, f"{prefix}mixed", shape.heads * value_head))
    rows.append(residual(shape, f"{prefix}joined", module, entering, f"{prefix}out"))
    return rows


def query_head(shape: Shape) -> int:
    """Width of a query's head, the rotary part beside it included."""
    return shape.model.head + shape.model.rope_dim


def _projections(shape: Shape, module: str, reads: str, memory: str, names: dict[str, str]) -> list[Row]:
    model = shape.model
    if model.latent_rank:
        return _latent(shape, module, reads, names)
    query, key = shape.heads * model.head, shape.kv * model.head
    if memory:
        keys = by_columns(shape, "cross_kv", module, memory, {names["k"]: key, names["v"]: key})
        return [*by_columns(shape, "cross_query", module, reads, {names["q"]: query}), *keys]
    rows = by_columns(shape, "qkv", module, reads, {names["q"]: query, names["k"]: key, names["v"]: key})
    if len(rows) > 1:
        return rows
    # Their gradients are put together again before the one product reads them.
    together = Work.moving(2 * sum(tensor.bytes for tensor in rows[0].makes))
    return [replace(rows[0], data=(*rows[0].data, together))]


def _latent(shape: Shape, module: str, reads: str, names: dict[str, str]) -> list[Row]:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): squeezed and stretched again; squeezing is not split."""
    model, heads = shape.model, shape.heads
    tokens, hidden, rope = shape.local, model.hidden, model.rope_dim
    down = {"q_latent": model.query_rank, "kv_latent": model.latent_rank + rope}
    width = sum(down.values())
    squeeze = Row(
        "squeeze", module, (reads,), tuple(Tensor(key, 2 * tokens * size) for key, size in down.items() if size), (reads,),
        forward=(Work.product(1, tokens, width, hidden, low=True),), data=(Work.product(1, tokens, hidden, width, low=True),),
        weight=(Work.gradient(1, hidden, width, tokens, low=True),), whole=hidden * width,
    )  # fmt: skip
    size = query_head(shape)
    queries = by_columns(shape, "query", module, "q_latent", {names["q"]: heads * size}, model.query_rank or hidden)
    keys = by_columns(shape, "stretch", module, "kv_latent", {names["k"]: heads * size, names["v"]: heads * model.head}, model.latent_rank)
    return [squeeze, *queries, *keys]


def _rope(shape: Shape, module: str, names: dict[str, str]) -> Row:
    key_heads = shape.heads if shape.model.latent_rank else shape.kv
    q, k = (2 * shape.tokens * count * query_head(shape) for count in (shape.heads, key_heads))
    traffic, kernels = (2, 2) if shape.kernels.fused_rope else (8, 12)
    work = Work.moving(traffic * (q + k), kernels)
    return Row(
        "rope", module, (names["q"], names["k"]), (Tensor("q_rope", q), Tensor("k_rope", k)), forward=(work,), data=(work,)
    )  # fmt: skip


def _keys(shape: Shape, prefix: str) -> int:
    """Keys that each query sees."""
    return shape.sequence


def _explicit(shape: Shape, module: str, names: dict[str, str], prefix: str, causal: bool) -> list[Row]:
    batch, queries, keys = shape.batch * shape.heads, shape.queries, _keys(shape, prefix)
    size, head, value = 2 * batch * queries * keys, query_head(shape), shape.model.head
    scores, probs, kept = f"{prefix}scores", f"{prefix}probs", f"{prefix}probs"
    traffic, kernels = (1, 1) if shape.kernels.fused_elementwise else (4, 5)
    rows = [
        Row(
            scores, module, (names["q"], names["k"]), (Tensor(scores, size),), (names["q"], names["k"]),
            forward=(Work.product(batch, queries, keys, head),),
            data=(Work.product(batch, queries, head, keys), Work.product(batch, keys, head, queries)),
        ),
        Row(
            f"{prefix}softmax", module, (scores,), (Tensor(probs, size),), (probs,),
            forward=(Work.moving(2 * size * traffic, kernels),), data=(Work.moving(3 * size * traffic, kernels),),
        ),
    ]  # fmt: skip
    if shape.model.attention_dropout:
        kept, mask = f"{prefix}dropped", f"{prefix}mask"
        rows.append(
            Row(
                kept, module, (probs,), (Tensor(kept, size), Tensor(mask, size // 2)), (mask,),
                forward=(Work.moving(2 * size + size // 2),), data=(Work.moving(2 * size + size // 2),), random=True,
            )
        )  # fmt: skip
    rows.append(
        Row(
            f"{prefix}mix", module, (kept, names["v"]), (Tensor(f"{prefix}mixed", 2 * batch * queries * value),), (kept, names["v"]),
            forward=(Work.product(batch, queries, value, keys),),
            data=(Work.product(batch, queries, keys, value), Work.product(batch, keys, value, queries)),
        )
    )  # fmt: skip
    return rows


def _fused(shape: Shape, module: str, names: dict[str, str], prefix: str, causal: bool) -> list[Row]:
    batch, queries, keys = shape.batch * shape.heads, shape.queries, _keys(shape, prefix)
    rows, value = batch * queries, shape.model.head
    flops, done = 2 * batch * queries * keys * (query_head(shape) + value), 0.5 if causal else 1.0
    mixed, sums = f"{prefix}mixed", f"{prefix}sums"
    sends: tuple[Transfer, ...] = ()
    returns: tuple[Transfer, ...] = ()
    if shape.context > 1:
        # Keys and values go round the ring; their gradients too.
        size = 2 * shape.batch * keys * shape.kv * (query_head(shape) + value)
        sends = (Transfer("all_gather", size, "context", "own"),)
        returns = (Transfer("all_gather", 2 * size, "context", "own"),)
    return [
        Row(
            f"{prefix}core", module, tuple(names.values()), (Tensor(mixed, 2 * rows * value), Tensor(sums, 4 * rows)),
            (*names.values(), mixed, sums), forward=(Work("attention", flops, 0, (rows,), done=done),),
            data=(Work("attention_backward", flops * 2, 0, (rows,), done=done * _AGAIN),), sends=sends, returns=returns,
            random=shape.model.attention_dropout,
        )
    ]  # fmt: skip
