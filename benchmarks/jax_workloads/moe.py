"""A mixture of experts: every layer sends each token to its two best experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

import jax


def workload(*, layers: int = 4, width: int = 128, experts: int = 4, tokens: int = 1024) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step of regression; experts are weighted by their gates, the others by nothing."""
    keys = jax.random.split(jax.random.key(0), 3 * layers + 2)
    params = [
        {
            "router": jax.random.normal(keys[3 * layer], (width, experts)) * 0.1,
            "up": jax.random.normal(keys[3 * layer + 1], (experts, width, 2 * width)) * 0.1,
            "down": jax.random.normal(keys[3 * layer + 2], (experts, 2 * width, width)) * 0.1,
        }
        for layer in range(layers)
    ]
    x, y = jax.random.normal(keys[-2], (tokens, width)), jax.random.normal(keys[-1], (tokens, width))

    def loss(params: Any, x: Any, y: Any) -> Any:
        for layer in params:
            x = x + _experts(x, layer)
        return jnp.square(x - y).mean()

    return loss, (params, x, y)


def _experts(x: Any, layer: Any) -> Any:
    chances = jax.nn.softmax(x @ layer["router"])
    best, which = jax.lax.top_k(chances, 2)
    gates = jnp.zeros_like(chances).at[jnp.arange(x.shape[0])[:, None], which].set(best)
    inner = jax.nn.gelu(jnp.einsum("td,edh->teh", x, layer["up"]))
    return jnp.einsum("teh,ehd,te->td", inner, layer["down"], gates)
