"""Chains in steps: cuts, menus, schedules that recompute more than once, the classical strategies, and large steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphs
from recoup.errors import UsageError
from recoup.graph import StepGraph
from recoup.plan import LIVE, STATIC
from recoup.plan.file import plan_json
from recoup.simulate import simulate, simulate_plan
from recoup.simulate.index import replays
from recoup.solve import solve
from recoup.solve.binomial import checkpoints, forward_steps, sqrt_segments
from recoup.solve.chain import Schedule
from recoup.solve.choice import runnable
from recoup.solve.cuts import chain_of
from recoup.solve.descent import judge
from recoup.solve.entry import decide
from recoup.solve.hierarchy import links_of
from recoup.solve.holds import first_asks, held_from
from recoup.solve.optimal import Optimal, bound_seconds
from recoup.solve.strategy import Problem

EXECUTORS = st.sampled_from([LIVE, STATIC])


def uniform_chain(blocks: int, boundary: int = 100, inner: int = 10, seconds: float = 1.0) -> StepGraph:
    """Equal blocks of two operations: one makes what only its own backward needs, one the boundary, which is saved too."""
    build = graphs.Builder(f"chain-{blocks}")
    x = build.standing(boundary, "input")
    for place in range(blocks):
        (y,) = build.op("up", (x,), (inner,), saves=(x, -1), module=f"b.{place}", seconds=seconds)
        (x,) = build.op("down", (y,), (boundary,), saves=(y,), module=f"b.{place}", seconds=0.0)
    build.op("loss", (x,), (1,), saves=(x,), module="", seconds=0.0, outlives=True)
    return build.backward(gradients=False)


# ---- cuts and menus


def test_a_transformer_is_cut_where_the_residual_stream_alone_crosses():
    graph = graphs.transformer(6)
    chain = chain_of(replays(graph), LIVE)
    starts = [graph.ops[op].site for op in chain.cuts[:-1]]
    for block in range(6):
        assert f"h.{block}.ln_1/native_layer_norm" in starts
        assert f"h.{block}.ln_2/native_layer_norm" in starts
    assert all(len(entering) <= 1 for entering in chain.entering)
    assert list(chain.reached) == sorted(chain.reached, reverse=True)


def test_what_lives_through_the_step_is_set_apart():
    build = graphs.Builder("skip")
    x = build.standing(10, "input")
    (mask,) = build.op("mask", (x,), (500,), module="m")
    for place in range(20):
        (y,) = build.op("a", (x, mask), (300,), saves=(-1, mask), module=f"b.{place}")
        (x,) = build.op("b", (y,), (50,), saves=(-1,), module=f"b.{place}")
    chain = chain_of(replays(build.backward()), LIVE)
    assert len(chain) > 10
    assert not any(mask in part for part in (*chain.entering, *chain.inner))


def test_storages_of_a_chain_are_parted():
    graph = graphs.transformer(3)
    chain = chain_of(replays(graph), LIVE)
    inner = [v for part in chain.inner for v in part]
    assert len(inner) == len(set(inner))
    assert not set(inner) & {v for part in chain.entering for v in part}


def test_identical_segments_share_a_menu():
    links = links_of(replays(graphs.transformer(6)), LIVE)
    ways = [segment.ways for segment in links.segments]
    # Attention and feed-forward halves of blocks 1 to 4: their menus are those of one kind each.
    assert ways[3] == ways[5] == ways[7]
    assert ways[4] == ways[6] == ways[8]
    assert ways[3] != ways[4]
    for menu in ways:
        for one in menu:
            better = [way for way in menu if way != one and way.kept_bytes <= one.kept_bytes and way.seconds <= one.seconds]
            assert all(way.working_bytes > one.working_bytes for way in better)


def test_moments_as_storages_and_back():
    graph = graphs.chain((10, 20, 30, 40))
    index = replays(graph)
    every = frozenset({2, 3, 4, 5})
    asks = first_asks(index)
    assert [v for v, _ in sorted(asks.items(), key=lambda item: item[1])] == [5, 4, 3, 2]
    assert held_from(index, every, {2: asks[3], 3: 0, 4: 99}) == {2: 3, 4: 2}
    # Where the storage at that moment is kept, the next one that is dropped stands for it.
    assert held_from(index, frozenset({2, 3, 5}), {2: asks[4]}) == {2: 3}


# ---- schedules


def squares(length: int) -> StepGraph:
    """x -> x^2 -> x^4 ...: every operation saves what it reads, so that a backward step needs one state and nothing else."""
    build = graphs.Builder("squares")
    x = build.standing(100, "input")
    for place in range(length):
        (x,) = build.op("square", (x,), (100,), saves=(x,), module=f"layers.{place}")
    return build.backward(gradients=False)


@pytest.mark.parametrize(("steps", "slots"), [(4, 1), (8, 2), (10, 3), (13, 2), (20, 3), (56, 5), (100, 4)])
def test_binomial_checkpoints_replay_as_often_as_the_closed_form_says(steps, slots):
    """The simulator runs t(n, c) forward steps, the first sweep of n - 1 included, and holds c states and the one in motion."""
    graph = squares(steps)
    links = links_of(replays(graph), LIVE)
    assert len(links.chain) == steps
    found = links.judged(Schedule(0.0, (0,) * steps, tuple(range(steps)), checkpoints(steps, slots)))
    assert len(found.run.replayed.ops) == forward_steps(steps, slots) - (steps - 1)
    # The input stands anyway and has the first slot; a state is rebuilt from the one before it.
    assert found.peak_bytes <= 100 * (slots + 2)


@pytest.mark.parametrize("slots", [2, 3, 5])
def test_optimal_needs_no_more_replays_than_the_binomial(slots):
    graph = squares(14)
    budget = 100 * (slots + 2)
    plan = solve(graph, budget, gear="live")
    replayed = simulate_plan(graph, plan).replayed_ops
    assert plan.peak_bytes <= budget
    assert replayed <= forward_steps(14, slots) - 13


@pytest.mark.parametrize("blocks", [9, 16, 25])
def test_sqrt_segments_peak_as_chen_says(blocks):
    """One boundary a block and nothing else: k live in a segment and n/k kept, least at sqrt(n)."""
    live, length = sqrt_segments(blocks)
    assert length == round(blocks**0.5)
    assert live == 2 * length
    graph = uniform_chain(blocks, inner=0)
    index = replays(graph)
    boundaries = [storage.id for storage in graph.storages if storage.kind == "activation" and storage.bytes == 100]
    kept = set(boundaries[length - 1 :: length])
    found = judge(index, runnable(index, frozenset(boundaries) - kept, LIVE), LIVE)
    other = simulate(graph).peak_bytes - 100 * blocks
    # The last segment is never dropped by anyone who thinks; here all are, and its own boundaries come back at once.
    assert found.peak_bytes - other <= 100 * (live + 1)
    assert found.peak_bytes < simulate(graph).peak_bytes * 0.8


@given(st.integers(3, 10), st.integers(1, 60), st.floats(0.0, 1.0), EXECUTORS)
@settings(max_examples=15)
def test_optimal_is_never_worse_than_the_classics_on_chains(blocks, inner, share, executor):
    graph = uniform_chain(blocks, inner=inner)
    least = decide(graph, 1, Optimal(), executor, 5.0).simulation.peak_bytes
    budget = least + int((simulate(graph).peak_bytes - least) * share)
    best = solve(graph, budget, gear=executor.name)
    for strategy in ("rotor", "revolve", "hierarchy"):
        found = decide(graph, budget, _by_name(strategy), executor, 5.0)
        if found.feasible:
            assert best.step_seconds <= found.simulation.step_seconds * (1 + 1e-9)


def _by_name(name: str):
    from recoup.solve import strategies_by_name

    return strategies_by_name()[name]


def test_a_budget_below_one_boundary_a_block_is_met_by_rebuilding_again():
    graph = graphs.transformer(6)
    every = solve(graph, strategy="every_block", gear="live")
    standing = graph.resident_bytes
    budget = standing + (every.peak_bytes - standing) * 2 // 3
    plan = solve(graph, budget, gear="live")
    assert plan.peak_bytes <= budget < every.peak_bytes
    assert plan.held_from_sites
    assert plan.step_seconds < 2 * plan.unplanned_step_seconds


def test_the_chain_alone_comes_near_the_optimum():
    graph = graphs.transformer(8)
    for share in ("30%", "50%", "70%"):
        near, best = solve(graph, share, strategy="hierarchy", gear="live"), solve(graph, share, gear="live")
        assert best.step_seconds <= near.step_seconds <= best.step_seconds * 1.03


def test_strategies_for_chains_refuse_steps_of_several_calls():
    graph = msgspec.structs.replace(graphs.transformer(2), root_calls=2)
    for strategy in ("rotor", "revolve", "hierarchy"):
        with pytest.raises(UsageError, match="2 calls"):
            solve(graph, "60%", strategy=strategy)
    assert solve(graph, "60%").peak_bytes <= simulate(graph).peak_bytes * 0.6


@pytest.mark.parametrize("strategy", ["rotor", "revolve", "hierarchy", "checkmate"])
def test_strategies_that_take_budgets_need_one(strategy):
    with pytest.raises(UsageError, match="budget"):
        solve(graphs.chain(), strategy=strategy)


# ---- proof, and large steps


@pytest.mark.parametrize("share", ["25%", "40%", "60%", "80%"])
@pytest.mark.parametrize("gear", ["live", "static"])
def test_the_gap_of_a_transformer_is_below_a_percent(share, gear):
    graph = graphs.transformer(12)
    if gear == "static" and share == "25%":
        share = "30%"
    plan = solve(graph, share, gear=gear)
    assert plan.gap is not None
    assert plan.gap <= 0.01


@given(graphs.step_graphs(), EXECUTORS)
@settings(max_examples=40)
def test_bounds_fall_as_budgets_grow(graph, executor):
    peak = simulate(graph).peak_bytes
    bounds = [bound_seconds(Problem(graph, peak * share // 10, executor)) for share in (4, 6, 8, 9)]
    assert bounds == sorted(bounds, reverse=True)


def test_a_large_step_is_solved_close_to_its_bound():
    graph = graphs.transformer(200)
    plan = solve(graph, "40%", gear="live")
    assert plan.gap is not None
    assert plan.gap <= 0.01
    assert plan.peak_bytes <= plan.budget_bytes


def test_plans_repeat_byte_for_byte_in_another_process():
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "import graphs\n"
        "from msgspec.structs import replace\n"
        "from recoup.plan.file import plan_json\n"
        "from recoup.solve import solve\n"
        "for share in ('30%', '50%'):\n"
        "    print(plan_json(replace(solve(graphs.transformer(3), share), solve_seconds=0.0)))\n"
    )
    here = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    other = subprocess.run([sys.executable, "-c", code, *here], capture_output=True, text=True, check=True).stdout
    plans = (solve(graphs.transformer(3), share) for share in ("30%", "50%"))
    assert other == "".join(plan_json(msgspec.structs.replace(plan, solve_seconds=0.0)) + "\n" for plan in plans)
