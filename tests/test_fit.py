"""``fit``: one call from a step and a budget to a proven plan at work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recoup
from benchmarks.workloads import load
from recoup.errors import InfeasibleBudget, UsageError
from recoup.fitting import fit, with_scratch
from recoup.graph.peak import peak_bytes
from recoup.torch import measure_peak, record
from recoup.torch.state import same_bits
from recoup.units import parse_budget


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def transformer() -> tuple[nn.Module, Callable[[], Tensor]]:
    return load("llama", tiny=True, batch=16)


def net() -> tuple[nn.Module, Callable[[], object]]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Tanh()) for _ in range(4)))
    x = torch.randn(256, 32)

    def step() -> None:
        model.zero_grad()
        model(x).square().sum().backward()

    return model, step


def gradients(model: nn.Module, step: Callable[[], object]) -> list[Tensor | None]:
    torch.manual_seed(3)
    step()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def equal(left: list[Tensor | None], right: list[Tensor | None]) -> bool:
    return all((a is None and b is None) or (a is not None and b is not None and same_bits(a, b)) for a, b in zip(left, right, strict=True))


def test_a_transformer_at_60_percent() -> None:
    model, step = transformer()
    base = gradients(model, step)
    keys = [set(vars(module)) for module in model.modules()]
    seen: list[tuple[int, int, str]] = []
    model.zero_grad()
    fitted = fit(model, step, "60%", steps=3, name="llama", progress=lambda done, total, text: seen.append((done, total, text)))
    found = fitted.verification
    assert found.passed
    assert all(check.passed for check in found.checks)
    assert {"gradients after step 1", "gradients after step 3", "peak", "residue"} <= {check.name for check in found.checks}
    assert fitted.graph.name == "llama"
    budget = int(peak_bytes(fitted.graph) * 0.6)
    assert fitted.plan.budget_bytes == budget
    assert fitted.plan.gear == fitted.applied.gear
    assert found.peak_bytes is not None
    assert 0.97 * fitted.plan.peak_bytes <= found.peak_bytes <= budget
    assert found.unplanned_peak_bytes is not None
    assert found.peak_bytes <= 0.61 * found.unplanned_peak_bytes
    # It is at work, and its state is that of before.
    assert fitted.report().live_calls == 0
    assert equal(base, gradients(model, step))
    assert fitted.report().dropped_bytes > 0
    for _ in range(3):
        step()
    assert measure_peak(step, model) <= budget
    fitted.remove()
    fitted.remove()
    calls = fitted.report().live_calls
    assert equal(base, gradients(model, step))
    assert fitted.report().live_calls == calls
    assert [set(vars(module)) for module in model.modules()] == keys
    assert measure_peak(step, model) > budget
    assert {"recording", "solving", "measuring peaks", "timing"} <= {text for _, _, text in seen}
    assert all(0 <= done <= total for done, total, _ in seen)


def test_it_is_a_context_and_comes_off_when_the_step_fails() -> None:
    model, step = net()
    with recoup.fit(model, step, "80%", steps=1) as fitted:
        step()
        assert fitted.report().dropped_bytes > 0
    with pytest.raises(ZeroDivisionError), fit(model, step, "80%", steps=1):
        raise ZeroDivisionError
    assert all("_compiled_call_impl" not in vars(module) for module in model.modules())
    calls = fitted.report().live_calls + fitted.report().static_calls
    step()
    assert fitted.report().live_calls + fitted.report().static_calls == calls


def test_a_budget_below_the_least_says_what_would_do() -> None:
    model, step = net()
    with pytest.raises(InfeasibleBudget) as caught:
        fit(model, step, "20%")
    error = caught.value
    assert error.budget_bytes < error.least_bytes
    assert error.moment
    assert error.moment in str(error)
    assert str(error.least_bytes) in str(error)
    assert "_compiled_call_impl" not in vars(model)
    with fit(model, step, error.least_bytes, steps=1) as fitted:
        assert fitted.verification.passed
        assert fitted.verification.peak_bytes is not None
        assert fitted.verification.peak_bytes <= error.least_bytes
    with pytest.raises(InfeasibleBudget):
        fit(model, step, error.least_bytes // 2)


def test_an_ample_budget_drops_nothing() -> None:
    model, step = net()
    with fit(model, step, "100%", steps=1) as fitted:
        assert fitted.plan.drops_nothing
        step()
        assert fitted.report().live_calls == 0
    with fit(model, step, "auto", steps=1) as fitted:
        assert fitted.plan.budget_bytes > 2**20
        assert fitted.plan.drops_nothing


@pytest.mark.parametrize("gear", ["live", "static"])
def test_the_gear_asked_for(gear: str) -> None:
    model, step = net()
    base = gradients(model, step)
    with fit(model, step, "80%", gear=gear, steps=1) as fitted:
        assert fitted.plan.gear == fitted.applied.gear == gear
        for _ in range(5):
            assert equal(base, gradients(model, step))
        report = fitted.report()
    assert (report.live_calls, report.static_calls) == ((3, 2) if gear == "static" else (5, 0))


def test_a_named_strategy() -> None:
    model, step = net()
    with fit(model, step, parse_budget("1GiB"), strategy="every_block", steps=1) as fitted:
        assert fitted.plan.strategy == "every_block"
        assert fitted.plan.budget_bytes == 2**30
        assert not fitted.plan.drops_nothing


def test_mistakes_leave_the_model_alone() -> None:
    model, step = net()
    calls = [0]

    def counted() -> None:
        calls[0] += 1
        step()

    for budget, text in (("lots", "6GiB"), ("-3", "positive"), (0, "positive"), ("0%", "positive"), ("5 KiBs", "bytes"), (True, "text")):
        with pytest.raises(UsageError, match=text):
            fit(model, counted, budget)
    assert calls == [0]  # a budget is read before anything runs
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"gear": "third"}, "third"),
        ({"strategy": "best"}, "optimal"),
        ({"steps": 0}, "at least one step"),
    ]
    for option, text in wrong:
        with pytest.raises(UsageError, match=text):
            fit(model, step, "80%", **option)
    assert "_compiled_call_impl" not in vars(model)
    assert all(p.grad is None for p in model.parameters())


def test_a_correction_raises_every_moment_alike() -> None:
    model, step = net()
    graph = record(step, model=model, runs=1)
    corrected = with_scratch(graph, 1000)
    assert peak_bytes(corrected) == peak_bytes(graph) + 1000
    assert corrected.fingerprint == graph.fingerprint
