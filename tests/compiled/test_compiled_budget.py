"""A budget of bytes for compiled models: the backend by name, and record, solve, apply, verify and fit on a compiled model."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import config as inductor_config
from torch.nn.parallel import DistributedDataParallel

import recoup
from compiled.models import Block, Stack, left_behind, rows, stepping
from recoup.errors import InfeasibleBudget, PlanMismatch, UsageError
from recoup.graph.rules import check
from recoup.torch import doctor
from recoup.torch.compiled import budgeted, session
from recoup.torch.compiled.backend import _session, _settings, compiled_plan, recoup_backend
from recoup.torch.compiled.detect import is_compiled
from recoup.torch.compiled.emit import emit
from recoup.torch.meter import measure_peak

KERNELS = ("aten", "inductor")


def by_name(model: nn.Module, step: str, budget: str = "60%", kernels: str = "aten", results: str = "held", **options: Any) -> nn.Module:
    asked = {"budget": budget, "kernels": kernels, "step": step, "results": results}
    return torch.compile(model, backend="recoup", options=asked, **options)


def trained(make: Callable[[], nn.Module], compile_: Callable[[nn.Module], Callable[..., Any]], x: Tensor, steps: int = 2) -> list[Tensor]:
    """What some steps of a fresh model leave behind."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = make()
    step = stepping(model, compile_(model), x)
    return [tensor for _ in range(steps) for tensor in [step().detach(), *left_behind(model)]]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


SITUATIONS: dict[str, Callable[[], nn.Module]] = {
    "dropout": Stack,
    "batch norm": lambda: Stack(norm=True),
    "graph break": lambda: Stack(inside="break"),
    "checkpoint": lambda: Stack(inside="checkpoint"),
    "in place": lambda: Stack(inside="in place"),
    "generator": lambda: Stack(draws=torch.Generator().manual_seed(3)),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_gradients_and_buffers_are_those_of_the_step_that_keeps_all(situation: str) -> None:
    make, x = SITUATIONS[situation], rows()
    want = trained(make, lambda model: by_name(model, situation, "100%"), x)
    assert same(trained(make, lambda model: by_name(model, situation, "65%"), x), want)
    plan = compiled_plan({"budget": "65%", "kernels": "aten", "step": situation})
    assert plan is not None
    assert not plan.drops_nothing


def test_inductor_gives_the_same_bits_with_dropout_and_batch_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stock budget gives wrong gradients here, silently: the random operation is drawn anew in its backward."""
    keeping_dead_buffers: list[bool] = []

    def emitting(*args: Any) -> Any:
        keeping_dead_buffers.append(inductor_config.allow_buffer_reuse)
        return emit(*args)

    monkeypatch.setattr(session, "emit", emitting)
    want = trained(lambda: Stack(3, norm=True), lambda model: by_name(model, "inductor", "100%", "inductor"), rows())
    got = trained(lambda: Stack(3, norm=True), lambda model: by_name(model, "inductor", "70%", "inductor"), rows())
    assert same(got, want)
    plan = compiled_plan({"budget": "70%", "kernels": "inductor", "step": "inductor"})
    assert plan is not None
    assert not plan.drops_nothing
    # A plan counts what is dead as gone. Inductor would keep it for later buffers of its size: up to 4 % over the budget, on 12 blocks.
    assert keeping_dead_buffers
    assert not any(keeping_dead_buffers)


def test_dropout_gradients_fit_the_mask_that_the_forward_drew() -> None:
    """The situation of the stock partitioner's fault: the gradient is rebuilt from what the forward kept."""
    weight = nn.Parameter(torch.randn(64, 64) / 8)

    def model(x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.sin(torch.sin(torch.sin(x @ weight))), 0.5, training=True)

    x = torch.randn(64, 64, requires_grad=True)
    y = torch.compile(model, backend="recoup", options={"budget": "80%", "kernels": "aten", "step": "mask"})(x)
    y.sum().backward()
    mask = (y.detach() != 0).double() * 2
    z = x.detach().double().requires_grad_()
    (torch.sin(torch.sin(torch.sin(z @ weight.detach().double()))) * mask).sum().backward()
    assert x.grad is not None
    assert z.grad is not None
    assert torch.allclose(x.grad.double(), z.grad, atol=1e-5)
    plan = compiled_plan({"budget": "80%", "kernels": "aten", "step": "mask"})
    assert plan is not None
    assert not plan.drops_nothing


def test_every_shape_has_its_own_plan_and_the_same_bits() -> None:
    def lengths(call: Callable[..., Any], model: nn.Module) -> list[Tensor]:
        found: list[Tensor] = []
        for count in (64, 96, 130):
            stepping(model, call, rows(count))()
            found += left_behind(model)
        return found

    for dynamic in (False, True):
        results = []
        for budget in ("100%", "85%"):
            torch.compiler.reset()
            torch.manual_seed(0)
            model = Stack()
            results.append(lengths(by_name(model, f"shapes {dynamic}", budget, dynamic=dynamic), model))
        assert same(*results)


def test_backward_twice_and_two_forwards_before_a_backward() -> None:
    def steps(budget: str) -> list[Tensor]:
        torch.compiler.reset()
        torch.manual_seed(0)
        model = Stack()
        call = by_name(model, "twice", budget)
        one, other = call(rows()), call(2 * rows())
        one.backward(retain_graph=True)
        one.backward()
        other.backward()
        return left_behind(model)

    assert same(steps("100%"), steps("60%"))


def test_mixed_precision_and_a_forward_without_backward() -> None:
    def steps(budget: str) -> list[Tensor]:
        torch.compiler.reset()
        torch.manual_seed(0)
        model = Stack()
        call = by_name(model, "mixed", budget)
        with torch.no_grad():
            call(rows())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = call(rows())
        loss.backward()
        return left_behind(model)

    assert same(steps("100%"), steps("80%"))


def test_the_peak_never_rises_when_the_budget_falls_and_is_as_predicted() -> None:
    model, x = Stack(6, drop=0.0), rows(512)
    call = torch.compile(model, backend="recoup", options={"kernels": "aten", "budget": "1GiB"})
    step = stepping(model, call, x)
    graph = recoup.record(step, model=call)
    check(graph)
    peaks = []
    for share in (1.0, 0.85, 0.7, 0.55):
        plan = recoup.solve(graph, int(share * recoup.simulate(graph, recoup.solve(graph, "100%")).peak_bytes))
        with recoup.apply(call, plan):
            step()
            peaks.append(measure_peak(step, call))
        assert peaks[-1] <= plan.peak_bytes <= plan.budget_bytes
        assert peaks[-1] >= 0.95 * plan.peak_bytes
    assert peaks == sorted(peaks, reverse=True)


class Row(nn.Module):
    """Blocks that are compiled one by one."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(32, 0.1) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("by", ["backend", "fit"])
def test_blocks_compiled_one_by_one_share_one_budget(by: str) -> None:
    """The blocks are alike, but their decisions are not: the last ones keep what the first ones drop."""
    x = rows()

    def regional(model: nn.Module, budget: str) -> nn.Module:
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile(backend="recoup", options={"budget": budget, "kernels": "aten", "step": f"regional {by}"})
        return model

    want = trained(Row, lambda model: regional(model, "100%"), x)
    if by == "backend":
        assert same(trained(Row, lambda model: regional(model, "70%"), x), want)
        plan = compiled_plan({"budget": "70%", "kernels": "aten", "step": f"regional {by}"})
        assert plan is not None
    else:
        torch.compiler.reset()
        torch.manual_seed(0)
        model = regional(Row(), "100%")
        step = stepping(model, model, x)
        with recoup.fit(model, step, "70%") as fitted:
            got = [tensor for _ in range(2) for tensor in [step().detach(), *left_behind(model)]]
        assert same(got, want)
        plan = fitted.plan
        assert plan.recompute_sites
        assert all(site.startswith("blocks.") for site in plan.recompute_sites)
        dropped = {site.split("/")[0].split(".")[1] for site in plan.recompute_sites}
        assert dropped != {"0", "1", "2", "3"} or len({sum(f"blocks.{n}." in site for site in plan.recompute_sites) for n in range(4)}) > 1


def test_a_graph_break_is_named_and_the_rest_is_planned_in_pieces() -> None:
    model, x = Stack(inside="break"), rows()
    call = torch.compile(model, backend="recoup", options={"kernels": "aten", "budget": "1GiB"})
    graph = recoup.record(stepping(model, call, x), model=call)
    check(graph)
    assert graph.environment["compiled graphs"] == "2"
    assert "graph_break" in graph.environment["graph breaks"]
    plan = recoup.solve(graph, "70%")
    assert {site.split("/")[0][:8] for site in plan.recompute_sites} & {"blocks.0", "blocks.1"}
    # What the first graph hands to the second is one storage: nothing is counted twice.
    assert graph.measured_peak_bytes is not None
    unplanned = recoup.simulate(graph, recoup.solve(graph, "100%")).peak_bytes
    assert graph.measured_peak_bytes <= unplanned <= 1.05 * graph.measured_peak_bytes


def test_fit_on_a_compiled_model_verifies_saves_and_applies_again(tmp_path: Path) -> None:
    model, x = Stack(), rows()
    call = torch.compile(model, backend="recoup", options={"kernels": "aten", "budget": "1GiB"})
    step = stepping(model, call, x)
    with recoup.fit(call, step, "70%") as fitted:
        assert fitted.verification.passed
        report = fitted.report()
        step()
        assert fitted.report().dropped_bytes > report.dropped_bytes
        want = left_behind(model)
    assert (fitted.plan.frontend, fitted.plan.gear) == ("torch-compile", "compiled")
    fitted.plan.save(tmp_path / "plan.json")
    with recoup.apply(call, recoup.load_plan(tmp_path / "plan.json")) as applied:
        step()
        assert same(left_behind(model), want)
        assert applied.report().sites_met == applied.report().sites_expected


def test_a_plan_for_something_else_is_refused() -> None:
    model, x = Stack(), rows()
    call = torch.compile(model, backend="recoup", options={"kernels": "aten", "budget": "1GiB"})
    step = stepping(model, call, x)
    plan = recoup.solve(recoup.record(step, model=call), "70%")
    with pytest.raises(PlanMismatch, match="torch-eager"):
        recoup.apply(call, replace(plan, frontend="torch-eager"))
    with pytest.raises(PlanMismatch, match="PyTorch eager"):
        recoup.apply(Stack(), plan)
    other = Row(2)
    strange = torch.compile(other, backend="recoup", options={"kernels": "aten", "budget": "1GiB"})
    wrong = stepping(other, strange, x)
    elsewhere = replace(plan, decisions=tuple(replace(one, site=f"encoder.{one.site}", held_from="") for one in plan.decisions))
    with recoup.apply(strange, elsewhere):
        wrong()
        with pytest.raises(PlanMismatch, match=r"no compiled graph of this step has"):
            wrong()
    with recoup.apply(call, plan), pytest.raises(UsageError, match="applied"):
        recoup.apply(call, plan)


def test_compiling_the_same_again_asks_no_solver(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    make, x = Stack, rows()
    with caplog.at_level(logging.INFO, logger="recoup"):
        first = trained(make, lambda model: by_name(model, "again"), x)
    assert any("predicted peak" in record.getMessage() for record in caplog.records)
    monkeypatch.setattr("recoup.torch.compiled.budgeted.solve", lambda *_, **__: pytest.fail("the solver was asked again"))
    assert same(trained(make, lambda model: by_name(model, "again"), x), first)


def test_errors_name_the_option_and_the_least_peak() -> None:
    model, x = Stack(), rows()
    with pytest.raises(BackendCompilerFailed, match="needs a budget"):
        torch.compile(model, backend="recoup")(x)
    with pytest.raises(BackendCompilerFailed, match="'inductor' or 'aten', not 'metal'"):
        by_name(model, "errors", kernels="metal")(x)
    with pytest.raises(UsageError, match="no option is called 'epilogue'"):
        recoup_backend(torch.fx.symbolic_trace(nn.Identity()), [x], options={"budget": "1GiB", "kernels": "aten", "epilogue": True})
    with pytest.raises(BackendCompilerFailed, match="least peak found is"):
        by_name(model, "errors", "1KiB")(x)


def test_what_stands_beside_the_graphs_is_counted_on_top() -> None:
    peaks = []
    for standing in (0, "1MiB"):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = Stack()
        options = {"budget": "1GiB", "kernels": "aten", "step": "standing", "standing_bytes": standing}
        stepping(model, torch.compile(model, backend="recoup", options=options), rows())()
        plan = compiled_plan(options)
        assert plan is not None
        peaks.append(plan.peak_bytes)
    assert peaks[1] == peaks[0] + 2**20


class WithResult(Stack):
    """Returns its loss, and what it was made from."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y = self.row(x, 0, len(self.blocks))
        return y.square().mean(), y


def test_results_that_are_let_go_are_not_counted_and_one_that_is_not_is_named() -> None:
    peaks, x = {}, rows(512)
    for results in ("held", "released"):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = WithResult(drop=0.0)
        options = {"budget": "100%", "kernels": "aten", "step": "results", "results": results}
        call = torch.compile(model, backend="recoup", options=options)
        step = stepping(model, lambda x, call=call: call(x)[0], x)
        step()
        plan = compiled_plan(options)
        assert plan is not None
        peaks[results] = plan.peak_bytes, measure_peak(step, model)
    assert peaks["held"][1] == peaks["released"][1]
    y_bytes = x.untyped_storage().nbytes()
    assert peaks["held"][0] - peaks["released"][0] == y_bytes
    assert 0 <= peaks["released"][0] + 64 - peaks["released"][1] <= 0.02 * peaks["released"][1]  # 64: the loss and its gradient
    loss, kept = call(x)
    with pytest.raises(UsageError, match="result 1 of graph 0 is still there"):
        loss.backward()
    del kept
    with pytest.raises(BackendCompilerFailed, match="'held' or 'released', not 'gone'"):
        by_name(model, "results", results="gone")(x)


def test_graphs_that_are_never_called_again_are_let_go() -> None:
    options = {"budget": "85%", "kernels": "aten", "step": "let go"}
    for count in (64, 96, 130):
        torch.compiler.reset()  # what dynamo does with the code of a shape that it drops
        model = Stack(2)
        stepping(model, torch.compile(model, backend="recoup", options=options, dynamic=False), rows(count))()
    session, _ = _session(_settings(options), {})
    gc.collect()
    assert [piece.number for piece in session.pieces] == [2]


def test_plans_not_asked_for_the_longest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgeted, "_SOLVED", 2)
    model, x = Stack(2), rows()
    for share in ("100%", "95%", "90%"):
        torch.compiler.reset()
        stepping(model, by_name(model, "forgotten", share), x)()
    assert [key[2].budget.text for key in budgeted._solved] == ["95%", "90%"]


def test_a_share_that_is_too_small_is_refused_once_the_step_is_known() -> None:
    model, x = Stack(inside="break"), rows()
    step = stepping(model, by_name(model, "too small", "5%"), x)
    step()
    _, chooser = _session(_settings({"budget": "5%", "kernels": "aten", "step": "too small"}), {})
    assert chooser.shortfall is not None
    assert chooser.shortfall.__traceback__ is None  # it would keep what the frames of the first step hold
    with pytest.raises(InfeasibleBudget, match="least peak found"):
        step()


def test_doctor_tries_the_compilers_interfaces() -> None:
    found = {check.name: check for check in doctor()}
    assert found["the joint graph can be split at chosen nodes"].passed
    assert found["extraction takes the arguments known"].passed


def test_eager_models_do_without_the_compiler() -> None:
    code = """
import sys, torch, recoup
model = torch.nn.Linear(2, 2)
plan = recoup.solve(recoup.record(lambda: model(torch.ones(1, 2)).sum().backward(), model=model, runs=1), "100%")
recoup.apply(model, plan).remove()
print([name for name in sys.modules if name in ("torch._functorch.partitioners", "recoup.torch.compiled.interfaces")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "[]\n", done.stderr


def test_a_compiled_model_is_known_as_one() -> None:
    model = Row(2)
    assert not is_compiled(model)
    assert is_compiled(torch.compile(model, backend="eager"))
    model.blocks[0].compile(backend="eager")
    assert is_compiled(model)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("around", [False, True])
def test_data_parallel_around_and_inside(around: bool) -> None:
    def wrapped(model: nn.Module, budget: str) -> nn.Module:
        options = {"budget": budget, "kernels": "aten", "step": f"ddp {around}"}
        if around:
            return torch.compile(DistributedDataParallel(model, bucket_cap_mb=0.01), backend="recoup", options=options)
        return DistributedDataParallel(torch.compile(model, backend="recoup", options=options), bucket_cap_mb=0.01)

    budget = "96%"  # what crosses from one piece to the next is kept
    want = trained(Stack, lambda model: wrapped(model, "100%"), rows(), steps=3)
    assert same(trained(Stack, lambda model: wrapped(model, budget), rows(), steps=3), want)
    plan = compiled_plan({"budget": budget, "kernels": "aten", "step": f"ddp {around}"})
    assert plan is not None
    assert not plan.drops_nothing
    assert plan.peak_bytes <= plan.budget_bytes
