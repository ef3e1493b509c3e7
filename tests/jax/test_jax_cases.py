"""Where recomputation goes wrong in JAX: nothing saved, flags and keywords, names that match nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import recoup.jax
from recoup.errors import InfeasibleBudget, VerifyFailure
from recoup.jax.residuals import compiled_memory

jax = pytest.importorskip("jax")
jnp = jax.numpy
LAYERS, ROWS, WIDTH = 8, 512, 64


def _layer(x: Any, w: Any) -> Any:
    return jnp.tanh(jnp.sin(jnp.tanh(x @ w) * 1.5))


def _unrolled(ws: Any, x: Any) -> Any:
    for layer in range(ws.shape[0]):
        x = _layer(x, ws[layer])
    return jnp.square(x).sum()


def _scanned(ws: Any, x: Any) -> Any:
    return jnp.square(jax.lax.scan(lambda x, w: (_layer(x, w), None), x, ws)[0]).sum()


def _arguments() -> tuple[Any, Any]:
    ws, x = (LAYERS, WIDTH, WIDTH), (ROWS, WIDTH)
    return jax.random.normal(jax.random.key(0), ws) / 8, jax.random.normal(jax.random.key(1), x)


@pytest.mark.parametrize(("loss", "share"), [(_unrolled, 0.75), (_scanned, 0.55)])
def test_where_a_checkpoint_around_everything_saves_nothing(loss: Any, share: float) -> None:
    args = _arguments()
    plain = compiled_memory(jax.value_and_grad(loss), args)
    around = compiled_memory(jax.value_and_grad(jax.checkpoint(loss)), args)
    assert around.temp_bytes > 0.9 * plain.temp_bytes
    fitted = recoup.jax.fit(loss, *args, budget=int(plain.peak_bytes * share), runs=0, measure=False, time_limit_seconds=2.0)
    planned = compiled_memory(jax.value_and_grad(fitted), args)
    assert planned.peak_bytes <= plain.peak_bytes * share
    # Both numbers are stated, and neither stands for the other.
    assert fitted.verification.residual_bytes == recoup.jax.residual_bytes(fitted, *args)
    assert fitted.verification.peak_bytes == planned.peak_bytes
    got, want = (jax.jit(jax.grad(one))(*args) for one in (fitted, loss))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * float(jnp.abs(want).max()))


def test_a_plan_without_effect_is_loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if XLA undid every plan: values are not tied, so that what is made again is merged with the forward."""
    from recoup.jax import running

    monkeypatch.setattr(running, "tie", lambda values, flowing, still: (list(values), list(flowing)))
    args = _arguments()
    with pytest.raises((VerifyFailure, InfeasibleBudget), match="compiled"):
        recoup.jax.fit(_unrolled, *args, budget="75%", runs=0, measure=False, time_limit_seconds=2.0)


def test_the_same_region_by_every_form_of_call() -> None:
    def f(x: Any, w: Any, flag: bool = False) -> Any:
        y = jnp.tanh(x @ w)
        return (y * 2 if flag else y).sum()

    x, w = jnp.ones((4, 4)), jnp.eye(4)
    recording = recoup.jax.record(f, x, w, True, runs=0)
    plan = recoup.jax.solve(recording, 10**9)
    planned = recoup.jax.apply(f, plan, x, w, kwargs={"flag": True})
    want = jax.grad(lambda x: f(x, w, True))(x)
    for got in (jax.grad(lambda x: planned(x, w, True))(x), jax.grad(lambda x: planned(x, w, flag=True))(x)):
        np.testing.assert_allclose(got, want)
