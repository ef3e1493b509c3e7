"""The strategy ``optimal`` against every schedule of a thousand small steps, rebuilds in rebuilds included."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import graphs
import oracle
from recoup.errors import InfeasibleBudget
from recoup.graph import StepGraph
from recoup.plan import LIVE, STATIC, Capabilities, Plan
from recoup.simulate import simulate
from recoup.simulate.index import replays
from recoup.solve import Problem, solve
from recoup.solve.choice import droppable
from recoup.solve.named import NAMED

EXECUTORS = st.sampled_from([LIVE, STATIC])
GRAPHS = st.one_of(graphs.step_graphs(), oracle.tangled_graphs())
SLACK = 1e-6

_covered = {"graphs": 0, "schedules": 0}
# Of each step how many schedules there are, and the best of them; none where there are too many. Steps come more than once.
_fronts: dict[tuple[bytes, str], tuple[int, list[tuple[int, float]]]] = {}


def coverage() -> dict[str, int]:
    """How many steps this file has looked at so far, one that came twice counted twice, and how many of their schedules."""
    return dict(_covered)


def front_of(graph: StepGraph, executor: Capabilities) -> list[tuple[int, float]]:
    """The oracle's peaks and times; steps with nothing to drop, or too many ways to do it, are passed over."""
    assume(droppable(replays(graph), executor))
    step = msgspec.json.encode(graph), executor.name
    if step not in _fronts:
        try:
            every = list(oracle.schedules(graph, executor))
        except oracle.TooMany:
            _fronts[step] = 0, []
        else:
            _fronts[step] = len(every), oracle.front((peak, seconds) for _, _, peak, seconds in every)
    count, front = _fronts[step]
    assume(front)
    _covered["graphs"] += 1
    _covered["schedules"] += count
    return front


def between(front: list[tuple[int, float]], graph: StepGraph, share: float, tight: bool) -> int:
    """A budget between the oracle's least peak and the unplanned one; a tight one leaves the best schedule no byte."""
    least, peak = front[0][0], simulate(graph).peak_bytes
    budget = least + int((peak - least) * share)
    return max(point for point, _ in front if point <= budget) if tight else budget


def solved(graph: StepGraph, budget: int, executor: Capabilities) -> Plan:
    return solve(graph, budget, gear=executor.name, strategy="optimal")


# ---- the solver


@given(GRAPHS, EXECUTORS, st.floats(0, 1), st.booleans())
@settings(max_examples=1200)
def test_the_best_of_every_schedule(graph, executor, share, tight):
    front = front_of(graph, executor)
    budget = between(front, graph, share, tight)
    best = oracle.fastest(front, budget)
    plan = solved(graph, budget, executor)
    assert plan.peak_bytes <= budget
    assert plan.step_seconds >= best * (1 - SLACK)
    assert plan.bound_seconds <= best * (1 + SLACK)
    if plan.gap == 0:
        assert plan.step_seconds == pytest.approx(best, rel=SLACK)


@given(GRAPHS, EXECUTORS)
@settings(max_examples=100)
def test_time_does_not_rise_with_the_budget(graph, executor):
    front = front_of(graph, executor)
    times = [solved(graph, between(front, graph, share, False), executor).step_seconds for share in (0, 0.25, 0.5, 0.75, 1)]
    assert all(more <= less * (1 + SLACK) for less, more in pairwise(times))


@given(GRAPHS, EXECUTORS)
@settings(max_examples=50)
def test_the_unplanned_peak_gives_the_unplanned_step(graph, executor):
    plan = solved(graph, simulate(graph).peak_bytes, executor)
    assert plan.drops_nothing
    assert plan.gap == 0
    assert plan.step_seconds == plan.unplanned_step_seconds


@given(GRAPHS, EXECUTORS)
@settings(max_examples=100)
def test_what_does_not_fit_is_told_what_would(graph, executor):
    least = front_of(graph, executor)[0][0]
    with pytest.raises(InfeasibleBudget) as caught:
        solved(graph, least - 1, executor)
    told = caught.value.least_bytes
    assert told >= least
    assert solved(graph, told, executor).peak_bytes <= told


@given(GRAPHS, EXECUTORS, st.floats(0, 1))
@settings(max_examples=100)
def test_no_named_strategy_dominates(graph, executor, share):
    plan = solved(graph, between(front_of(graph, executor), graph, share, False), executor)
    for strategy in NAMED:
        found = simulate(graph, strategy.choose(Problem(graph, None, executor)).recompute, executor)
        better = found.peak_bytes <= plan.peak_bytes and found.step_seconds <= plan.step_seconds
        assert not (better and (found.peak_bytes, found.step_seconds) != (plan.peak_bytes, plan.step_seconds))


# ---- the oracle


@given(GRAPHS, EXECUTORS)
@settings(max_examples=100)
def test_nothing_is_left_out_that_another_way_to_list_them_finds(graph, executor):
    assume(len(droppable(replays(graph), executor)) <= 5)
    assert oracle.pareto(graph, executor) == oracle.by_triggers(graph, executor)


@given(GRAPHS, EXECUTORS)
@settings(max_examples=40)
def test_each_schedule_runs_and_comes_once(graph, executor):
    front_of(graph, executor)
    seen = set()
    for recompute, held_from, peak, seconds in oracle.schedules(graph, executor):
        found = simulate(graph, recompute, executor, held_from)
        assert (found.peak_bytes, found.step_seconds) == (peak, seconds)
        assert (recompute, frozenset(held_from.items())) not in seen
        seen.add((recompute, frozenset(held_from.items())))


def test_too_many_are_refused():
    with pytest.raises(oracle.TooMany, match="10"):
        list(oracle.schedules(graphs.chain((100, 200, 300, 400)), LIVE, 10))
