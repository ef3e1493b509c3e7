"""What a region leaves behind: nothing, with the garbage collector off."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from situations import GEARS, Region, Regions, Result, Step, plain, plan_equals_plain, planned, regions_equal_plain
from torch import Tensor, nn

from recoup.torch import apply
from recoup.torch.meter import CpuMeter


class Fused(torch.autograd.Function):
    """Stands for a fused kernel that saves one of its own outputs."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = torch.sin(x), torch.cos(x)
        ctx.save_for_backward(x, a, b)
        return a, b

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, ga: Tensor, gb: Tensor) -> Tensor:
        _, a, b = ctx.saved_tensors  # type: ignore[attr-defined]
        return ga * b - gb * a


class EndsFused(nn.Module):
    """The fused function is the last operation."""

    def forward(self, x: Tensor) -> Tensor:
        return Fused.apply(torch.tanh(x))[0]


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


def fused_step(model: nn.Module, region: Region) -> Result:
    x = torch.randn(2**14, requires_grad=True)
    region(model, x).sum().backward()
    return {"x": x.grad}


@pytest.mark.usefixtures("no_collector")
def test_a_custom_function_at_the_end_of_a_region() -> None:
    regions_equal_plain(lambda region: fused_step(EndsFused(), region))
    model = EndsFused()

    def steps() -> None:
        for _ in range(10):
            fused_step(model, Regions())

    net, _ = CpuMeter().net_and_peak(steps, before=steps)
    assert net == 0


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("gear", GEARS)
def test_a_custom_function_at_the_end_under_a_plan(gear: str) -> None:
    def make() -> tuple[nn.Module, Step]:
        model = EndsFused()
        return model, lambda: fused_step(model, plain)

    plan_equals_plain(make, gear)
    model, step, plan = planned(make, gear)
    with apply(model, plan, gear=gear):
        for _ in range(5):
            step()
        net, _ = CpuMeter().net_and_peak(lambda: [step() for _ in range(5)] and None, before=step)
    assert net == 0


def storage_of_a_step(region: Region, kind: str) -> weakref.ref[torch.UntypedStorage]:
    """One step; all of its names are gone when this returns."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    x = torch.randn(64, 64, requires_grad=True)
    store: dict[str, Tensor] = {}

    def fn(t: Tensor) -> Tensor:
        store.get("y")
        return torch.tanh(model(t))

    y = region(fn, x)
    found = weakref.ref(y.untyped_storage())
    if kind == "cycle":
        store["y"] = y
    if kind != "thrown away":
        y.sum().backward()
    return found


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("kind", ["normal", "thrown away", "cycle"])
def test_nothing_of_a_step_is_alive(kind: str) -> None:
    storage_of_a_step(Regions(), "normal")
    assert storage_of_a_step(plain, kind)() is None
    assert storage_of_a_step(Regions(), kind)() is None


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("gear", GEARS)
def test_nothing_of_a_planned_step_is_alive(gear: str, backward: bool) -> None:
    def make() -> tuple[nn.Module, Step]:
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())

        def step() -> Result:
            model.zero_grad()
            model(torch.randn(64, 64)).sum().backward()
            return {}

        return model, step

    model, step, plan = planned(make, gear)

    def once() -> weakref.ref[torch.UntypedStorage]:
        y = model(torch.randn(64, 64))
        if backward:
            y.sum().backward()
        return weakref.ref(y.untyped_storage())

    with apply(model, plan, gear=gear):
        for _ in range(5):
            step()
        assert once()() is None


class Swallows(nn.Module):
    """Falls back on whatever goes wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.fallbacks = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        try:
            return torch.tanh(torch.tanh(h))
        except Exception:
            self.fallbacks += 1
            return h.clamp(-1, 1) * h.sigmoid()


def swallowed(model: nn.Module, region: Region) -> Result:
    model.zero_grad()
    x = torch.randn(32, 32, requires_grad=True)
    region(model, x).sum().backward()
    return {"x": x.grad, "fallbacks": model.fallbacks}


def test_a_region_that_swallows_exceptions() -> None:
    regions_equal_plain(lambda region: swallowed(Swallows(), region))


@pytest.mark.parametrize("gear", GEARS)
def test_a_region_that_swallows_exceptions_under_a_plan(gear: str) -> None:
    def make() -> tuple[nn.Module, Step]:
        model = Swallows()
        return model, lambda: swallowed(model, plain)

    plan_equals_plain(make, gear)
