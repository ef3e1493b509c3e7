"""A GPT in plain JAX, layers unrolled or scanned.

``workload`` unrolls them, ``scanned`` loops over stacked weights; the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

import jax

Workload = tuple[Callable[..., Any], tuple[Any, ...]]


def workload(*, layers: int = 8, width: int = 256, heads: int = 4, sequence: int = 256, batch: int = 4, vocabulary: int = 512) -> Workload:
    """The unrolled model: parameters are a list of layers."""
    params, tokens = _made(layers, width, sequence, batch, vocabulary)
    params["blocks"] = [jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["blocks"]) for layer in range(layers)]

    def loss(params: Any, tokens: Any) -> Any:
        x = params["embedding"][tokens] + params["positions"]
        for block in params["blocks"]:
            x = _block(x, block, heads)
        return _cross_entropy(x, params, tokens)

    return loss, (params, tokens)


def scanned(*, layers: int = 8, width: int = 256, heads: int = 4, sequence: int = 256, batch: int = 4, vocabulary: int = 512) -> Workload:
    """The same model as a loop over layers."""
    params, tokens = _made(layers, width, sequence, batch, vocabulary)

    def loss(params: Any, tokens: Any) -> Any:
        x = params["embedding"][tokens] + params["positions"]
        x, _ = jax.lax.scan(lambda x, block: (_block(x, block, heads), None), x, params["blocks"])
        return _cross_entropy(x, params, tokens)

    return loss, (params, tokens)


def _made(layers: int, width: int, sequence: int, batch: int, vocabulary: int) -> tuple[dict[str, Any], Any]:
    keys = iter(jax.random.split(jax.random.PRNGKey(0), 8))

    def normal(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape) * 0.02

    blocks = {
        "scale1": jnp.ones((layers, width)), "scale2": jnp.ones((layers, width)),
        "qkv": normal(layers, width, 3 * width), "out": normal(layers, width, width),
        "up": normal(layers, width, 4 * width), "down": normal(layers, 4 * width, width),
    }  # fmt: skip
    params = {"embedding": normal(vocabulary, width), "positions": normal(sequence, width), "blocks": blocks, "scale": jnp.ones((width,))}
    return params, jax.random.randint(next(keys), (batch, sequence), 0, vocabulary)


def _norm(x: Any, scale: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5) * scale


def _attention(x: Any, block: Any, heads: int) -> Any:
    batch, sequence, width = x.shape
    q, k, v = jnp.split((x @ block["qkv"]).reshape(batch, sequence, heads, -1), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5
    causal = jnp.tril(jnp.ones((sequence, sequence), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, sequence, width) @ block["out"]


def _block(x: Any, block: Any, heads: int) -> Any:
    x = x + _attention(_norm(x, block["scale1"]), block, heads)
    return x + jax.nn.gelu(_norm(x, block["scale2"]) @ block["up"]) @ block["down"]


def _cross_entropy(x: Any, params: Any, tokens: Any) -> Any:
    logits = _norm(x, params["scale"]) @ params["embedding"].T
    logs = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.take_along_axis(logs, tokens[:, 1:, None], -1).mean()
