"""The strategy ``checkmate`` against every schedule of small steps."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import graphs
import oracle
from recoup.errors import UsageError
from recoup.graph import StepGraph
from recoup.graph.rules import check
from recoup.plan import LIVE, STATIC, Capabilities
from recoup.simulate import Simulation, simulate
from recoup.simulate.index import replays
from recoup.simulate.judge import run
from recoup.solve.checkmate import Checkmate
from recoup.solve.choice import droppable
from recoup.solve.strategy import Choice, Problem

ONCE = replace(LIVE, name="once", rebuilds_again=False)
EXECUTORS = st.sampled_from([LIVE, STATIC])
SLACK = 1e-7


def chosen(graph: StepGraph, budget: int, executor: Capabilities = LIVE) -> tuple[Choice, Simulation]:
    choice = Checkmate().choose(Problem(graph, budget, executor))
    return choice, simulate(graph, choice.recompute, executor, choice.held_from)


def check_against(front: list[tuple[int, float]], graph: StepGraph, budget: int, executor: Capabilities) -> None:
    """What is within the budget is the fastest, and proven; else it is the least peak."""
    choice, found = chosen(graph, budget, executor)
    best = oracle.fastest(front, budget)
    if best is None:
        assert found.peak_bytes == front[0][0]
        assert choice.bound_seconds is None
        assert "no plan fits" in choice.note
    else:
        assert found.peak_bytes <= budget
        assert found.step_seconds == pytest.approx(best, rel=SLACK)
        assert choice.bound_seconds is not None
        assert choice.bound_seconds <= best * (1 + 1e-12)
        assert choice.bound_seconds == pytest.approx(best, rel=SLACK)


def solves(graph: StepGraph, budget: int, executor: Capabilities) -> int:
    """How often the program is solved until its schedule is proven, or proven not to be."""
    turns: list[int] = []
    Checkmate().choose(Problem(graph, budget, executor, progress=lambda done, total, text: turns.append(done)))
    return len(turns)


def budget_of(front: list[tuple[int, float]], graph: StepGraph, share: float, tight: bool) -> int:
    """A budget from just below the least peak to just below the unplanned one; a tight one leaves the best schedule no byte."""
    least, peak = front[0][0] - 1, simulate(graph).peak_bytes - 1
    budget = least + int((peak - least) * share)
    return max((point for point, _ in front if point <= budget), default=least) if tight else budget


def written_together() -> StepGraph:
    """Two results that one operation writes in place, each saved, each read again."""
    build = graphs.Builder("together")
    x = build.standing(1, "input")
    (a,) = build.op("linear", (x,), (100,), module="m", seconds=3.0)
    (b,) = build.op("linear", (x,), (70,), module="m", seconds=4.0)
    build.op("_foreach_add_", (a, b, x), mutates=(a, b), module="m", backward=False)
    (c,) = build.op("mul", (a,), (50,), saves=(a,), module="n")
    (d,) = build.op("mul", (b, c), (90,), saves=(b, c), module="n")
    build.op("wide", (d,), (200,), saves=(-1,), module="n")
    return build.backward()


def made_in_parts() -> StepGraph:
    """Two results of one operation, one of them written in place afterwards; the other is asked for first."""
    build = graphs.Builder("parts")
    x = build.standing(1, "input")
    (h,) = build.op("linear", (x,), (60,), saves=(x,), module="m", seconds=5.0)
    a, b = build.op("split", (h,), (100, 90), saves=(h,), module="m", seconds=2.0)
    build.op("relu_", (a,), mutates=(a,), module="m", seconds=0.5, backward=False)
    (c,) = build.op("mul", (a,), (40,), saves=(a,), module="n")
    (d,) = build.op("mul", (b, c), (80,), saves=(b, c), module="n")
    build.op("wide", (d,), (200,), module="n")
    return build.backward()


def in_two_passes(graph: StepGraph, share: float, retained: int) -> StepGraph:
    """The backward cut in two passes; every ``retained``-th save of the first one is unpacked again by the second."""
    start, count = graph.backwards[0], len(graph.ops)
    middle = start + 1 + int((count - start - 2) * share)
    again = {n for n, save in enumerate(graph.saves) if save.unpacked_at[0] < middle and n % retained == 0}
    saves = tuple(
        replace(save, unpacked_at=(save.unpacked_at[0], middle + n % (count - middle)), released_at=count) if n in again else save
        for n, save in enumerate(graph.saves)
    )
    held = {saves[n].ref.storage for n in again}
    storages = tuple(replace(storage, dies=count) if storage.id in held else storage for storage in graph.storages)
    events = sorted((gap, -n) for n, save in enumerate(saves) for gap in save.unpacked_at)
    found = replace(graph, saves=saves, storages=storages, unpack_order=tuple(-n for _, n in events), backwards=(start, middle))
    check(found)
    return found


@given(st.one_of(graphs.step_graphs(), oracle.tangled_graphs()), EXECUTORS, st.floats(0, 1), st.booleans())
@settings(max_examples=400)
def test_the_best_of_every_schedule(graph, executor, share, tight):
    assume(0 < len(droppable(replays(graph), executor)) <= 7)
    try:
        front = oracle.pareto(graph, executor)
    except oracle.TooMany:
        assume(False)
        raise
    budget = budget_of(front, graph, share, tight)
    check_against(front, graph, budget, executor)
    # The rows say what the simulator says: nothing has to be cut off.
    assert solves(graph, budget, executor) == 1


@given(graphs.step_graphs(6), st.sampled_from([LIVE, STATIC, ONCE]), st.floats(0, 1), st.booleans(), st.integers(0, 2), st.integers(1, 2))
@settings(max_examples=120)
def test_several_passes_and_calls_and_an_executor_that_rebuilds_once(graph, executor, share, tight, retained, calls):
    graph = replace(in_two_passes(graph, share, retained) if retained else graph, root_calls=calls)
    assume(0 < len(droppable(replays(graph), executor)) <= 4)
    front = oracle.by_triggers(graph, executor)
    check_against(front, graph, budget_of(front, graph, share, tight), executor)


@pytest.mark.parametrize("executor", [LIVE, STATIC], ids=["live", "static"])
@pytest.mark.parametrize("made", [written_together, made_in_parts, graphs.inplace_chain, graphs.multi_output, graphs.unsaved_leaf])
def test_every_budget_of_steps_made_by_hand(made, executor):
    graph = made()
    front = oracle.pareto(graph, executor)
    for peak, _ in front:
        check_against(front, graph, peak, executor)
        check_against(front, graph, peak - 1, executor)


@pytest.mark.parametrize("seed", [5, 42, 68, 347, 664, 838, 960, 1049, 1671, 1759, 3313])
def test_no_row_can_be_left_out(seed):
    """Steps that need those rows that others rarely do: without them schedules would have to be cut off."""
    graph = oracle.tangled_graph(seed)
    front = oracle.pareto(graph, LIVE)
    for peak, _ in front[:-1]:
        check_against(front, graph, peak, LIVE)
        assert solves(graph, peak, LIVE) == 1


@pytest.mark.parametrize(("budget", "replayed"), [(500, 2), (401, 2), (301, 3), (201, 6)])
def test_a_chain_is_rebuilt_again_as_often_as_it_must(budget, replayed):
    graph = graphs.deep_chain(6)
    front = oracle.pareto(graph, LIVE, 10_000)
    check_against(front, graph, budget, LIVE)
    choice, found = chosen(graph, budget)
    assert found.replayed_ops == replayed
    assert (found.replayed_ops > len(choice.recompute)) == (budget == 201)


def test_a_longer_chain_takes_many_rebuilds_of_one_storage():
    choice, found = chosen(graphs.deep_chain(12), 201)
    assert found.peak_bytes == 201
    assert found.replayed_ops == 30
    assert Counter(run(graphs.deep_chain(12), choice.recompute, choice.held_from).replayed.ops).most_common(1)[0][1] > 3
    assert choice.bound_seconds == pytest.approx(found.step_seconds, rel=SLACK)


def test_the_same_step_gives_the_same_plan():
    graph = graphs.deep_chain(9)
    assert chosen(graph, 250)[0] == chosen(graph, 250)[0]


def test_what_it_does_not_take_is_said():
    with pytest.raises(UsageError, match="needs a budget"):
        Checkmate().choose(Problem(graphs.chain()))
    graph = graphs.transformer(2)
    with pytest.raises(UsageError, match=f"60 .* {len(droppable(replays(graph), LIVE))}"):
        Checkmate().choose(Problem(graph, 1, LIVE))


def test_what_fits_is_left_alone():
    graph = graphs.chain()
    choice = Checkmate().choose(Problem(graph, simulate(graph).peak_bytes))
    assert choice.recompute == frozenset()
    assert choice.bound_seconds == replays(graph).base_seconds
