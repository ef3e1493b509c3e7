"""How planned losses may be called: flags, keywords, other shapes, other gradients, donation, devices, names."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import losses
import numpy as np
import planning
import pytest

import recoup.jax
from recoup.errors import CaptureError, PlanMismatch, UsageError
from recoup.jax.recording import load, save

jax = pytest.importorskip("jax")
jnp = jax.numpy


@cache
def fitted_flagged() -> Any:
    return recoup.jax.fit(flagged, X, W, kwargs={"flag": True}, **planning.MOST)


def flagged(x: Any, w: Any, flag: bool = False, *, times: int = 1) -> Any:
    for _ in range(6):
        x = jnp.tanh(jnp.sin(x @ w) * (2 if flag else 1) + x)
    return jnp.square(x).mean() * times


X, W = jnp.ones((256, 32)), jnp.eye(32)


@pytest.mark.newest
@pytest.mark.parametrize(("args", "kwargs"), [((X, W, True), {}), ((X, W), {"flag": True}), ((X,), {"w": W, "flag": True})])
def test_a_flag_is_taken_by_position_and_by_keyword(args: Any, kwargs: Any) -> None:
    fitted = fitted_flagged()
    assert not fitted.plan.drops_nothing
    got = jax.jit(lambda x: jax.grad(lambda x: fitted(x, *args[1:], **kwargs))(x))(X)
    want = jax.grad(lambda x: flagged(x, W, True))(X)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-9)


def test_partial_binds_a_flag() -> None:
    fitted = recoup.jax.fit(partial(flagged, flag=True), X, W, **planning.MOST)
    np.testing.assert_allclose(jax.grad(fitted)(X, W), jax.grad(lambda x: flagged(x, W, True))(X), rtol=1e-4, atol=1e-9)


def test_another_flag_is_refused_by_name() -> None:
    fitted = fitted_flagged()
    with pytest.raises(PlanMismatch, match="flag=True, but is called with False"):
        fitted(X, W, flag=False)


def test_a_number_that_python_decides_on_must_be_named() -> None:
    def loss(x: Any, layers: int) -> Any:
        for _ in range(layers):
            x = jnp.tanh(x @ W)
        return x.sum()

    with pytest.raises(CaptureError, match="static_argnames"):
        recoup.jax.record(loss, X, 3, runs=0)
    assert recoup.jax.record(loss, X, 3, static_argnames=("layers",), runs=0).operations > 5
    with pytest.raises(UsageError, match="names 'depth', but loss takes x, layers"):
        recoup.jax.record(loss, X, 3, static_argnames=("depth",), runs=0)


def test_argnums_that_cannot_be_differentiated_are_refused() -> None:
    with pytest.raises(UsageError, match="argument 2 of flagged holds no floating point array"):
        recoup.jax.record(flagged, X, W, True, argnums=2, runs=0)
    with pytest.raises(UsageError, match="argnums names argument 7"):
        recoup.jax.record(flagged, X, W, argnums=7, runs=0)


def test_what_is_no_loss_is_refused() -> None:
    with pytest.raises(CaptureError, match="must return one scalar loss"):
        recoup.jax.record(lambda x: jnp.tanh(x), X, runs=0)


def test_auxiliary_results_come_along() -> None:
    def loss(w: Any, x: Any) -> Any:
        for _ in range(4):
            x = jnp.tanh(jnp.sin(x @ w) + x)
        return jnp.square(x).mean(), {"last": x, "rows": x.shape[0]}

    fitted = recoup.jax.fit(loss, W, X, has_aux=True, **planning.MOST)
    (value, aux), grads = jax.jit(jax.value_and_grad(fitted, has_aux=True))(W, X)
    (want, known), slopes = jax.jit(jax.value_and_grad(loss, has_aux=True))(W, X)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    np.testing.assert_allclose(grads, slopes, rtol=1e-4, atol=1e-9)
    np.testing.assert_allclose(aux["last"], known["last"], rtol=1e-5, atol=1e-7)


def test_gradients_that_the_plan_was_not_made_for_are_right() -> None:
    fitted, (loss, (ws, x)) = planning.fitted(losses.scanned), losses.scanned()
    np.testing.assert_allclose(jax.grad(fitted, argnums=1)(ws, x), jax.grad(loss, argnums=1)(ws, x), rtol=1e-4, atol=1e-9)


def test_other_shapes_run_the_same_decisions() -> None:
    fitted, (loss, (ws, x)) = planning.fitted(losses.scanned), losses.scanned()
    np.testing.assert_allclose(jax.grad(fitted)(ws, x[:7]), jax.grad(loss)(ws, x[:7]), rtol=1e-4, atol=1e-8)
    assert len(fitted.signatures) == 2


def test_a_plan_of_another_loss_is_refused_with_the_first_difference() -> None:
    fitted = planning.fitted(losses.unrolled)
    loss, args = losses.scanned()
    with pytest.raises(PlanMismatch, match="which loss does not have"):
        recoup.jax.apply(loss, fitted.plan, *args)


def test_a_donated_argument_and_an_update_in_the_step() -> None:
    fitted, (loss, (ws, x)) = planning.fitted(losses.unrolled), losses.unrolled()

    def update(function: Any, ws: Any, x: Any) -> Any:
        return ws - 0.1 * jax.grad(function)(ws, x)

    planned = jax.jit(partial(update, fitted), donate_argnums=0)
    plain = jax.jit(partial(update, loss))
    first, second = jnp.array(ws), jnp.array(ws)
    for _ in range(3):
        first, second = planned(first, x), plain(second, x)
    np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-7)


@pytest.mark.newest
def test_vmap_and_a_second_derivative_go_through_a_planned_loss() -> None:
    fitted, (loss, (ws, x)) = planning.fitted(losses.unrolled), losses.unrolled()
    several = jnp.stack([x, x * 2])
    np.testing.assert_allclose(
        jax.vmap(jax.grad(fitted), (None, 0))(ws, several), jax.vmap(jax.grad(loss), (None, 0))(ws, several), rtol=1e-4, atol=1e-8
    )


@pytest.mark.newest
@pytest.mark.parametrize("explicit", [False, True])
def test_arguments_laid_over_two_devices(explicit: bool) -> None:
    if len(jax.devices()) < 2:
        pytest.skip("one device only: XLA_FLAGS was set before")
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit if explicit else AxisType.Auto,))

    def loss(ws: Any, x: Any) -> Any:
        x = jnp.square(jax.lax.scan(lambda x, w: (jnp.tanh(jnp.sin(x * w) + x), None), x, ws)[0])
        return jnp.tanh(jnp.sin(x * 2) * 3).mean()

    ws, x = jnp.linspace(0.1, 1, 6 * 32).reshape(6, 32), jnp.ones((256, 32))
    rows = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    whole = jax.device_put(ws, NamedSharding(mesh, PartitionSpec()))
    fitted = recoup.jax.fit(loss, whole, rows, budget="80%", argnums=(0, 1), runs=0, measure=False)
    assert fitted.recording.devices == 2
    assert not fitted.plan.drops_nothing
    got = jax.jit(jax.grad(fitted, argnums=(0, 1)))(whole, rows)
    for one, other in zip(got, jax.grad(loss, argnums=(0, 1))(ws, x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-8)


@pytest.mark.newest
def test_recordings_and_plans_survive_the_file(tmp_path: Any) -> None:
    recording = planning.recorded(losses.nested).recording
    save(recording, tmp_path / "step.graph.json.gz")
    again = load(tmp_path / "step.graph.json.gz")
    assert again == recording
    assert again.fingerprint == recording.fingerprint
    plan = recoup.jax.solve(again, "50%")
    plan.save(tmp_path / "plan.json")
    from recoup.plan.file import load_plan

    assert load_plan(tmp_path / "plan.json") == plan
    loss, args = losses.nested()
    assert recoup.jax.verify(loss, load_plan(tmp_path / "plan.json"), *args, measure=False).passed


def test_plans_repeat() -> None:
    first, second = planning.recorded(losses.attention).recording, planning.recorded_of(*losses.attention()).recording
    assert first.fingerprint == second.fingerprint
    plans = [recoup.jax.solve(recording, "75%") for recording in (first, second)]
    assert plans[0].decisions == plans[1].decisions
