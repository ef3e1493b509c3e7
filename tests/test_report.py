from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import graphs
from recoup.errors import MissingExtra, UsageError
from recoup.plan import Decision, Plan
from recoup.report.figure import frontier_figure
from recoup.report.series import series_of
from recoup.report.text import checks_table, frontier_table, graph_summary, peak_table, plan_summary, renderable_text, verification_summary

MIB = 2**20


@dataclass(frozen=True)
class Point:
    strategy: str
    budget_bytes: int
    predicted_peak_bytes: int
    relative_time: float
    gear: str = "live"
    measured_peak_bytes: int | None = None
    step_seconds: float = 0.1
    gap: float | None = None
    feasible: bool = True
    price_seconds_per_byte: float | None = None
    binding: str = ""
    tiles: str = ""


@dataclass(frozen=True)
class Seen:
    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Verified:
    passed: bool
    checks: tuple[Seen, ...]
    peak_bytes: int | None = 600 * MIB
    predicted_peak_bytes: int = 605 * MIB
    unplanned_peak_bytes: int | None = 1000 * MIB
    step_seconds: float | None = 0.11
    unplanned_step_seconds: float | None = 0.1
    relative_time: float | None = 1.1


POINTS: list[Any] = [
    Point("none", 0, 1000 * MIB, 1.0),
    Point("optimal", 600 * MIB, 598 * MIB, 1.05, gap=0.001),
    Point("optimal", 800 * MIB, 790 * MIB, 1.02, gap=0.0),
    Point("every_block", 600 * MIB, 700 * MIB, 1.3, feasible=False),
    Point("sqrt", 600 * MIB, 590 * MIB, 1.3, "static"),
]


def shown(*renderables: Any) -> str:
    text = "\n".join(renderable_text(renderable, width=140) for renderable in renderables)
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


def test_a_frontier_as_a_table() -> None:
    assert [line.split() for line in shown(frontier_table(POINTS)).splitlines() if "─" not in line] == [
        ["strategy", "gear", "budget", "peak", "step", "time", "gap"],
        ["none", "live", "-", "1000", "MiB", "100", "ms", "1.000x", "-"],
        ["optimal", "live", "600", "MiB", "598", "MiB", "100", "ms", "1.050x", "0.10%"],
        ["optimal", "live", "800", "MiB", "790", "MiB", "100", "ms", "1.020x", "0.00%"],
        ["every_block", "live", "600", "MiB", "700", "MiB", "100", "ms", "1.300x", "-", "over", "budget"],
        ["sqrt", "static", "600", "MiB", "590", "MiB", "100", "ms", "1.300x", "-"],
    ]


def test_infeasible_points_say_so() -> None:
    rows = shown(frontier_table(POINTS)).splitlines()
    assert [row for row in rows if "over budget" in row] == [row for row in rows if row.startswith("every_block")]
    assert "measured" not in rows[0]


def test_a_measured_column_appears_with_measurements() -> None:
    text = shown(frontier_table([replace(POINTS[1], measured_peak_bytes=597 * MIB)]))
    assert "measured peak" in text.splitlines()[0]
    assert "597 MiB" in text


def make_plan(**changes: Any) -> Plan:
    fields = {
        "fingerprint": "0123456789abcdef",
        "strategy": "optimal",
        "budget_bytes": 600 * MIB,
        "peak_bytes": 590 * MIB,
        "step_seconds": 0.105,
        "unplanned_peak_bytes": 1000 * MIB,
        "unplanned_step_seconds": 0.1,
        "gap": 0.0012,
        "decisions": (
            Decision(site="h.[0-11].mlp/gelu", action="recompute", bytes=400 * MIB, why="cheap [sic]"),
            Decision(site="head/mm", action="keep", bytes=MIB, why="read by replays"),
        ),
    }
    return Plan(**(fields | changes))


def test_a_plan_is_summed_up() -> None:
    text = shown(plan_summary(make_plan()))
    assert "590 MiB predicted, 1000 MiB unplanned (59.0%)" in text
    assert "at most 0.12% slower than the fastest plan" in text
    assert "h.[0-11].mlp/gelu" in text, "ranges must not be taken for markup"
    assert "cheap [sic]" in text


def test_a_plan_summary_shows_the_largest_decisions() -> None:
    text = shown(plan_summary(make_plan(), limit=1))
    assert "mlp/gelu" in text
    assert "head/mm" not in text
    assert "... and 1 more decisions" in text


def test_a_plan_without_budget_or_gap() -> None:
    text = shown(plan_summary(make_plan(budget_bytes=0, gap=None, decisions=())))
    assert "budget    -" in text
    assert "gap       not known" in text


def test_a_verification_gives_its_verdict_first() -> None:
    good = Verified(True, (Seen("gradients", True, "148 equal"),))
    bad = Verified(False, (Seen("gradients", True, "148 equal"), Seen("peak", False, "over by 3.00 MiB")))
    assert shown(verification_summary(good)).startswith("verified\n")
    text = shown(verification_summary(bad))
    assert text.startswith("verification FAILED\n")
    assert any("peak" in line and "FAILED" in line and "over by 3.00 MiB" in line for line in text.splitlines())
    assert "0.600x" in text
    assert "1.100x" in text


def test_a_verification_without_measurements() -> None:
    text = shown(verification_summary(Verified(True, (), None, MIB, None, None, None, None)))
    assert "1.00 MiB" in text
    assert "None" not in text


def test_checks_may_hold_brackets() -> None:
    assert "tensor[0]" in shown(checks_table([Seen("[x]", False, "tensor[0]")]))


def test_a_graph_is_summed_up() -> None:
    text = shown(graph_summary(graphs.chain()))
    assert "6 operations, 8 storages, 3 saved tensors" in text
    assert "960 B simulated" in text
    assert "600 B of activations, 600 B of them can be recomputed" in text


def test_what_stands_at_the_peak_sums_up_small_places() -> None:
    places = [("h.0", 600), ("h.1", 300), ("parameter", 60), ("buffer", 40)]
    text = shown(peak_table(places, 1000, limit=2))
    assert "60.0%" in text
    assert any(line.split() == ["2", "smaller", "100", "B", "10.0%"] for line in text.splitlines())


def test_series_leave_out_what_is_not_feasible() -> None:
    series = series_of(POINTS)
    assert [line.name for line in series] == ["optimal", "none", "sqrt"]
    assert series[0].places == ((1.02, 790 * MIB), (1.05, 598 * MIB))


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_figure_is_drawn(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"frontier.{suffix}"
    frontier_figure(POINTS, path, title="chain", measured=[replace(POINTS[1], measured_peak_bytes=597 * MIB)])
    assert path.stat().st_size > 2000


def test_a_figure_names_its_strategies_and_marks(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    path = tmp_path / "frontier.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        frontier_figure(POINTS, path, title="my step", measured=[replace(POINTS[1], measured_peak_bytes=597 * MIB)])
    text = path.read_text()
    for words in (
        "my step",
        "optimal",
        "sqrt",
        "unplanned 1000 MiB",
        "least feasible 590 MiB",
        "peak of the step (MiB)",
        "filled: measured",
    ):
        assert words in text
    assert "every block" not in text


def test_a_figure_is_200_dots_an_inch(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("PIL.Image")
    frontier_figure(POINTS, tmp_path / "frontier.png", title="chain")
    with image.open(tmp_path / "frontier.png") as picture:
        assert picture.width >= 1600


def test_a_figure_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no point of the frontier is feasible"):
        frontier_figure([POINTS[3]], tmp_path / "frontier.png", title="x")


def test_a_figure_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(UsageError, match="cannot draw into"):
        frontier_figure(POINTS, tmp_path / "frontier.docx", title="x")
    with pytest.raises(UsageError, match="cannot write"):
        frontier_figure(POINTS, tmp_path / "absent" / "frontier.png", title="x")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"recoup\[report\]"):
        frontier_figure(POINTS, tmp_path / "frontier.png", title="x")
