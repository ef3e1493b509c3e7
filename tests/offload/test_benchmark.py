"""The benchmark of offloading: its arithmetic, and one small run of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks import longer
from benchmarks.offload import main
from benchmarks.offload_report import FAST, JOINT, MOVES, RECOMPUTES, Row, arithmetic_table, peaks_table, removed, times_table
from recoup.errors import UsageError
from recoup.report.text import renderable_text
from tests.offload.planning import LINK

MIB = 2**20
ALONE = Row(
    "llama", "50%", RECOMPUTES, 50 * MIB, 100 * MIB, 2.0, 0.8, 0.5, 0.25, "", 2.1, "static", 0.01, 49 * MIB, 49 * MIB, True,
    predicted_relative_time=1.2, relative_time=1.3,
)  # fmt: skip
BOTH = replace(
    ALONE,
    plan=JOINT,
    predicted_relative_time=1.05,
    relative_time=1.15,
    offloaded_bytes=40 * MIB,
    link_seconds=2.5,
    measured_stall_seconds=0.01,
)
ABSENT = replace(ALONE, plan=MOVES, gear="", predicted_relative_time=None, relative_time=None, note="does not fit: 60.0 MiB is the least")


def test_what_is_gone_of_the_time_that_recomputing_adds():
    rows = [ALONE, BOTH, ABSENT]
    assert removed(rows, BOTH, simulated=True) == pytest.approx(0.75)
    assert removed(rows, BOTH, simulated=False) == pytest.approx(0.5)
    assert removed(rows, ALONE, simulated=True) is None
    assert removed(rows, ABSENT, simulated=True) is None
    # Where recomputing costs nothing there is nothing to be gone, and another budget is no measure.
    assert removed([replace(ALONE, relative_time=0.98), BOTH], BOTH, simulated=False) is None
    assert removed([replace(ALONE, budget="30%"), BOTH], BOTH, simulated=False) is None


def test_the_tables_say_what_fits_and_what_the_link_carries():
    text = renderable_text(peaks_table([ALONE, ABSENT, BOTH]), width=200)
    assert "does not fit: 60.0 MiB is the least" in text
    assert "bitwise" in text
    assert "DIFFER" in renderable_text(peaks_table([replace(ALONE, gradients_equal=False)]), width=200)
    times = renderable_text(times_table([ALONE, ABSENT, BOTH]), width=200)
    assert "50%" in times
    assert MOVES not in times
    lines = [line for line in renderable_text(arithmetic_table([ALONE, ABSENT, BOTH]), width=200).splitlines() if "llama" in line]
    assert ["0.375" in lines[0], "yes" in lines[0], "1.250" in lines[1], "no" in lines[1]] == [True] * 4


def test_a_small_run(tmp_path: Path) -> None:
    sizes = [f"--set={name}" for name in ("layers=2", "width=64", "hidden=128", "sequence=256", "batch=8")]
    rows = tmp_path / "rows.json"
    main(
        ["--workloads", "llama", "--tiny", *sizes, "--threads", str(torch.get_num_threads()), "--offload-dir", str(tmp_path),
         "--shares", "0.7", "--repeats", "2", "--seconds", "1", "--json", str(rows), "--out", str(tmp_path / "rows.txt")]
    )  # fmt: skip
    found = json.loads(rows.read_text())
    by_plan = {row["plan"]: row for row in found["rows"]}
    assert list(by_plan) == [RECOMPUTES, MOVES, JOINT, FAST]
    for plan in (RECOMPUTES, MOVES, JOINT):
        row = by_plan[plan]
        assert row["gradients_equal"] is True
        assert row["note"] == ""
        assert row["measured_peak_bytes"] <= row["budget_bytes"]
        assert row["relative_time"] > 0
    assert by_plan[MOVES]["offloaded_bytes"] > 0
    assert by_plan[MOVES]["link_seconds"] > 0
    assert by_plan[FAST]["relative_time"] is None
    assert "out " in found["environment"]["options"]["measured_link"]
    assert "Can the link carry it?" in (tmp_path / "rows.txt").read_text()


def test_longer_sequences(tmp_path: Path) -> None:
    links, rows = tmp_path / "links.json", tmp_path / "rows.json"
    links.write_text(json.dumps({"links": [json.loads(msgspec.json.encode(LINK))]}))
    longer.main(
        ["--workloads", "llama", "--tiny", "--offload-dir", str(tmp_path), "--link", str(links), "--lengths", "64", "16", "24",
         "--threads", str(torch.get_num_threads()), "--seconds", "2", "--json", str(rows), "--out", str(tmp_path / "rows.txt")]
    )  # fmt: skip
    short, middle, long = json.loads(rows.read_text())["rows"]
    assert [row["length"] for row in (short, middle, long)] == [16, 24, 64]
    assert short["unplanned_token_seconds_ratio"] == 1
    for row in (short, middle):
        assert row["passed"] is True
        assert row["measured_peak_bytes"] <= row["budget_bytes"] == short["unplanned_peak_bytes"]
    assert long["note"].startswith("does not fit")


def test_what_the_program_refuses(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--warm must be 1 or more"):
        main(["--workloads", "llama", "--tiny", "--offload-dir", str(tmp_path), "--warm", "0"])
    (tmp_path / "links.json").write_text('{"links": [{"target": "host", "write_bytes_per_second": 1.0, "read_bytes_per_second": 1.0}]}')
    with pytest.raises(UsageError, match="no link to a disk"):
        main(["--workloads", "llama", "--tiny", "--offload-dir", str(tmp_path), "--link", str(tmp_path / "links.json")])
