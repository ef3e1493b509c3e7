"""What the Python of a region does besides computing happens once: statistics, counters, hooks, caches."""

from __future__ import annotations

import pytest
import torch
from situations import GEARS, Region, Result, Step, left_behind, plain, plan_equals_plain, regions_equal_plain
from torch import Tensor, nn


def conv_net(momentum: float | None = 0.1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8, momentum=momentum), nn.Tanh()
    ).train()


def normed(model: nn.Module, region: Region) -> Result:
    model.zero_grad()
    x = torch.randn(4, 3, 10, 10, requires_grad=True)
    region(model, x).mean().backward()
    return {"x": x.grad}


def test_batch_norm_moves_once() -> None:
    def run(region: Region) -> Result:
        model = conv_net()
        result = normed(model, region) | left_behind(model)
        region(model, torch.randn(4, 3, 10, 10))  # a forward whose backward never comes
        return result | {f"unused {name}": value for name, value in left_behind(model).items()}

    regions_equal_plain(run)


@pytest.mark.parametrize("momentum", [0.1, None], ids=["moving", "cumulative"])
@pytest.mark.parametrize("gear", GEARS)
def test_batch_norm_moves_once_under_a_plan(momentum: float | None, gear: str) -> None:
    def make() -> tuple[nn.Module, Step]:
        model = conv_net(momentum)

        def step() -> Result:
            result = normed(model, plain)
            model(torch.randn(4, 3, 10, 10))
            return result

        return model, step

    # A cumulative average has another factor in every call: no static program.
    plan_equals_plain(make, gear, static=momentum is not None)


class Router(nn.Module):
    """Adds its balance to a tracker."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 8)
        self.tracker = 0.0

    def forward(self, x: Tensor) -> Tensor:
        p = self.gate(x).softmax(-1)
        self.tracker += float(p.detach().mean(0).square().sum())
        return p


class Routed(nn.Module):
    """A router whose hook counts tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.linear = Router(), nn.Linear(32, 8)
        self.register_buffer("tokens", torch.zeros(8))
        self.router.register_forward_hook(self.count)

    def count(self, module: nn.Module, args: object, out: Tensor) -> None:
        self.tokens.add_(torch.bincount(out.argmax(-1), minlength=8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(torch.tanh(self.router(x) * self.linear(x)).sum(-1))


def tracked(model: Routed, region: Region) -> Result:
    model.zero_grad()
    x = torch.randn(64, 32, requires_grad=True)
    region(model, x).sum().backward()
    return {"x": x.grad, "tracker": model.router.tracker, "tokens": model.tokens.clone()}


def test_counters_and_hooks_move_once() -> None:
    regions_equal_plain(lambda region: tracked(Routed(), region))


@pytest.mark.parametrize("gear", GEARS)
def test_counters_and_hooks_move_once_under_a_plan(gear: str) -> None:
    def make() -> tuple[nn.Module, Step]:
        model = Routed()
        return model, lambda: tracked(model, plain)

    plan_equals_plain(make, gear)


class Attention(nn.Module):
    """Appends to a cache that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor, cache: dict[str, list[Tensor]]) -> Tensor:
        cache["k"].append(self.k(x))
        cache["v"].append(self.v(x))
        k, v = torch.cat(cache["k"], 1), torch.cat(cache["v"], 1)
        return torch.tanh(nn.functional.scaled_dot_product_attention(self.q(x)[:, None], k[:, None], v[:, None])[:, 0])


def cached(model: nn.Module, region: Region) -> Result:
    model.zero_grad()
    x = torch.randn(2, 16, 32, requires_grad=True)
    cache: dict[str, list[Tensor]] = {"k": [], "v": []}
    y = region(model, x, cache)
    y = y + region(model, y, cache)
    y.square().sum().backward()
    return {"x": x.grad, "entries": len(cache["k"]), "k": torch.cat(cache["k"], 1)}


def test_a_cache_is_appended_to_once() -> None:
    regions_equal_plain(lambda region: cached(Attention(), region))


@pytest.mark.parametrize("gear", GEARS)
def test_a_cache_is_appended_to_once_under_a_plan(gear: str) -> None:
    def make() -> tuple[nn.Module, Step]:
        model = Attention()
        return model, lambda: cached(model, plain)

    plan_equals_plain(make, gear)
