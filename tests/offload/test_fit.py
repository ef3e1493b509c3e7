"""From a budget and a directory to a verified plan that offloads: in Python, and on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

import recoup
from recoup.cli import main
from recoup.cost import OffloadLink
from recoup.errors import UsageError
from recoup.simulate import simulate
from tests.offload.planning import LINK, model_and_step, recorded

WORKLOAD = """
from tests.offload.planning import model_and_step

def workload(rows=512):
    return model_and_step(rows=rows)
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(WORKLOAD)
    return f"{path}:workload"


def test_fit_offloads_to_a_directory_and_proves_it(tmp_path: Path) -> None:
    model, step, graph = recorded(rows=4096)
    unplanned = simulate(graph).peak_bytes
    with recoup.fit(model, step, unplanned * 6 // 10, offload=f"disk:{tmp_path}", disk_budget="1GiB") as fitted:
        plan = fitted.plan
        assert fitted.verification.passed
        assert plan.peak_bytes <= plan.budget_bytes
        assert fitted.verification.peak_bytes is not None
        assert fitted.verification.peak_bytes <= plan.budget_bytes
        if plan.offload_sites:
            step()
            assert fitted.report().offloaded_bytes > 0
    assert not list(tmp_path.iterdir())


def test_plans_that_offload_go_through_files(tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    links = tmp_path / "links.json"
    # So fast that moving is always cheaper than rebuilding.
    figures = {"where": str(disk), "write_bytes_per_second": 1e13, "read_bytes_per_second": 1e13, "latency_seconds": 0.0}
    links.write_text(json.dumps({"links": [{**json.loads(_json(LINK)), **figures}]}))
    plan = tmp_path / "train.plan.json"
    rows = ["--set", "rows=16384"]
    assert main(["solve", source, *rows, "--budget", "55%", "--offload", str(links), "-o", str(plan), "-q"]) == 0
    found = recoup.load_plan(plan)
    assert found.traffic is not None
    assert found.traffic.link.where == str(disk)
    assert str(disk) in capsys.readouterr().out
    assert main(["verify", source, *rows, "--plan", str(plan), "-q"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--offload", "tape"], "takes host, disk:DIRECTORY"),
        (["--offload", "disk:/nowhere/at/all"], "takes host, disk:DIRECTORY"),
        (["--disk-budget", "1GiB"], "give it too"),
        (["--offload", "disk:/tmp", "--disk-budget", "much"], "much"),
        (["--offload", "missing.json"], "missing.json"),
    ],
)
def test_what_cannot_be_understood_is_said_before_the_work(
    arguments: list[str], message: str, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", source, "--budget", "60%", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_host_is_no_place_to_offload_to_from_itself() -> None:
    model, step = model_and_step()
    with pytest.raises(UsageError, match="already"):
        recoup.fit(model, step, "60%", offload="host")


def _json(link: OffloadLink) -> str:
    return msgspec.json.encode(link).decode()
