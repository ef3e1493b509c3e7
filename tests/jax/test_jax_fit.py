"""Every kind of loss under a plan: the same gradients, residual bytes to the byte, memory within the budget."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import losses
import numpy as np
import pytest
from planning import fitted, recorded

import recoup.jax
from recoup.errors import InfeasibleBudget
from recoup.graph.rules import check
from recoup.jax.figures import residual_bytes as graph_residual_bytes
from recoup.jax.solving import unplanned_peak_bytes
from recoup.plan import Plan
from recoup.plan.capabilities import JIT
from recoup.simulate import simulate

jax = pytest.importorskip("jax")


def _least(recording: recoup.jax.Recording) -> int:
    with pytest.raises(InfeasibleBudget) as caught:
        recoup.jax.solve(recording, recording.graph.resident_bytes + 1)
    return caught.value.least_bytes


@pytest.mark.newest
@pytest.mark.parametrize("make", losses.ALL, ids=lambda make: make.__name__)
def test_plans_keep_gradients_and_residual_bytes(make: Callable[[], losses.Made]) -> None:
    recording = recorded(make).recording
    check(recording.graph)
    for body in recording.bodies():
        check(body.graph)
    whole, least = unplanned_peak_bytes(recording), _least(recording)
    for budget in {(3 * least + whole) // 4, *([least] if make in (losses.unrolled, losses.scanned) else [])}:
        plan = recoup.jax.solve(recording, budget, time_limit_seconds=1.0)
        assert not plan.drops_nothing
        assert plan.peak_bytes <= budget
        seen, verdicts = recorded(make).verified(plan)
        assert verdicts["residual bytes"].passed, verdicts["residual bytes"].detail
        assert verdicts["values and gradients"].passed, verdicts["values and gradients"].detail
        assert seen.residual_bytes <= budget


_MARKED = [pytest.param(losses.unrolled, marks=pytest.mark.newest), pytest.param(losses.long_loop, marks=pytest.mark.newest)]


@pytest.mark.parametrize("make", [*_MARKED, losses.scanned, losses.attention], ids=lambda make: make.__name__)
def test_fit_brings_the_compiled_step_within_the_budget(make: Callable[[], losses.Made]) -> None:
    found = fitted(make)
    seen = found.verification
    assert seen.passed
    assert seen.peak_bytes <= found.plan.budget_bytes < seen.unplanned_peak_bytes
    assert seen.residual_bytes < seen.unplanned_residual_bytes
    assert seen.peak_bytes <= found.plan.peak_bytes


@pytest.mark.newest
def test_residual_bytes_of_the_graph_are_those_of_jax() -> None:
    recording = recorded(losses.unrolled).recording
    assert graph_residual_bytes(recording.graph, frozenset()) <= recording.unplanned_residual_bytes


def test_a_long_loop_is_split_where_its_carries_do_not_fit() -> None:
    step = recorded(losses.long_loop)
    recording = step.recording
    (body,) = recording.loops
    carries = body.turns * body.carry_bytes
    plan = recoup.jax.solve(recording, recording.graph.resident_bytes + carries // 2)
    assert set(plan.stretches) == {body.name}
    assert all(1 < length < body.turns for lengths in plan.stretches.values() for length in lengths)
    seen, _ = step.verified(plan)
    assert seen.residual_bytes < carries // 2
    assert seen.peak_bytes < seen.unplanned_peak_bytes / 2


_SPLITS = [(losses.long_loop, (33,)), (losses.long_loop, (16, 4, 2)), (losses.reversed_outputs, (2,)), (losses.reversed_outputs, (3, 2))]


@pytest.mark.parametrize(("make", "stretches"), _SPLITS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_any_split_gives_the_same_gradients(make: Callable[[], losses.Made], stretches: tuple[int, ...]) -> None:
    step = recorded(make)
    (body,) = step.recording.loops
    plan = Plan(
        frontend="jax", gear="jit", fingerprint=step.recording.fingerprint, strategy="by hand", peak_bytes=1 << 30, step_seconds=1,
        unplanned_peak_bytes=1 << 30, unplanned_step_seconds=1, stretches={body.name: stretches},
    )  # fmt: skip
    _, verdicts = step.verified(plan)
    assert verdicts["values and gradients"].passed
    # The plan was written by hand, but what it hands over is told by the graph all the same.
    assert "the plan says" not in verdicts["residual bytes"].detail


def test_more_budget_never_takes_more_time_and_the_bound_holds() -> None:
    recording = recorded(losses.scanned).recording
    whole, least = unplanned_peak_bytes(recording), _least(recording)
    plans = [recoup.jax.solve(recording, least + (whole - least) * part // 8) for part in range(9)]
    times = [plan.step_seconds for plan in plans]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in itertools.pairwise(times))
    assert all(plan.bound_seconds <= plan.step_seconds for plan in plans)
    assert plans[-1].drops_nothing


def test_what_fits_is_left_as_it_is() -> None:
    loss, args = losses.unrolled()
    found = recoup.jax.fit(loss, *args, budget="100%", runs=0, measure=False)
    assert found.plan.drops_nothing
    assert jax.make_jaxpr(found)(*args).jaxpr.eqns[-1].primitive.name != "custom_vjp_call"


def test_an_infeasible_budget_says_the_least() -> None:
    recording = recorded(losses.scanned).recording
    least = _least(recording)
    assert recoup.jax.solve(recording, least).peak_bytes <= least


def test_simulated_recording_matches_its_own_rules_under_a_plan() -> None:
    recording = recorded(losses.attention).recording
    plan = recoup.jax.solve(recording, "60%")
    assert simulate(recording.graph, executor=JIT).peak_bytes >= plan.peak_bytes


def test_values_of_a_planned_loss_outside_of_jit() -> None:
    loss, args = losses.scanned()
    np.testing.assert_allclose(np.asarray(fitted(losses.scanned)(*args)), np.asarray(loss(*args)), rtol=1e-5)
