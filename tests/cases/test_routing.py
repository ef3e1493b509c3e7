"""Routing that would flip if it were decided a second time: the decision of the forward is kept."""

from __future__ import annotations

import pytest
import torch
from situations import GEARS, Region, Result, Step, plain, plan_equals_plain, regions_equal_plain
from torch import Tensor, nn


class Mixture(nn.Module):
    """Top-1 experts behind a score that is not the same twice in a row, with many exact ties."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.calls = 0

    def noisy(self, x: Tensor) -> Tensor:
        self.calls += 1
        last_digit = 1e-7 * ((self.calls * 2654435761) % 7 - 3)
        return x * (1 + last_digit) + 1e-7 * ((torch.arange(x.shape[-1]) * self.calls) % 5)

    def forward(self, x: Tensor) -> Tensor:
        weight, index = self.noisy(self.gate(x)).softmax(-1).topk(1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (index[:, 0] == number).nonzero()[:, 0]
            y = y.index_add(0, rows, torch.tanh(torch.sin(expert(x[rows]))) * weight[rows])
        return y


def routed(model: nn.Module, region: Region) -> Result:
    model.zero_grad()
    x = torch.randn(64, 32)
    x[16:] = 0.0  # padding: exact ties
    x.requires_grad_()
    region(model, x).sum().backward()
    return {"x": x.grad, **{name: parameter.grad for name, parameter in model.named_parameters()}}


def test_ties() -> None:
    regions = regions_equal_plain(lambda region: routed(Mixture(), region))
    assert any("decision" in reason for reason in regions.kept.values())


@pytest.mark.parametrize("gear", GEARS)
def test_ties_under_a_plan(gear: str) -> None:
    def make() -> tuple[nn.Module, Step]:
        model = Mixture()
        return model, lambda: routed(model, plain)

    # Numbers that change from call to call are no static program.
    plan_equals_plain(make, gear, static=False)
