"""Links measured with the stores themselves."""

from __future__ import annotations

import errno
import json
import time
from pathlib import Path

import pytest
import torch

import recoup.torch
from recoup import cli
from recoup.errors import OffloadError
from recoup.torch.offload import measure_disk, measure_host
from recoup.torch.offload.beside import Window, until
from tests.offload.conftest import MIB
from tests.offload.faults import FaultyRequests, failing, slow


def test_the_figures_are_those_of_the_disk(directory: Path) -> None:
    link = measure_disk(directory, seconds=0.5, requests=FaultyRequests(write=slow(0.005), read=slow(0.010)))
    # two threads, each a MiB in 5 or 10 ms at best
    assert 0 < link.write_bytes_per_second <= 400 * MIB
    assert 0 < link.read_bytes_per_second <= 200 * MIB
    assert 0.010 <= link.latency_seconds < 0.2
    assert (link.target, link.where, link.provenance) == ("disk", str(directory), "measured")
    assert (link.staging_bytes, link.shared) == (2 * MIB + 4096, True)
    assert 0 <= link.drag < 1
    assert 0 < link.call_seconds < 0.1
    assert list(directory.iterdir()) == []


def test_a_disk_that_fails_is_not_measured(directory: Path) -> None:
    with pytest.raises(OffloadError, match=f"the link cannot be measured: {directory} is full"):
        measure_disk(directory, requests=FaultyRequests(write=failing(errno.ENOSPC, always_from=10)))


def test_the_cpus_tensors_are_in_the_hosts_memory() -> None:
    assert measure_host("cpu") == ()


class _Countdown:
    def __init__(self, asked: int) -> None:
        self.left = asked

    def done(self) -> bool:
        self.left -= 1
        return self.left <= 0


def test_compute_is_counted_while_transfers_run() -> None:
    calls: list[int] = []
    window = until(lambda: calls.append(1), lambda: [_Countdown(4), _Countdown(1), _Countdown(3)])
    assert window.calls == len(calls) == 5  # asked in order: three times no, then yes and yes, twice no, yes
    assert Window(2.0, 5).rate == 2.5
    assert Window(2.0, 3, starting_seconds=0.5).rate == 2.0  # what starting took was never there for compute
    assert until(lambda: None, list, at_least_seconds=0.02).seconds >= 0.02


def test_what_starting_the_transfers_took_is_told_apart() -> None:
    def start() -> list[_Countdown]:
        time.sleep(0.02)
        return [_Countdown(1)]

    window = until(lambda: None, start)
    assert 0.02 <= window.starting_seconds <= window.seconds


def test_doctor_measures_the_directory_it_is_given(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recoup.torch, "doctor", list)  # its other checks, which take seconds
    assert cli.main(["doctor", "--offload-dir", str(directory), "--format", "json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {check["name"]: check["detail"] for check in facts["checks"]}["offload to disk"].startswith(f"{directory} on ")
    disk = facts["links"][0]
    assert (disk["target"], disk["where"]) == ("disk", str(directory))
    assert disk["write_bytes_per_second"] > 0
    assert len(facts["links"]) == (3 if torch.cuda.is_available() else 1)


def test_doctor_refuses_a_directory_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--offload-dir", "nowhere"]) == 1
    assert "nowhere is no directory" in capsys.readouterr().err
