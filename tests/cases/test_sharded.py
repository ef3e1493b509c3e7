"""Sharded and swapped weights, collectives: gradients as plain, and nobody waits for a rank that is not coming."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from situations import GEARS, Region, Regions, Result, differing, everything, plain, regions_equal_plain
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from recoup.torch import apply, record


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Block(nn.Module):
    """Two linears, the region inside or around."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32)
        self.region = region

    def body(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.tanh(torch.sin(self.a(x)))))

    def forward(self, x: Tensor) -> Tensor:
        return self.region(self.body, x)


def sharded(place: str, region: Region) -> nn.Module:
    """``around``: the region holds sharded modules; ``inside``: a sharded module holds the region."""
    mesh = init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    model = nn.Sequential(*(Block(region) for _ in range(2)))
    for block in model:
        for part in (block.a, block.b) if place == "around" else (block,):
            fully_shard(part, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def trained(model: nn.Module) -> Result:
    model.zero_grad()
    model(torch.randn(32, 32)).float().square().sum().backward()
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters() if parameter.grad is not None}  # type: ignore[attr-defined]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("place", ["around", "inside"])
def test_fully_sharded(place: str) -> None:
    regions_equal_plain(lambda region: trained(sharded(place, region)))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("place", ["around", "inside"])
@pytest.mark.parametrize("gear", GEARS)
def test_fully_sharded_under_a_plan(place: str, gear: str) -> None:
    """The plan is made on the model before it is sharded: sites are places in the module tree, and those stay."""

    def steps(planned: bool) -> list[Result]:
        whole = nn.Sequential(*(Block(plain) for _ in range(2)))
        plan = everything(record(lambda: whole(torch.randn(32, 32)).square().sum().backward(), model=whole), gear)
        torch.manual_seed(0)
        model = sharded(place, plain)
        torch.manual_seed(1)
        if not planned:
            return [trained(model) for _ in range(6)]
        with apply(model, plan, gear=gear) as applied:
            results = [trained(model) for _ in range(6)]
            assert applied.report().dropped_bytes > 0
        return results

    for base, got in zip(steps(False), steps(True), strict=True):
        assert differing(base, got) == []


class Swapped(nn.Module):
    """Its weight lives on a shelf: filled ahead of the forward, emptied behind it."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(32, 32) / 4, requires_grad=not frozen)
        self.shelf = self.w.data.clone()
        self.drop()
        self.register_forward_pre_hook(lambda *_: self.fill())
        self.register_forward_hook(lambda *_: self.drop())

    def fill(self) -> None:
        self.w.data = self.shelf

    def drop(self) -> None:
        self.w.data = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.sin(x @ self.w))


def swapped(region: Region) -> Result:
    model = nn.ModuleList([Swapped(True), Swapped(False), Swapped(True)])
    x = torch.randn(32, 32, requires_grad=True)

    def block(t: Tensor) -> Tensor:
        for part in model:
            t = part(t)
        return t

    y = region(block, x)
    for part in model:  # the framework's hook ahead of the backward
        y.register_hook(lambda grad, part=part: part.fill())
    y.sum().backward()
    return {"x": x.grad, "w": model[1].w.grad}


def test_weights_released_between_forward_and_backward() -> None:
    regions_equal_plain(swapped)


class Counted(nn.Module):
    """All ranks add up a statistic, which carries no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        total = x.detach().abs().mean()
        dist.all_reduce(total)
        return torch.tanh(torch.tanh(self.linear(x)) / total)


def uneven(rank: int, x: Tensor, y: Tensor) -> Tensor:
    return (y if rank == 0 else y.detach() * x).sum()  # the second rank does not need the branch


def _train(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2, timeout=datetime.timedelta(seconds=30)
    )
    found: dict[str, object] = {}
    x = torch.full((32, 32), 0.1 * (rank + 1)).requires_grad_()

    def step(region: Region = plain) -> Tensor:
        x.grad = None
        uneven(rank, x, region(model, x)).backward()
        assert x.grad is not None
        return x.grad.clone()

    torch.manual_seed(0)
    model = Counted()
    want = step()
    regions = Regions()
    found["checkpoint"] = torch.equal(want, step(regions))
    found["dropped"] = regions.dropped_bytes
    plan = everything(record(step, model=model), "live")
    with apply(model, plan) as applied:
        found["plan"] = all(torch.equal(want, step()) for _ in range(3))
        found["plan dropped"] = applied.report().dropped_bytes
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_a_collective_in_a_region_runs_once(tmp_path: Path) -> None:
    """With two ranks of which one never runs the backward of the region, a second all-reduce would hang."""
    torch.multiprocessing.spawn(_train, (str(tmp_path),), nprocs=2)
    for rank in (0, 1):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found["checkpoint"]
        assert found["plan"]
        assert found["dropped"] > 0
    assert torch.load(tmp_path / "0.pt")["plan dropped"] > 0


@pytest.mark.usefixtures("one_process")
def test_a_collective_is_kept_and_named() -> None:
    regions = Regions()
    regions(Counted(), torch.ones(32, 32, requires_grad=True)).sum().backward()
    assert any("collective" in reason for reason in regions.kept.values())
