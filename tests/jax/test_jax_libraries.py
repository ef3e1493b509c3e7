"""Models of Flax (linen and nnx) and Equinox, and the other workloads of the benchmarks, at small sizes."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from planning import recorded_of

import recoup.jax

pytest.importorskip("jax")
WORKLOADS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("gpt", "workload", "jax", {"layers": 1, "width": 32, "heads": 2, "sequence": 32, "batch": 2, "vocabulary": 64}),
    ("gpt", "scanned", "jax", {"layers": 4, "width": 32, "heads": 2, "sequence": 32, "batch": 2, "vocabulary": 64}),
    ("linen", "workload", "flax", {"layers": 1, "width": 32, "heads": 2, "sequence": 32, "batch": 2, "vocabulary": 64}),
    ("nnx", "workload", "flax", {"layers": 3, "width": 32, "batch": 128}),
    ("equinox", "workload", "equinox", {"layers": 1, "width": 32, "heads": 2, "patches": 16, "batch": 4}),
    ("cnn", "workload", "jax", {"stages": 2, "blocks": 1, "channels": 8, "size": 16, "batch": 4}),
    ("rnn", "workload", "jax", {"steps": 32, "width": 32, "batch": 16}),
    ("moe", "workload", "jax", {"layers": 1, "width": 32, "tokens": 128}),
)


@pytest.mark.newest
@pytest.mark.parametrize(("module", "function", "needs", "sizes"), WORKLOADS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_workload_under_a_plan(module: str, function: str, needs: str, sizes: dict[str, Any]) -> None:
    pytest.importorskip(needs)
    loss, args = getattr(importlib.import_module(f"benchmarks.jax_workloads.{module}"), function)(**sizes)
    step = recorded_of(loss, args)
    plan = recoup.jax.solve(step.recording, "75%")
    assert not plan.drops_nothing
    seen, verdicts = step.verified(plan)
    assert verdicts["residual bytes"].passed, verdicts["residual bytes"].detail
    assert verdicts["values and gradients"].passed, verdicts["values and gradients"].detail
    assert seen.residual_bytes < seen.unplanned_residual_bytes
