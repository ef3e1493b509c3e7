"""Malformed input to the Python functions: an error of the right class that says what, where and the way out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import recoup
from recoup.errors import CaptureError, PlanMismatch, UsageError
from recoup.graph import StepGraph
from recoup.plan import Decision, Plan
from recoup.torch import apply, record

torch.set_num_threads(1)


def net() -> tuple[nn.Module, Callable[[], object]]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)), torch.randn(16, 32)
    return model, lambda: model(x).sum().backward()


@functools.cache
def recorded() -> StepGraph:
    model, step = net()
    return record(step, model=model, runs=1)


def a_plan(*sites: str) -> Plan:
    return Plan(
        fingerprint="0" * 16,
        strategy="none",
        peak_bytes=1,
        step_seconds=1.0,
        unplanned_peak_bytes=1,
        unplanned_step_seconds=1.0,
        decisions=tuple(Decision(site=site, action="recompute", bytes=1) for site in sites),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "net"}, r"as a torch\.nn\.Module, not a str"),
        ({"model": nn.Linear}, r"as a torch\.nn\.Module, not a type"),
        ({"step": 3}, "can be called without arguments"),
        ({"runs": 0}, "at least one run"),
    ],
)
def test_record(change: dict[str, Any], message: str) -> None:
    model, step = net()
    options = {"step": step, "model": model, **change}
    with pytest.raises(UsageError, match=message):
        record(options.pop("step"), **options)


def test_record_with_a_step_that_wants_arguments() -> None:
    model, _ = net()
    with pytest.raises(TypeError, match="batch"):
        record(lambda batch: model(batch).sum().backward(), model=model)  # type: ignore[misc, arg-type]


def test_record_below_a_profiler() -> None:
    model, step = net()
    with torch.profiler.profile(), pytest.raises(CaptureError, match="profiler is already running"):
        record(step, model=model, runs=1)
    assert "_compiled_call_impl" not in vars(model)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gear": "third"}, "gear is 'live' or 'static', not 'third'"),
        ({"new_shape": "guess"}, "new_shape is 'reuse', 'keep' or 'raise', not 'guess'"),
    ],
)
def test_apply_options(options: dict[str, Any], message: str) -> None:
    model, _ = net()
    with pytest.raises(UsageError, match=message):
        apply(model, a_plan("1/tanh"), **options)
    assert "_compiled_call_impl" not in vars(model)


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ("tanh", "'tanh' is not a site; a site reads module.path/operation"),
        ("1/", "is not a site"),
        ("5/tanh", r"the plan names 5/tanh, but the model has no module '5'"),
        ("[1-5]/tanh", r"the plan names 3/tanh, but the model has no module '3'"),
        ("1.inner/tanh", r"no module '1\.inner'"),
    ],
)
def test_plans_that_name_what_is_not_there(site: str, message: str) -> None:
    model, step = net()
    with pytest.raises(PlanMismatch, match=message):
        apply(model, a_plan(site))
    assert "_compiled_call_impl" not in vars(model)
    with apply(model, a_plan("1/tanh")) as applied:
        step()
    assert applied.report().sites_met == 1


def test_a_plan_that_names_operations_that_do_not_come_is_counted() -> None:
    model, step = net()
    with apply(model, a_plan("1/tanh", "1/sigmoid", "1/tanh#1")) as applied:
        step()
        report = applied.report()
    assert (report.sites_expected, report.sites_met) == (3, 1)


def test_verify() -> None:
    model, step = net()
    with pytest.raises(UsageError, match="at least one step is compared, got steps=-1"):
        recoup.verify(model, step, a_plan(), steps=-1)
    with pytest.raises(PlanMismatch, match="no module '7'"):
        recoup.verify(model, step, a_plan("7/tanh"))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "'optimal' needs a budget, such as 6GiB or 60%"),
        ({"budget": "sixty"}, "write for example 6GiB"),
        ({"budget": "-1GiB"}, "must be positive"),
        ({"budget": 0}, "must be positive"),
        ({"budget": 1.5}, "not float"),
        ({"budget": "60%", "gear": "fast"}, "no gear is called 'fast'; there are live, static, auto"),
        ({"budget": "60%", "strategy": "luck"}, "no strategy is called 'luck'; there are optimal"),
        ({"budget": "auto"}, "free memory is known"),
    ],
)
def test_solve(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        recoup.solve(recorded(), **options)


def test_simulate_a_plan_of_another_graph() -> None:
    with pytest.raises(PlanMismatch, match=r"9/tanh"):
        recoup.simulate(recorded(), a_plan("9/tanh"))
    with pytest.raises(PlanMismatch, match="PyTorch eager"):
        apply(net()[0], replace(a_plan(), frontend="jax"))
