"""The bound that counts repeats, against every schedule of small steps."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import graphs
import oracle
from recoup.graph import StepGraph
from recoup.plan import LIVE, STATIC, Capabilities
from recoup.simulate.index import replays
from recoup.solve.survey import survey_of
from recoup.solve.walls import walls_seconds
from test_checkmate import in_two_passes

EXECUTORS = st.sampled_from([LIVE, STATIC])
NEAR = 1 + 1e-9


def bound(graph: StepGraph, executor: Capabilities, budget: int) -> float:
    survey = survey_of(graph, executor)
    return survey.floor_seconds + walls_seconds(survey.index, executor, survey.frame, budget)


@given(st.one_of(graphs.step_graphs(), oracle.tangled_graphs()), EXECUTORS)
@settings(max_examples=120)
def test_no_schedule_is_faster(graph, executor):
    try:
        front = oracle.pareto(graph, executor, 500)
    except oracle.TooMany:
        assume(False)
        raise
    # The unplanned step, the last one, pays nothing for being planned.
    for peak, seconds in front:
        assert bound(graph, executor, peak) <= seconds * NEAR or seconds == replays(graph).base_seconds


@given(graphs.step_graphs(6), EXECUTORS, st.integers(0, 2), st.integers(1, 2))
@settings(max_examples=60)
def test_nor_in_several_passes_and_calls(graph, executor, retained, calls):
    graph = replace(in_two_passes(graph, 0.5, retained) if retained else graph, root_calls=calls)
    assume(len([storage for storage in graph.storages if storage.kind == "activation"]) <= 6)
    for peak, seconds in oracle.by_triggers(graph, executor):
        assert bound(graph, executor, peak) <= seconds * NEAR or seconds == replays(graph).base_seconds


@pytest.mark.parametrize(("length", "counted"), [(6, 5), (12, 20)])
def test_of_a_deep_chain_repeats_are_counted(length, counted):
    """Where two results stand at a time, a chain of 6 takes 6 replays, and one of 12 takes 30."""
    survey = survey_of(graphs.deep_chain(length), LIVE)
    replays_seconds = walls_seconds(survey.index, LIVE, survey.frame, 201)
    assert replays_seconds == pytest.approx(counted * (1.0 + LIVE.replay_seconds), rel=1e-9)
    assert walls_seconds(survey.index, LIVE, survey.frame, 301) == 0.0
