"""Arguments in containers, results of every kind: they go in and come out as they are."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable

import pytest
import torch
from situations import GEARS, Region, Regions, Result, Step, plain, plan_equals_plain, regions_equal_plain
from torch import Tensor, nn


@dataclasses.dataclass
class Output:
    """As libraries return it."""

    hidden: Tensor
    aux: object = None
    n: int = 0


class Pair(typing.NamedTuple):
    """As libraries return it, too."""

    hidden: Tensor
    n: int


WRAPS: dict[str, Callable[[Tensor], typing.Any]] = {
    "dataclass": lambda h: Output(h, None, 3),
    "namedtuple": lambda h: Pair(h, 3),
    "dict": lambda h: {"hidden": h, "n": 3, "none": None},
    "list": lambda h: [h, "text", 1.5],
}


class Wrapping(nn.Module):
    """Returns its result in a structure."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.kind = kind

    def forward(self, x: Tensor) -> typing.Any:
        return WRAPS[self.kind](torch.tanh(torch.tanh(self.linear(x))))


def unwrapped(result: typing.Any) -> tuple[Tensor, object]:
    if isinstance(result, dict):
        return result["hidden"], {key: value for key, value in result.items() if key != "hidden"}
    if isinstance(result, list):
        return result[0], result[1:]
    return result.hidden, result.n


def wrapped(model: nn.Module, region: Region) -> Result:
    model.zero_grad()
    x = torch.randn(32, 32, requires_grad=True)
    result = region(model, x)
    hidden, rest = unwrapped(result)
    hidden.sum().backward()
    return {"type": type(result).__name__, "rest": rest, "requires": hidden.requires_grad, "x": x.grad}


@pytest.mark.parametrize("kind", WRAPS)
def test_results_come_out_as_they_are(kind: str) -> None:
    regions_equal_plain(lambda region: wrapped(Wrapping(kind), region))


@pytest.mark.parametrize("kind", WRAPS)
@pytest.mark.parametrize("gear", GEARS)
def test_results_come_out_as_they_are_under_a_plan(kind: str, gear: str) -> None:
    def make() -> tuple[nn.Module, Step]:
        model = Wrapping(kind)
        return model, lambda: wrapped(model, plain)

    plan_equals_plain(make, gear)


class Offload:
    """Saved-tensor hooks around the region, as an offload has them; counts the bytes it is given."""

    def __init__(self) -> None:
        self.seen = 0
        self.brought = 0

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Tensor:
        self.seen += tensor.nbytes
        return tensor.clone()

    def unpack(self, tensor: Tensor) -> Tensor:
        self.brought += tensor.nbytes
        return tensor


HOWS = ["positional", "keyword", "list", "dict"]


def offloaded(how: str, region: Region) -> tuple[Offload, Result]:
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 64), torch.randn(128, 64, requires_grad=True)
    h, offload = torch.sin(x), Offload()
    with offload.hooks():
        if how == "positional":
            y = region(lambda t: torch.tanh(torch.tanh(linear(t))), h)
        elif how == "keyword":
            y = region(lambda t: torch.tanh(torch.tanh(linear(t))), t=h)
        elif how == "list":
            y = region(lambda t: torch.tanh(torch.tanh(linear(t[0]))), [h])
        else:
            y = region(lambda t: torch.tanh(torch.tanh(linear(t["h"]))), {"h": h})
    y.sum().backward()
    return offload, {"x": x.grad, "w": linear.weight.grad}


@pytest.mark.parametrize("how", HOWS)
def test_nested_inputs_reach_an_outer_offload(how: str) -> None:
    regions = Regions()
    offload, got = offloaded(how, regions)
    reference, base = offloaded(how, plain)
    assert all(torch.equal(typing.cast(Tensor, got[key]), typing.cast(Tensor, base[key])) for key in base)
    assert regions.dropped_bytes > 0
    assert 128 * 64 * 4 <= offload.seen < reference.seen  # the region's input went out, and less of the rest
    assert offload.brought >= 128 * 64 * 4  # ... and came back
    assert offload.seen == offloaded("positional", Regions())[0].seen


class Nested(nn.Module):
    """Takes its tensor out of a container, and flags and text beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, batch: dict[str, list[Tensor]], flag: bool = False, name: str = "") -> Tensor:
        h = torch.tanh(torch.tanh(self.linear(batch["h"][0])))
        return h * 2 if flag and name == "twice" else h


def nested(model: nn.Module, region: Region) -> Result:
    model.zero_grad()
    x = torch.randn(32, 32, requires_grad=True)
    region(model, {"h": [x]}, flag=True, name="twice").sum().backward()
    return {"x": x.grad}


def test_nested_arguments() -> None:
    regions_equal_plain(lambda region: nested(Nested(), region))


@pytest.mark.parametrize("gear", GEARS)
def test_nested_arguments_under_a_plan(gear: str) -> None:
    def make() -> tuple[nn.Module, Step]:
        model = Nested()
        return model, lambda: nested(model, plain)

    plan_equals_plain(make, gear)
