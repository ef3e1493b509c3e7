"""Random numbers from everywhere: filled after the fact, from a generator of one's own, in threads, on hidden arguments."""

from __future__ import annotations

import threading

import pytest
import torch
from situations import GEARS, Region, Regions, Result, Step, everything, plain, plan_equals_plain, regions_equal_plain
from torch import Tensor, nn

from recoup.torch import apply, checkpoint, record


def trained(model: nn.Module, *shape: int) -> tuple[nn.Module, Step]:
    def step() -> Result:
        model.zero_grad()
        x = torch.randn(*shape, requires_grad=True)
        loss = model(x).square().sum()
        loss.backward()
        return {"loss": loss, "x": x.grad}

    return model, step


def rrelu() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.RReLU(0.1, 0.9)).train()


def test_noise_filled_in_after_it_was_saved() -> None:
    def run(region: Region) -> Result:
        model = rrelu()
        x = torch.randn(32, 32, requires_grad=True)
        region(model, x).square().sum().backward()
        return {"x": x.grad, "w": model[0].weight.grad}

    regions_equal_plain(run)


@pytest.mark.parametrize("gear", GEARS)
def test_noise_filled_in_after_it_was_saved_under_a_plan(gear: str) -> None:
    plan_equals_plain(lambda: trained(rrelu(), 32, 32), gear)


class OwnDropout(nn.Module):
    """Draws its mask from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.own = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x))
        return self.linear(torch.sin(h * torch.bernoulli(torch.full_like(h, 0.5), generator=self.own) * 2))


def test_a_generator_of_its_own() -> None:
    def run(region: Region) -> Result:
        model = OwnDropout()
        x = torch.randn(32, 32, requires_grad=True)
        region(model, x).sum().backward()
        return {"x": x.grad, "w": model.linear.weight.grad, "generator": model.own.get_state()}

    regions_equal_plain(run)


@pytest.mark.parametrize("gear", GEARS)
def test_a_generator_of_its_own_under_a_plan(gear: str) -> None:
    def make() -> tuple[nn.Module, Step]:
        model = OwnDropout()
        inner = trained(model, 32, 32)[1]
        return model, lambda: inner() | {"own": model.own.get_state()}

    plan_equals_plain(make, gear)


class DropoutTwice(nn.Module):
    """Two masks; where the last one is zero, both the output and the gradient must be."""

    def __init__(self) -> None:
        super().__init__()
        self.between = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(nn.functional.dropout(x, 0.5))
        self.between()
        return torch.sin(nn.functional.dropout(h, 0.5) * 3)


def wrong_entries(y: Tensor, x: Tensor) -> int:
    assert x.grad is not None
    return int(((y.detach() == 0) != (x.grad == 0)).sum())


def draw_between(region: Region) -> int:
    """One thread stands between its two masks while the other replays and draws."""
    middle, go = threading.Event(), threading.Event()
    x = torch.randn(1024, requires_grad=True)
    model = DropoutTwice()

    def stop() -> None:
        model.between = lambda: None
        middle.set()
        assert go.wait(20)

    model.between = stop

    def other() -> None:
        z = torch.randn(1024, requires_grad=True)
        y = region(lambda t: torch.sin(nn.functional.dropout(t)), z)
        assert middle.wait(20)
        y.sum().backward()
        torch.rand(5)
        go.set()

    thread = threading.Thread(target=other)
    thread.start()
    y = region(model, x)
    thread.join()
    y.sum().backward()
    return wrong_entries(y, x)


def test_a_thread_that_draws_between() -> None:
    assert draw_between(plain) == 0
    regions = Regions()
    assert draw_between(regions) == 0
    assert regions.dropped_bytes > 0


def test_threads_under_a_plan() -> None:
    def make() -> tuple[DropoutTwice, Step]:
        model = DropoutTwice()
        return model, trained(model, 1024)[1]

    model, step = make()
    plan = everything(record(step, model=model), "live")
    wrong: list[int] = []

    def train(model: nn.Module) -> None:
        for _ in range(20):
            x = torch.randn(1024, requires_grad=True)
            y = model(x)
            y.sum().backward()
            wrong.append(wrong_entries(y, x))

    with apply(model, plan) as applied:  # one model, used by both
        threads = [threading.Thread(target=train, args=(model,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert applied.report().dropped_bytes > 0
    assert wrong == [0] * 40


class Hidden:
    """An argument that no search through containers finds."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_random_numbers_on_an_argument_that_cannot_be_seen() -> None:
    def run(region: Region) -> Result:
        x = torch.randn(1024, requires_grad=True)
        y = region(lambda hidden: torch.sin(nn.functional.dropout(torch.sin(hidden.tensor), 0.5)), Hidden(x))
        torch.rand(3)
        y.sum().backward()
        return {"x": x.grad, "wrong": wrong_entries(y, x)}

    regions_equal_plain(run)


@pytest.mark.parametrize("gear", GEARS)
def test_dropout_under_a_plan(gear: str) -> None:
    def make() -> tuple[nn.Module, Step]:
        return trained(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.3), nn.Tanh(), nn.Linear(32, 32), nn.Dropout(0.3), nn.GELU()), 32, 32)

    plan_equals_plain(make, gear)


def test_checkpoint_leaves_the_generator_alone() -> None:
    x = torch.randn(1024, requires_grad=True)
    y = checkpoint(lambda t: torch.sin(nn.functional.dropout(t)), x)
    before = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(before, torch.get_rng_state())
