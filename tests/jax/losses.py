"""Small losses of every kind that a JAX training step comes in: each function returns a loss and its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

import jax
from jax import lax

Made = tuple[Callable[..., Any], tuple[Any, ...]]
WIDTH, ROWS, DEPTH = 32, 256, 6


def _weights(*shape: int) -> Any:
    return jax.random.normal(jax.random.key(0), shape) * 0.2


def _rows() -> Any:
    return jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


def _layer(x: Any, w: Any) -> Any:
    return jnp.tanh(jnp.sin(x @ w) + x)


def unrolled() -> Made:
    def loss(ws: Any, x: Any) -> Any:
        for i in range(DEPTH):
            x = _layer(x, ws[i])
        return jnp.square(x).mean()

    return loss, (_weights(DEPTH, WIDTH, WIDTH), _rows())


def scanned() -> Made:
    def loss(ws: Any, x: Any) -> Any:
        return jnp.square(lax.scan(lambda x, w: (_layer(x, w), x.mean()), x, ws)[0]).mean()

    return loss, (_weights(DEPTH, WIDTH, WIDTH), _rows())


def reversed_outputs() -> Made:
    """A loop from the back whose outputs count too, with a shared weight and a counter among the carries."""

    def loss(params: Any, x: Any) -> Any:
        def turn(state: Any, w: Any) -> Any:
            x, count = state
            x = _layer(x, w + params["shared"]) * (1 + count / 100)
            return (x, count + 1), x.sum(-1)

        (x, _), sums = lax.scan(turn, (x, 0), params["ws"], reverse=True)
        return jnp.square(x).mean() + jnp.square(sums).mean()

    return loss, ({"ws": _weights(DEPTH, WIDTH, WIDTH), "shared": _weights(WIDTH, WIDTH)}, _rows())


def nested() -> Made:
    def loss(ws: Any, x: Any) -> Any:
        def outer(x: Any, stack: Any) -> Any:
            return lax.scan(lambda x, w: (_layer(x, w), None), x, stack)[0], None

        return jnp.square(lax.scan(outer, x, ws)[0]).mean()

    return loss, (_weights(4, 5, WIDTH, WIDTH), _rows())


def long_loop() -> Made:
    def loss(w: Any, x: Any) -> Any:
        return jnp.square(lax.scan(lambda x, _: (_layer(x, w), None), x, None, length=67)[0]).mean()

    return loss, (_weights(WIDTH, WIDTH), _rows())


def dropped_out() -> Made:
    def loss(ws: Any, x: Any, key: Any) -> Any:
        for i in range(DEPTH):
            key, now = jax.random.split(key)
            x = _layer(x, ws[i])
            x = jnp.where(jax.random.bernoulli(now, 0.9, x.shape), x / 0.9, 0)
        return jnp.square(x).mean()

    return loss, (_weights(DEPTH, WIDTH, WIDTH), _rows(), jax.random.key(3))


def dropped_out_in_loop() -> Made:
    def loss(ws: Any, x: Any, key: Any) -> Any:
        def turn(state: Any, w: Any) -> Any:
            x, key = state
            key, now = jax.random.split(key)
            x = _layer(x, w)
            return (jnp.where(jax.random.bernoulli(now, 0.9, x.shape), x / 0.9, 0), key), None

        return jnp.square(lax.scan(turn, (x, key), ws)[0][0]).mean()

    return loss, (_weights(DEPTH, WIDTH, WIDTH), _rows(), jax.random.key(3))


def jit_inside() -> Made:
    layer = jax.jit(_layer)

    def loss(ws: Any, x: Any) -> Any:
        for i in range(DEPTH):
            x = layer(x, ws[i])
        return jnp.square(x).mean()

    return loss, unrolled()[1]


def branches() -> Made:
    def loss(ws: Any, x: Any) -> Any:
        for i in range(DEPTH):
            x = lax.cond(x.sum() > 0, lambda x, w: _layer(x, w), lambda x, w: x @ w, x, ws[i])
        return jnp.square(x).mean()

    return loss, unrolled()[1]


def loops_that_count() -> Made:
    """A ``while`` that no gradient flows through, and a ``fori_loop`` that one does."""

    def loss(w: Any, x: Any) -> Any:
        scale = lax.while_loop(lambda s: s < 8.0, lambda s: s * 2, lax.stop_gradient(jnp.abs(x).mean()) + 1)
        return jnp.square(lax.fori_loop(0, 5, lambda i, x: _layer(x, w) / scale, x)).mean()

    return loss, (_weights(WIDTH, WIDTH), _rows())


def own_rules() -> Made:
    @jax.custom_vjp
    def doubled(x: Any) -> Any:
        return jnp.sin(x)

    doubled.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda c, g: (2 * c * g,))

    @jax.custom_jvp
    def steep(x: Any) -> Any:
        return jnp.exp(-x * x)

    @steep.defjvp
    def _rule(primals: Any, tangents: Any) -> Any:
        (x,), (t,) = primals, tangents
        y = steep(x)
        return y, -2 * x * y * t

    def loss(ws: Any, x: Any) -> Any:
        for i in range(DEPTH):
            x = steep(doubled(x @ ws[i]))
        return jnp.square(x).mean()

    return loss, unrolled()[1]


def checkpoint_inside() -> Made:
    def loss(ws: Any, x: Any) -> Any:
        for i in range(DEPTH):
            x = jax.checkpoint(_layer)(x, ws[i])
        return jnp.square(lax.scan(jax.checkpoint(lambda x, w: (_layer(x, w), None)), x, ws)[0]).mean()

    return loss, unrolled()[1]


def vmapped() -> Made:
    def loss(ws: Any, x: Any) -> Any:
        def one(row: Any) -> Any:
            return lax.scan(lambda row, w: (_layer(row, w), None), row, ws)[0]

        return jnp.square(jax.vmap(one)(x)).mean()

    return loss, unrolled()[1]


def half() -> Made:
    def loss(ws: Any, x: Any) -> Any:
        x = x.astype(jnp.bfloat16)
        for i in range(DEPTH):
            x = _layer(x, ws[i].astype(jnp.bfloat16))
        return jnp.square(x.astype(jnp.float32)).mean()

    return loss, unrolled()[1]


def attention() -> Made:
    def loss(ws: Any, x: Any) -> Any:
        for i in range(3):
            q, k, v = (x @ ws[i, j] for j in range(3))
            scores = jnp.einsum("bqd,bkd->bqk", q, k) / WIDTH**0.5
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -1e9)
            x = x + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v)
        return jnp.square(x).mean()

    return loss, (_weights(3, 3, WIDTH, WIDTH), jnp.ones((2, 96, WIDTH)))


ALL = (
    unrolled, scanned, reversed_outputs, nested, long_loop, dropped_out, dropped_out_in_loop, jit_inside, branches, loops_that_count,
    own_rules, checkpoint_inside, vmapped, half, attention,
)  # fmt: skip
