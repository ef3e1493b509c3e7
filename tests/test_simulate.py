"""The judge, against numbers computed by hand and against laws on random graphs."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphs
from recoup.errors import PlanMismatch
from recoup.graph.peak import alive_bytes
from recoup.graph.rules import check
from recoup.plan import LIVE, STATIC, Decision, Plan
from recoup.simulate import attribution, plan_ids, simulate, simulate_plan, violations
from recoup.simulate.index import replays
from recoup.solve.choice import droppable, runnable

HAND_MADE = (graphs.chain, graphs.shared_input, graphs.multi_output, graphs.inplace_chain, graphs.unsaved_leaf)


@pytest.mark.parametrize("make", HAND_MADE)
def test_hand_made_graphs_are_well_formed(make):
    check(make())


def test_chain_nothing_dropped():
    found = simulate(graphs.chain())
    # 60 resident; 100, 200, 300 made and saved; each backward operation makes a gradient as large as its output.
    assert found.bytes_at.tolist() == [160, 360, 660, 960, 860, 460]
    assert (found.peak_bytes, found.peak_op, found.peak_in_replay) == (960, 3, False)
    assert found.step_seconds == 9.0
    assert (found.replayed_ops, found.recomputed_bytes) == (0, 0)


def test_chain_one_dropped():
    found = simulate(graphs.chain(), frozenset({3}))
    # The 200 bytes are gone after operation 2 and come back before operation 4, beside the first result.
    assert found.bytes_at.tolist() == [160, 360, 660, 760, 860, 460]
    assert found.replayed_ops == 1
    assert found.recomputed_bytes == 200
    frames = 1
    assert found.step_seconds == pytest.approx(9 + 1 + LIVE.replay_seconds + LIVE.capture_seconds * frames + 3 * LIVE.pack_seconds)


def test_chain_all_dropped_comes_back_at_once():
    found = simulate(graphs.chain(), frozenset({2, 3, 4}))
    assert found.bytes_at.tolist() == [160, 360, 560, 960, 860, 460]
    assert found.replayed_ops == 3
    assert sorted(state for _, _, state in found.live_at_peak).count("recomputed") == 3


def test_shared_input_is_rebuilt_once():
    graph = graphs.shared_input()
    found = simulate(graph, frozenset({1}))
    # Gone during the sum (314) and its gradient (14); rebuilt once, it lives until the third save is released.
    assert found.bytes_at.tolist() == [1010, 1110, 1210, 1310, 314, 14, 1114, 1210, 1210, 1110]
    assert found.replayed_ops == 1


def test_multi_output_makes_all_outputs():
    graph = graphs.multi_output()
    found = simulate(graph, frozenset({1}))
    # Before operation 4 the split runs again: 10 resident, the gradient of 4, 100 + 300 fresh, 7 of scratch.
    assert found.bytes_at.tolist() == [417, 460, 364, 14, 421, 460]
    assert int(found.moments[4]) == 0
    assert found.recomputed_bytes == 100


def test_writes_in_place_are_replayed_and_allocate_nothing():
    graph = graphs.inplace_chain()
    found = simulate(graph, frozenset({1}))
    assert found.bytes_at.tolist() == [510, 510, 510, 610, 114, 14, 614, 610]
    assert found.replayed_ops == 3
    assert found.step_seconds == pytest.approx(9.75 + 1.75 + 3 * LIVE.replay_seconds + 3 * LIVE.capture_seconds + LIVE.pack_seconds)


def test_unsaved_leaf_is_held_for_the_replay():
    graph = graphs.unsaved_leaf()
    found = simulate(graph, frozenset({2}))
    # Storage 1 (100 bytes), saved by nobody, stays until the save of storage 2 is released.
    assert found.bytes_at.tolist() == [110, 1110, 1210, 1110, 1014, 114, 1214, 1110, 1110]
    assert (1, 100, "kept for replay") in found.live_at_peak


def test_executor_that_cannot_keep_unsaved_activations():
    graph = graphs.unsaved_leaf()
    assert "does not save" in violations(graph, frozenset({2}), STATIC)[0]
    assert violations(graph, frozenset({1, 2}), STATIC) == ()
    with pytest.raises(PlanMismatch, match="static gear"):
        simulate(graph, frozenset({2}), STATIC)


def test_what_is_no_activation_or_does_not_replay_is_refused():
    graph = graphs.chain()
    assert "parameter" in violations(graph, frozenset({0}))[0]
    opaque = msgspec.structs.replace(graph.storages[3], replayable="opaque kernel")
    marked = msgspec.structs.replace(graph, storages=(*graph.storages[:3], opaque, *graph.storages[4:]))
    assert "opaque kernel" in violations(marked, frozenset({3}))[0]
    assert "not in the step" in violations(graph, frozenset({99}))[0]


def test_random_operations_need_the_live_gear():
    build = graphs.Builder()
    x = build.standing(10, "input")
    (a,) = build.op("dropout", (x,), (100,), saves=(-1,), flags=("random",), module="m")
    graph = build.backward()
    assert violations(graph, frozenset({a}), LIVE) == ()
    assert "random" in violations(graph, frozenset({a}), STATIC)[0]


def _plan(graph, sites):
    return Plan(
        fingerprint=graph.fingerprint, strategy="test", peak_bytes=0, step_seconds=0, unplanned_peak_bytes=0, unplanned_step_seconds=0,
        decisions=tuple(Decision(site=site, action="recompute", bytes=0) for site in sites),
    )  # fmt: skip


def test_plans_are_read_by_site():
    graph = graphs.chain()
    plan = _plan(graph, ["layers.[0-1]/relu"])
    assert plan_ids(graph, plan) == {2, 3}
    assert simulate_plan(graph, plan).peak_bytes == simulate(graph, frozenset({2, 3})).peak_bytes
    with pytest.raises(PlanMismatch, match=r"layers\.7/relu"):
        simulate_plan(graph, _plan(graph, ["layers.[0-1,7]/relu"]))


def test_two_passes_replay_twice():
    graph = graphs.chain((100,))
    save = graph.saves[0]
    again = msgspec.structs.replace(save, unpacked_at=(1, 2), released_at=3)
    second = msgspec.structs.replace(graph.ops[1], id=2, site="again/backward")
    storages = tuple(msgspec.structs.replace(item, dies=3 if item.kind != "gradient" else 2) for item in graph.storages)
    twice = msgspec.structs.replace(
        graph, ops=(*graph.ops, second), storages=storages, saves=(again,), unpack_order=(0, 0), backwards=(1, 2)
    )  # fmt: skip
    assert simulate(twice, frozenset({2})).replayed_ops == 2
    single = msgspec.structs.replace(twice, backwards=(1,))
    assert simulate(single, frozenset({2})).replayed_ops == 1


def test_attribution_sums_to_the_peak():
    graph = graphs.transformer(2)
    found = simulate(graph)
    places = attribution(graph, found, 2)
    assert sum(count for _, count in places) == found.peak_bytes
    assert [count for _, count in places] == sorted((count for _, count in places), reverse=True)


@given(graphs.step_graphs())
@settings(max_examples=60, deadline=None)
def test_unplanned_is_the_recorded_step(graph):
    check(graph)
    assert simulate(graph).bytes_at.tolist() == alive_bytes(graph).tolist()


@given(graphs.step_graphs(), st.data())
@settings(max_examples=100, deadline=None)
def test_laws_of_any_choice(graph, data):
    index = replays(graph)
    executor = data.draw(st.sampled_from([LIVE, STATIC]))
    candidates = sorted(droppable(index, executor))
    drawn = data.draw(st.sets(st.sampled_from(candidates))) if candidates else set()
    chosen = runnable(index, frozenset(drawn), executor)
    assert violations(graph, chosen, executor) == ()
    found = simulate(graph, chosen, executor)
    assert sum(count for _, count, _ in found.live_at_peak) == found.peak_bytes == found.bytes_at.max()
    assert found.step_seconds >= simulate(graph).step_seconds
    assert found.replayed_ops <= len(index.closure_ops(chosen))
    # What is needed at an operation is there: a dropped storage that it unpacks has its copy.
    for event in index.events:
        if event.storage in chosen and event.released_at > event.gap and event.gap < len(graph.ops):
            assert found.bytes_at[event.gap] >= graph.resident_bytes + index.bytes[event.storage]
