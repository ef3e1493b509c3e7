"""State that the operations do not show: modes, a default device, autocast and its cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.utils._device as default_device
from situations import GEARS, Region, Result, Step, differing, plain, plan_equals_plain, planned, regions_equal_plain
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from recoup.torch import apply


class DoubledTanh(TorchFunctionMode):
    """Stands for fake quantisation."""

    def __torch_function__(
        self, func: Callable[..., Tensor], types: object, args: tuple[Tensor, ...] = (), kwargs: dict[str, object] | None = None
    ) -> Tensor:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func in (torch.tanh, Tensor.tanh) else out


class SteadyNoise(TorchDispatchMode):
    """Stands for noise injection."""

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple[Tensor, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if func is torch.ops.aten.rand_like.default:
            return torch.full_like(args[0], 0.25)
        return func(*args, **(kwargs or {}))


class Noisy(nn.Module):
    """One operation for each mode to change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x))
        return torch.sin(torch.sin(h * torch.rand_like(h)))


MODES = [DoubledTanh, SteadyNoise]


def under(mode: type[DoubledTanh] | type[SteadyNoise], model: nn.Module, region: Region) -> Result:
    model.zero_grad()
    x = torch.randn(32, 32, requires_grad=True)
    with mode():
        loss = region(model, x).sum()
    loss.backward()  # outside of the mode, as loops do
    return {"x": x.grad, "loss": loss}


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_around_the_forward(mode: type[DoubledTanh] | type[SteadyNoise]) -> None:
    regions_equal_plain(lambda region: under(mode, Noisy(), region))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gear", GEARS)
def test_a_mode_around_the_forward_under_a_plan(mode: type[DoubledTanh] | type[SteadyNoise], gear: str) -> None:
    def make() -> tuple[nn.Module, Step]:
        model = Noisy()
        return model, lambda: under(mode, model, plain)

    plan_equals_plain(make, gear)


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_around_the_backward_only(mode: type[DoubledTanh] | type[SteadyNoise]) -> None:
    def run(region: Region) -> Result:
        model, x = Noisy(), torch.randn(32, 32, requires_grad=True)
        loss = region(model, x).sum()
        with mode():
            loss.backward()
        return {"x": x.grad}

    regions_equal_plain(run)


class Factory(nn.Module):
    """Makes a tensor on the default device and says where."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(str(torch.ones(4).device))
        return torch.sin(torch.sin(x * 2))


@pytest.mark.parametrize("how", ["context", "default"])
def test_a_default_device_around_the_forward(how: str) -> None:
    def run(region: Region) -> Result:
        model, x = Factory(), torch.randn(1024, requires_grad=True)
        if how == "context":
            with torch.device("meta"):
                y = region(model, x)
        else:
            torch.set_default_device("meta")
            y = region(model, x)
        y.sum().backward()
        torch.set_default_device(None)
        return {"x": x.grad, "seen": model.seen, "device": str(default_device.CURRENT_DEVICE), "new": str(torch.empty(1).device)}

    regions_equal_plain(run)


@pytest.mark.parametrize("gear", GEARS)
def test_a_default_device_around_the_forward_under_a_plan(gear: str) -> None:
    device = "cpu"

    def make() -> tuple[nn.Module, Step]:
        model = Factory()

        def step() -> Result:
            x = torch.randn(1024, requires_grad=True)
            with torch.device(device):
                y = model(x)
            y.sum().backward()
            return {"x": x.grad, "seen": model.seen[-1], "device": str(default_device.CURRENT_DEVICE)}

        return model, step

    model, step, plan = planned(make, gear)
    device = "meta"
    torch.manual_seed(1)
    bases = [step() for _ in range(6)]
    assert bases[0]["seen"] == "meta"
    torch.manual_seed(1)
    with apply(model, plan, gear=gear) as applied:
        for base in bases:
            assert differing(base, step()) == []
        assert applied.report().dropped_bytes > 0


class Mixed(nn.Module):
    """Autocast is off for a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
        self.seen: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.seen.add(str(h.dtype))
        with torch.autocast("cpu", enabled=False):
            h = torch.tanh(self.b(h.float()))
            self.seen.add(str(h.dtype))
        return torch.sin(self.a(h))


def cast(model: nn.Module, region: Region) -> Result:
    model.zero_grad()
    x = torch.randn(32, 64, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = region(model, x).float().sum()
    loss.backward()  # outside of autocast
    return {"x": x.grad, "seen": sorted(getattr(model, "seen", [])), "autocast": torch.is_autocast_enabled("cpu")}


def test_the_backward_is_outside_of_autocast() -> None:
    regions_equal_plain(lambda region: cast(Mixed(), region))


@pytest.mark.parametrize("gear", GEARS)
def test_the_backward_is_outside_of_autocast_under_a_plan(gear: str) -> None:
    def make() -> tuple[nn.Module, Step]:
        model = Mixed()
        return model, lambda: cast(model, plain)

    plan_equals_plain(make, gear)


def warmed(model: nn.Module, grad_first: bool, region: Region) -> Result:
    """The cache of cast weights is filled by a call without gradients, or with them, ahead of the region."""
    model.zero_grad()
    x = torch.randn(32, 64, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.set_grad_enabled(grad_first):
            warm = model(x)
        loss = region(model, x).float().square().sum()
    loss.backward()
    return {"x": x.grad, "warm": warm}


def relu_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())


@pytest.mark.parametrize("grad_first", [False, True])
def test_the_cache_of_cast_weights(grad_first: bool) -> None:
    regions_equal_plain(lambda region: warmed(relu_net(), grad_first, region))


@pytest.mark.parametrize("grad_first", [False, True])
@pytest.mark.parametrize("gear", GEARS)
def test_the_cache_of_cast_weights_under_a_plan(grad_first: bool, gear: str) -> None:
    def make() -> tuple[nn.Module, Step]:
        model = relu_net()
        return model, lambda: warmed(model, grad_first, plain)

    # A cast weight that a call without gradients has made is read by replays alone, which the static gear cannot see:
    # for that gear there is nothing to drop.
    plan_equals_plain(make, gear, drops=grad_first or gear == "live", static=grad_first)
