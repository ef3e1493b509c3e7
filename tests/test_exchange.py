"""Local search through worse plans and plans over the budget: what it keeps to, and that it finds what descent does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import graphs
import oracle
from recoup.graph import StepGraph
from recoup.plan import LIVE, STATIC, Capabilities
from recoup.simulate import simulate
from recoup.simulate.index import replays
from recoup.solve import Problem, least_peak, solve
from recoup.solve.anneal import annealed
from recoup.solve.choice import droppable
from recoup.solve.descent import Judged, hold_more, judge, judge_choice, keep_more, tries_for
from recoup.solve.exchange import exchanged
from recoup.solve.least import least_judged

EXECUTORS = st.sampled_from([LIVE, STATIC])
NEVER_ENOUGH, NO_LIMIT = 0.0, 1e9
Search = Callable[..., Judged]
both = pytest.mark.parametrize("search", [exchanged, annealed])


def searched(
    search: Search, graph: StepGraph, executor: Capabilities, start: Judged, budget: int, work: int, enough: float = NEVER_ENOUGH
) -> Judged:
    index = replays(graph)
    return search(index, start, executor, droppable(index, executor), budget, enough, work, NO_LIMIT)


def uneven(length: int) -> StepGraph:
    """A chain whose sizes come in an order that no greedy rule knows."""
    return graphs.chain(tuple(100 + 37 * (place * 7 % 11) for place in range(length)))


@given(st.one_of(graphs.step_graphs(), oracle.tangled_graphs()), EXECUTORS, st.floats(0, 1))
@settings(max_examples=30, deadline=None)
@both
def test_it_stays_within_the_budget_and_never_loses_what_it_began_with(search, graph, executor, share):
    least, peak = least_peak(graph, executor)[0], simulate(graph).peak_bytes
    budget = least + int((peak - least) * share)
    start = least_judged(Problem(graph, None, executor))
    found = searched(search, graph, executor, start, budget, 20_000)
    told = simulate(graph, found.recompute, executor, found.run.held_from)
    assert (told.peak_bytes, told.step_seconds) == (found.peak_bytes, found.step_seconds)
    assert found.peak_bytes <= budget
    assert found.step_seconds <= start.step_seconds


@given(oracle.tangled_graphs(), EXECUTORS)
@settings(max_examples=20, deadline=None)
@both
def test_it_is_never_faster_than_the_oracle(search, graph, executor):
    try:
        front = oracle.pareto(graph, executor, 500)
    except oracle.TooMany:
        assume(False)
        raise
    start = least_judged(Problem(graph, None, executor))
    found = searched(search, graph, executor, start, start.peak_bytes, 20_000)
    assert found.step_seconds >= oracle.fastest(front, start.peak_bytes) * (1 - 1e-9)


@both
def test_it_repeats(search):
    graph = uneven(30)
    start = least_judged(Problem(graph, None, LIVE))
    budget = start.peak_bytes + (simulate(graph).peak_bytes - start.peak_bytes) // 5
    one, other = (searched(search, graph, LIVE, start, budget, 100_000) for _ in range(2))
    assert one.key == other.key
    assert one.step_seconds < start.step_seconds


@both
def test_it_goes_on_where_descent_ends(search):
    graph, index = uneven(30), replays(uneven(30))
    start = least_judged(Problem(graph, None, LIVE))
    budget = start.peak_bytes + (simulate(graph).peak_bytes - start.peak_bytes) // 5
    tries = tries_for(start)
    held = hold_more(index, start, LIVE, budget, NO_LIMIT, tries)
    descended = keep_more(index, held, LIVE, budget, NO_LIMIT, tries)
    found = searched(search, graph, LIVE, descended, budget, 200_000)
    assert found.step_seconds < descended.step_seconds


@both
def test_it_stops_at_what_is_enough(search):
    graph = uneven(30)
    start = least_judged(Problem(graph, None, LIVE))
    peak = simulate(graph).peak_bytes
    assert searched(search, graph, LIVE, start, peak, 100_000, start.step_seconds) is start
    assert searched(search, graph, LIVE, start, peak, 0) is start


@pytest.mark.parametrize("executor", [LIVE, STATIC])
def test_optimal_is_no_slower_than_the_chain_near_the_least_peak(executor):
    graph = graphs.transformer(3)
    least = least_peak(graph, executor)[0]
    budget = least + (simulate(graph).peak_bytes - least) // 40
    plan = solve(graph, budget, gear=executor.name, time_limit_seconds=4)
    chain = solve(graph, budget, strategy="hierarchy", gear=executor.name)
    assert plan.peak_bytes <= budget
    assert plan.step_seconds <= chain.step_seconds
    assert plan.bound_seconds <= plan.step_seconds


@both
def test_a_plan_that_it_finds_is_one_that_can_be_told(search):
    graph = uneven(26)
    start = least_judged(Problem(graph, None, LIVE))
    found = searched(search, graph, LIVE, start, start.peak_bytes + 200, 60_000)
    assert judge_choice(replays(graph), found.choice, LIVE).step_seconds == found.step_seconds
    assert judge(replays(graph), found.recompute, LIVE, found.since).peak_bytes == found.peak_bytes
