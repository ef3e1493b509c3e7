"""Planned steps that offload: the bits of the unplanned step, the peak of the plan, and nothing lost when something goes wrong."""

from __future__ import annotations

import errno
import gc
import time
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup.errors import OffloadError, PlanMismatch, ReplayMismatch
from recoup.simulate import simulate_plan
from recoup.simulate.result import attribution
from recoup.torch.offload import DiskStore
from tests.offload.faults import FaultyRequests, failing, slow
from tests.offload.planning import offloading, recorded
from tests.offload.test_store import wait_until


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right)
    assert all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize("gear", ["live", "static"])
def test_a_step_that_offloads_all_it_can_has_the_bits_and_the_peak_of_its_plan(gear: str, tmp_path: Path) -> None:
    model, step, graph = recorded(rows=512)
    plan = offloading(graph, gear)
    found = recoup.verify(model, step, plan, offload_to=tmp_path, steps=2)
    found.raise_if_failed()
    assert found.peak_bytes == plan.peak_bytes
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("gear", ["live", "static"])
def test_the_buffers_of_transfers_are_gone_once_all_has_come_back(gear: str, tmp_path: Path) -> None:
    """The step is widest where the gradient of the first weight is made, after the last fetch."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4096, 1024), nn.Tanh(), nn.Linear(1024, 8)), torch.randn(256, 4096)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    graph = recoup.record(step, model=model)
    plan = offloading(graph, gear)
    assert plan.traffic is not None
    simulated = simulate_plan(graph, plan)
    assert "buffers of transfers" not in dict(attribution(graph, simulated))
    assert plan.peak_bytes < plan.unplanned_peak_bytes + plan.traffic.link.staging_bytes
    found = recoup.verify(model, step, plan, offload_to=tmp_path, steps=2)
    found.raise_if_failed()
    assert found.peak_bytes == plan.peak_bytes


def test_two_forwards_at_once_keep_to_the_disk_budget(tmp_path: Path) -> None:
    """The plan has room for one; the second's stay in memory, said aloud, and the gradients are right."""
    model, step, graph = recorded(rows=512)
    plan = offloading(graph)
    assert plan.traffic is not None
    waiting = simulate_plan(graph, plan).offloaded_bytes
    assert waiting == plan.traffic.offloaded_bytes
    plan = msgspec.structs.replace(plan, traffic=msgspec.structs.replace(plan.traffic, limit_bytes=waiting))
    x = torch.randn(512, 32)

    def both() -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        losses = [model(x).square().mean(), model(2 * x).square().mean()]
        for loss in losses:
            loss.backward()
        return gradients(model)

    want = both()
    with recoup.apply(model, plan, offload_to=tmp_path) as applied:
        step()
        assert not applied.report().kept
        with pytest.warns(RuntimeWarning, match="the disk budget of .* bytes has no room"):
            assert_same(both(), want)
        assert applied.report().kept


@pytest.mark.parametrize("gear", ["live", "static"])
def test_offloading_and_recomputing_together(gear: str, tmp_path: Path) -> None:
    model, step, graph = recorded(rows=512)
    recompute = recoup.solve(graph, strategy="selective", gear=gear)
    plan = offloading(graph, gear, recompute=recompute)
    assert plan.recompute_sites
    assert plan.offload_sites
    found = recoup.verify(model, step, plan, offload_to=tmp_path, steps=2)
    found.raise_if_failed()
    assert found.peak_bytes is not None
    assert found.peak_bytes <= plan.peak_bytes


def test_what_moves_is_the_distinct_activations_once(tmp_path: Path) -> None:
    """Three layers save one input; views and weights are saved too: a hook that copies what it is given would move them all."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(64, 64, bias=False) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.sin(x)
            q, k, v = (layer(x).view(8, 32, 4, 16).transpose(1, 2) for layer in (self.q, self.k, self.v))
            return self.o(((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).reshape(8, 32, 64))

    torch.manual_seed(0)
    model, x = Attention(), torch.randn(8, 32, 64, requires_grad=True)

    def step() -> None:
        model(x).sum().backward()

    graph = recoup.record(step, model=model)
    plan = offloading(graph)
    with recoup.apply(model, plan, offload_to=tmp_path) as applied:
        loss = model(x).sum()
        outbox = applied._outbox
        # What has not left yet when it is asked for is taken from memory.
        wait_until(lambda: (outbox.accept(), not outbox.on_the_way)[1])
        loss.backward()
        report = applied.report()
    distinct = {storage.id for storage in graph.storages if storage.site in plan.offload_sites}
    assert report.offloaded_bytes == report.fetched_bytes == sum(graph.storages[v].bytes for v in distinct)
    assert report.sites_met == report.sites_expected


@pytest.mark.parametrize("nesting", ["list", "dict", "keyword"])
def test_inputs_inside_lists_and_dicts_are_offloaded_too(nesting: str, tmp_path: Path) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, given: object = None, *, t: Tensor | None = None) -> Tensor:
            x = t if t is not None else given[0] if isinstance(given, list) else given["h"]  # type: ignore[index]
            return torch.tanh(self.linear(x))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            h = torch.sin(x)
            return self.inner([h]) if nesting == "list" else self.inner({"h": h}) if nesting == "dict" else self.inner(t=h)

    torch.manual_seed(0)
    model, x = Outer(), torch.randn(128, 64, requires_grad=True)

    def step() -> None:
        model(x).sum().backward()

    graph = recoup.record(step, model=model)
    plan = offloading(graph)
    assert any("sin" in site for site in plan.offload_sites)
    recoup.verify(model, step, plan, offload_to=tmp_path).raise_if_failed()


@pytest.mark.parametrize("gear", ["live", "static"])
def test_several_backwards_of_one_forward(gear: str, tmp_path: Path) -> None:
    model, step, graph = recorded()
    x = torch.randn(64, 32)
    with recoup.apply(model, offloading(graph, gear), offload_to=tmp_path):
        for _ in range(4):  # into the static gear
            step()
        model.zero_grad()
        torch.manual_seed(3)
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        first = gradients(model)
        loss.backward()
        second = gradients(model)
    assert_same([2 * gradient for gradient in first], second)


@pytest.mark.parametrize("gear", ["live", "static"])
def test_two_forwards_before_their_backwards_in_either_order(gear: str, tmp_path: Path) -> None:
    model, step, graph = recorded()
    inputs = [torch.randn(64, 32), torch.randn(64, 32)]

    def both(order: tuple[int, int]) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(3)
        losses = [model(x).square().mean() for x in inputs]
        for place in order:
            losses[place].backward()
        return gradients(model)

    plain = {order: both(order) for order in ((0, 1), (1, 0))}
    with recoup.apply(model, offloading(graph, gear), offload_to=tmp_path):
        for _ in range(4):
            step()
        for order, expected in plain.items():
            assert_same(expected, both(order))


@pytest.mark.parametrize("gear", ["live", "static"])
def test_a_forward_without_a_backward_and_one_that_raises_leave_nothing(gear: str, tmp_path: Path) -> None:
    model, step, graph = recorded()
    step()
    torch.manual_seed(5)
    step()
    expected = gradients(model)
    store = DiskStore(tmp_path)
    with recoup.apply(model, offloading(graph, gear), offload_to=store):
        for _ in range(4):
            step()
        result = model(torch.randn(64, 32))
        del result
        broken = model[2].drop.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step()
        broken.remove()
        for _ in range(4):
            step()
        torch.manual_seed(5)
        step()
        assert_same(expected, gradients(model))
        model.zero_grad()
        gc.collect()
        deadline = time.monotonic() + 5
        while store.used_bytes and time.monotonic() < deadline:
            time.sleep(0.01)
        assert store.used_bytes == 0


def test_a_backward_that_raises_in_the_middle_can_be_run_again(tmp_path: Path) -> None:
    model, step, graph = recorded()
    torch.manual_seed(5)
    step()
    expected = gradients(model)

    def stop(_: Tensor) -> None:
        raise KeyboardInterrupt

    with recoup.apply(model, offloading(graph), offload_to=tmp_path):
        broken = next(model[1].parameters()).register_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            step()
        broken.remove()
        torch.manual_seed(5)
        step()
        assert_same(expected, gradients(model))


@pytest.mark.parametrize("gear", ["live", "static"])
@pytest.mark.parametrize("nth", [0, 3])
def test_a_disk_that_fills_up_keeps_the_rest_in_memory_and_says_so(gear: str, nth: int, tmp_path: Path) -> None:
    model, step, graph = recorded()
    torch.manual_seed(5)
    step()
    expected = gradients(model)
    store = DiskStore(tmp_path, requests=FaultyRequests(write=failing(errno.ENOSPC, always_from=nth + 1)))
    with recoup.apply(model, offloading(graph, gear), offload_to=store) as applied:
        torch.manual_seed(5)
        with pytest.warns(RuntimeWarning, match="stays in memory"):
            step()
        assert_same(expected, gradients(model))
        for _ in range(4):
            torch.manual_seed(5)
            step()
            assert_same(expected, gradients(model))
    assert any("could not be offloaded" in reason for reason in applied.report().kept.values())


@pytest.mark.parametrize("gear", ["live", "static"])
@pytest.mark.parametrize("nth", [0, 2])
def test_a_read_error_is_raised_before_any_weight_moves(gear: str, nth: int, tmp_path: Path) -> None:
    model, step, graph = recorded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    requests = FaultyRequests()

    def train() -> None:
        step()
        optimizer.step()

    with recoup.apply(model, offloading(graph, gear), offload_to=DiskStore(tmp_path, requests=requests)):
        for _ in range(4):
            step()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        requests.reading(failing(errno.EIO, always_from=nth + 1))
        with pytest.raises(OffloadError, match="no weight was touched"):
            train()
        assert_same(before, [parameter.detach() for parameter in model.parameters()])
        requests.reading()
        torch.manual_seed(5)
        step()
        planned = gradients(model)
    torch.manual_seed(5)
    step()
    assert_same(planned, gradients(model))


def test_a_slow_disk_makes_a_slow_step_with_the_right_gradients(tmp_path: Path) -> None:
    model, step, graph = recorded()
    torch.manual_seed(5)
    step()
    expected = gradients(model)
    with recoup.apply(
        model, offloading(graph, windows=1), offload_to=DiskStore(tmp_path, requests=FaultyRequests(write=slow(0.002), read=slow(0.002)))
    ) as applied:
        torch.manual_seed(5)
        step()
        assert_same(expected, gradients(model))
        assert applied.report().waited_seconds > 0


class Writes(nn.Module):
    """Writes a result in place, and saves it then; or saves it, and writes it when ``flow`` says so, where nobody sees it."""

    def __init__(self, flow: dict[str, bool] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.flow = flow

    def forward(self, x: Tensor) -> Tensor:
        if self.flow is None:
            return torch.exp(self.linear(x).mul_(2))
        y = torch.sigmoid(self.linear(x))
        z = y.sum()
        if self.flow["write"]:
            with torch.no_grad():
                y.mul_(0)
        return z


def test_writes_in_place_before_a_save_move_what_was_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Writes(), torch.randn(64, 64)

    def step() -> None:
        model(x).sum().backward()

    graph = recoup.record(step, model=model)
    recoup.verify(model, step, offloading(graph), offload_to=tmp_path).raise_if_failed()


@pytest.mark.parametrize("gear", ["live", "static"])
def test_writes_in_place_after_a_save_never_give_a_wrong_gradient(gear: str, tmp_path: Path) -> None:
    """The plan was made for a step that does not write; the step that runs does."""
    torch.manual_seed(0)
    flow = {"write": False}
    model, x = Writes(flow), torch.randn(256, 64)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    graph = recoup.record(step, model=model)
    with recoup.apply(model, offloading(graph, gear), offload_to=tmp_path):
        for _ in range(4):
            step()
        expected = gradients(model)
        flow["write"] = True
        try:
            step()
        except (RuntimeError, ReplayMismatch) as error:
            assert "modified by an inplace operation" in str(error)  # noqa: PT017
        else:
            assert_same(expected, gradients(model))


def test_a_plan_that_does_not_say_how_things_move_is_refused(tmp_path: Path) -> None:
    model, _, graph = recorded()
    plan = msgspec.structs.replace(offloading(graph), traffic=None)
    with pytest.raises(PlanMismatch, match="does not say how it moves"):
        recoup.apply(model, plan, offload_to=tmp_path)


def test_a_plan_for_the_host_is_refused_where_the_host_is_the_device() -> None:
    model, _, graph = recorded()
    plan = offloading(graph)
    assert plan.traffic is not None
    link = msgspec.structs.replace(plan.traffic.link, target="host")
    host = msgspec.structs.replace(plan, traffic=msgspec.structs.replace(plan.traffic, link=link))
    with pytest.raises(OffloadError, match="are already"):
        recoup.apply(model, host)


def test_too_little_space_is_said_before_the_step(tmp_path: Path) -> None:
    model, _, graph = recorded()
    with pytest.raises(OffloadError, match=r"bytes|KiB|MiB"):
        recoup.apply(model, offloading(graph), offload_to=DiskStore(tmp_path, limit_bytes=4096))


def test_removing_the_plan_between_forward_and_backward(tmp_path: Path) -> None:
    model, step, graph = recorded()
    x = torch.randn(64, 32)
    torch.manual_seed(3)
    model.zero_grad()
    model(x).sum().backward()
    expected = gradients(model)
    model.zero_grad()
    torch.manual_seed(3)
    applied = recoup.apply(model, offloading(graph), offload_to=tmp_path)
    loss = model(x).sum()
    applied.remove()
    gc.collect()
    loss.backward()
    assert_same(expected, gradients(model))
    with applied:
        step()
        assert applied.report().offloaded_bytes > 0
