"""Verification passes a faithful plan, and names what an unfaithful one changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch import nn

import recoup.torch
from recoup.errors import UsageError, VerifyFailure
from recoup.plan.plan import Plan
from recoup.torch.meter import measure_peak
from recoup.torch.state import own_attributes, same_bits
from recoup.verify import Verification, verify

torch.set_num_threads(1)

Applied = Callable[[nn.Module], AbstractContextManager[object]]


class Net(nn.Module):
    """Dropout, batch norm and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.3)
        self.last = nn.Linear(16, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.last(self.dropout(self.norm(self.first(x)).relu()))


def make() -> tuple[Net, Callable[[], torch.Tensor]]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(12, 8)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return model, step


def a_plan(peak_bytes: int = 10**9, budget_bytes: int = 0) -> Plan:
    return Plan(
        fingerprint="0" * 16,
        strategy="none",
        peak_bytes=peak_bytes,
        budget_bytes=budget_bytes,
        step_seconds=1.0,
        unplanned_peak_bytes=peak_bytes,
        unplanned_step_seconds=1.0,
    )


@pytest.fixture
def run_as(monkeypatch: pytest.MonkeyPatch) -> Callable[[Applied], None]:
    """Puts a given change of the model in the place of a plan's application."""

    def put(change: Applied) -> None:
        monkeypatch.setattr(recoup.torch, "apply", lambda model, plan, gear=None, offload_to=None: change(model), raising=False)

    return put


@contextmanager
def faithful(model: nn.Module) -> Iterator[None]:
    yield


def hooked(install: Callable[[nn.Module], torch.utils.hooks.RemovableHandle]) -> Applied:
    @contextmanager
    def change(model: nn.Module) -> Iterator[None]:
        handle = install(model)
        try:
            yield
        finally:
            handle.remove()

    return change


def failed(verification: Verification) -> set[str]:
    return {check.name for check in verification.checks if not check.passed}


def test_a_faithful_plan_passes_and_the_state_comes_back(run_as: Callable[[Applied], None]) -> None:
    run_as(faithful)
    model, step = make()
    step()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    told: list[tuple[int, int]] = []
    verification = verify(model, step, a_plan(), steps=3, progress=lambda done, total, text: told.append((done, total)))
    assert verification.passed, verification.checks
    verification.raise_if_failed()
    names = [check.name for check in verification.checks]
    assert {"gradients after step 1", "gradients after step 3", "buffers after step 3", "state after step 1", "peak", "residue"} <= set(
        names
    )
    assert all(same_bits(value, state[name]) for name, value in model.state_dict().items())
    assert same_bits(torch.get_rng_state(), generator)
    assert model.calls == 1
    assert told == [(done, 4) for done in range(5)]
    assert verification.peak_bytes == verification.unplanned_peak_bytes == measure_peak(step, model)
    assert verification.relative_time is not None
    assert 0.05 < verification.relative_time < 20


def test_without_measuring_there_are_no_numbers(run_as: Callable[[Applied], None]) -> None:
    run_as(faithful)
    model, step = make()
    verification = verify(model, step, a_plan(), measure=False)
    assert verification.passed
    assert (verification.peak_bytes, verification.relative_time) == (None, None)
    counts = {check.name: check.detail.split()[0] for check in verification.checks}
    assert counts["gradients"] == counts["parameters"] == "6"
    assert counts["buffers"] == "3"
    assert int(counts["attributes"]) == sum(len(own_attributes(module)) for module in model.modules())
    assert int(counts["generators"]) >= 3
    assert int(counts["state"]) > 18


def test_a_gradient_off_by_one_bit_is_caught_and_named(run_as: Callable[[Applied], None]) -> None:
    def one_bit(grad: torch.Tensor) -> torch.Tensor:
        off = grad.clone()
        off.view(torch.int32)[2, 1] ^= 1
        return off

    run_as(hooked(lambda model: model.get_parameter("last.weight").register_hook(one_bit)))
    model, step = make()
    verification = verify(model, step, a_plan(), measure=False)
    assert not verification.passed
    assert "gradients" in failed(verification)
    assert not failed(verification) & {"result", "buffers", "attributes", "generators"}
    with pytest.raises(VerifyFailure, match=r"gradients: 1 of 6 differ, first 'last.weight' by up to "):
        verification.raise_if_failed()


def test_a_missing_gradient_is_infinitely_off(run_as: Callable[[Applied], None]) -> None:
    def drop(model: nn.Module) -> torch.utils.hooks.RemovableHandle:
        bias = model.get_parameter("last.bias")

        def clear(parameter: torch.Tensor) -> None:
            parameter.grad = None

        return bias.register_post_accumulate_grad_hook(clear)

    run_as(hooked(drop))
    model, step = make()
    with pytest.raises(VerifyFailure, match=r"gradients: 1 of 6 differ, first 'last.bias' by up to inf"):
        verify(model, step, a_plan(), measure=False).raise_if_failed()


def counts_batches_twice(module: nn.Module, *_: object) -> None:
    module.get_buffer("num_batches_tracked").add_(1)


def counts_again(module: nn.Module, *_: object) -> None:
    assert isinstance(module, Net)
    module.calls += 1


def draws(*_: object) -> None:
    torch.rand(1)


@pytest.mark.parametrize(
    ("kind", "where", "hook"), [("buffers", "norm", counts_batches_twice), ("attributes", "", counts_again), ("generators", "", draws)]
)
def test_side_effects_done_twice_are_caught(kind: str, where: str, hook: Callable[..., None], run_as: Callable[[Applied], None]) -> None:
    run_as(hooked(lambda model: model.get_submodule(where).register_forward_hook(hook)))
    model, step = make()
    assert failed(verify(model, step, a_plan(), measure=False)) == {kind}


def test_an_unsteady_step_is_compared_within_its_own_unsteadiness(run_as: Callable[[Applied], None]) -> None:
    weight = nn.Linear(4, 1)
    drift = iter(range(10**6))

    def step() -> None:
        weight.zero_grad()
        weight(torch.full((2, 4), 1 + 1e-4 * (next(drift) % 3))).sum().backward()

    run_as(faithful)
    verification = verify(weight, step, a_plan(), measure=False)
    gradients = next(check for check in verification.checks if check.name == "gradients")
    assert gradients.passed
    assert "two unplanned runs differ too" in gradients.detail
    run_as(hooked(lambda model: model.get_parameter("weight").register_hook(lambda grad: grad * 1.5)))
    assert failed(verify(weight, step, a_plan(), measure=False)) == {"gradients"}


def test_a_peak_over_the_budget_fails(run_as: Callable[[Applied], None]) -> None:
    run_as(faithful)
    model, step = make()
    peak = measure_peak(step, model)
    assert failed(verify(model, step, a_plan(peak, budget_bytes=peak))) == set()
    assert failed(verify(model, step, a_plan(peak, budget_bytes=peak - 1))) == {"peak"}
    assert failed(verify(model, step, a_plan(peak // 2))) == {"peak"}


def test_memory_left_behind_fails(run_as: Callable[[Applied], None]) -> None:
    kept: list[torch.Tensor] = []
    run_as(hooked(lambda model: model.register_forward_hook(lambda module, args, out: kept.append(out.detach()))))
    model, step = make()
    verification = verify(model, step, a_plan())
    assert failed(verification) == {"residue"}
    assert "384 B allocated, two unplanned ones 0 B" in next(check.detail for check in verification.checks if check.name == "residue")


def test_the_state_comes_back_when_the_planned_step_fails(run_as: Callable[[Applied], None]) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    run_as(hooked(lambda model: model.get_submodule("last").register_forward_hook(fail)))
    model, step = make()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ZeroDivisionError):
        verify(model, step, a_plan())
    assert all(same_bits(value, state[name]) for name, value in model.state_dict().items())
    assert model.calls == 0


def test_at_least_one_step() -> None:
    model, step = make()
    with pytest.raises(UsageError, match="steps=0"):
        verify(model, step, a_plan(), steps=0)
