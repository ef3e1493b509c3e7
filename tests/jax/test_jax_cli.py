"""The command line on a JAX step, and that the core and the front-end import what they should."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recoup.cli import main
from recoup.jax import jaxprs, ties

jax = pytest.importorskip("jax")
jnp = jax.numpy
WORKLOAD = """
import jax, jax.numpy as jnp

def workload(*, layers=6):
    def loss(ws, x):
        return jnp.square(jax.lax.scan(lambda x, w: (jnp.tanh(jnp.sin(x @ w) + x), None), x, ws)[0]).mean()
    return loss, (jax.random.normal(jax.random.key(0), (layers, 32, 32)) / 6, jax.random.normal(jax.random.key(1), (128, 32)))

def optioned():
    return (lambda x, w, flag: (x @ w).sum()), (jnp.ones((2, 2)), jnp.ones((2, 2)), True), {"argnums": (0, 1)}

def odd():
    return (lambda x: x.sum()), (jnp.ones(2),), {"argnum": 0}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(WORKLOAD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


@pytest.mark.newest
def test_record_solve_verify_show(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", "train.py:workload", "--set", "layers=8", "--runs", "1", "--format", "json"]) == 0
    facts = _json(capsys)
    assert facts["frontend"] == "jax"
    assert [loop["turns"] for loop in facts["loops"]] == [8]
    assert main(["solve", "train.graph.json.gz", "--budget", "60%", "--format", "json"]) == 0
    plan = _json(capsys)
    assert plan["gear"] == "jit"
    assert main(["verify", "train.py:workload", "--set", "layers=8", "--plan", "train.plan.json", "--format", "json"]) == 0
    assert _json(capsys)["passed"]
    assert main(["show", "train.graph.json.gz"]) == 0
    assert main(["show", "train.plan.json"]) == 0
    assert main(["frontier", "train.graph.json.gz", "--budgets", "70%,50%", "--format", "json"]) == 0


def test_fit_and_a_budget_that_nothing_meets(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "train.py:workload", "--budget", "70%", "--format", "json"]) == 0
    facts = _json(capsys)
    assert facts["verification"]["passed"]
    assert facts["verification"]["peak_bytes"] <= facts["plan"]["budget_bytes"]
    assert main(["fit", "train.py:workload", "--budget", "10KiB", "-o", "no.json"]) == 3
    assert "least peak" in capsys.readouterr().err


def test_options_of_a_workload(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", "train.py:optioned", "--runs", "1"]) == 0
    assert main(["record", "train.py:odd", "-o", "odd.json"]) == 2
    assert "argnums" in capsys.readouterr().err


@pytest.mark.newest
def test_the_front_end_imports_no_torch_and_the_core_no_jax() -> None:
    code = "import sys, recoup, recoup.cli, recoup.solve; assert not {'jax', 'torch'} & set(sys.modules)\n"
    code += "import recoup.jax; assert 'torch' not in sys.modules and 'jax' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.newest
def test_what_is_relied_on_holds_for_this_jax() -> None:
    for name, holds, seen in jaxprs.self_test():
        assert holds, f"{name}: {seen}"


@pytest.mark.newest
def test_the_tie_of_this_platform_is_honoured() -> None:
    assert ties.way_of("cpu") in ("barrier", "select")
    assert ties.honoured(lambda values, flowing: ties.tie(values, flowing, [False] * len(values)))


def test_what_a_tie_waits_for_is_not_computed_for_every_element() -> None:
    """The select tie reads one element of a cotangent; fused into what is tied, its whole chain would run for each of theirs."""

    def tied(xs: Any, value: Any) -> Any:
        total = jnp.float32(0)
        for x in xs:
            total = jnp.sin(total + x)
        (value,), (total,) = ties.tie([value], [total], [False])
        return jnp.tanh(value) + 1, (total * 2).sum()

    shape = jax.ShapeDtypeStruct((64, 64), "float32")
    text = jax.jit(tied).lower([shape] * 30, jax.ShapeDtypeStruct((512, 512), "float32")).compile().as_text()
    fused = [part for part in text.split("\n\n") if " tanh(" in part]
    assert len(fused) == 1
    assert " sine(" not in fused[0]
