"""Weights, inputs and flags that change between the forward and the backward: the error that plain autograd gives, or its result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from situations import GEARS, Region, Regions, Result, Step, differing, plain, plan_equals_plain, planned, regions_equal_plain
from torch import Tensor, nn

from recoup.errors import ReplayMismatch
from recoup.torch import apply


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))


def halve(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


@pytest.mark.parametrize("region", [plain, Regions()], ids=["plain", "checkpoint"])
def test_weights_updated_too_early(region: Region) -> None:
    model = net()
    loss = region(model, torch.randn(32, 32, requires_grad=True)).square().sum()
    halve(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_error_names_the_weight() -> None:
    model = net()
    loss = Regions()(model, torch.randn(32, 32)).sum()
    with torch.no_grad():
        model[2].weight.mul_(0.5)
    with pytest.raises(ReplayMismatch, match=r"2\.weight, read in region Sequential"):
        loss.backward()
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if name.startswith("0"))


@pytest.mark.parametrize("gear", GEARS)
def test_weights_updated_too_early_under_a_plan(gear: str) -> None:
    def make() -> tuple[nn.Module, Step]:
        model = net()

        def step() -> Result:
            model.zero_grad()
            model(torch.randn(32, 32, requires_grad=True)).square().sum().backward()
            return {}

        return model, step

    model, step, plan = planned(make, gear)
    with apply(model, plan, gear=gear) as applied:
        for _ in range(5):
            step()
        loss = model(torch.randn(32, 32, requires_grad=True)).square().sum()
        assert bool(applied.report().static_calls) == (gear == "static")
        halve(model)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        step()  # the next step is whole again


class Scaled(nn.Module):
    """Takes tensors by keyword and in a container."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor, scale: Tensor, extra: dict[str, list[Tensor]]) -> Tensor:
        return torch.tanh(torch.tanh(self.linear(x)) * scale) * extra["s"][0]


@pytest.mark.parametrize("how", ["positional", "keyword", "nested"])
@pytest.mark.parametrize("region", [plain, Regions()], ids=["plain", "checkpoint"])
def test_an_argument_written_too_early(how: str, region: Region) -> None:
    model, x = Scaled(), torch.randn(32, 32, requires_grad=True)
    scale, extra = torch.full((32,), 2.0), torch.full((32,), 3.0)
    if how == "positional":
        loss = region(model, x, scale, {"s": [extra]}).sum()
    else:
        loss = region(model, x, scale=scale, extra={"s": [extra]}).sum()
    (extra if how == "nested" else scale).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("how", ["keyword", "nested"])
@pytest.mark.parametrize("gear", GEARS)
def test_an_argument_written_too_early_under_a_plan(how: str, gear: str) -> None:
    def make() -> tuple[nn.Module, Step]:
        model = Scaled()

        def step() -> Result:
            model.zero_grad()
            model(
                torch.randn(32, 32, requires_grad=True), scale=torch.full((32,), 2.0), extra={"s": [torch.full((32,), 3.0)]}
            ).sum().backward()
            return {}

        return model, step

    model, step, plan = planned(make, gear)
    with apply(model, plan, gear=gear):
        for _ in range(5):
            step()
        scale, extra = torch.full((32,), 2.0), torch.full((32,), 3.0)
        loss = model(torch.randn(32, 32, requires_grad=True), scale=scale, extra={"s": [extra]}).sum()
        (extra if how == "nested" else scale).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def frozen_between(region: Region) -> Result:
    model, x = net(), torch.randn(32, 32, requires_grad=True)
    loss = region(model, x).mean()
    model.requires_grad_(False)
    loss.backward()
    return {"x": x.grad, "w": model[0].weight.grad, "last": model[4].weight.grad}


def test_frozen_between_forward_and_backward() -> None:
    regions_equal_plain(frozen_between)


@pytest.mark.parametrize("gear", GEARS)
def test_frozen_between_forward_and_backward_under_a_plan(gear: str) -> None:
    def make() -> tuple[nn.Module, Step]:
        model = net()

        def step() -> Result:
            model.zero_grad()
            model.requires_grad_(True)
            x = torch.randn(32, 32, requires_grad=True)
            loss = model(x).mean()
            model.requires_grad_(False)
            loss.backward()
            return {"x": x.grad}

        return model, step

    plan_equals_plain(make, gear)


class Writes(nn.Module):
    """Writes its input, or a position buffer that came as argument, in place."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.what = what

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        if self.what == "input":
            return torch.tanh(torch.tanh(self.linear(x.mul_(2))))
        if self.what == "position first":
            position.add_(1)
            return torch.tanh(torch.tanh(self.linear(x)) * position)
        y = torch.tanh(torch.tanh(self.linear(x) + position))  # an addition saves nothing, but a replay reads it
        position.add_(1)
        return y


WRITES = ["input", "position first", "position last"]


def writing(what: str) -> tuple[Writes, Callable[[Region], Result]]:
    model = Writes(what)
    position = torch.ones(32)

    def run(region: Region) -> Result:
        model.zero_grad()
        x = torch.randn(32, 32, requires_grad=True)
        region(model, torch.sin(x), position).sum().backward()
        return {"x": x.grad, "position": position.clone()}

    return model, run


@pytest.mark.parametrize("what", WRITES)
def test_a_region_that_writes_its_input(what: str) -> None:
    regions = regions_equal_plain(lambda region: writing(what)[1](region))
    assert (regions.copied_bytes > 0) == (what == "position last")


def test_a_region_that_writes_what_it_closes_over() -> None:
    def run(region: Region) -> Result:
        model, position = Writes("position last"), torch.ones(32)
        x = torch.randn(32, 32, requires_grad=True)
        region(lambda t: model(t, position), x).sum().backward()
        return {"x": x.grad, "position": position}

    regions_equal_plain(run)


@pytest.mark.parametrize("what", WRITES)
@pytest.mark.parametrize("gear", GEARS)
def test_a_region_that_writes_its_input_under_a_plan(what: str, gear: str) -> None:
    def make() -> tuple[nn.Module, Step]:
        model, run = writing(what)
        return model, lambda: run(plain)

    plan_equals_plain(make, gear)


def late(region: Region) -> Result:
    """What only a replay reads is written after the region: plain autograd does not mind, a replay would read the new value."""
    model, position = Writes("nothing"), torch.ones(32)
    x = torch.randn(32, 32, requires_grad=True)
    y = region(lambda t: torch.tanh(torch.tanh(model.linear(t) + position)), x)
    position.add_(1)
    y.sum().backward()
    return {"x": x.grad}


def test_what_only_a_replay_reads_is_written_afterwards() -> None:
    assert differing(late(plain), late(plain)) == ["x"]  # other inputs: it runs, in plain autograd
    with pytest.raises(ReplayMismatch, match="Move the write behind the backward pass"):
        late(Regions())
