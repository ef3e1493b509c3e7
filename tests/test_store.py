from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import given

import graphs
from recoup.errors import PlanMismatch, UsageError
from recoup.graph import StepGraph
from recoup.graph.store import load, save, write_file


@given(graph=graphs.step_graphs())
def test_a_graph_reads_back_as_it_was(graph: StepGraph, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("store") / "graph.json"
    save(graph, path)
    assert load(path) == graph
    assert load(path).fingerprint == graph.fingerprint


def test_the_form_is_a_versioned_envelope(tmp_path: Path) -> None:
    save(graphs.chain(), tmp_path / "graph.json")
    written = json.loads((tmp_path / "graph.json").read_text())
    assert list(written) == ["format", "graph"]
    assert written["format"] == 1
    assert written["graph"]["name"] == "chain"


def test_gz_files_are_zipped_and_repeatable(tmp_path: Path) -> None:
    graph = graphs.transformer(2)
    for name in ("a.json.gz", "b.json.gz"):
        save(graph, tmp_path / name)
    data = (tmp_path / "a.json.gz").read_bytes()
    assert data == (tmp_path / "b.json.gz").read_bytes()
    assert json.loads(gzip.decompress(data))["format"] == 1
    assert load(tmp_path / "a.json.gz") == graph


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no file .*absent\.json"):
        load(tmp_path / "absent.json")


def test_a_folder_is_no_graph(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["graph.json", "graph.json.gz"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_file_cut_short_is_refused(tmp_path: Path, name: str, share: float) -> None:
    path = tmp_path / name
    save(graphs.chain(), path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(PlanMismatch, match="cut short"):
        load(path)


def test_damaged_zip_data_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "graph.json.gz"
    save(graphs.chain(), path)
    data = bytearray(path.read_bytes())
    data[20] ^= 0xFF
    path.write_bytes(bytes(data))
    with pytest.raises(PlanMismatch, match="damaged"):
        load(path)


def edited(path: Path, *keys: str | int, value: object) -> Path:
    save(graphs.chain(), path)
    whole = json.loads(path.read_text())
    place = whole
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path.write_text(json.dumps(whole))
    return path


def test_another_format_version_is_named_as_such(tmp_path: Path) -> None:
    path = edited(tmp_path / "graph.json", "format", value=2)
    with pytest.raises(PlanMismatch, match="step graph format 2, but this version of Recoup reads format 1"):
        load(path)


def test_the_version_is_asked_before_the_fields(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text('{"format": 9, "graph": {"new": "shape"}}')
    with pytest.raises(PlanMismatch, match="format 9"):
        load(path)


def test_an_unknown_field_is_refused_with_its_path(tmp_path: Path) -> None:
    path = edited(tmp_path / "graph.json", "graph", "ops", 1, "colour", value="red")
    with pytest.raises(PlanMismatch, match=r"unknown field `colour` - at `\$\.graph\.ops\[1\]`"):
        load(path)


def test_a_wrong_type_is_refused_with_its_path(tmp_path: Path) -> None:
    path = edited(tmp_path / "graph.json", "graph", "storages", 0, "bytes", value="many")
    with pytest.raises(PlanMismatch, match=r"storages\[0\]\.bytes"):
        load(path)


def test_what_is_no_graph_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    for data in (b"[]", b"{}", b"null", b"\xff\xfe", b"hello"):
        path.write_bytes(data)
        with pytest.raises(PlanMismatch):
            load(path)


def test_writing_into_no_folder_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        save(graphs.chain(), tmp_path / "absent" / "graph.json")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "graph.json"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UsageError, match="No space left"):
        save(graphs.chain(), path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["graph.json"]


def test_a_write_replaces_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_file(path, b"one")
    write_file(path, b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["file.txt"]
