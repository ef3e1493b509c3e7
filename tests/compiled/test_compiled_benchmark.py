"""The benchmark of compiled models at tiny sizes: what its rows must say whatever the machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.compiled import main, options_of
from benchmarks.compiled_report import Row, read_rows
from recoup.errors import UsageError

SMALL = ["--tiny", "--threads", "1", "--repeats", "2", "--workloads", "gpt2", "--kernels", "aten"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """One run of the benchmark, read back from its JSON."""
    path = tmp_path_factory.mktemp("compiled") / "rows.json"
    log, text = path.with_suffix(".log"), path.with_suffix(".txt")
    written = ["--json", str(path), "--log", str(log), "--out", str(text)]
    main([*SMALL, "--stock", "1,0.5", "--points", "2", "--processor-time", *written])
    found = read_rows([path])
    assert [json.loads(line)["setting"] for line in log.read_text().splitlines()] == [row.setting for row in found if not row.note]
    return found


def recoups(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.variant == "recoup" and not row.note]


def test_there_is_a_row_for_each_variant_and_times_are_relative_to_keeping_all(rows: list[Row]) -> None:
    assert [(row.variant, row.setting) for row in rows if not row.note][:3] == [("keep all", ""), ("stock", "1"), ("stock", "0.5")]
    assert {row.setting for row in rows if row.variant == "recoup"} == {"at stock 1", "at stock 0.5", "budget 0", "budget 1"}
    assert rows[0].relative_time == 1.0
    for row in rows:
        assert row.note or (row.step_seconds or 0) > 0
        assert row.note or row.relative_time == pytest.approx((row.step_seconds or 0) / (rows[0].step_seconds or 1))


def test_recoup_keeps_each_budget_within_five_percent_of_its_word_and_the_bits_of_keeping_all(rows: list[Row]) -> None:
    assert len(recoups(rows)) >= 3
    for row in recoups(rows):
        assert row.bitwise_equal
        assert row.gradient_difference == 0.0
        assert row.measured_peak_bytes is not None
        assert row.predicted_peak_bytes is not None
        assert row.budget_bytes is not None
        assert row.measured_peak_bytes <= row.predicted_peak_bytes <= row.budget_bytes
        assert row.measured_peak_bytes >= 0.95 * row.predicted_peak_bytes


def test_recoups_peak_never_rises_as_the_budget_falls(rows: list[Row]) -> None:
    falling = sorted(recoups(rows), key=lambda row: -(row.budget_bytes or 0))
    assert all((one.measured_peak_bytes or 0) >= (other.measured_peak_bytes or 0) for one, other in pairwise(falling))


def test_the_shares_of_a_compilation_are_a_part_of_it(rows: list[Row]) -> None:
    for row in recoups(rows):
        assert 0 < row.pricing_seconds + row.solve_seconds < (row.compile_seconds or 0)
    assert all(row.solve_seconds == row.pricing_seconds == 0 for row in rows if row.variant == "stock")


def test_rows_of_earlier_runs_are_joined_into_tables_and_a_figure(rows: list[Row], tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps({"rows": [asdict(row) for row in rows]}))
    written = ["--out", str(tmp_path / "tables.txt"), "--figure", str(tmp_path / "curves.png")]
    main([*SMALL, "--read", str(tmp_path / "rows.json"), *written])
    tables = (tmp_path / "tables.txt").read_text()
    assert "stock 0.5" in tables
    assert "OVER BUDGET" not in tables
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_wrong_options_are_said() -> None:
    with pytest.raises(UsageError, match="--kernels takes aten and inductor"):
        options_of(["--kernels", "metal"])
    with pytest.raises(UsageError, match="there must be points"):
        options_of(["--points", "0", "--stock", ""])
