from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recoup.errors import PlanMismatch, UsageError
from recoup.plan import Decision, Plan
from recoup.plan.file import load_plan, plan_json, save_plan

PLAN = Plan(
    fingerprint="0123456789abcdef",
    strategy="optimal",
    budget_bytes=600,
    peak_bytes=590,
    step_seconds=1.25,
    unplanned_peak_bytes=1000,
    unplanned_step_seconds=1.0,
    bound_seconds=1.25,
    gap=0.0,
    environment={"torch": "2.13.0"},
    decisions=(
        Decision(site="h.[0-11].mlp/gelu", action="recompute", bytes=400, why="rebuilt in 12 us"),
        Decision(site="h.[0-11].mlp/addmm", action="keep", bytes=300),
    ),
)


def test_a_plan_is_text_that_a_person_can_compare() -> None:
    assert plan_json(PLAN) == (
        "{\n"
        '  "format": 1,\n'
        '  "frontend": "torch-eager",\n'
        '  "fingerprint": "0123456789abcdef",\n'
        '  "signature": "",\n'
        '  "environment": {\n'
        '    "torch": "2.13.0"\n'
        "  },\n"
        '  "gear": "live",\n'
        '  "strategy": "optimal",\n'
        '  "budget_bytes": 600,\n'
        '  "peak_bytes": 590,\n'
        '  "step_seconds": 1.25,\n'
        '  "unplanned_peak_bytes": 1000,\n'
        '  "unplanned_step_seconds": 1.0,\n'
        '  "bound_seconds": 1.25,\n'
        '  "gap": 0.0,\n'
        '  "price_seconds_per_byte": null,\n'
        '  "binding": [],\n'
        '  "solve_seconds": 0.0,\n'
        '  "root_calls": 1,\n'
        '  "watch": [],\n'
        '  "traffic": null,\n'
        '  "stretches": {},\n'
        '  "decisions": [\n'
        '    {"site": "h.[0-11].mlp/gelu", "action": "recompute", "bytes": 400, "why": "rebuilt in 12 us"},\n'
        '    {"site": "h.[0-11].mlp/addmm", "action": "keep", "bytes": 300}\n'
        "  ]\n"
        "}\n"
    )


DECISIONS = st.builds(
    Decision,
    site=st.sampled_from(["h.[0-3]/gelu", "head/mm", 'odd"name\\/x', "schön/relu"]),
    action=st.sampled_from(["keep", "recompute"]),
    bytes=st.integers(0, 2**50),
    why=st.text(max_size=20),
)
PLANS = st.builds(
    Plan,
    fingerprint=st.text("0123456789abcdef", min_size=16, max_size=16),
    strategy=st.text(max_size=8),
    peak_bytes=st.integers(0, 2**50),
    step_seconds=st.floats(0, 1e6),
    unplanned_peak_bytes=st.integers(0, 2**50),
    unplanned_step_seconds=st.floats(0, 1e6),
    gap=st.none() | st.floats(0, 10),
    environment=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    decisions=st.lists(DECISIONS, max_size=4).map(tuple),
)


@given(plan=PLANS)
def test_a_plan_reads_back_as_it_was(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    save_plan(plan, path)
    assert load_plan(path) == plan
    assert load_plan(path).recompute_sites == plan.recompute_sites


def test_a_plan_for_many_layers_is_short() -> None:
    assert len(plan_json(PLAN).splitlines()) < 30


def edited(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps(json.loads(plan_json(PLAN)) | changes))
    return path


def test_unknown_fields_are_refused_with_their_path(tmp_path: Path) -> None:
    with pytest.raises(PlanMismatch, match="unknown field `colour`"):
        load_plan(edited(tmp_path / "plan.json", colour="red"))
    decision = {"site": "a/b", "action": "keep", "bytes": 1, "when": "now"}
    with pytest.raises(PlanMismatch, match=r"unknown field `when` - at `\$\.decisions\[0\]`"):
        load_plan(edited(tmp_path / "plan.json", decisions=[decision]))


def test_unknown_actions_are_refused(tmp_path: Path) -> None:
    decision = {"site": "a/b", "action": "forget", "bytes": 1}
    with pytest.raises(PlanMismatch, match=r"'forget' - at `\$\.decisions\[0\]\.action`"):
        load_plan(edited(tmp_path / "plan.json", decisions=[decision]))


def test_malformed_ranges_are_refused_with_their_path(tmp_path: Path) -> None:
    decisions = [{"site": "a/b", "action": "keep", "bytes": 1}, {"site": "h.[3-]/b", "action": "keep", "bytes": 1}]
    with pytest.raises(PlanMismatch, match=r"malformed range \[3-\] - at `\$\.decisions\[1\]\.site`"):
        load_plan(edited(tmp_path / "plan.json", decisions=decisions))


def test_malformed_watch_ranges_are_refused_with_their_path(tmp_path: Path) -> None:
    with pytest.raises(PlanMismatch, match=r"malformed range \[,\] - at `\$\.watch\[0\]`"):
        load_plan(edited(tmp_path / "plan.json", watch=["h.[,]"]))


def test_other_versions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanMismatch, match="plan format 7, but this version of Recoup reads format 1"):
        load_plan(edited(tmp_path / "plan.json", format=7))


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"format": 1, "fingerprint": "x"}')
    with pytest.raises(PlanMismatch, match="missing required field `strategy`"):
        load_plan(path)


def test_a_plan_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan_json(PLAN)[:-10])
    with pytest.raises(PlanMismatch, match="cut short"):
        load_plan(path)


def test_missing_and_unwritable_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no file"):
        load_plan(tmp_path / "absent.json")
    with pytest.raises(UsageError, match="cannot write"):
        save_plan(PLAN, tmp_path / "absent" / "plan.json")


def test_a_plan_saves_itself(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == PLAN
