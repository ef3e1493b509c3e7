"""What is trained: the sizes of a transformer, checked once, so that nothing after it need ask whether they fit together."""

from __future__ import annotations

from itertools import groupby
from typing import Literal

import msgspec

from recoup.errors import UsageError

__all__ = ["Kind", "Model"]

Kind = Literal["dense", "moe", "encoder", "decoder"]


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A transformer's sizes.

    Attributes:
        name: what reports call it.
        layers: of the decoder stack, or of both stacks together.
        hidden: width of the residual stream.
        heads: query heads.
        kv_heads: key and value heads; 0 for as many as ``heads``.
        head_dim: width of a head; 0 for ``hidden / heads``.
        ffn: width of the feed-forward network; 0 for ``4 * hidden``.
        gated: whether its activation is gated (SwiGLU: two products into ``ffn``).
        vocab: words, padding included.
        tied: whether embedding and output share weights.
        positions: learned position embeddings, 0 for none.
        rope: rotary position embedding on queries and keys.
        head_products: products of hidden by hidden that the head has before the vocabulary's (BERT: two, one of them its pooler).
        norm: ``layernorm`` or ``rmsnorm``.
        bias: whether linear layers have biases.
        attention_dropout: whether probabilities are dropped.
        hidden_dropout: whether branches are dropped before they join the residual stream.
        causal: whether attention looks back only.
        experts: routed experts of a mixture-of-experts layer, 0 for a dense model.
        experts_per_token: how many of them see a token.
        expert_ffn: width of one expert; 0 for ``ffn``.
        shared_ffn: width of the shared expert, 0 for none.
        dense_layers: how many of the first layers are dense in a mixture of experts.
        moe_every: every how many layers one is a mixture of experts.
        encoder_layers: how many of the first layers are an encoder; the others then are a decoder that also attends to it.
        query_rank: width that queries are squeezed through (multi-head latent attention), 0 for none.
        latent_rank: width that keys and values are squeezed through, 0 for none.
        rope_dim: width of the rotary part of a head beside ``head_dim``, with latent attention.
    """

    name: str = "model"
    layers: int
    hidden: int
    heads: int
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    gated: bool = False
    vocab: int
    tied: bool = True
    positions: int = 0
    rope: bool = False
    head_products: int = 0
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    bias: bool = True
    attention_dropout: bool = False
    hidden_dropout: bool = False
    causal: bool = True
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    moe_every: int = 1
    encoder_layers: int = 0
    query_rank: int = 0
    latent_rank: int = 0
    rope_dim: int = 0

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "heads", "vocab", "moe_every"):
            _demand(getattr(self, field) > 0, field, f"must be positive, got {getattr(self, field)}")
        for field in _SIZES:
            _demand(getattr(self, field) >= 0, field, f"must not be negative, got {getattr(self, field)}")
        if not self.head_dim:
            divisors = ", ".join(str(n) for n in range(1, self.hidden + 1) if self.hidden % n == 0 and n <= 256)
            _demand(self.hidden % self.heads == 0, "heads", f"{self.heads} must divide hidden {self.hidden} (or give head_dim): {divisors}")
        if self.kv_heads:
            _demand(self.heads % self.kv_heads == 0, "kv_heads", f"{self.kv_heads} must divide heads {self.heads}")
        if self.experts:
            per = self.experts_per_token
            _demand(0 < per <= self.experts, "experts_per_token", f"must be 1 to {self.experts}, got {per}")
        _demand(self.encoder_layers < self.layers or not self.encoder_layers, "encoder_layers", f"must be below layers {self.layers}")
        _demand(not (self.encoder_layers and self.experts), "encoder_layers", "a mixture of experts with an encoder is not modelled")

    @property
    def kv(self) -> int:
        """Key and value heads."""
        return self.kv_heads or self.heads

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def feed_forward(self) -> int:
        """Width of the dense feed-forward network."""
        return self.ffn or 4 * self.hidden

    @property
    def expert_width(self) -> int:
        """Width of one routed expert."""
        return self.expert_ffn or self.feed_forward

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kind of each layer, in order."""
        if self.encoder_layers:
            return ("encoder",) * self.encoder_layers + ("decoder",) * (self.layers - self.encoder_layers)
        if not self.experts:
            return ("dense",) * self.layers
        return tuple("dense" if place < self.dense_layers or (place + 1) % self.moe_every else "moe" for place in range(self.layers))

    @property
    def runs(self) -> tuple[tuple[Kind, int], ...]:
        """The kinds of the layers as runs: (kind, how many)."""
        return tuple((kind, len(tuple(group))) for kind, group in groupby(self.kinds))


_SIZES = (
    "kv_heads", "head_dim", "ffn", "positions", "head_products", "experts", "experts_per_token", "expert_ffn", "shared_ffn", "dense_layers",
    "encoder_layers", "query_rank", "latent_rank", "rope_dim",
)  # fmt: skip


def _demand(holds: bool, field: str, what: str) -> None:
    if not holds:
        raise UsageError(f"model field `{field}`: {what}")
