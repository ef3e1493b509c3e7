"""The command line on a real step, from recording to verification."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from recoup.cli import main  # noqa: E402
from recoup.graph.rules import check  # noqa: E402
from recoup.graph.store import load  # noqa: E402
from recoup.plan.file import load_plan  # noqa: E402

WORKLOAD = """
import torch
from torch import nn


def workload(*, layers=4, width=64, batch=256, backward=True):
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.GELU()) for _ in range(layers))
    model = nn.Sequential(*blocks)
    inputs = torch.randn(batch, width)

    def step():
        model.zero_grad(set_to_none=True)
        loss = model(inputs).square().mean()
        if backward:
            loss.backward()
        return loss.detach()

    return model, step
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(WORKLOAD)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main(argv)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_record_solve_verify(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "record", "train.py:workload")[0] == 0
    graph = load("train.graph.json.gz")
    check(graph)
    status, out, err = run(capsys, "solve", "train.graph.json.gz", "--budget", "70%", "--format", "json")
    assert status == 0, err
    plan = load_plan("train.plan.json")
    assert plan.peak_bytes <= plan.budget_bytes < plan.unplanned_peak_bytes
    assert plan.fingerprint == graph.fingerprint
    assert plan.recompute_sites
    assert json.loads(out)["peak_bytes"] == plan.peak_bytes
    status, out, err = run(capsys, "verify", "train.py:workload", "--plan", "train.plan.json", "--format", "json")
    assert status == 0, out + err
    facts = json.loads(out)
    assert facts["peak_bytes"] <= plan.budget_bytes
    assert facts["unplanned_peak_bytes"] > plan.budget_bytes


def test_fit(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "fit", "train.py:workload", "--budget", "70%", "--set", "layers=3")
    assert status == 0, out + err
    assert "verified" in out
    assert load_plan("train.plan.json").recompute_sites


def test_frontier_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    argv = ("frontier", "train.py:workload", "--budgets", "70%,100%", "--measure", "1", "--figure", "f.png", "--format", "json")
    status, out, err = run(capsys, *argv)
    assert status == 0, err
    facts = json.loads(out)
    optimal = [point for point in facts["points"] if point["strategy"] == "optimal"]
    assert all(point["predicted_peak_bytes"] <= point["budget_bytes"] for point in optimal if point["feasible"])
    assert all(point["measured_peak_bytes"] <= point["budget_bytes"] for point in facts["measured"])
    assert Path("f.png").stat().st_size > 2000


def test_a_budget_that_cannot_be_met_exits_3(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "solve", "train.py:workload", "--budget", "1KiB")
    assert (status, out) == (3, "")
    assert "MiB" in err, "the message says the least budget"


def test_an_unknown_strategy_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "solve", "train.py:workload", "--budget", "70%", "--strategy", "magic")
    assert status == 2
    assert "magic" in err
    assert "optimal" in err


def test_a_step_without_a_backward_is_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "record", "train.py:workload", "--set", "backward=False")
    assert status == 1
    assert "backward" in err


def test_a_plan_for_another_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "solve", "train.py:workload", "--budget", "70%")[0] == 0
    status, _, err = run(capsys, "verify", "train.py:workload", "--plan", "train.plan.json", "--set", "layers=1")
    assert status == 2, err


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "doctor")
    assert status == 0, out + err
    assert "allocator meter" in out
