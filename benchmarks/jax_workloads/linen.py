"""A transformer encoder in Flax linen, with dropout by keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

import jax


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm, with dropout."""

    heads: int
    rate: float

    @nn.compact
    def __call__(self, x: Any, deterministic: bool) -> Any:
        """Adds both to the input."""
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(num_heads=self.heads, dropout_rate=self.rate)(y, deterministic=deterministic)
        x = x + nn.Dropout(self.rate)(y, deterministic=deterministic)
        y = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dropout(self.rate)(nn.Dense(x.shape[-1])(y), deterministic=deterministic)


class Encoder(nn.Module):
    """Embedding, blocks, and a projection to classes."""

    layers: int
    width: int
    heads: int
    rate: float
    vocabulary: int

    @nn.compact
    def __call__(self, tokens: Any, deterministic: bool) -> Any:
        """Logits for each token."""
        x = nn.Embed(self.vocabulary, self.width)(tokens)
        for layer in range(self.layers):
            x = Block(self.heads, self.rate, name=f"layers_{layer}")(x, deterministic)
        return nn.Dense(self.vocabulary)(nn.LayerNorm()(x))


def workload(
    *, layers: int = 6, width: int = 128, heads: int = 4, sequence: int = 128, batch: int = 8, vocabulary: int = 256, rate: float = 0.1
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step with dropout; its key is an argument."""
    model = Encoder(layers, width, heads, rate, vocabulary)
    tokens = jax.random.randint(jax.random.key(1), (batch, sequence), 0, vocabulary)
    params = model.init(jax.random.key(0), tokens, True)

    def loss(params: Any, tokens: Any, key: Any) -> Any:
        logits = model.apply(params, tokens, False, rngs={"dropout": key})
        logs = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(logs, tokens[..., None], -1).mean()

    return loss, (params, tokens, jax.random.key(2))
