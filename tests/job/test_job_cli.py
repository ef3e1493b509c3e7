"""``recoup job``: tables, JSON, figures, exports, exit statuses, and errors that name the field."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from recoup.cli import main
from recoup.cost import device
from recoup.job.file import JobFile
from recoup.job.layout import Layout
from recoup.plan.file import load_plan

JOB = ["job", "--preset", "gpt-22b", "--gpus", "16", "--device", "a100", "--tensor", "4", "--pipeline", "2", "--sequence-parallel"]
JOB += ["--attention", "explicit", "--sequence", "2048", "--global-batch", "32"]


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(list(arguments))
    streams = capsys.readouterr()
    return status, streams.out, streams.err


def test_json_has_what_a_person_decides_by(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = said(capsys, *JOB, "--format", "json", "--curve", "--price", "2")
    assert status == 0
    assert err == ""
    facts = json.loads(out)
    assert facts["devices"] == 16
    assert facts["parameters"] == pytest.approx(22e9, rel=0.01)
    assert facts["peak_bytes"] == max(stage["peak_bytes"] for stage in facts["stages"]) <= facts["limit_bytes"]
    for stage in facts["stages"]:
        assert sum(stage["bytes"].values()) == stage["peak_bytes"]
        assert sum(part["last"] - part["first"] + 1 for part in stage["layers"]) == 24
    tokens = 32 * 2048
    assert facts["tokens_per_second"] == pytest.approx(tokens / facts["step_seconds"])
    assert facts["dollars_per_billion_tokens"] == pytest.approx(2 * 16 / 3600 / facts["tokens_per_second"] * 1e9)
    seconds = facts["seconds"]
    parts = seconds["compute"] + seconds["idle"] + seconds["exposed_exchange"] + seconds["optimizer"]
    assert parts == pytest.approx(facts["step_seconds"])
    assert [change["speedup"] for change in facts["changes"] if change["fits"]] == sorted(
        (change["speedup"] for change in facts["changes"] if change["fits"]), reverse=True
    )
    times = [point["step_seconds"] for point in facts["curve"]]
    assert times == sorted(times, reverse=True)
    for name, named in facts["named"].items():
        assert not named["fits"] or facts["step_seconds"] <= named["step_seconds"], name


def test_text_names_stages_layers_and_changes(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = said(capsys, *JOB, "--limit", "56GiB")
    assert status == 0
    for text in ("22.1 billion parameters", "Plan by layer", "probs", "What to change", "fused attention", "MFU"):
        assert text in out


def test_what_does_not_fit_exits_3_with_by_how_much_and_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = said(capsys, *JOB, "--limit", "40GiB")
    assert status == 3
    assert out == ""
    for text in ("stage 0 of 2 does not fit 40.0 GiB", "too much", "optimizer states", "it fits with"):
        assert text in err


def test_a_way_out_that_is_given_fits(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = said(capsys, *JOB, "--limit", "40GiB")
    assert "ZeRO stage 1" in err
    assert said(capsys, *JOB, "--limit", "40GiB", "--zero", "1")[0] == 0


def test_more_devices_are_named_where_no_change_helps(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["job", "--preset", "gpt-175b", "--gpus", "8", "--device", "a100", "--tensor", "8", "--sequence", "2048"]
    status, _, err = said(capsys, *arguments)
    assert status == 3
    assert "no single change makes it fit" in err
    assert "devices fit it with" in err


def test_without_a_layout_the_fastest_that_fits_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = said(capsys, "job", "--preset", "mpt-1b", "--gpus", "4", "--device", "h100", "--format", "json", "--no-advice")
    assert status == 0
    assert "No layout given" in err
    chosen = json.loads(out)
    status, out, err = said(capsys, "job", "--preset", "mpt-1b", "--gpus", "4", "--device", "h100", "--format", "json", "--sweep")
    assert status == 0
    fastest = json.loads(out)
    assert fastest[0]["layout"] == chosen["layout"]
    assert fastest[0]["step_seconds"] == pytest.approx(chosen["step_seconds"])
    assert len(fastest) == 20
    speeds = [item["tokens_per_second"] for item in fastest]
    assert speeds == sorted(speeds, reverse=True)
    assert "layouts planned" in err


def test_figure_and_its_name_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "job.png"
    status, _, err = said(capsys, *JOB, "--no-advice", "--figure", str(picture))
    assert status == 0
    assert f"Wrote {picture}" in err
    assert picture.read_bytes().startswith(b"\x89PNG")
    status, _, err = said(capsys, *JOB, "--figure", str(picture))
    assert status == 2
    assert "exists" in err


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("megatron", ("--recompute-granularity", "--tensor-model-parallel-size 4", "--sequence-parallel")),
        ("torchtitan", ("[activation_checkpoint]", "tensor_parallel_degree = 4")),
        ("maxtext", ("remat_policy: 'custom'", "decoder_layer_input: 'device'")),
    ],
)
def test_exports_say_what_they_cost(name: str, texts: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = said(capsys, *JOB, "--limit", "58GiB", "--export", name)
    assert status == 0
    for text in texts:
        assert text in out
    assert "The plan itself is faster" in err


def test_a_plan_file_of_a_stage_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "stage.plan.json"
    status, _, _ = said(capsys, *JOB, "--limit", "56GiB", "--export", "recoup", "--stage", "0", "--output", str(path))
    assert status == 0
    plan = load_plan(path)
    assert plan.peak_bytes <= plan.budget_bytes == 56 * 2**30
    assert all(site.startswith("layers.") for site in plan.recompute_sites)
    assert any("attention/probs" in site for site in plan.recompute_sites)


def test_a_job_file_is_the_same_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = said(capsys, *JOB, "--format", "json", "--no-advice")
    facts = json.loads(out)
    path = tmp_path / "job.json"
    layout = msgspec.convert(facts["layout"], type=Layout)
    path.write_bytes(msgspec.json.encode({"model": "gpt-22b", "layout": layout, "device": "a100", "kernels": facts["kernels"]}))
    _, again, _ = said(capsys, "job", "--job", str(path), "--format", "json", "--no-advice")
    assert json.loads(again) == facts
    assert JobFile(model="gpt-22b", layout=layout, device="a100").layout == layout


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["--tensor", "3"], ("--gpus", "take a multiple of 6")),
        (
            ["--tensor", "16", "--pipeline", "1", "--model", "heads=24,head_dim=256"],
            ("`tensor`", "16 does not divide model heads 24", "1, 2, 3, 4"),
        ),
        (["--pipeline", "1", "--gpus", "20", "--tensor", "1", "--context", "5"], ("`sequence_parallel`", "`tensor`")),
        (["--gpus", "20", "--pipeline", "5"], ("pipeline * chunks", "5 does not divide model layers 48", "1, 2, 3, 4, 6, 8")),
        (["--model", "heads=63"], ("model field `heads`", "63 must divide hidden 6144")),
        (["--model", "width=1"], ("model field `width` is not known", "hidden")),
        (["--kernels", "attention=fast"], ("attention",)),
        (["--kernels", "speed=1"], ("kernels field `speed` is not known", "hidden_share")),
        (["--device", "h101"], ("no device is called 'h101'", "h100")),
        (["--preset", "gpt-23b"], ("no preset is called 'gpt-23b'", "did you mean gpt-2")),
        (["--precision", "fp8"], ("a100-80g has no rate for 'fp8'", "bf16")),
        (["--global-batch", "3"], ("`global_batch`", "multiple of data 2")),
        (["--schedule", "interleaved"], ("`chunks` must be at least 2",)),
        (["--chunks", "2"], ("`schedule` interleaved",)),
        (["--expert", "2"], ("`expert`", "`experts`")),
        (["--price", "0"], ("--price must be positive",)),
        (["--output", "x"], ("--export",)),
        (["--export", "recoup", "--stage", "9"], ("stages 0 to 1, not 9",)),
        (["--limit", "much"], ("much",)),
        (["--context", "2", "--gpus", "32"], ("`context`", "flash")),
    ],
)
def test_wrong_usage_names_the_field_and_the_way_out(
    arguments: list[str], texts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = said(capsys, *JOB, *arguments)
    assert status == 2, err
    assert out == ""
    for text in texts:
        assert text in err


def test_no_model_and_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--preset" in said(capsys, "job", "--gpus", "8", "--device", "a100")[2]
    assert "--device is missing" in said(capsys, "job", "--gpus", "8", "--preset", "gpt-22b")[2]
    assert "hidden, heads" in said(capsys, "job", "--gpus", "8", "--device", "a100", "--model", "layers=2,vocab=100")[2]


def test_a_measured_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.json"
    fields = msgspec.to_builtins(device("a100"))
    path.write_text(json.dumps(fields | {"name": "mine", "memory_bytes": 2 * fields["memory_bytes"]}))
    status, out, _ = said(capsys, *JOB, "--device", str(path), "--format", "json", "--no-advice")
    assert status == 0
    assert json.loads(out)["limit_bytes"] == 2 * fields["memory_bytes"] - fields["reserved_bytes"]
    del fields["memory_bytes_per_second"]
    path.write_text(json.dumps(fields))
    status, _, err = said(capsys, *JOB, "--device", str(path))
    assert status == 2
    assert "memory_bytes_per_second" in err
    path.write_text(json.dumps(msgspec.to_builtins(device("a100")) | {"memory_bytes_per_second": 0}))
    assert "`memory_bytes_per_second` must be a positive number" in said(capsys, *JOB, "--device", str(path))[2]
    path.write_text(json.dumps(msgspec.to_builtins(device("a100")) | {"colour": "green"}))
    assert "colour" in said(capsys, *JOB, "--device", str(path))[2]
