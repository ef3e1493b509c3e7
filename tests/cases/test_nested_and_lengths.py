"""Regions inside regions, and lengths that change from step to step."""

from __future__ import annotations

import pytest
import torch
from situations import GEARS, Region, Result, Step, differing, plain, plan_equals_plain, planned, regions_equal_plain
from torch import Tensor, nn

from recoup.errors import PlanMismatch
from recoup.torch import apply, checkpoint


class Inner(nn.Module):
    """Counts how often its Python runs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.3), nn.Tanh()).train()
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.net(x)


class Outer(nn.Module):
    """A library layer that recomputes on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor, region: Region = plain) -> Tensor:
        return torch.sin(region(self.inner, torch.sin(region(self.inner, x))))


def nested(model: Outer, outer: Region, inner: Region) -> Result:
    model.zero_grad()
    x = torch.randn(32, 32, requires_grad=True)
    outer(model, x, inner).sum().backward()
    return {"x": x.grad, "w": model.inner.net[0].weight.grad, "runs": model.inner.runs}


def test_a_region_in_a_region() -> None:
    regions_equal_plain(lambda region: nested(Outer(), region, region))


def test_torch_checkpoint_in_our_region() -> None:
    """The library's own recomputation runs inside ours; it alone runs its Python again."""

    def theirs(fn: Region, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(fn, x, use_reentrant=False)

    def run(region: Region) -> Result:
        model = Outer()
        result = nested(model, region, plain if region is plain else theirs)
        return {name: value for name, value in result.items() if name != "runs"}

    regions_equal_plain(run, drops=True)


def test_our_region_in_torch_checkpoint() -> None:
    def theirs(fn: Region, x: Tensor, inner: Region) -> Tensor:
        return torch.utils.checkpoint.checkpoint(fn, x, inner, use_reentrant=False)

    def run(region: Region) -> Result:
        result = nested(Outer(), plain if region is plain else theirs, region)
        return {name: value for name, value in result.items() if name != "runs"}

    # It pairs by order what forward and recomputation save, so ours, in between, must let everything through.
    regions_equal_plain(run, drops=False)


@pytest.mark.parametrize("inner", [plain, checkpoint], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("gear", GEARS)
def test_a_region_under_a_plan(inner: Region, gear: str) -> None:
    model, step, plan = planned(lambda: (lambda model: (model, lambda: nested(model, plain, plain)))(Outer()), gear)
    torch.manual_seed(1)
    bases = [step() for _ in range(6)]
    model.inner.runs = 0
    torch.manual_seed(1)
    with apply(model, plan, gear=gear):
        for base in bases:
            assert differing(base, nested(model, plain, inner)) == []


class Attention(nn.Module):
    """A block of linear cost in length."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(32, 96), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(*x.shape[:2], 4, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = x + self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
        return x + self.mlp(x)


def of_length(model: nn.Module, length: int, region: Region = plain) -> Result:
    model.zero_grad()
    x = torch.randn(2, length, 32, requires_grad=True)
    region(model, x).square().sum().backward()
    return {"x": x.grad, **{name: parameter.grad for name, parameter in model.named_parameters()}}


LENGTHS = (16, 7, 33, 16, 64)


def test_lengths_that_change() -> None:
    def run(region: Region) -> Result:
        model = nn.Sequential(Attention(), Attention())
        return {f"{number}": of_length(model, length, region) for number, length in enumerate(LENGTHS)}

    regions_equal_plain(run)


def blocks() -> tuple[nn.Module, Step]:
    model = nn.Sequential(Attention(), Attention())
    return model, lambda: of_length(model, 16)


@pytest.mark.parametrize("new_shape", ["reuse", "keep"])
@pytest.mark.parametrize("gear", GEARS)
def test_lengths_that_change_under_a_plan(gear: str, new_shape: str) -> None:
    model, _, plan = planned(blocks, gear)
    lengths = LENGTHS * 4
    torch.manual_seed(1)
    bases = [of_length(model, length) for length in lengths]
    torch.manual_seed(1)
    with apply(model, plan, gear=gear, new_shape=new_shape) as applied:  # type: ignore[arg-type]
        for base, length in zip(bases, lengths, strict=True):
            assert differing(base, of_length(model, length)) == []
        report = applied.report()
    assert report.dropped_bytes > 0
    assert bool(report.static_calls) == (gear == "static")
    assert set(report.unplanned_shapes) == {"2x7x32:float32", "2x33x32:float32", "2x64x32:float32"}
    assert bool(report.plain_calls) == (new_shape == "keep")


def test_a_length_without_a_plan_is_refused_if_asked_for() -> None:
    model, step, plan = planned(blocks, "live")
    with apply(model, plan, new_shape="raise"):
        step()
        with pytest.raises(PlanMismatch, match="2x7x32:float32"):
            of_length(model, 7)
        step()


def test_saved_bytes_grow_with_the_length() -> None:
    """The block is linear in length, and so is what the plan for a length says."""

    def unplanned(length: int) -> int:
        from recoup.torch import record

        model = nn.Sequential(Attention(), Attention())
        graph = record(lambda: of_length(model, length), model=model)
        saved = {save.ref.storage for save in graph.saves}
        return sum(graph.storages[number].bytes for number in saved if graph.storages[number].kind == "activation")

    assert unplanned(32) == 2 * unplanned(16)


def test_a_region_in_a_region_under_a_plan_runs_its_python_once() -> None:
    report = plan_equals_plain(lambda: (lambda model: (model, lambda: nested(model, plain, plain)))(Outer()), "live")
    assert report.live_calls == 6
