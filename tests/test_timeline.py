"""When everything in a planned step happens: numbers by hand, laws on random graphs, the picture and the command line."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphs
from recoup.cli import main
from recoup.cost import OffloadLink
from recoup.errors import MissingExtra, PlanMismatch, UsageError
from recoup.graph import StepGraph
from recoup.graph.store import save
from recoup.plan import LIVE, Decision, Plan, Traffic
from recoup.plan.file import save_plan
from recoup.report.lanes import lanes_of, merged, timeline_facts, timeline_summary
from recoup.report.text import renderable_text
from recoup.report.timeline import timeline_figure
from recoup.simulate import offloadable, simulate, simulate_plan, timeline_of
from recoup.simulate.index import replays
from recoup.solve.choice import droppable, runnable


def link(*, write: float = 100.0, read: float = 100.0, **figures: float) -> OffloadLink:
    return OffloadLink(target="disk", write_bytes_per_second=write, read_bytes_per_second=read, shared=True, **figures)  # type: ignore[arg-type]


def plan_of(
    graph: StepGraph,
    recompute: frozenset[int] = frozenset(),
    offload: frozenset[int] = frozenset(),
    over: OffloadLink | None = None,
    windows: tuple[int, int] = (0, 0),
    budget_bytes: int = 0,
) -> Plan:
    """A plan by storage ids, simulated by nobody."""
    over = over or link()

    def decided(storages: frozenset[int], action: str) -> list[Decision]:
        made = [graph.storages[v] for v in sorted(storages)]
        return [Decision(site=item.site, action=action, bytes=item.bytes, target="disk") for item in made]  # type: ignore[arg-type]

    traffic = Traffic(link=over, write_window_bytes=windows[0], read_window_bytes=windows[1]) if offload else None
    return Plan(
        fingerprint=graph.fingerprint,
        strategy="by hand",
        budget_bytes=budget_bytes,
        peak_bytes=1,
        step_seconds=1.0,
        unplanned_peak_bytes=1,
        unplanned_step_seconds=1.0,
        traffic=traffic,
        decisions=(*decided(recompute, "recompute"), *decided(offload, "offload")),
    )


def spans(found: object) -> list[tuple[float, float]]:
    return [(item.start_seconds, item.end_seconds) for item in found]  # type: ignore[attr-defined]


def test_nothing_dropped_runs_as_recorded():
    found = timeline_of(graphs.chain(), plan_of(graphs.chain()))
    assert found.planned.start_seconds.tolist() == found.unplanned.start_seconds.tolist() == [0, 1, 2, 3, 5, 7]
    assert found.planned.end_seconds.tolist() == [1, 2, 3, 5, 7, 9]
    assert (found.planned.backward_seconds, found.planned.placed_seconds, found.unplaced_seconds) == (3, 9, 0)
    assert (found.planned.peak_seconds, found.planned.peak_bytes) == (3, 960)
    assert found.replays == found.waits == found.moves == ()


def test_a_replay_pushes_back_what_comes_after_it():
    graph = graphs.chain()
    found = timeline_of(graph, plan_of(graph, frozenset({3})))
    assert found.planned.start_seconds.tolist() == [0, 1, 2, 3, 6, 8]
    assert found.planned.reached_seconds.tolist() == [0, 1, 2, 3, 5, 8]
    assert [(span.start_seconds, span.end_seconds, span.op) for span in found.replays] == [(5, 6, 1)]
    assert found.planned.placed_seconds == 10
    assert found.unplaced_seconds == pytest.approx(LIVE.replay_seconds + LIVE.capture_seconds + 3 * LIVE.pack_seconds)


def test_a_peak_in_a_replay_stands_when_that_replay_runs():
    build = graphs.Builder("scratch")
    x = build.standing(50, "input")
    for place, size in enumerate((100, 200, 300)):
        (x,) = build.op("relu", (x,), (size,), saves=(-1,), module=f"layers.{place}", scratch=1500 if place == 2 else 0)
    graph = build.backward()
    found = timeline_of(graph, plan_of(graph, frozenset({1, 2, 3})))
    assert found.simulation.peak_in_replay
    assert [(span.start_seconds, span.end_seconds, span.op) for span in found.replays] == [(3, 4, 0), (4, 5, 1), (5, 6, 2)]
    assert found.planned.peak_seconds == 5


def test_a_slow_way_back_is_waited_for():
    graph = graphs.chain()
    found = timeline_of(graph, plan_of(graph, offload=frozenset({2, 3}), over=link(read=25.0), windows=(100, 100)))
    # Out: 100 bytes from when they are saved, then 200. In: only what was forced out, after the first unpacking that has room for it.
    assert [(move.direction, move.storage, move.start_seconds, move.end_seconds) for move in found.moves] == [
        ("write", 2, 1, 2), ("write", 3, 2, 4), ("read", 2, 5, 9),
    ]  # fmt: skip
    assert spans(found.waits) == [(7, 9)]
    assert found.planned.start_seconds.tolist() == [0, 1, 2, 3, 5, 9]
    assert found.planned.placed_seconds == 11


def test_a_slow_way_out_is_waited_for_in_the_forward():
    graph = graphs.chain()
    found = timeline_of(graph, plan_of(graph, offload=frozenset({2, 3}), over=link(write=20.0), windows=(100, 100)))
    assert spans(found.waits)[0] == (2, 6)
    assert found.planned.start_seconds.tolist()[:3] == [0, 1, 6]
    assert found.planned.backward_seconds == 7
    assert found.unplanned.backward_seconds == 3


def test_drag_has_no_place_of_its_own():
    graph = graphs.chain()
    plain = timeline_of(graph, plan_of(graph, offload=frozenset({2, 3}), windows=(100, 100)))
    dragged = timeline_of(graph, plan_of(graph, offload=frozenset({2, 3}), windows=(100, 100), over=link(drag=0.5)))
    assert dragged.planned.start_seconds.tolist() == plain.planned.start_seconds.tolist()
    busy = sum(end - start for start, end in spans(dragged.moves))
    assert dragged.unplaced_seconds - plain.unplaced_seconds == pytest.approx(0.5 * busy)


def test_what_the_training_thread_does_for_each_transfer_has_no_place_of_its_own():
    graph = graphs.chain()
    plain = timeline_of(graph, plan_of(graph, offload=frozenset({2, 3}), windows=(100, 100)))
    called = timeline_of(graph, plan_of(graph, offload=frozenset({2, 3}), windows=(100, 100), over=link(call_seconds=0.25)))
    assert called.planned.start_seconds.tolist() == plain.planned.start_seconds.tolist()
    assert called.unplaced_seconds - plain.unplaced_seconds == pytest.approx(0.25 * len(called.moves))


def test_another_graph_is_refused():
    with pytest.raises(PlanMismatch):
        timeline_of(graphs.shared_input(), plan_of(graphs.chain(), frozenset({3})))


@st.composite
def planned(draw: st.DrawFn) -> tuple[StepGraph, Plan]:
    graph = draw(graphs.step_graphs())
    index = replays(graph)
    free = sorted(offloadable(index)) if graph.root_calls == 1 else []
    away = frozenset(draw(st.sets(st.sampled_from(free)))) if free else frozenset()
    rest = sorted(droppable(index, LIVE) - away)
    chosen = frozenset(draw(st.sets(st.sampled_from(rest)))) if rest else frozenset()
    rates = st.sampled_from((5.0, 100.0, 1e9))
    over = link(
        write=draw(rates), read=draw(rates), latency_seconds=draw(st.sampled_from((0.0, 0.1))), drag=draw(st.sampled_from((0.0, 0.3)))
    )
    windows = draw(st.tuples(st.integers(0, 600), st.integers(0, 600)))
    return graph, plan_of(graph, runnable(index, chosen, LIVE), away, over, windows)


@given(planned())
@settings(max_examples=150, deadline=None)
def test_the_timeline_is_the_judges_step(case):
    graph, plan = case
    found, judged = timeline_of(graph, plan), simulate_plan(graph, plan)
    course = found.planned
    assert course.bytes_at.tolist() == judged.bytes_at.tolist()
    assert found.unplanned.bytes_at.tolist() == simulate(graph).bytes_at.tolist()
    assert found.step_seconds == judged.step_seconds
    # Nothing is lost: recorded work, replays and waiting make up the placed seconds, and the rest is the executor's and the drag.
    inside = sum(end - start for start, end in (*spans(found.replays), *spans(found.waits)))
    assert course.placed_seconds == pytest.approx(simulate(graph).step_seconds + inside)
    transfers = judged.transfers
    assert sum(end - start for start, end in spans(found.waits)) == pytest.approx(transfers.stall_seconds if transfers else 0.0)
    assert found.step_seconds >= course.placed_seconds - 1e-9
    if transfers is not None:
        assert course.placed_seconds + transfers.drag_seconds == pytest.approx(transfers.end_seconds)
    # One thing at a time, in order.
    busy = sorted((*zip(course.start_seconds, course.end_seconds, strict=True), *spans(found.replays), *spans(found.waits)))
    assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(busy))
    assert np.all(course.reached_seconds <= course.start_seconds + 1e-9)
    assert 0 <= course.peak_seconds <= course.placed_seconds
    # A disk does one transfer at a time, and a read comes after its own write.
    for direction in ("write", "read"):
        moves = [move for move in found.moves if move.direction == direction]
        assert all(before.end_seconds <= after.start_seconds + 1e-9 for before, after in pairwise(moves))
    written = {move.storage: move.end_seconds for move in found.moves if move.direction == "write"}
    assert all(move.start_seconds >= written[move.storage] - 1e-9 for move in found.moves if move.direction == "read")


def test_spans_that_touch_are_drawn_as_one():
    assert merged([(0, 1), (1, 2), (2.5, 3), (2.6, 2.7)], 0.1) == [(0, 2), (2.5, 3)]
    assert merged([], 1) == []


def drawn() -> tuple[StepGraph, Plan]:
    graph = graphs.chain()
    return graph, plan_of(graph, frozenset({4}), frozenset({2, 3}), link(read=25.0), (100, 100), budget_bytes=900)


def test_lanes_are_what_the_plan_does():
    graph, plan = drawn()
    lanes = {lane.key: lane for lane in lanes_of(graph, timeline_of(graph, plan))}
    assert list(lanes) == ["writes", "reads", "replays", "waits"]
    assert (lanes["writes"].bytes, lanes["reads"].bytes, lanes["replays"].bytes) == (300, 100, None)
    assert lanes["writes"].text == "2x, 300 B, 3.00 s"
    alone = lanes_of(graph, timeline_of(graph, plan_of(graph, frozenset({3}))))
    assert [lane.name for lane in alone] == ["recomputing"]
    fast = lanes_of(graph, timeline_of(graph, plan_of(graph, offload=frozenset({2, 3}), over=link(write=1e9, read=1e9))))
    assert [lane.text for lane in fast if lane.key == "waits"] == ["none"]
    assert lanes_of(graph, timeline_of(graph, plan_of(graph))) == ()


def test_facts_and_text_say_the_same():
    graph, plan = drawn()
    timeline = timeline_of(graph, plan)
    facts = json.loads(json.dumps(timeline_facts(graph, plan, timeline)))
    assert facts["budget_bytes"] == 900
    assert facts["operations"] == [op.site for op in graph.ops]
    assert facts["planned"]["bytes_at"] == timeline.planned.bytes_at.tolist()
    assert [item["direction"] for item in facts["transfers"]] == [move.direction for move in timeline.moves]
    assert facts["replays"][0]["site"] == "layers.2/relu"
    assert len(facts["waits"]) == len(timeline.waits) > 0
    text = renderable_text(timeline_summary(graph, plan, timeline))
    for words in ("planned", "unplanned", "out over the link", "back over the link", "recomputing", "waiting for the link", "budget 900 B"):
        assert words in text


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_timeline_is_drawn(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    graph, plan = drawn()
    path = tmp_path / f"timeline.{suffix}"
    timeline_figure(graph, plan, timeline_of(graph, plan), path)
    assert path.stat().st_size > 2000


def svg_of(graph: StepGraph, plan: Plan, path: Path) -> str:
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        timeline_figure(graph, plan, timeline_of(graph, plan), path)
    return path.read_text()


def test_a_timeline_names_what_it_shows(tmp_path: Path) -> None:
    text = svg_of(*drawn(), tmp_path / "timeline.svg")
    for words in (
        "chain: by hand plan, live gear", "planned: peak", "unplanned: peak 960 B, 9.00 s", "budget 900 B", "planned peak",
        "forward", "backward",
        "bytes alive (B)", "time in the simulated step (s)", "out over the link", "back over the link",
        "recomputing", "waiting for the link",
    ):  # fmt: skip
        assert words in text, words


def test_a_plan_that_recomputes_alone_has_no_lanes_of_a_link(tmp_path: Path) -> None:
    text = svg_of(graphs.chain(), plan_of(graphs.chain(), frozenset({3})), tmp_path / "timeline.svg")
    assert "recomputing" in text
    assert "the link" not in text
    assert "budget" not in text
    assert "recomputing" not in svg_of(graphs.chain(), plan_of(graphs.chain()), tmp_path / "none.svg")


def test_what_cannot_be_drawn_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, plan = drawn()
    timeline = timeline_of(graph, plan)
    with pytest.raises(UsageError, match="cannot draw into"):
        timeline_figure(graph, plan, timeline, tmp_path / "timeline.docx")
    with pytest.raises(UsageError, match="cannot write"):
        timeline_figure(graph, plan, timeline, tmp_path / "absent" / "timeline.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"recoup\[report\]"):
        timeline_figure(graph, plan, timeline, tmp_path / "timeline.png")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    graph, plan = drawn()
    save(graph, tmp_path / "g.graph.json")
    save_plan(plan, tmp_path / "p.plan.json")
    return tmp_path


def test_show_draws_a_timeline_and_overwrites_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    argv = ["show", "g.graph.json", "--plan", "p.plan.json", "--timeline", "t.svg"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert "waiting for the link" in out
    assert err == "Wrote t.svg\n"
    assert main(argv) == 2
    assert "t.svg exists" in capsys.readouterr().err
    assert main([*argv, "--force", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["unplanned"]["peak_bytes"] == 960


@pytest.mark.parametrize(
    "argv",
    [["g.graph.json", "--timeline", "t.svg"], ["p.plan.json", "--plan", "p.plan.json", "--timeline", "t.svg"],
     ["g.graph.json", "--plan", "p.plan.json", "--timeline", "t.svg", "--peak"], ["g.graph.json", "--plan", "p.plan.json"]],
)  # fmt: skip
def test_a_timeline_needs_a_graph_and_a_plan(argv: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", *argv]) == 2
    assert "--timeline" in capsys.readouterr().err
    assert not (folder / "t.svg").exists()
