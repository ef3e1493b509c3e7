"""The joint graph as a step graph, and choices run on it exactly as simulated."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, fx, nn

from compiled.models import Stack, left_behind, rows, stepping
from recoup.graph.rules import check
from recoup.graph.step import StepGraph
from recoup.plan import COMPILED
from recoup.simulate import Simulation, simulate
from recoup.simulate.index import replays
from recoup.solve.choice import droppable, prune
from recoup.torch.compiled.emit import emit
from recoup.torch.compiled.interfaces import CustomPartitionerFn, aten_compiler
from recoup.torch.compiled.joint import OUTSIDE, Joint, joint_of
from recoup.torch.compiled.loops import loops
from recoup.torch.compiled.pricing import price_of, priced
from recoup.torch.meter import measure_peak


class Chosen(CustomPartitionerFn):
    """Splits by a choice made from the joint graph, and remembers both."""

    def __init__(self, choose: object = None, fuses: bool = False) -> None:
        self.choose = choose
        self.fuses = fuses
        self.joint: Joint | None = None
        self.simulation: Simulation | None = None

    def uuid(self) -> None:
        return None

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: object) -> tuple[fx.GraphModule, fx.GraphModule]:
        static = options.get("static_lifetime_input_indices") or ()
        joint = self.joint = priced(joint_of(gm, options["num_fwd_outputs"], static, fuses=self.fuses))  # type: ignore[arg-type]
        recompute, held = self.choose(joint.graph) if callable(self.choose) else (frozenset(), {})
        self.simulation = simulate(joint.graph, recompute, COMPILED, held)
        return emit(joint, recompute, held)


def compiled(model: nn.Module, chosen: Chosen) -> nn.Module:
    torch.compiler.reset()
    compile_with = aten_compiler()
    return torch.compile(model, backend=lambda gm, inputs: compile_with(gm, inputs, chosen))


def recorded(model: nn.Module, x: Tensor, fuses: bool = False) -> Joint:
    chosen = Chosen(fuses=fuses)
    stepping(model, compiled(model, chosen), x)()
    assert chosen.joint is not None
    return chosen.joint


def test_a_joint_graph_keeps_the_rules_and_names_its_modules() -> None:
    graph = recorded(Stack(norm=True), rows()).graph
    check(graph)
    sites = {storage.site for storage in graph.storages}
    assert {f"blocks.{number}.up/addmm" for number in range(4)} <= sites
    assert [op.target for op in graph.ops].count(OUTSIDE) == 1
    assert graph.ops[graph.backwards[0]].target == OUTSIDE


def test_views_are_no_storages() -> None:
    graph = recorded(Stack(), rows()).graph
    assert not [op for op in graph.ops if op.target in ("aten.view.default", "aten.t.default", "aten.detach.default")]


def test_what_batch_norm_writes_is_read_once() -> None:
    """Statistics are written at the end of the forward, so what reads them cannot be replayed; later calls read the first one's."""
    graph = recorded(Stack(norm=True), rows()).graph
    site = "norm/_native_batch_norm_legit_functional"
    reasons = {storage.site: storage.replayable for storage in graph.storages if storage.site.startswith(site) and storage.bytes > 1024}
    assert "writes in place" in reasons.pop(site)
    assert list(reasons.values()) == [""] * 3


@pytest.mark.parametrize("seed", range(6))
def test_any_choice_runs_as_simulated_and_gives_the_same_bits(seed: int) -> None:
    """Random choices, copies held from random moments: equal gradients, and never more memory than was said."""
    draw = random.Random(seed)
    model, x = Stack(norm=seed % 2 == 0), rows()
    buffers = [buffer.clone() for buffer in model.buffers()]
    plain = Chosen()
    step = stepping(model, compiled(model, plain), x)
    step()
    want = left_behind(model)
    unplanned = measure_peak(step, model)

    def choose(graph: StepGraph) -> tuple[frozenset[int], dict[int, int]]:
        index = replays(graph)
        picked = prune(index, frozenset(v for v in sorted(droppable(index, COMPILED)) if draw.random() < 0.7))
        held = {v: draw.choice(sorted(picked)) for v in picked if draw.random() < 0.4}
        return picked, held

    chosen = Chosen(choose)
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    step = stepping(model, compiled(model, chosen), x)
    step()
    assert all(torch.equal(got, wanted) for got, wanted in zip(left_behind(model), want, strict=True))
    assert plain.simulation is not None
    assert chosen.simulation is not None
    assert chosen.simulation.replayed_ops > 0
    # What the step graph does not know (the loss, numbers) is the same for both.
    beside = unplanned - plain.simulation.peak_bytes
    assert measure_peak(step, model) <= chosen.simulation.peak_bytes + max(beside, 0) + 64


def test_a_loop_is_one_operation_and_holds_all_it_reads() -> None:
    alone, fused = recorded(Stack(drop=0.0), rows()).graph, recorded(Stack(drop=0.0), rows(), fuses=True).graph
    check(fused)
    assert len(fused.ops) < len(alone.ops)
    assert {storage.site for storage in fused.storages if storage.site and not storage.site.startswith("~")} == {
        storage.site for storage in alone.storages if storage.site and not storage.site.startswith("~")
    }
    assert any(op.target.startswith("recoup.loop.") for op in fused.ops)


def test_loops_come_after_what_they_read() -> None:
    joint = recorded(Stack(), rows(), fuses=True)
    nodes = [node for node in joint.module.graph.nodes if node.op == "call_function"]
    place: dict[fx.Node, int] = {}
    for number, group in enumerate(loops(nodes)):
        place |= dict.fromkeys(group, number)
    assert len(place) == len(nodes)
    assert all(place[argument] <= place[node] for node in nodes for argument in node.all_input_nodes if argument in place)


@torch.library.custom_op("recoup_tests::picky", mutates_args=())
def picky(x: Tensor) -> Tensor:
    """Fails on numbers that are all the same, as made-up ones are."""
    if bool((x == x.reshape(-1)[0]).all()):
        raise ValueError("all the same")
    return x.clone()


@picky.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_what_cannot_be_run_on_made_up_numbers_costs_at_least_its_bytes() -> None:
    made = []
    for count in (256, 4096):
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(count, 256)
        node = graph.call_function(torch.ops.recoup_tests.picky.default, (x,))
        node.meta["val"] = torch.empty(count, 256)
        made.append(price_of(node))
    small, large = made
    assert {small.provenance, large.provenance} == {"modelled"}
    assert 0 < small.seconds < large.seconds
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4096, 256)
    copied = graph.call_function(torch.ops.aten.clone.default, (x,))
    copied.meta["val"] = torch.empty(4096, 256)
    assert large.seconds == pytest.approx(price_of(copied).seconds, rel=2)  # a copy moves just as much
