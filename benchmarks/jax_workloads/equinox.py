"""A vision transformer's blocks in Equinox, each example by itself under ``vmap``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp

import jax


class Block(eqx.Module):
    """Attention and a feed-forward layer, each after a norm."""

    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    feed: eqx.nn.MLP

    def __init__(self, width: int, heads: int, key: Any) -> None:
        first, second = jax.random.split(key)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=first)
        self.feed = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=second)

    def __call__(self, x: Any) -> Any:
        """Adds both to the patches of one image."""
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(self.feed)(jax.vmap(self.norm2)(x))


class Network(eqx.Module):
    """A projection of patches, blocks, and a head on their mean."""

    patches: eqx.nn.Linear
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, layers: int, features: int, width: int, heads: int, classes: int, key: Any) -> None:
        keys = jax.random.split(key, layers + 2)
        self.patches = eqx.nn.Linear(features, width, key=keys[0])
        self.blocks = [Block(width, heads, one) for one in keys[2:]]
        self.head = eqx.nn.Linear(width, classes, key=keys[1])

    def __call__(self, image: Any) -> Any:
        """Logits of one image."""
        x = jax.vmap(self.patches)(image)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(0))


def workload(
    *, layers: int = 6, features: int = 48, width: int = 128, heads: int = 4, patches: int = 64, batch: int = 16, classes: int = 10
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step of classification; the model itself, functions in it and all, is the argument."""
    model = Network(layers, features, width, heads, classes, jax.random.key(0))
    images = jax.random.normal(jax.random.key(1), (batch, patches, features))
    labels = jax.random.randint(jax.random.key(2), (batch,), 0, classes)

    def loss(model: Any, images: Any, labels: Any) -> Any:
        logs = jax.nn.log_softmax(jax.vmap(model)(images))
        return -jnp.take_along_axis(logs, labels[:, None], -1).mean()

    arrays, fixed = eqx.partition(model, eqx.is_inexact_array)
    return lambda arrays, images, labels: loss(eqx.combine(arrays, fixed), images, labels), (arrays, images, labels)
