"""Solving a realistic transformer: quality, proof and speed; the frontier; plans in words."""

from __future__ import annotations

import time

import msgspec
import pytest

import graphs
from recoup.errors import InfeasibleBudget
from recoup.graph.rules import check
from recoup.simulate import simulate
from recoup.solve import explain, frontier, solve
from recoup.solve.segments import merged, segments


@pytest.fixture(scope="module")
def graph():
    return graphs.transformer(12)


def test_it_is_well_formed(graph):
    check(graph)


def test_simulation_is_fast(graph):
    simulate(graph)
    sites = frozenset(item.id for item in graph.storages if item.replayable == "" and item.site.startswith("h."))
    best = min(_timed(lambda: simulate(graph, sites)) for _ in range(5))
    assert best < 0.2, "a simulation of 600 operations takes some milliseconds"


def _timed(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@pytest.mark.parametrize("budget", ["80%", "50%", "30%"])
def test_a_large_step_is_solved_near_the_bound(graph, budget):
    plan = solve(graph, budget, gear="live")
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.gap is not None
    assert plan.gap < 0.005
    assert plan.solve_seconds < 20
    assert len(plan.decisions) < 60, "identical layers collapse"


def test_it_beats_every_block(graph):
    block = solve(graph, strategy="every_block", gear="live")
    plan = solve(graph, block.peak_bytes, gear="live")
    assert plan.step_seconds < block.step_seconds


def test_the_time_limit_is_no_error(graph):
    least = solve(graph, strategy="every_block", gear="live").peak_bytes
    plan = solve(graph, least, gear="live", time_limit_seconds=0.01)
    assert plan.peak_bytes <= least


def test_frontier_is_monotone_and_carries_proofs():
    small = graphs.transformer(2)
    told = []
    points = frontier(small, gear="live", progress=lambda done, total, text: told.append((done, total)))
    optimal = [point for point in points if point.strategy == "optimal"]
    assert all(point.feasible and point.predicted_peak_bytes <= point.budget_bytes for point in optimal)
    times = [point.step_seconds for point in optimal]
    assert times == sorted(times, reverse=True)
    assert optimal[-1].relative_time == 1.0
    assert all(point.gap is not None and point.gap >= 0 for point in optimal)
    assert {point.strategy for point in points} == {"optimal", "none", "every_block", "sqrt", "selective", "rotor"}
    assert told[-1] == (len(points), len(points))


def test_frontier_marks_what_does_not_fit():
    points = frontier(graphs.transformer(2), ["1%", "70%"], ["optimal"], gear="static")
    assert [point.feasible for point in points] == [False, True]


def test_explain_says_what_and_why(graph):
    text = explain(graph, solve(graph, "50%", gear="live"))
    for word in ("budget", "peak", "time", "recompute", "h.[", "rebuilt in"):
        assert word in text


def test_a_plan_explains_itself(graph):
    plan = solve(graph, "50%", gear="live")
    assert "one more MiB would save" in plan.explain()
    assert "binds at" in plan.explain()
    assert "h.[" in plan.binding[0]
    assert plan.explain().splitlines()[0] == "optimal in the live gear"


def test_the_price_is_the_slope_of_the_frontier(graph):
    """One byte more saves what the price says: the slope between two budgets lies between the prices at both."""
    low, high = solve(graph, "50%", gear="live"), solve(graph, "52%", gear="live")
    slope = (low.step_seconds - high.step_seconds) / (high.budget_bytes - low.budget_bytes)
    assert low.price_seconds_per_byte is not None
    assert high.price_seconds_per_byte is not None
    # Plans are whole numbers of storages, and each may be 0.1 % off its bound.
    slack = 1e-3 * low.step_seconds / (high.budget_bytes - low.budget_bytes)
    assert high.price_seconds_per_byte - slack <= slope <= low.price_seconds_per_byte + slack
    assert solve(graph, "100%").price_seconds_per_byte == 0.0


def test_infeasible_says_the_way_out(graph):
    with pytest.raises(InfeasibleBudget, match="smaller batch") as caught:
        solve(graph, "5%", gear="static")
    assert "backward" in caught.value.moment or "forward" in caught.value.moment
    assert caught.value.least_bytes > caught.value.budget_bytes


def test_segments_without_named_blocks():
    graph = msgspec.structs.replace(graphs.transformer(4), blocks=())
    assert len(segments(graph)) == 4
    assert len(merged(segments(graph))) == 2
    flat = graphs.Builder()
    x = flat.standing(8, "input")
    for _ in range(9):
        (x,) = flat.op("tanh", (x,), (10,), saves=(-1,))
    assert [len(part) for part in segments(flat.backward())] == [3, 3, 3]
