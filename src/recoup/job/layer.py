"""Layers by kind, and both ends of the model, as tables."""

from __future__ import annotations

from functools import lru_cache

from recoup.job.attention import attention_rows
from recoup.job.feedforward import dense_rows, expert_rows
from recoup.job.linear import norm
from recoup.job.shape import Shape
from recoup.job.table import Row, Table, Tensor, Transfer, Work

__all__ = ["head_table", "input_table", "layer_table"]


@lru_cache(maxsize=4096)
def layer_table(shape: Shape, kind: str) -> Table:
    """The operations of one layer: ``dense``, ``moe``, ``encoder`` or ``decoder`` (which also attends to an encoder)."""
    entering = Tensor("x", shape.stream_bytes)
    outside: tuple[Tensor, ...] = ()
    rows = attention_rows(shape, causal=shape.model.causal and kind != "encoder")
    joined = "joined"
    if kind == "decoder":
        outside = (Tensor("encoded", shape.stream_bytes),)
        rows += attention_rows(shape, "joined", "cross_attention", "encoded", causal=False)
        joined = "cross_joined"
    rows += expert_rows(shape, joined) if kind == "moe" else dense_rows(shape, joined)
    return Table(kind, entering, tuple(rows), outside)


@lru_cache(maxsize=4096)
def input_table(shape: Shape) -> Table:
    """The embedding: a look-up in a table split by words, reduced over the group, with dropout if there is any."""
    model, size = shape.model, shape.stream_bytes
    mask = size // 2 if model.hidden_dropout else 0
    makes = (Tensor("embedded", size), Tensor("embedded_mask", mask)) if mask else (Tensor("embedded", size),)
    sends = ()
    if shape.tensor > 1:
        sends = (Transfer("reduce_scatter" if shape.sequence_parallel else "all_reduce", shape.whole_bytes, "tensor"),)
    row = Row(
        "embedded", "embedding", ("ids",), makes, ("ids", "embedded_mask") if mask else ("ids",),
        forward=(Work.moving(2 * size + mask, 2),), data=(Work.moving(4 * size, 2),), sends=sends, random=bool(mask),
        weights=-(-model.vocab // shape.tensor) * model.hidden, whole=model.positions * model.hidden,
    )  # fmt: skip
    return Table("input", Tensor("ids", 8 * shape.tokens), (row,))


@lru_cache(maxsize=4096)
def head_table(shape: Shape) -> Table:
    """The last normalization, the product with the vocabulary, and the loss over split words.

    Logits are made in two bytes. An unfused loss copies them to four, in which it works in place and which it saves
    (``4 s b v / t``, Korthikanti et al. 2022, section 4.3); a fused one works in place on the two.
    """
    model, words = shape.model, -(-shape.model.vocab // shape.tensor)
    logits, hidden, tokens = 2 * shape.tokens * words, model.hidden, shape.tokens
    whole = shape.whole_bytes
    sends = returns = ()
    if shape.tensor > 1:
        sends = (Transfer("all_gather", whole, "tensor"),) if shape.sequence_parallel else ()
        returns = (Transfer("reduce_scatter" if shape.sequence_parallel else "all_reduce", whole, "tensor", "weight"),)
    product = Row(
        "logits", "head", ("final_norm",), (Tensor("logits", logits),), ("final_norm",),
        forward=(Work.product(1, tokens, words, hidden),), data=(Work.product(1, tokens, hidden, words),),
        weight=(Work.gradient(1, hidden, words, tokens),), sends=sends, returns=returns,
        weights=0 if model.tied else words * hidden,
    )  # fmt: skip
    rows = (norm(shape, "final_norm", "x", "head"), *_before(shape), product, _loss(shape, logits))
    return Table("head", Tensor("x", shape.stream_bytes), rows)


def _before(shape: Shape) -> tuple[Row, ...]:
    """Products of the head before the vocabulary's, on every device of the group alike."""
    hidden, tokens = shape.model.hidden, shape.tokens
    return tuple(
        Row(
            f"head_product{place}", "head", ("final_norm",), (Tensor(f"head_product{place}", 2 * tokens * hidden),), ("final_norm",),
            forward=(Work.product(1, tokens, hidden, hidden),), data=(Work.product(1, tokens, hidden, hidden),),
            weight=(Work.gradient(1, hidden, hidden, tokens),), whole=hidden * hidden,
        )
        for place in range(shape.model.head_products)
    )  # fmt: skip


def _loss(shape: Shape, logits: int) -> Row:
    """Reads and writes of the logits, and what is saved of them, by kernel."""
    tokens = Tensor("loss", 4 * shape.tokens)
    if shape.kernels.loss == "fused":
        return Row(
            "loss", "head", ("logits",), (tokens,), ("logits",), forward=(Work.moving(2 * logits, 2),), data=(Work.moving(2 * logits),)
        )  # fmt: skip
    copies = 1 if shape.kernels.loss == "inplace" else 2
    # A plain loss makes the gradient of its copy beside that of the logits.
    scratch = 2 * logits if shape.kernels.loss == "plain" else 0
    return Row(
        "loss", "head", ("logits",), (tokens, Tensor("softmax", 2 * copies * logits)), ("softmax",),
        forward=(Work.moving(11 * logits, 6),), data=(Work.moving((5 if copies == 1 else 9) * logits, 3),), scratch=scratch,
    )  # fmt: skip
