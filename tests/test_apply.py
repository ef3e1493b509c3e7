"""Applying a plan: gradients as plain, peak as promised, and no trace left, whatever happens on the way."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from benchmarks.workloads import load
from cases.situations import GEARS, Result, Step, everything, plan_equals_plain, planned, same
from recoup.errors import InfeasibleBudget, PlanMismatch, UsageError
from recoup.graph import StepGraph
from recoup.graph.peak import peak_bytes
from recoup.plan import Plan
from recoup.plan.capabilities import capabilities
from recoup.solve import least_peak, solve
from recoup.torch import apply, measure_peak, record
from recoup.torch.meter import CpuMeter
from recoup.torch.private import below_modes, outer_saved_tensor_hooks
from recoup.torch.state import same_bits
from recoup.verify import verify

# Tiny, but with enough samples that activations outweigh weights.
SIZES: dict[str, dict[str, int]] = {
    **{name: {"batch": 16} for name in ("gpt2", "llama", "bert", "vit", "mixtral", "resnet", "lora")},
    **{name: {"batch": 8} for name in ("t5", "unet")},
    "chain": {"batch": 32, "image": 16},
}


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> Iterator[None]:
    """Recording collects garbage; what the imports made need not be looked through every time."""

    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    gc.enable()
    assert below_modes() == 0
    assert outer_saved_tensor_hooks() is None
    assert not torch.is_autocast_enabled("cpu")


@functools.cache
def workload(name: str) -> tuple[nn.Module, Callable[[], object], StepGraph]:
    model, step = load(name, tiny=True, **SIZES[name])
    return model, step, record(step, model=model, runs=1, name=name)


@functools.cache
def tightest(name: str, gear: str) -> int:
    return least_peak(workload(name)[2], capabilities(gear))[0]


def budget_of(name: str, gear: str, share: float) -> int:
    """75 % of the unplanned peak, or what is needed at least; or a factor on the latter."""
    least = tightest(name, gear)
    return int(least * share) if share > 1 else max(int(peak_bytes(workload(name)[2]) * share), least)


# -- the ten workloads


@pytest.mark.parametrize("share", [0.75, 1.05])
@pytest.mark.parametrize("gear", GEARS)
@pytest.mark.parametrize("name", SIZES)
def test_gradients_and_peak_are_as_promised(name: str, gear: str, share: float) -> None:
    model, step, graph = workload(name)
    budget = budget_of(name, gear, share)
    plan = solve(graph, budget, gear=gear)
    assert not plan.drops_nothing
    assert plan.peak_bytes <= budget < plan.unplanned_peak_bytes
    found = verify(model, step, plan, steps=10, measure=False)
    assert [check for check in found.checks if not check.passed] == []
    assert {"gradients after step 1", "gradients after step 10"} <= {check.name for check in found.checks}
    with apply(model, plan) as applied:
        for _ in range(3):
            step()
        measured = measure_peak(step, model)
        report = applied.report()
    assert report.dropped_bytes > 0
    assert report.kept == {}
    assert report.sites_met == report.sites_expected > 0
    assert (report.live_calls, report.static_calls) == ((3, 2) if gear == "static" else (5, 0))
    assert measured <= budget
    assert plan.peak_bytes * 0.97 <= measured <= plan.peak_bytes


@pytest.mark.parametrize("gear", GEARS)
@pytest.mark.parametrize("name", SIZES)
def test_gradients_add_up_as_plain(name: str, gear: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two backward passes before gradients are cleared."""
    model, step, graph = workload(name)
    plan = solve(graph, budget_of(name, gear, 1.05), gear=gear)
    monkeypatch.setattr(model, "zero_grad", lambda **_: None)
    found = verify(model, step, plan, steps=2, measure=False)
    assert [check for check in found.checks if not check.passed] == []


@pytest.mark.parametrize("gear", GEARS)
def test_below_the_least_nothing_fits(gear: str) -> None:
    least = tightest("resnet", gear)
    with pytest.raises(InfeasibleBudget) as caught:
        solve(workload("resnet")[2], least // 2, gear=gear)
    assert least // 2 < caught.value.least_bytes
    assert solve(workload("resnet")[2], caught.value.least_bytes, gear=gear).peak_bytes <= caught.value.least_bytes


# -- small models


class Small(nn.Module):
    """Two blocks, with batch norm and dropout, that take flags."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(dropout)) for _ in range(2))
        )
        self.last = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.sin(self.blocks(x)))


def make(dropout: float = 0.0) -> tuple[Small, Step]:
    model = Small(dropout)

    def step() -> Result:
        model.zero_grad()
        y = model(torch.randn(24, 32))
        y.square().sum().backward()
        return {"y": y}

    return model, step


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def after(model: nn.Module, step: Callable[[], object], seed: int = 5) -> Result:
    """Gradients and buffers that one step under a seed leaves."""
    torch.manual_seed(seed)
    step()
    return {**gradients(model), **{name: buffer.clone() for name, buffer in model.named_buffers()}}


def reset(model: nn.Module, state: dict[str, Tensor]) -> None:
    model.load_state_dict(state)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("gear", GEARS)
def test_removal_leaves_no_trace(gear: str) -> None:
    model, step, plan = planned(make, gear)
    step()
    hooks = [name for name in vars(model) if name.endswith("hooks")]
    assert hooks

    def trace() -> list[object]:
        return [
            (path, {key: id(value) for key, value in vars(module).items()}, {key: dict(getattr(module, key)) for key in hooks})
            for path, module in model.named_modules()
        ]

    before, keys = trace(), list(model.state_dict())
    applied = apply(model, plan, gear)
    for _ in range(5):
        step()
    assert list(model.state_dict()) == keys
    assert all(not getattr(module, key) for module in model.modules() for key in hooks)
    applied.remove()
    applied.remove()
    assert trace() == before
    calls = applied.report()
    step()
    assert applied.report() == calls
    with apply(model, plan, gear) as again:
        step()
    assert again.report().dropped_bytes > 0
    assert trace() == before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_a_copy_runs_plain_and_can_be_planned_itself(copied: Callable[[nn.Module], nn.Module]) -> None:
    model, step, plan = planned(make, "live")
    with apply(model, plan) as applied:
        step()
        other = copied(model)
        assert all("_compiled_call_impl" not in vars(module) or module._compiled_call_impl is None for module in other.modules())
        live = applied.report().live_calls
        other(torch.randn(24, 32)).sum().backward()
        assert applied.report().live_calls == live
        with apply(other, plan) as second:
            other(torch.randn(24, 32)).sum().backward()
            assert second.report().dropped_bytes > 0
        assert applied.report().live_calls == live


def test_a_second_plan_is_refused_until_the_first_is_off() -> None:
    model, step, plan = planned(make, "live")
    with apply(model, plan):
        with pytest.raises(UsageError, match=r"applied to this Small already; call remove\(\)"):
            apply(model, plan)
        with pytest.raises(UsageError, match="already"):
            record(step, model=model)
        with pytest.raises(UsageError, match="already"):
            verify(model, step, plan)
        step()
    with apply(model, plan):
        step()


def test_a_plan_of_another_model_names_the_first_site() -> None:
    _, _, plan = planned(make, "live")
    other = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    with pytest.raises(PlanMismatch, match=r"the plan names blocks\.0\.0/addmm, but the model has no module 'blocks\.0\.0'"):
        apply(other, plan)
    assert "_compiled_call_impl" not in vars(other)
    assert apply(other, replace(plan, decisions=())).report().live_calls == 0


def test_a_plan_of_a_deeper_model_is_refused_and_one_of_a_wider_runs() -> None:
    def sized(width: int, layers: int) -> tuple[nn.Module, Step]:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))

        def step() -> Result:
            model.zero_grad()
            model(torch.randn(24, width)).sum().backward()
            return {}

        return model, step

    model, step = sized(32, 3)
    plan = everything(record(step, model=model, runs=1), "live")
    with pytest.raises(PlanMismatch, match=r"no module '2\.0'"):
        apply(sized(32, 2)[0], plan)
    wide, step = sized(48, 3)
    base = after(wide, step)
    with apply(wide, plan) as applied:
        assert same(base, after(wide, step))
    assert applied.report().unplanned_shapes == ("24x48:float32",)


# -- input shapes


def calls_of(model: nn.Module, *rows: int) -> list[dict[str, Tensor | None]]:
    found = []
    for count in rows:
        model.zero_grad()
        torch.manual_seed(count)
        model(torch.randn(count, 32)).square().sum().backward()
        found.append(gradients(model))
    return found


def plan_at(rows: int) -> tuple[nn.Module, Plan]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
    graph = record(lambda: model(torch.ones(rows, 32)).square().sum().backward(), model=model, runs=1)
    return model, everything(graph, "live")


def test_new_shapes_reuse_keep_or_raise() -> None:
    model, plan = plan_at(24)
    base = calls_of(model, 24, 8, 24, 40)
    with apply(model, plan) as applied:
        assert same(base, calls_of(model, 24, 8, 24, 40))
    report = applied.report()
    assert (report.live_calls, report.plain_calls) == (4, 0)
    assert report.unplanned_shapes == ("8x32:float32", "40x32:float32")
    with apply(model, plan, new_shape="keep") as applied:
        assert same(base, calls_of(model, 24, 8, 24, 40))
    assert (applied.report().live_calls, applied.report().plain_calls) == (2, 2)
    with apply(model, plan, new_shape="raise") as applied:
        assert same(base[:1], calls_of(model, 24))
        with pytest.raises(PlanMismatch, match=r"no plan for inputs 8x32:float32; there are plans for 24x32:float32"):
            calls_of(model, 8)
        assert same(base[2:3], calls_of(model, 24))


def test_a_plan_may_be_added_for_another_shape() -> None:
    model, plan = plan_at(24)
    _, other = plan_at(8)
    assert (plan.signature, other.signature) == ("24x32:float32", "8x32:float32")
    base = calls_of(model, 24, 8, 24)
    with apply(model, plan, new_shape="raise") as applied:
        applied.add_plan(other)
        assert same(base, calls_of(model, 24, 8, 24))
        report = applied.report()
        assert report.live_calls == 3
        assert report.unplanned_shapes == ()
        assert report.sites_met == report.sites_expected
        with pytest.raises(PlanMismatch, match="steps with 2 calls of the model, the one applied for 1"):
            applied.add_plan(replace(other, root_calls=2))
        foreign = planned(make, "live")[2]
        with pytest.raises(PlanMismatch, match=r"no module 'blocks"):
            applied.add_plan(foreign)


def test_a_plan_for_a_shape_may_come_after_one_that_drops_nothing() -> None:
    model, plan = plan_at(24)
    base = calls_of(model, 24, 8)
    applied = apply(model, replace(plan, decisions=(), signature="8x32:float32"))
    assert same(base, calls_of(model, 24, 8))
    assert applied.report().live_calls == 0
    applied.add_plan(plan)
    assert same(base, calls_of(model, 24, 8))
    assert applied.report().dropped_bytes > 0
    applied.remove()


# -- what happens on the way


@pytest.mark.parametrize("gear", GEARS)
def test_a_forward_without_a_backward(gear: str) -> None:
    model, step, plan = planned(make, gear)
    state = state_of(model)
    model(torch.ones(24, 32))
    base = after(model, step)
    reset(model, state)
    for _ in range(3):
        with apply(model, plan, gear):
            for _ in range(5):
                step()
            reset(model, state)
            model(torch.ones(24, 32))
            assert same(base, after(model, step))
        reset(model, state)


class Interrupted(Small):
    """Raises in the forward or in the backward if told so."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.told: list[tuple[str, type[BaseException]]] = []

    def _maybe(self, where: str) -> None:
        if self.told and self.told[0][0] == where:
            raise self.told.pop()[1](where)

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(x)
        self._maybe("forward")
        y = torch.sin(y)
        y.register_hook(lambda grad: self._maybe("backward"))
        return self.last(torch.sin(y))


def interruptible() -> tuple[Interrupted, Step]:
    model = Interrupted()

    def step() -> Result:
        model.zero_grad()
        model(torch.randn(24, 32)).square().sum().backward()
        return {}

    return model, step


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("gear", GEARS)
def test_the_step_after_an_interrupt_is_right(gear: str, where: str, kind: type[BaseException]) -> None:
    model, step, plan = planned(interruptible, gear)
    state = state_of(model)
    base = after(model, step)
    reset(model, state)
    with apply(model, plan, gear) as applied:
        for _ in range(4):
            step()
        for _ in range(2):
            model.told.append((where, kind))
            with pytest.raises(kind, match=where):
                step()
            assert below_modes() == 0
            assert outer_saved_tensor_hooks() is None
            assert torch._C._current_graph_task_id() == -1
            reset(model, state)
            assert same(base, after(model, step))
        assert bool(applied.report().static_calls) == (gear == "static")
    reset(model, state)
    assert same(base, after(model, step))


@pytest.mark.parametrize("gear", GEARS)
def test_two_threads_with_a_planned_model_each(gear: str) -> None:
    wrong: list[str] = []

    def train(number: int) -> None:
        torch.set_num_threads(1)
        model, plan = ready[number]
        plain = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(number)
        with apply(model, plan, gear) as applied:
            for _ in range(12):
                x = torch.randn(24, 32, generator=generator)
                for one in (plain, model):
                    one.zero_grad()
                    one(x).square().sum().backward()
                wrong.extend(name for name, value in gradients(plain).items() if not same(value, gradients(model)[name]))
                met.wait()
        if not applied.report().dropped_bytes or bool(applied.report().static_calls) != (gear == "static"):
            wrong.append("nothing dropped")

    ready = []
    for _ in range(2):
        model, _, plan = planned(make, gear)
        ready.append((model, plan))
    met = threading.Barrier(2, timeout=60)
    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert not met.broken


@pytest.mark.parametrize("gear", GEARS)
def test_one_planned_model_called_in_two_threads(gear: str) -> None:
    model, _, plan = planned(make, gear)
    model.eval()
    x = torch.randn(24, 32)
    want = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    found: list[bool] = []

    def train() -> None:
        torch.set_num_threads(1)
        for _ in range(8):
            got = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
            found.append(all(same_bits(a, b) for a, b in zip(want, got, strict=True)))

    with apply(model, plan, gear) as applied:
        threads = [threading.Thread(target=train) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert applied.report().dropped_bytes > 0
    assert found == [True] * 16


def in_eval() -> tuple[nn.Module, Step]:
    model, step = make(0.3)
    model.eval()
    return model, step


def with_scaler() -> tuple[nn.Module, Step]:
    model = Small(0.0)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def step() -> Result:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(24, 32)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return {"loss": loss, "scale": scaler.get_scale(), **{name: p.detach().clone() for name, p in model.named_parameters()}}

    return model, step


def retained() -> tuple[nn.Module, Step]:
    model = Small(0.0)

    def step() -> Result:
        model.zero_grad()
        loss = model(torch.randn(24, 32)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        once = gradients(model)
        loss.backward()
        return {"after two": once}

    return model, step


class Tied(nn.Module):
    """The first and the last weight are one, and the middle runs three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32), nn.Tanh()), nn.Linear(32, 32)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for _ in range(3):
            x = self.middle(x)
        return torch.tanh(self.last(x))


def tied() -> tuple[nn.Module, Step]:
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step() -> Result:
        optimizer.zero_grad()
        model(torch.randn(24, 32)).square().sum().backward()
        optimizer.step()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    return model, step


def accumulating() -> tuple[nn.Module, Step]:
    """Two outermost calls in one step, the second forward before the first backward."""
    model = Small(0.0)

    def step() -> Result:
        model.zero_grad()
        first = model(torch.randn(24, 32)).square().sum()
        second = model(torch.randn(24, 32)).square().sum()
        first.backward()
        second.backward()
        return {}

    return model, step


RUNS = {
    "eval": in_eval,
    "autocast and a gradient scaler": with_scaler,
    "retain_graph twice": retained,
    "tied weights, a module three times": tied,
    "two calls in a step": accumulating,
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("gear", GEARS)
def test_steps_of_every_kind_are_as_plain(name: str, gear: str) -> None:
    report = plan_equals_plain(RUNS[name], gear)
    assert report.kept == {}
    assert report.sites_met == report.sites_expected


@pytest.mark.parametrize("gear", GEARS)
def test_a_double_backward_under_a_plan_for_a_single_one(gear: str) -> None:
    def smooth() -> tuple[nn.Module, Step]:
        model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())

        def step() -> Result:
            model.zero_grad()
            model(torch.randn(24, 32, requires_grad=True)).square().sum().backward()
            return {}

        return model, step

    def twice() -> Result:
        model.zero_grad()
        x = torch.randn(24, 32, requires_grad=True)
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        return {"x": x.grad}

    model, step, plan = planned(smooth, gear)
    base = after(model, twice)
    with apply(model, plan, gear) as applied:
        for _ in range(4):
            step()
        assert same(base, after(model, twice))
        assert same(base, after(model, twice))
        report = applied.report()
    assert report.dropped_bytes > 0
    assert bool(report.static_calls) == (gear == "static")


@pytest.mark.parametrize("gear", GEARS)
def test_a_double_backward_that_was_recorded_keeps_what_it_must(gear: str) -> None:
    """The first backward saves tensors of the forward outside of the call that made them: those are kept, by the record."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())

    def step() -> None:
        model.zero_grad()
        x = torch.ones(24, 32, requires_grad=True)
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()

    graph = record(step, model=model, runs=1)
    tanh = [storage for storage in graph.storages if storage.site in ("1/tanh", "3/tanh")]
    assert [storage.replayable for storage in tanh] == ["saved outside of the outermost module call that made it"] * 2
    base = after(model, step)
    with apply(model, everything(graph, gear), gear):
        for _ in range(5):
            assert same(base, after(model, step))


@pytest.mark.parametrize("gear", GEARS)
def test_nothing_is_left_from_step_to_step(gear: str) -> None:
    model, step, plan = planned(make, gear)
    with apply(model, plan, gear) as applied:
        for _ in range(5):
            step()
        gc.collect()
        gc.disable()

        def two() -> None:
            step()
            step()

        assert CpuMeter().net_and_peak(two, before=step)[0] == 0
        gc.enable()
        assert applied.report().dropped_bytes > 0
        assert bool(applied.report().static_calls) == (gear == "static")


@pytest.mark.parametrize("gear", GEARS)
def test_a_backward_after_the_removal_is_right(gear: str) -> None:
    model, step, plan = planned(make, gear)
    state = state_of(model)
    x = torch.randn(24, 32)
    model.zero_grad()
    model(x).square().sum().backward()
    base = gradients(model)
    with apply(model, plan, gear):
        for _ in range(4):
            step()
        reset(model, state)
        model.zero_grad()
        y = model(x)
    y.square().sum().backward()
    assert same(base, gradients(model))
