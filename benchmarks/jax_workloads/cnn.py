"""A residual convolutional network in plain JAX, the image halved and the channels doubled at every stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

import jax


def workload(
    *, stages: int = 3, blocks: int = 2, channels: int = 16, size: int = 32, batch: int = 16, classes: int = 10
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step of classification with batch statistics taken in the step."""
    keys = iter(jax.random.split(jax.random.key(0), 2 * stages * blocks + stages + 4))

    def kernel(before: int, after: int, side: int = 3) -> Any:
        return jax.random.normal(next(keys), (side, side, before, after)) * (2 / (side * side * before)) ** 0.5

    widths = [channels * 2**stage for stage in range(stages)]
    params = {
        "stem": kernel(3, channels),
        "stages": [
            {
                "down": kernel(widths[max(stage - 1, 0)], widths[stage]),
                "blocks": [
                    {"first": kernel(widths[stage], widths[stage]), "second": kernel(widths[stage], widths[stage])} for _ in range(blocks)
                ],
            }
            for stage in range(stages)
        ],
        "head": jax.random.normal(next(keys), (widths[-1], classes)) * 0.05,
    }
    images = jax.random.normal(next(keys), (batch, size, size, 3))
    labels = jax.random.randint(next(keys), (batch,), 0, classes)

    def loss(params: Any, images: Any, labels: Any) -> Any:
        x = jax.nn.relu(_normed(_convolved(images, params["stem"])))
        for number, stage in enumerate(params["stages"]):
            x = jax.nn.relu(_normed(_convolved(x, stage["down"], 2 if number else 1)))
            for block in stage["blocks"]:
                y = jax.nn.relu(_normed(_convolved(x, block["first"])))
                x = jax.nn.relu(x + _normed(_convolved(y, block["second"])))
        logs = jax.nn.log_softmax(x.mean((1, 2)) @ params["head"])
        return -jnp.take_along_axis(logs, labels[:, None], -1).mean()

    return loss, (params, images, labels)


def _convolved(x: Any, kernel: Any, stride: int = 1) -> Any:
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _normed(x: Any) -> Any:
    return (x - x.mean((0, 1, 2))) * jax.lax.rsqrt(x.var((0, 1, 2)) + 1e-5)
