"""Tying values to the cotangent in flight, so that XLA neither merges what is made again with the forward nor makes it early.

Two ways, both exact:

- *barrier*: ``optimization_barrier`` over values and cotangents. XLA for GPU and TPU honours it, and for CPU from jaxlib 0.11.1 on.
- *select*: each value ``x`` becomes ``select(p, x, 0)`` with ``p`` true for every cotangent, which XLA cannot know: a number is
  unequal to itself or at most infinity. It is fused into what reads ``x`` or costs one pass over it. For CPU before that, where
  barriers go before common subexpressions are merged. The numbers that ``p`` is made from pass through a sort, which XLA does not
  fuse: else all that the first element of a cotangent is computed from would be computed again for every element of ``x``.

Which one holds is tried on the backend, once. Arrays whose types carry shardings cannot be sliced for the second; they take the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax
from recoup.jax.jaxprs import is_explicit

__all__ = ["honoured", "tie", "ties_are_free", "way_of"]

_DEPTH, _WIDTH = 6, 128
_SMALL = 4096


def tie(values: Sequence[Any], flowing: Sequence[Any], still: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """Values that XLA takes for results of the cotangents, and the cotangents to go on with.

    Args:
        values: arrays that a group of equations is made again from.
        flowing: cotangents in flight, at least one.
        still: which values are arguments of the step; they stand anyway, and are tied only where that is free.
    """
    if way_of(jax.default_backend()) == "barrier" or any(is_explicit(jax.typeof(one)) for one in flowing):
        tied, after = jax.lax.optimization_barrier((list(values), list(flowing)))
        return tied, after
    sign = _always([one for one in flowing if one.size])
    loose = {place for place, standing in enumerate(still) if standing and values[place].size > _SMALL}
    if len(loose) == len(values):
        loose.discard(min(loose, key=lambda place: values[place].size))
    return [value if place in loose else _selected(sign, value) for place, value in enumerate(values)], list(flowing)


def ties_are_free() -> bool:
    """Whether tying a value costs nothing; a ``select`` may be fused with what made the value, which then is made twice."""
    return way_of(jax.default_backend()) == "barrier"


def _always(cotangents: Sequence[Any]) -> Any:
    """True, by a comparison that XLA does not fold."""
    firsts = [jnp.real(one[(0,) * one.ndim]).astype(jnp.float32) for one in cotangents]
    last = jax.lax.sort(jnp.stack([*firsts, jnp.float32(0)]))[-1]
    return (last != last) | (last <= jnp.inf)


def _selected(sign: Any, value: Any) -> Any:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        words = _selected(sign, jax.random.key_data(value))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(value))
    return jax.lax.select_n(jnp.broadcast_to(sign, value.shape), jnp.zeros_like(value), value)


@cache
def way_of(backend: str) -> str:
    """``barrier`` where the backend honours it, ``select`` on a CPU that does not."""
    return "select" if backend == "cpu" and not honoured(_barrier) else "barrier"


def _barrier(values: list[Any], flowing: list[Any]) -> tuple[list[Any], list[Any]]:
    tied, after = jax.lax.optimization_barrier((values, flowing))
    return tied, after


def honoured(way: Any) -> bool:
    """Whether a compiled step with its layers' inner values made again needs less memory than one that keeps them."""
    return _probe_bytes(way) < 0.75 * _probe_bytes(None)


def _probe_bytes(way: Any) -> int:
    """Temporary bytes of a chain of two products a layer, whose middle is kept, or made again if ``way`` says how to tie."""

    @jax.custom_vjp
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w) @ w

    def forward(x: Any, w: Any) -> Any:
        middle = jnp.tanh(x @ w)
        return middle @ w, (x, w, None if way else middle)

    def backward(kept: Any, flow: Any) -> Any:
        x, w, middle = kept
        if way:
            (x,), (flow,) = way([x], [flow])
            middle = jnp.tanh(x @ w)
        inner = (flow @ w.T) * (1 - middle * middle)
        return inner @ w.T, middle.T @ flow + x.T @ inner

    layer.defvjp(forward, backward)

    def loss(w: Any, x: Any) -> Any:
        for _ in range(_DEPTH):
            x = layer(x, w)
        return (x * x).sum()

    shapes = jax.ShapeDtypeStruct((_WIDTH, _WIDTH), np.float32), jax.ShapeDtypeStruct((4 * _WIDTH, _WIDTH), np.float32)
    memory = jax.jit(jax.grad(loss)).lower(*shapes).compile().memory_analysis()
    assert memory is not None, "XLA for CPU analyses memory"
    return memory.temp_size_in_bytes
