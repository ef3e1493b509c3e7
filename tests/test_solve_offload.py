"""Laws of plans that keep, recompute and offload; offload_oracle.py holds the solver against every plan of small steps."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import graphs
from offload_oracle import TooMany, links, plans
from recoup.cost import OffloadLink
from recoup.errors import InfeasibleBudget, UsageError
from recoup.graph import StepGraph
from recoup.plan import LIVE, STATIC, Capabilities, Plan
from recoup.plan.file import load_plan, plan_json
from recoup.simulate import simulate, simulate_plan
from recoup.simulate.index import replays
from recoup.simulate.offload import Offload, offloadable
from recoup.solve import Problem, frontier, solve
from recoup.solve.offload import Joint, Routes
from recoup.solve.offload.anneal import annealed_joint
from recoup.solve.offload.least import joint_least
from recoup.solve.offload.moving import moving_of

EXECUTORS = st.sampled_from([LIVE, STATIC])
NEAR = 1 + 1e-9


def host(rate: float, **figures: float) -> OffloadLink:
    """A link to the host that is as fast out as back."""
    return msgspec.structs.replace(OffloadLink(target="host", write_bytes_per_second=rate, read_bytes_per_second=rate), **figures)


def least_of(graph: StepGraph, gear: str, link: OffloadLink, **caps: int) -> int:
    """The least feasible budget, as the error for one byte names it."""
    with pytest.raises(InfeasibleBudget) as caught:
        solve(graph, 1, gear=gear, offload=link, **caps)
    return caught.value.least_bytes


def within(graph: StepGraph, gear: str, link: OffloadLink, share: float, **caps: int) -> int:
    """A budget between the least feasible one and the unplanned peak."""
    least, peak = least_of(graph, gear, link, **caps), simulate(graph).peak_bytes
    return least + int((peak - least) * share)


def seconds_or_never(graph: StepGraph, budget: int, **options: object) -> float:
    try:
        return solve(graph, budget, **options).step_seconds  # type: ignore[arg-type]
    except InfeasibleBudget:
        return float("inf")


def offload_only(link: OffloadLink) -> Joint:
    return Joint(Routes((link,)), recomputing=False)


@given(graphs.step_graphs(7), links(), st.sampled_from(["live", "static", "auto"]), st.floats(0, 1), st.sampled_from([None, 0, 50, 200]))
@settings(max_examples=25, deadline=None)
def test_plans_fit_and_say_just_what_was_simulated(graph, link, gear, share, cap):
    caps = {} if cap is None else {f"{link.target}_budget": cap}
    plan = solve(graph, within(graph, gear, link, share, **caps), gear=gear, offload=link, **caps)
    found = simulate_plan(graph, plan)
    assert found.peak_bytes == plan.peak_bytes <= plan.budget_bytes
    assert found.step_seconds == plan.step_seconds >= plan.bound_seconds
    assert sum(count for _, count, _ in found.live_at_peak) == found.peak_bytes
    assert (plan.traffic is None) == (not plan.offload_sites)
    if plan.traffic is not None:
        assert found.transfers is not None
        assert (plan.traffic.offloaded_bytes, plan.traffic.stall_seconds) == (found.offloaded_bytes, found.transfers.stall_seconds)
        assert cap is None or plan.traffic.offloaded_bytes <= cap
        assert all(decision.target == link.target for decision in plan.decisions if decision.action == "offload")


@given(graphs.step_graphs(7), links(), EXECUTORS)
@settings(max_examples=15, deadline=None)
def test_the_least_feasible_budget_is_feasible(graph, link, executor):
    least = least_of(graph, executor.name, link)
    assert solve(graph, least, gear=executor.name, offload=link).peak_bytes <= least
    with pytest.raises(InfeasibleBudget) as alone:
        solve(graph, 1, gear=executor.name)
    assert least <= alone.value.least_bytes


@given(graphs.step_graphs(7), links(), st.sampled_from(["live", "static", "auto"]), st.floats(0, 1))
@settings(max_examples=20, deadline=None)
def test_no_slower_than_either_alone(graph, link, gear, share):
    budget = within(graph, gear, link, share)
    joint = solve(graph, budget, gear=gear, offload=link).step_seconds
    assert joint <= seconds_or_never(graph, budget, gear=gear) * NEAR
    assert joint <= seconds_or_never(graph, budget, gear=gear, strategy=offload_only(link)) * NEAR


def test_no_slower_than_offloading_alone_at_its_least_peak():
    # No window's linear program leads to the plan that offloads alone here: only the search for its least peak does.
    recipes = [graphs.Recipe((0,), (1,), seconds=seconds) for seconds in (8, 9, 1, 1)]
    recipes += [graphs.Recipe((9,), (1, 100)), graphs.Recipe((0,), (1,), save_output=True)]
    graph = graphs.random_graph(recipes, False)
    link = OffloadLink(target="host", write_bytes_per_second=10.0, read_bytes_per_second=50.0)
    budget = least_of(graph, "live", link)
    alone = solve(graph, budget, gear="live", strategy=offload_only(link)).step_seconds
    assert solve(graph, budget, gear="live", offload=link).step_seconds <= alone * NEAR


@given(graphs.step_graphs(), links(), EXECUTORS, st.floats(0, 1), st.sampled_from([None, 70]))
@settings(max_examples=25, deadline=None)
def test_a_walk_over_the_budget_ends_within_it_and_loses_nothing(graph, link, executor, share, cap):
    problem = Problem(graph, None, executor)
    spaces = Joint(Routes((link,), disk_bytes=cap, host_bytes=cap)).spaces(problem)
    start = joint_least(problem, spaces, recomputing=True)
    budget = start.peak_bytes + int((simulate(graph).peak_bytes - start.peak_bytes) * share)
    for space in spaces:
        found = annealed_joint(space, start, executor, budget, 0.0, 20_000, 1e9)
        told = simulate(graph, found.recompute, executor, found.run.held_from, found.offload)
        assert (told.peak_bytes, told.step_seconds) == (found.peak_bytes, found.step_seconds)
        assert told.peak_bytes <= budget
        assert found.step_seconds <= start.step_seconds
        assert cap is None or told.offloaded_bytes <= cap


def test_a_walk_where_nothing_can_be_recomputed():
    graph = graphs.random_graph([graphs.Recipe((0,), (70,), seconds=3, save_output=True) for _ in range(6)], False)
    problem = Problem(graph, None, STATIC)
    (space,) = Joint(Routes((host(50.0),)), recomputing=False).spaces(problem)
    start = joint_least(problem, [space], recomputing=False)
    budget = (start.peak_bytes + simulate(graph).peak_bytes) // 2
    found = annealed_joint(space, start, STATIC, budget, 0.0, 50_000, 1e9)
    assert found.peak_bytes <= budget
    assert found.offloaded
    assert not found.recompute
    assert found.step_seconds < start.step_seconds


def every(graph: StepGraph, executor: Capabilities, link: OffloadLink) -> list[tuple[int, float, int]]:
    largest = moving_of(replays(graph), link).largest
    try:
        return list(plans(graph, executor, link, (0, largest, 2 * largest)))
    except TooMany:
        assume(False)
        raise


@given(graphs.step_graphs(5), links(), EXECUTORS, st.floats(0, 1), st.sampled_from([None, 70]))
@settings(max_examples=30, deadline=None)
def test_as_fast_as_the_best_of_all_plans_and_bounded_below(graph, link, executor, share, cap):
    known = [(peak, seconds) for peak, seconds, away in every(graph, executor, link) if cap is None or away <= cap]
    least, unplanned = min(peak for peak, _ in known), simulate(graph).peak_bytes
    budget = least + int(share * (unplanned - least))
    best = min(seconds for peak, seconds in known if peak <= budget)
    caps = {} if cap is None else {f"{link.target}_budget": cap}
    plan = solve(graph, budget, gear=executor.name, offload=link, **caps)
    assert plan.bound_seconds <= best * NEAR
    # It may be faster than all of these: it may also let copies wait.
    assert plan.step_seconds <= best * NEAR
    if plan.gap == 0:
        assert plan.step_seconds == pytest.approx(best, rel=1e-8)


@given(graphs.step_graphs(5), links(), EXECUTORS, st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=20, deadline=None)
def test_more_memory_costs_no_time(graph, link, executor, one, other):
    every(graph, executor, link)
    budgets = [within(graph, executor.name, link, share) for share in sorted((one, other))]
    tight, loose = (solve(graph, budget, gear=executor.name, offload=link).step_seconds for budget in budgets)
    assert loose <= tight * NEAR


@given(graphs.step_graphs(5), links(), EXECUTORS, st.floats(0, 1))
@settings(max_examples=20, deadline=None)
def test_a_faster_link_costs_no_time(graph, link, executor, share):
    every(graph, executor, link)
    budget = within(graph, executor.name, link, share)
    faster = msgspec.structs.replace(
        link, write_bytes_per_second=8 * link.write_bytes_per_second, read_bytes_per_second=8 * link.read_bytes_per_second,
        latency_seconds=link.latency_seconds / 8,
    )  # fmt: skip
    slow, fast = (solve(graph, budget, gear=executor.name, offload=way).step_seconds for way in (link, faster))
    assert fast <= slow * NEAR


@given(graphs.step_graphs(8), EXECUTORS, st.floats(0, 1))
@settings(max_examples=20, deadline=None)
def test_over_a_free_link_a_step_costs_the_executors_overheads(graph, executor, share):
    link, index = host(1e30), replays(graph)
    out = Offload(offloadable(index), link, 0, 0)
    least, unplanned = simulate(graph, executor=executor, offload=out).peak_bytes, simulate(graph).peak_bytes
    assume(least < unplanned)
    plan = solve(graph, least + int((unplanned - least) * share), gear=executor.name, offload=link)
    overheads = (
        executor.pack_seconds * len(graph.saves)
        + executor.capture_seconds * len(graph.ops)
        + executor.replay_seconds * len(graph.unpack_order) * len(graph.storages)
    )
    assert plan.step_seconds <= plan.unplanned_step_seconds + overheads


@given(graphs.step_graphs(7), EXECUTORS, st.floats(0, 1))
@settings(max_examples=15, deadline=None)
def test_over_a_hopeless_link_nothing_moves_that_can_be_recomputed(graph, executor, share):
    with pytest.raises(InfeasibleBudget) as caught:
        solve(graph, 1, gear=executor.name)
    least, peak = caught.value.least_bytes, simulate(graph).peak_bytes
    budget = least + int((peak - least) * share)
    alone = solve(graph, budget, gear=executor.name)
    joint = solve(graph, budget, gear=executor.name, offload=host(1e-9, drag=1.0))
    assert joint.traffic is None
    assert joint.step_seconds == alone.step_seconds


def stripped(plan: Plan) -> str:
    return plan_json(msgspec.structs.replace(plan, solve_seconds=0.0))


@given(graphs.step_graphs(7), links(), st.floats(0, 1))
@settings(max_examples=10, deadline=None)
def test_the_same_problem_has_the_same_plan(graph, link, share):
    again = msgspec.json.decode(msgspec.json.encode(graph), type=StepGraph)
    budget = within(graph, "auto", link, share)
    assert stripped(solve(graph, budget, offload=link)) == stripped(solve(again, budget, offload=link))


def test_plans_survive_their_file(tmp_path: Path):
    graph = graphs.transformer(blocks=2, tokens=512, width=128, heads=4)
    link = host(2e9, staging_bytes=1 << 16)
    plan = solve(graph, "60%", offload=link)
    assert plan.traffic is not None
    plan.save(tmp_path / "plan.json")
    read = load_plan(tmp_path / "plan.json")
    assert read == plan
    assert simulate_plan(graph, read).peak_bytes == plan.peak_bytes
    assert json.loads((tmp_path / "plan.json").read_text())["traffic"]["link"]["target"] == "host"


def two_ways() -> StepGraph:
    """Two wide results, one by an operation that takes long, one made in no time; then something else to do, for one of them."""
    build = graphs.Builder("two ways")
    x = build.standing(10, "input")
    (dear,) = build.op("scan", (x,), (1000,), saves=(-1,), seconds=50.0, module="dear")
    (cheap,) = build.op("cast", (x,), (1000,), saves=(-1,), seconds=0.1, module="cheap")
    (y,) = build.op("join", (cheap, dear), (10,), saves=(-1,), seconds=1.0, module="join")
    (y,) = build.op("think", (y,), (10,), saves=(-1,), seconds=5.0, module="think")
    build.op("wide", (y,), (2500,), seconds=1.0, module="wide")
    return build.backward(gradients=False)


def test_what_is_rebuilt_more_cheaply_than_moved_is_rebuilt():
    graph = two_ways()
    # The way out takes six seconds, as long as there is something else to do: a second one would be waited for.
    plan = solve(graph, simulate(graph).peak_bytes - 1500, offload=host(1000 / 6))
    assert plan.recompute_sites == {"cheap/cast"}
    assert "dear/scan" in plan.offload_sites
    why = next(decision.why for decision in plan.decisions if decision.site == "dear/scan")
    assert why == "moved in 12.0 s, rebuilt in 50.0 s"


def test_what_cannot_be_rebuilt_says_so():
    build = graphs.Builder("opaque")
    x = build.standing(10, "input")
    (a,) = build.op("scan", (x,), (1000,), saves=(-1,), module="a", replayable="it is opaque")
    # Something that is put after it, so that it has left for certain.
    (b,) = build.op("next", (a,), (100,), saves=(-1,), module="b")
    build.op("wide", (b,), (1000,), module="wide")
    graph = build.backward(gradients=False)
    plan = solve(graph, "70%", offload=host(1000.0))
    assert plan.recompute_sites == frozenset()
    assert {decision.site: decision.why for decision in plan.decisions}["a/scan"] == "moved in 2.00 s, cannot be rebuilt: it is opaque"


@given(graphs.step_graphs(6), links(), links(), st.floats(0, 1))
@settings(max_examples=10, deadline=None)
def test_of_several_links_the_best_is_taken(graph, one, other, share):
    budget = within(graph, "static", one, share)
    both = solve(graph, budget, gear="static", offload=[one, other])
    assert both.step_seconds <= seconds_or_never(graph, budget, gear="static", offload=one) * NEAR
    assert both.step_seconds <= seconds_or_never(graph, budget, gear="static", offload=other) * NEAR
    assert both.traffic is None or both.traffic.link in (one, other)


def test_a_frontier_with_a_link_falls_and_begins_lower():
    graph = graphs.transformer(blocks=2, tokens=512, width=128, heads=4)
    points = frontier(graph, strategies=["optimal"], gear="static", offload=host(1e9), time_limit_seconds=5)
    joint = [point for point in points if point.strategy == "joint"]
    alone = [point for point in points if point.strategy == "optimal"]
    assert [point.budget_bytes for point in joint] == [point.budget_bytes for point in alone]
    assert all(point.feasible for point in joint)
    times = [point.step_seconds for point in joint]
    assert times == sorted(times, reverse=True)
    assert all(mine.step_seconds <= theirs.step_seconds * NEAR for mine, theirs in zip(joint, alone, strict=True) if theirs.feasible)


def test_what_cannot_be_honoured_is_refused():
    graph = graphs.chain()
    with pytest.raises(UsageError, match="offload names no link to it"):
        solve(graph, "80%", host_budget="1GiB")
    with pytest.raises(UsageError, match="offload names no link to it"):
        solve(graph, "80%", offload=host(1e9), disk_budget=5)
    with pytest.raises(UsageError, match="offloads nothing"):
        solve(graph, "80%", strategy="every_block", offload=host(1e9))
    with pytest.raises(UsageError, match="cannot be below 0"):
        solve(graph, "80%", offload=host(1e9), host_budget=-1)
    with pytest.raises(UsageError, match="nothing can be offloaded to host in the jit gear"):
        solve(msgspec.structs.replace(graph, frontend="jax"), "80%", offload=host(1e9))


SIZES = {"layers": 3, "width": 64, "heads": 4, "sequence": 64, "batch": 4, "vocabulary": 256}


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_transformers_are_strictly_faster_than_either_alone_somewhere(name: str):
    pytest.importorskip("transformers")
    from benchmarks.workloads import load
    from recoup.torch import record

    model, step = load(name, **SIZES)
    graph = record(step, model=model, name=name)
    # A link that carries all that may move, out and back, in as long as the step takes.
    can = sum(graph.storages[v].bytes for v in offloadable(replays(graph)))
    link = host(2 * can / graph.step_seconds)
    least = least_of(graph, "static", link)
    peak = simulate(graph).peak_bytes
    better = []
    for share in (0.05, 0.2):
        budget = least + int((peak - least) * share)
        joint = solve(graph, budget, gear="static", offload=link, time_limit_seconds=10).step_seconds
        alone = seconds_or_never(graph, budget, gear="static")
        moved = seconds_or_never(graph, budget, gear="static", strategy=offload_only(link))
        assert joint <= min(alone, moved) * NEAR
        better.append(joint < min(alone, moved) * (1 - 1e-6))
    assert any(better)
