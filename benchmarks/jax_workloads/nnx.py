"""A residual network of dense layers in Flax nnx; the state is an argument of the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx

import jax


class Block(nnx.Module):
    """A norm, two dense layers, and the way around them."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        """Adds the layers to the input."""
        return x + self.down(jax.nn.silu(self.up(self.norm(x))))


class Network(nnx.Module):
    """Blocks and a head."""

    def __init__(self, layers: int, width: int, classes: int, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Block(width, rngs) for _ in range(layers)])
        self.head = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        """Logits."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def workload(*, layers: int = 8, width: int = 192, batch: int = 1024, classes: int = 16) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step of classification on random features."""
    graph, state = nnx.split(Network(layers, width, classes, nnx.Rngs(0)))
    features = jax.random.normal(jax.random.key(1), (batch, width))
    labels = jax.random.randint(jax.random.key(2), (batch,), 0, classes)

    def loss(state: Any, features: Any, labels: Any) -> Any:
        logs = jax.nn.log_softmax(nnx.merge(graph, state)(features))
        return -jnp.take_along_axis(logs, labels[:, None], -1).mean()

    return loss, (state, features, labels)
