"""Compiled steps that offload: the bits of the step that keeps all, the peak of the plan, nothing lost when something goes wrong."""

from __future__ import annotations

import errno
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn.parallel import DistributedDataParallel

import recoup
from compiled.models import Block, Stack, left_behind, rows, stepping
from recoup.cost import OffloadLink
from recoup.errors import OffloadError, PlanMismatch
from recoup.graph import StepGraph
from recoup.graph.rules import check
from recoup.plan import Plan
from recoup.simulate import offloadable
from recoup.simulate.index import replays
from recoup.torch.compiled import transfers
from recoup.torch.meter import measure_peak
from recoup.torch.offload import DiskStore
from tests.offload.faults import FaultyRequests, failing, slow
from tests.offload.planning import offloading

# So fast that it is always worth it.
LINK = OffloadLink(
    target="disk", write_bytes_per_second=1e12, read_bytes_per_second=1e12, latency_seconds=1e-9, staging_bytes=(2 << 20) + 4096
)


class Compiled:
    """A model, compiled, its step, and the recorded step."""

    def __init__(self, model: nn.Module, x: Tensor, kernels: str = "aten", **options: Any) -> None:
        self.model, self.x = model, x
        self.call = torch.compile(model, backend="recoup", options={"kernels": kernels, "budget": "1GiB"}, **options)
        self.step = stepping(model, self.call, x)
        self.graph: StepGraph = recoup.record(self.step, model=self.call)

    def kept(self) -> list[Tensor]:
        """What a step leaves behind that keeps all."""
        with recoup.apply(self.call, recoup.solve(self.graph, "100%")):
            return self.left()

    def loss(self) -> Tensor:
        """The forward of the step."""
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(11)
        return self.call(self.x)

    def left(self) -> list[Tensor]:
        return [self.step().detach(), *left_behind(self.model)]

    def plan(self, **options: Any) -> Plan:
        return offloading(self.graph, "compiled", **options)


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


def emptied(store: DiskStore) -> bool:
    """Whether all space of the store comes back, which may take as long as the transfers under way."""
    gc.collect()
    deadline = time.monotonic() + 5
    while store.used_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    return store.used_bytes == 0 and not transfers._moved


SITUATIONS: dict[str, Callable[[], nn.Module]] = {
    "dropout": Stack,
    "batch norm": lambda: Stack(norm=True),
    "graph break": lambda: Stack(inside="break"),
    "in place": lambda: Stack(inside="in place"),
    "generator": lambda: Stack(draws=torch.Generator().manual_seed(3)),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_step_that_offloads_all_it_can_has_the_bits_and_the_peak_of_its_plan(situation: str, tmp_path: Path) -> None:
    one = Compiled(SITUATIONS[situation](), rows(512))
    check(one.graph)
    plan = one.plan(windows=1)
    assert plan.traffic is not None
    assert plan.peak_bytes - plan.traffic.link.staging_bytes < 0.7 * plan.unplanned_peak_bytes
    found = recoup.verify(one.call, one.step, plan, offload_to=tmp_path, steps=2)
    found.raise_if_failed()
    assert found.peak_bytes is not None
    # What has left before it must is not in the measured peak.
    assert found.peak_bytes <= plan.peak_bytes <= found.peak_bytes + plan.traffic.write_window_bytes
    assert not list(tmp_path.iterdir())


def test_offloading_and_recomputing_together(tmp_path: Path) -> None:
    """Random operations that are rebuilt from what was fetched draw the masks of the forward."""
    one = Compiled(Stack(drop=0.3), rows(512))
    recompute = recoup.solve(one.graph, "75%")
    plan = one.plan(recompute=recompute, windows=1)
    assert plan.recompute_sites
    assert plan.offload_sites
    found = recoup.verify(one.call, one.step, plan, offload_to=tmp_path, steps=2)
    found.raise_if_failed()
    assert found.peak_bytes is not None
    assert found.peak_bytes <= plan.peak_bytes


def test_solve_and_fit_offload_under_a_budget(tmp_path: Path) -> None:
    one = Compiled(Stack(drop=0.0), rows(8192))
    with recoup.fit(one.call, one.step, "65%", offload=msgspec.structs.replace(LINK, where=str(tmp_path))) as fitted:
        one.step()
        report = fitted.report()
    assert (fitted.plan.frontend, fitted.plan.gear) == ("torch-compile", "compiled")
    assert fitted.plan.offload_sites
    assert fitted.verification.peak_bytes is not None
    assert fitted.verification.peak_bytes <= fitted.plan.budget_bytes
    assert report.sites_met == report.sites_expected
    assert report.offloaded_bytes >= report.fetched_bytes > 0


def test_a_plan_saved_and_read_back_moves_each_activation_once(tmp_path: Path) -> None:
    one = Compiled(Stack(), rows())
    one.plan(windows=1).save(tmp_path / "plan.json")
    plan = recoup.load_plan(tmp_path / "plan.json")
    with recoup.apply(one.call, plan, offload_to=tmp_path) as applied:
        one.step()
        once = applied.report()
        one.step()
        twice = applied.report()
    moved = sum(storage.bytes for storage in one.graph.storages if storage.site in plan.offload_sites)
    # What had not left yet is taken from memory.
    assert once.offloaded_bytes == moved >= once.fetched_bytes > 0
    assert twice.offloaded_bytes == 2 * moved
    assert twice.sites_met == twice.sites_expected


def test_inductor_writes_over_nothing_that_is_still_on_its_way(tmp_path: Path) -> None:
    """With slow writes all is still in memory when the forward ends: a buffer used again would give wrong gradients."""
    # PyTorch takes two backward passes through one graph of Inductor's only where a backward keeps its inputs.
    with torch._functorch.config.patch(donated_buffer=False):
        one = Compiled(Stack(2), rows(1024), kernels="inductor")
        want = one.kept()
        store = DiskStore(tmp_path, requests=FaultyRequests(write=slow(0.02), read=slow(0.02)))
        with recoup.apply(one.call, one.plan(windows=1000), offload_to=store):
            assert same(one.left(), want)
            loss = one.loss()
            loss.backward(retain_graph=True)
            assert same(left_behind(one.model), want[1:])
            loss.backward()
            assert same(left_behind(one.model), [2 * gradient for gradient in want[1:]])
        plan = one.plan(windows=1)
        assert plan.traffic is not None
        with recoup.apply(one.call, plan, offload_to=tmp_path):
            assert measure_peak(one.step, one.call) <= plan.peak_bytes < plan.unplanned_peak_bytes + plan.traffic.link.staging_bytes
            assert same(one.left(), want)


def test_several_backwards_and_two_forwards_before_their_backwards(tmp_path: Path) -> None:
    one = Compiled(Stack(), rows())

    def both(order: tuple[int, int]) -> list[Tensor]:
        one.model.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        losses = [one.call(x) for x in (one.x, 2 * one.x)]
        for place in order:
            losses[place].backward(retain_graph=True)
            losses[place].backward()
        return left_behind(one.model)

    with recoup.apply(one.call, recoup.solve(one.graph, "100%")):
        want = [both(order) for order in ((0, 1), (1, 0))]
    store = DiskStore(tmp_path)
    with recoup.apply(one.call, one.plan(windows=1), offload_to=store):
        assert all(same(both(order), before) for order, before in zip(((0, 1), (1, 0)), want, strict=True))
        assert emptied(store)


def test_forwards_without_a_backward_and_steps_that_raise_leave_nothing(tmp_path: Path) -> None:
    one = Compiled(Stack(), rows())
    want = one.kept()
    store = DiskStore(tmp_path)

    def stop(_: Tensor) -> None:
        raise KeyboardInterrupt

    with recoup.apply(one.call, one.plan(windows=1), offload_to=store):
        with torch.no_grad():
            one.call(one.x)
        loss = one.call(one.x)
        assert store.used_bytes > 0
        del loss
        assert not transfers._moved
        loss = one.call(one.x)
        broken = loss.register_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        broken.remove()
        del loss
        assert not transfers._moved
        assert same(one.left(), want)
        assert emptied(store)


@pytest.mark.parametrize("nth", [0, 3])
def test_a_disk_that_fills_up_keeps_the_rest_in_memory_and_says_so(nth: int, tmp_path: Path) -> None:
    one = Compiled(Stack(), rows())
    want = one.kept()
    store = DiskStore(tmp_path, requests=FaultyRequests(write=failing(errno.ENOSPC, always_from=nth + 1)))
    with recoup.apply(one.call, one.plan(), offload_to=store) as applied:
        with pytest.warns(RuntimeWarning, match="stays in memory"):
            first = one.left()
        assert same(first, want)
        assert same(one.left(), want)
    kept = applied.report().kept
    assert kept
    assert set(kept) <= one.plan().offload_sites
    assert all("could not be offloaded" in reason for reason in kept.values())


@pytest.mark.parametrize("nth", [0, 2])
def test_a_read_error_is_raised_before_any_weight_moves(nth: int, tmp_path: Path) -> None:
    one = Compiled(Stack(), rows())
    want = one.kept()
    optimizer = torch.optim.SGD(one.model.parameters(), lr=0.1)
    requests = FaultyRequests()

    def train() -> None:
        one.step()
        optimizer.step()

    with recoup.apply(one.call, one.plan(windows=1), offload_to=DiskStore(tmp_path, requests=requests)):
        one.step()
        before = [parameter.detach().clone() for parameter in one.model.parameters()]
        requests.reading(failing(errno.EIO, always_from=nth + 1))
        with pytest.raises(OffloadError, match="no weight was touched"):
            train()
        assert same(before, [parameter.detach() for parameter in one.model.parameters()])
        requests.reading()
        assert same(one.left(), want)


def test_removing_the_plan_between_forward_and_backward(tmp_path: Path) -> None:
    one = Compiled(Stack(), rows())
    want = one.kept()
    applied = recoup.apply(one.call, one.plan(windows=1), offload_to=tmp_path)
    loss = one.loss()
    applied.remove()
    gc.collect()
    loss.backward()
    assert same(left_behind(one.model), want[1:])


def test_hooks_that_copy_tokens_are_told_so(tmp_path: Path) -> None:
    one = Compiled(Stack(), rows())
    copying = torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone)
    with recoup.apply(one.call, one.plan(), offload_to=tmp_path), copying, pytest.raises(OffloadError, match="saved-tensor hooks"):
        one.step()


class Row(nn.Module):
    """Blocks compiled one by one; ``twice`` calls the second one again, on the same parameters."""

    def __init__(self, blocks: int = 3, twice: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(32, 0.1) for _ in range(blocks))
        self.twice = twice
        for block in self.blocks:
            block.compile(backend="recoup", options={"budget": "1GiB", "kernels": "aten"})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (self.blocks[1](x) if self.twice else x).square().mean()


@pytest.mark.parametrize("twice", [False, True])
def test_blocks_compiled_one_by_one(twice: bool, tmp_path: Path) -> None:
    """What one graph hands to the next stays, and so does what a graph makes that is called twice on the same parameters."""
    model = Row(twice=twice)
    step = stepping(model, model, rows(512))
    graph = recoup.record(step, model=model)
    plan = offloading(graph, "compiled", windows=1)
    moved = {site.split("/")[0].split("@")[0][:8] for site in plan.offload_sites}
    assert moved == ({"blocks.0", "blocks.2"} if twice else {"blocks.0", "blocks.1", "blocks.2"})
    assert all("result" in storage.movable for storage in graph.storages if storage.site in ("blocks.0/add.Tensor", "blocks.1/add.Tensor"))
    found = recoup.verify(model, step, plan, offload_to=tmp_path, steps=2)
    found.raise_if_failed()
    assert found.peak_bytes is not None
    assert found.peak_bytes <= plan.peak_bytes


def test_sizes_known_at_run_time_only_are_refused(tmp_path: Path) -> None:
    graph = Compiled(Stack(), rows(), dynamic=True).graph
    assert not offloadable(replays(graph))
    assert any("run time only" in storage.movable for storage in graph.storages)
    one = Compiled(Stack(), rows())
    with recoup.apply(one.call, one.plan(), offload_to=tmp_path):
        one.step()
        with pytest.raises(BackendCompilerFailed, match="run time only") as error:
            one.call(rows(96))
    assert isinstance(error.value.inner_exception, PlanMismatch)


def test_what_the_compiler_may_write_in_place_stays() -> None:
    class Scattering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.sigmoid(self.linear(x))
            z = torch.slice_scatter(y, x[:8], 0, 0, 8)
            return (y * z).square().mean()

    graph = Compiled(Scattering(), rows()).graph
    stuck = [storage.site for storage in graph.storages if "write it in place" in storage.movable]
    assert any("sigmoid" in site for site in stuck)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("around", [False, True])
def test_data_parallel_around_and_inside(around: bool, tmp_path: Path) -> None:
    model, x = Stack(), rows(512)
    options = {"budget": "1GiB", "kernels": "aten"}
    inner = torch.compile(model, backend="recoup", options=options)
    wrapped = DistributedDataParallel(model if around else inner, bucket_cap_mb=0.01)
    call = torch.compile(wrapped, backend="recoup", options=options) if around else wrapped
    compiled = call if around else inner
    step = stepping(model, call, x)
    graph = recoup.record(step, model=compiled)
    plan = offloading(graph, "compiled", windows=1)
    with recoup.apply(compiled, recoup.solve(graph, "100%")):
        want = [step().detach(), *left_behind(model)]
    (tmp_path / "waiting").mkdir()
    with recoup.apply(compiled, plan, offload_to=tmp_path / "waiting") as applied:
        for _ in range(2):
            assert same([step().detach(), *left_behind(model)], want)
        assert applied.report().fetched_bytes > 0
