"""A plan changes no name, class or key; a plan that matches nothing is refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from msgspec.structs import replace
from situations import GEARS, Result, Step, everything, planned
from torch import Tensor, nn

from recoup.errors import PlanMismatch
from recoup.torch import apply, record


class Block(nn.Module):
    """Has a flag to be written from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.flag = False

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(self.linear(x))) + (1 if self.flag else 0)


class Blocks(nn.Module):
    """Two blocks by name."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"a": Block(), "b": Block()})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


class Renamed(nn.Module):
    """The same two blocks under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a": Block(), "b": Block()})

    def forward(self, x: Tensor) -> Tensor:
        return self.layers["b"](self.layers["a"](x))


def make() -> tuple[Blocks, Step]:
    model = Blocks()

    def step() -> Result:
        model.zero_grad()
        y = model(torch.randn(32, 32))
        y.sum().backward()
        return {"y": y}

    return model, step


@pytest.mark.parametrize("gear", GEARS)
def test_names_classes_and_keys_stay(gear: str) -> None:
    model, step, plan = planned(make, gear)
    reference = Blocks()
    with apply(model, plan, gear=gear) as applied:
        for _ in range(5):
            step()
        assert list(model.state_dict()) == list(reference.state_dict())
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in reference.named_parameters()]
        assert [name for name, _ in model.named_modules()] == [name for name, _ in reference.named_modules()]
        assert type(model.blocks["a"]) is Block
        assert repr(model) == repr(reference)
        reference.load_state_dict(model.state_dict())
        model.load_state_dict(reference.state_dict())
        copied = copy.deepcopy(model)
        pickled = pickle.loads(pickle.dumps(model))
        calls = applied.report().live_calls + applied.report().static_calls
        x = torch.randn(32, 32)
        for other in (copied, pickled):
            assert torch.equal(other(x), reference(x))
        assert applied.report().live_calls + applied.report().static_calls == calls  # the copies run unplanned
        model.blocks["a"].flag = True
        assert not torch.equal(model(x), reference(x))
        reference.blocks["a"].flag = True
        assert torch.equal(model(x), reference(x))
    assert vars(model.blocks["a"]).keys() == vars(reference.blocks["a"]).keys()


def test_a_plan_whose_names_match_nothing() -> None:
    _, _, plan = planned(make, "live")
    with pytest.raises(PlanMismatch, match=r"the plan names blocks\.a.*no module 'blocks\.a"):
        apply(Renamed(), plan)


def test_a_plan_for_another_front_end() -> None:
    model, _, plan = planned(make, "live")
    with pytest.raises(PlanMismatch, match="PyTorch eager"):
        apply(model, replace(plan, frontend="torch-compile"))


def test_a_plan_that_offloads_is_not_taken_for_one_that_keeps() -> None:
    model, _, plan = planned(make, "live")
    first = plan.decisions[0]
    with pytest.raises(PlanMismatch, match="does not say how it moves"):
        apply(model, replace(plan, decisions=(replace(first, action="offload", held_from=""), *plan.decisions[1:])))


class Adapted(Block):
    """What an adapter library makes of a block."""


def test_adapted_classes_still_match() -> None:
    """Sites are places in the module tree, so another class in the same place runs the plan."""
    model, step, plan = planned(make, "live")
    for block in model.blocks.values():
        block.__class__ = Adapted
    with apply(model, plan) as applied:
        step()
        report = applied.report()
    assert report.dropped_bytes > 0
    assert report.sites_met == report.sites_expected


def test_blocks_compiled_before_are_not_silently_planned() -> None:
    """A compiled block shows no operations of its own: the graph has nothing there that a plan could name."""
    model, step = make()
    for name, block in list(model.blocks.items()):
        model.blocks[name] = torch.compile(block, backend="eager")
    graph = record(step, model=model)
    plan = everything(graph, "live")
    torch.manual_seed(3)
    want = step()["y"]
    with apply(model, plan) as applied:
        torch.manual_seed(3)
        got = step()["y"]
        report = applied.report()
    assert isinstance(want, Tensor)
    assert isinstance(got, Tensor)
    assert torch.equal(want, got)
    assert plan.drops_nothing or report.dropped_bytes > 0 or report.sites_met < report.sites_expected
    torch._dynamo.reset()
