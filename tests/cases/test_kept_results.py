"""Selective recomputation out of step with the forward: a cache that hits, a kept result edited in place, profiler ranges."""

from __future__ import annotations

import pytest
import torch
from situations import GEARS, Region, Result, Step, plain, plan_equals_plain, regions_equal_plain
from torch import Tensor, nn


class Tabled(nn.Module):
    """Builds a table with a matrix product in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(32, 32) / 4), nn.Parameter(torch.randn(32, 32) / 4)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            with torch.no_grad():
                self.table = torch.linspace(-1, 1, x.shape[1]).repeat(x.shape[0], 1) @ torch.eye(x.shape[1])
        h = torch.tanh(x @ self.a + self.table)
        return torch.tanh(h @ self.b)


class EditedInPlace(nn.Module):
    """A matrix product whose result is edited in place, and a view of a result that is."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(32, 32) / 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sigmoid(nn.functional.selu_(x @ self.w))
        g = h @ self.w
        g[:, :16].mul_(2)
        g.view(-1)[::2].add_(0.5)
        return torch.tanh(torch.sin(g))


class Ranges(nn.Module):
    """Opens one more profiler range in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        for _ in range(self.runs):
            with torch.autograd.profiler.record_function("gather weights"):
                x = x * 1
        return torch.tanh(self.linear(torch.tanh(self.linear(x))))


class EmptyRanges(Ranges):
    """The ranges have nothing in them."""

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        for _ in range(self.runs):
            with torch.autograd.profiler.record_function("gather weights"):
                pass
        return torch.tanh(self.linear(torch.tanh(self.linear(x))))


def run(model: nn.Module, region: Region) -> Result:
    model.zero_grad()
    x = torch.randn(32, 32, requires_grad=True)
    loss = region(model, x).sum()
    loss.backward()
    return {"loss": loss, "x": x.grad, **{name: parameter.grad for name, parameter in model.named_parameters()}}


MODELS = [Tabled, EditedInPlace, Ranges, EmptyRanges]


@pytest.mark.parametrize("kind", MODELS)
def test_kept_and_rebuilt_results_stay_apart(kind: type[nn.Module]) -> None:
    regions_equal_plain(lambda region: run(kind(), region))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("gear", GEARS)
def test_kept_and_rebuilt_results_stay_apart_under_a_plan(kind: type[nn.Module], gear: str) -> None:
    def make() -> tuple[nn.Module, Step]:
        model = kind()
        return model, lambda: run(model, plain)

    plan_equals_plain(make, gear)
