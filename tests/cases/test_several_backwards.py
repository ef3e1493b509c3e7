"""More than one backward pass: retained graphs, gradients inside the region, the two halves of a pipeline's backward."""

from __future__ import annotations

import pytest
import torch
from situations import GEARS, Region, Result, Step, plain, plan_equals_plain, regions_equal_plain
from torch import Tensor, nn

from recoup.torch.capture import Captured
from recoup.torch.checkpoint import _Everything
from recoup.torch.live import LiveSession


def trunk() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Tanh())


def two_losses(model: nn.Module, region: Region) -> Result:
    model.zero_grad()
    x = torch.randn(32, 32, requires_grad=True)
    y = region(model, x)
    y.sum().backward(retain_graph=True)
    first = x.grad.clone() if x.grad is not None else None
    y.square().sum().backward()
    return {"first": first, "x": x.grad}


def split(model: nn.Module, region: Region) -> Result:
    """Gradients of the input first, of the weights later."""
    x = torch.randn(32, 32, requires_grad=True)
    y = region(model, x)
    seed = torch.ones_like(y)
    (of_input,) = torch.autograd.grad(y, x, seed, retain_graph=True)
    of_weights = torch.autograd.grad(y, list(model.parameters()), seed)
    return {"x": of_input, "w": of_weights}


class Forces(nn.Module):
    """An energy model whose output is the gradient of its energy."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.Softplus(), nn.Linear(64, 1))

    def forward(self, position: Tensor) -> Tensor:
        with torch.enable_grad():
            energy = self.net(position).sum()
            (force,) = torch.autograd.grad(energy, position, create_graph=True)
        return force


def forces(model: nn.Module, region: Region) -> Result:
    model.zero_grad()
    position = torch.randn(32, 8, requires_grad=True)
    region(model, position).square().sum().backward()
    return {"x": position.grad}


RUNS = {"two losses": (trunk, two_losses), "split": (trunk, split), "forces": (Forces, forces)}


@pytest.mark.parametrize("name", RUNS)
def test_several_backwards(name: str) -> None:
    make, run = RUNS[name]
    regions_equal_plain(lambda region: run(make(), region))


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("gear", GEARS)
def test_several_backwards_under_a_plan(name: str, gear: str) -> None:
    make_model, run = RUNS[name]

    def make() -> tuple[nn.Module, Step]:
        model = make_model()
        return model, lambda: run(model, plain)

    plan_equals_plain(make, gear)


def test_a_replay_for_each_backward_and_nothing_between() -> None:
    """Each half of a split backward replays what it reads, once; between them nothing rebuilt is held."""
    model, x = trunk(), torch.randn(32, 32, requires_grad=True)
    replayed: list[Captured] = []
    session = LiveSession(_Everything("trunk", lambda: {}), replayed.append)
    session.on()
    try:
        with session.hooks:
            y = model(x)
    finally:
        session.off()
        session.close()
    assert replayed == []
    seed = torch.ones_like(y)
    torch.autograd.grad(y, x, seed, retain_graph=True)
    first = len(replayed)
    assert [op.site for op in replayed] == list(dict.fromkeys(op.site for op in replayed))
    held = [ref() for ref in session.rebuilder.touched]
    assert all(version is None or version.value is None for version in held)
    torch.autograd.grad(y, list(model.parameters()), seed)
    assert first > 0
    assert len(replayed) == 2 * first
