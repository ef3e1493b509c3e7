"""Frozen weights with adapters, one block called many times, distributed data parallel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from situations import GEARS, Region, Result, Step, everything, plain, plan_equals_plain, regions_equal_plain
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recoup.torch import apply, record


class Adapted(nn.Module):
    """A frozen weight with a trainable adapter of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(32, 2) / 4), nn.Parameter(torch.randn(2, 32) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(self.frozen(x) + x @ self.a @ self.b))


class Adapters(nn.Module):
    """Inputs without gradients, below the first trainable parameter nothing needs one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(32, 32).requires_grad_(False)
        self.blocks = nn.ModuleList(Adapted() for _ in range(3))

    def forward(self, x: Tensor, region: Region = plain) -> Tensor:
        x = torch.tanh(self.embed(x))
        for block in self.blocks:
            x = region(block, x)
        return x


def adapted(model: nn.Module, region: Region) -> Result:
    model.zero_grad()
    y = model(torch.randn(32, 32), region)
    y.sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_adapters_on_a_frozen_base() -> None:
    regions_equal_plain(lambda region: adapted(Adapters(), region))


@pytest.mark.parametrize("gear", GEARS)
def test_adapters_on_a_frozen_base_under_a_plan(gear: str) -> None:
    def make() -> tuple[nn.Module, Step]:
        model = Adapters()
        return model, lambda: adapted(model, plain)

    plan_equals_plain(make, gear)


class Looped(nn.Module):
    """One block with dropout, called four times for each of two streams, and a weight used twice."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(32, 32), nn.Dropout(p), nn.Tanh()).train()
        self.tied = nn.Linear(32, 32)
        self.tied.weight = self.block[0].weight

    def forward(self, x: Tensor, z: Tensor, region: Region = plain) -> tuple[Tensor, Tensor]:
        for _ in range(4):
            x = region(self.block, x)
            z = region(self.block, z)
        return self.tied(x), z


def looped(model: nn.Module, region: Region) -> Result:
    model.zero_grad()
    x, z = torch.randn(32, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True)
    a, b = model(x, z, region)
    ((a * b).sum() + a.sum()).backward()
    return {"x": x.grad, "z": z.grad}


def test_one_block_called_many_times() -> None:
    regions_equal_plain(lambda region: looped(Looped(0.3), region))


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("gear", GEARS)
def test_one_block_called_many_times_under_a_plan(p: float, gear: str) -> None:
    def make() -> tuple[nn.Module, Step]:
        model = Looped(p)
        return model, lambda: looped(model, plain)

    plan_equals_plain(make, gear)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Parallel(nn.Module):
    """A block used once or twice, and one never used."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.region = region

    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(self.a(x)))

    def forward(self, x: Tensor, twice: bool) -> Tensor:
        x = self.region(self.block, x)
        if twice:
            x = self.region(self.block, x)
        return self.b(x)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("twice", [False, True])
def test_distributed_data_parallel(twice: bool) -> None:
    def run(region: Region) -> Result:
        net = Parallel(region)
        model = DistributedDataParallel(net, find_unused_parameters=True)
        with model.no_sync():
            model(torch.randn(32, 32, requires_grad=True), twice).sum().backward()
        model(torch.randn(32, 32, requires_grad=True), twice).sum().backward()
        return {"w": net.a.weight.grad, "b": net.b.weight.grad}

    regions_equal_plain(run)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("gear", GEARS)
def test_distributed_data_parallel_under_a_plan(gear: str) -> None:
    """The plan is applied to the module inside, as users of a wrapper do."""

    def run(planned: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = Parallel(plain)
        model = DistributedDataParallel(net, find_unused_parameters=True)

        def step() -> Tensor:
            model.zero_grad()
            model(torch.randn(32, 32), True).sum().backward()
            assert net.a.weight.grad is not None
            return net.a.weight.grad.clone()

        plan = everything(record(step, model=net), gear)
        torch.manual_seed(1)
        if not planned:
            return [step() for _ in range(6)]
        with apply(net, plan, gear=gear) as applied:
            grads = [step() for _ in range(6)]
            assert applied.report().dropped_bytes > 0
            assert bool(applied.report().static_calls) == (gear == "static")
        return grads

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))
