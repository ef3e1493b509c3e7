"""Storages that come back, go, and come back again: the simulator's numbers, both gears on real models, and the plan file."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import graphs
from benchmarks.workloads import load
from cases.situations import GEARS
from recoup.errors import PlanMismatch
from recoup.graph import StepGraph
from recoup.graph.peak import peak_bytes
from recoup.graph.site import collapse_pairs, expand
from recoup.plan import LIVE, STATIC, Decision, Plan
from recoup.plan.capabilities import capabilities
from recoup.plan.file import load_plan
from recoup.simulate import plan_holds, plan_ids, simulate, simulate_plan, violations
from recoup.simulate.index import replays
from recoup.simulate.judge import run
from recoup.solve import Choice
from recoup.solve.choice import droppable, runnable
from recoup.solve.planning import plan_of
from recoup.torch import apply, record
from recoup.verify import verify


def made_plan(graph: StepGraph, recompute: frozenset[int], held_from: dict[int, int], gear: str) -> Plan:
    executor = capabilities(gear)
    found = simulate(graph, recompute, executor, held_from)
    choice = Choice(recompute, held_from=held_from)
    return plan_of(graph, choice, found, executor, simulate(graph), strategy="made", budget_bytes=found.peak_bytes, solve_seconds=0.0)


def waiting(graph: StepGraph, gear: str, seed: int, share: float) -> tuple[frozenset[int], dict[int, int]]:
    """A random choice, and random storages from which on its copies are held."""
    index, pick = replays(graph), random.Random(seed)
    chosen = runnable(
        index, frozenset(v for v in sorted(droppable(index, capabilities(gear))) if pick.random() < share), capabilities(gear)
    )
    asked = [v for v in sorted(chosen) if v in index.unpacked]
    return chosen, {v: pick.choice(asked) for v in sorted(chosen) if asked and pick.random() < 0.6}


# ---- the simulator


def test_a_chain_held_to_the_end_makes_all_at_once_and_one_that_waits_makes_two():
    graph = graphs.deep_chain(6)
    every = frozenset(range(1, 7))
    together = simulate(graph, every)
    apart = simulate(graph, every, held_from={v: v for v in every})
    assert (together.replayed_ops, together.peak_bytes) == (6, 601)
    # Each is rebuilt from the input for its own sake: 6 + 5 + ... + 1 operations, two results alive at a time.
    assert (apart.replayed_ops, apart.peak_bytes) == (21, 201)


def test_a_milestone_in_the_middle_holds_the_lower_half():
    graph = graphs.deep_chain(6)
    every = frozenset(range(1, 7))
    # The upper half is rebuilt one by one on the way through the lower; from storage 3 on, the lower half is held.
    held_from = {6: 6, 5: 5, 4: 4, 3: 3, 2: 3, 1: 3}
    found = simulate(graph, every, held_from=held_from)
    assert found.replayed_ops == 6 + 5 + 4 + 3
    assert found.peak_bytes == 301


def test_a_kept_boundary_ends_the_way_back():
    graph = graphs.deep_chain(6)
    upper = frozenset({4, 5, 6})
    found = simulate(graph, upper, held_from={v: v for v in upper})
    assert found.replayed_ops == 3 + 2 + 1
    assert found.peak_bytes == 300 + 200 + 1


def test_what_is_read_twice_in_one_rebuild_stays_for_both():
    build = graphs.Builder("diamond")
    x = build.standing(1, "input")
    (a,) = build.op("a", (x,), (100,), module="m")
    (b,) = build.op("b", (a,), (100,), module="m")
    (c,) = build.op("c", (b,), (100,), module="m")
    (d,) = build.op("d", (a, c), (100,), saves=(-1, a), module="m")
    graph = build.backward(gradients=False)
    found = simulate(graph, frozenset({a, b, c, d}), held_from={a: a})
    # d's rebuild makes a, b, c and d; a is not held, so that its own unpacking makes it again.
    assert found.replayed_ops == 5
    # a while c is made: a, b and c; then a, c and d.
    assert found.peak_bytes == 301


@given(graphs.step_graphs(), st.sampled_from(GEARS), st.integers(0, 9))
@settings(max_examples=60)
def test_waiting_never_takes_fewer_replays_and_lives_stay_sound(graph, gear, seed):
    chosen, held_from = waiting(graph, gear, seed, 0.8)
    once, again = run(graph, chosen), run(graph, chosen, held_from)
    assert len(again.replayed.ops) >= len(once.replayed.ops)
    assert set(again.replayed.ops) == set(once.replayed.ops)
    for copy in again.replayed.copies:
        assert copy.first < copy.last
        assert copy.gap <= copy.until
    index = replays(graph)
    # No two copies of one storage at one time, save where it is made beside another result and goes at once.
    for v in chosen:
        if index.produced[index.ops_of[v][0]] == (v,):
            lives = sorted((copy.first, copy.last) for copy in again.replayed.copies if copy.storage == v)
            assert all(end <= start for (_, end), (start, _) in pairwise(lives))


@given(graphs.step_graphs(), st.sampled_from(GEARS))
@settings(max_examples=40)
def test_held_from_the_first_ask_on_is_held_always(graph, gear):
    chosen, _ = waiting(graph, gear, 0, 0.9)
    index = replays(graph)
    first = next((event.storage for event in index.events if event.storage in chosen), None)
    if first is not None:
        once, same = run(graph, chosen), run(graph, chosen, dict.fromkeys(chosen, first))
        assert once.replayed.ops == same.replayed.ops
        assert once.bytes_at.tolist() == same.bytes_at.tolist()


def test_what_cannot_wait_is_said():
    graph = graphs.chain()
    assert "recomputes" in violations(graph, frozenset({2}), LIVE, {2: 3})[0]
    assert "recomputes" in violations(graph, frozenset({2}), LIVE, {3: 2})[0]
    from msgspec.structs import replace

    assert "more than once" in violations(graph, frozenset({2, 3}), replace(LIVE, rebuilds_again=False), {2: 3})[0]
    assert "2 times" in violations(replace(graph, root_calls=2), frozenset({2, 3}), STATIC, {2: 3})[0]
    assert violations(replace(graph, root_calls=2), frozenset({2, 3}), STATIC, {2: 2}) == ()


# ---- the plan file


def test_companions_collapse_with_their_layers():
    pairs = [(f"h.{n}.mlp/gelu", f"h.{n}/add") for n in range(4)]
    pairs += [(f"h.{n}/add", "h.3.mlp/gelu") for n in (1, 2)]
    pairs += [("h.0/add", "")]
    assert collapse_pairs(pairs) == [
        ("h.[0-3].mlp/gelu", "h.[0-3]/add", tuple(f"h.{n}.mlp/gelu" for n in range(4))),
        ("h.[1-2]/add", "h.3.mlp/gelu", ("h.1/add", "h.2/add")),
        ("h.0/add", "", ("h.0/add",)),
    ]


@given(st.dictionaries(st.from_regex(r"\A(h\.[0-3]\.)?[ab]/[xy]\Z"), st.from_regex(r"\A((h\.[0-3]\.)?[ab]/[xy])?\Z")))
def test_collapsed_pairs_expand_to_themselves(pairs):
    found = {}
    for pattern, companion, sites in collapse_pairs(pairs.items()):
        assert expand(pattern) == sites
        decision = Decision(site=pattern, action="recompute", bytes=0, held_from=companion)
        found.update(decision.holds or dict.fromkeys(sites, ""))
    assert found == pairs


@given(graphs.step_graphs(), st.sampled_from(GEARS), st.integers(0, 9))
@settings(max_examples=30)
def test_a_plan_says_just_what_waits(tmp_path_factory, graph, gear, seed):
    chosen, held_from = waiting(graph, gear, seed, 0.8)
    plan = made_plan(graph, chosen, held_from, gear)
    path = tmp_path_factory.mktemp("plan") / "p.json"
    plan.save(path)
    read = load_plan(path)
    assert (plan_ids(graph, read), plan_holds(graph, read)) == (chosen, held_from)
    assert simulate_plan(graph, read).peak_bytes == plan.peak_bytes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"site": "h.[0-3]/a", "action": "recompute", "bytes": 1, "held_from": "h.[0-1]/a"}', "names 2"),
        ('{"site": "h.0/a", "action": "keep", "bytes": 1, "held_from": "h.0/a"}', "keep"),
    ],
)
def test_ranges_that_do_not_go_together_are_refused(tmp_path, text, said):
    path = tmp_path / "p.json"
    names = ("fingerprint", "strategy", "peak_bytes", "step_seconds", "unplanned_peak_bytes", "unplanned_step_seconds")
    head = '"format": 1, ' + ", ".join(f'"{name}": {chr(34) * 2 if place < 2 else 1}' for place, name in enumerate(names))
    path.write_text(f'{{{head}, "decisions": [{text}]}}')
    with pytest.raises(PlanMismatch, match=said):
        load_plan(path)


# ---- the executors


@functools.cache
def workload(name: str) -> tuple[nn.Module, Callable[[], object], StepGraph]:
    torch.manual_seed(0)
    model, step = load(name, tiny=True)
    return model, step, record(step, model=model, runs=1, name=name)


@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet", "unet", "mixtral"])
@pytest.mark.parametrize("gear", GEARS)
@pytest.mark.parametrize(("seed", "share"), [(0, 1.0), (1, 0.7)])
def test_random_plans_that_rebuild_again_change_no_bit_and_keep_their_promise(name, gear, seed, share):
    model, step, graph = workload(name)
    chosen, held_from = waiting(graph, gear, seed, share)
    if graph.root_calls > 1:
        held_from = {v: v for v in held_from}
    assert simulate(graph, chosen, capabilities(gear), held_from).replayed_ops > simulate(graph, chosen, capabilities(gear)).replayed_ops
    plan = made_plan(graph, chosen, held_from, gear)
    verification = verify(model, step, plan, steps=2)
    verification.raise_if_failed()
    above = (graph.measured_peak_bytes or 0) - peak_bytes(graph)
    assert verification.peak_bytes is not None
    assert plan.peak_bytes * 0.88 <= verification.peak_bytes <= plan.peak_bytes + max(above, 0)


class InPlaceBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h.mul(h.sigmoid())
        h.add_(1.0).relu_()
        return x + self.second(h)


@pytest.mark.parametrize("gear", GEARS)
@pytest.mark.parametrize("seed", range(4))
def test_writes_in_place_are_rebuilt_again(gear, seed):
    torch.manual_seed(seed)
    model, x = nn.Sequential(*(InPlaceBlock() for _ in range(4))), torch.randn(64, 32, requires_grad=True)

    def step() -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    graph = record(step, model=model, runs=1)
    chosen, held_from = waiting(graph, gear, seed, 1.0)
    plan = made_plan(graph, chosen, held_from, gear)
    verify(model, step, plan, steps=2).raise_if_failed()


@pytest.mark.parametrize("gear", GEARS)
def test_the_replays_are_those_of_the_simulation(gear):
    model, step, graph = workload("gpt2")
    chosen, held_from = waiting(graph, gear, 3, 1.0)
    plan = made_plan(graph, chosen, held_from, gear)
    ran: list[int] = []
    with apply(model, plan) as applied:
        for _ in range(5):
            step()
        if gear == "static":
            assert applied.report().static_calls >= 1
            import recoup.torch.static as static

            plain = static.StaticCall._replay
            static.StaticCall._replay = lambda self, place: (ran.append(place), plain(self, place))[1]
            try:
                step()
            finally:
                static.StaticCall._replay = plain
        else:
            import recoup.torch.rebuild as rebuild

            replay = rebuild.replay
            rebuild.replay = lambda op, stamp: (ran.append(op.sequence), replay(op, stamp))[1]
            try:
                step()
            finally:
                rebuild.replay = replay
    assert len(ran) == simulate_plan(graph, plan).replayed_ops


class AsksTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y * 1.0

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        (first,), (second,) = ctx.saved_tensors, ctx.saved_tensors
        return grad * (first + second) / 2


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return AsksTwice.apply(self.linear(x)) + AsksTwice.apply(x)


@pytest.mark.parametrize("gear", GEARS)
def test_a_node_that_asks_twice_for_what_it_saved_once(gear):
    model, x = Twice(), torch.randn(4, 16)

    def step() -> Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    graph = record(step, model=model, runs=1)
    chosen = runnable(replays(graph), droppable(replays(graph), capabilities(gear)), capabilities(gear))
    assert chosen
    verify(model, step, made_plan(graph, chosen, {}, gear), steps=2).raise_if_failed()
