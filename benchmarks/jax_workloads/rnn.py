"""A gated recurrent network, one loop over time: long, with a small carry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

import jax


def workload(*, steps: int = 128, width: int = 96, batch: int = 64, features: int = 16) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step of regression on the last state."""
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "gates": jax.random.normal(keys[0], (width + features, 2 * width)) * 0.1,
        "state": jax.random.normal(keys[1], (width + features, width)) * 0.1,
        "head": jax.random.normal(keys[2], (width,)) * 0.1,
    }
    inputs = jax.random.normal(keys[3], (steps, batch, features))

    def loss(params: Any, inputs: Any) -> Any:
        def turn(state: Any, x: Any) -> tuple[Any, None]:
            reset, update = jnp.split(jax.nn.sigmoid(jnp.concatenate([state, x], -1) @ params["gates"]), 2, -1)
            new = jnp.tanh(jnp.concatenate([reset * state, x], -1) @ params["state"])
            return (1 - update) * state + update * new, None

        state, _ = jax.lax.scan(turn, jnp.zeros((batch, width)), inputs)
        return jnp.square(state @ params["head"] - 1).mean()

    return loss, (params, inputs)
