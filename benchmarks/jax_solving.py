"""How long solving takes for JAX steps: processor seconds from a recording to its plan, layers unrolled and in loops.

    python -m benchmarks.jax_solving

A share is of the recorded step's simulated peak without a plan. Every solve starts from the recording as read from its file, so that
nothing is known from the budget before. Equations are those of the jaxpr of the loss's value and gradient, bodies of loops counted once.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import recoup.jax
from recoup.errors import InfeasibleBudget
from recoup.jax.jaxprs import inner_jaxprs
from recoup.jax.recording import load, save
from recoup.jax.solving import unplanned_peak_bytes

STEPS: tuple[tuple[str, dict[str, int]], ...] = (
    ("gpt:workload", {"layers": 32}),
    ("gpt:scanned", {"layers": 32}),
    ("rnn:workload", {}),
)
SHARES = (0.75, 0.5, 0.35, 0.25)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES)
    args = parser.parse_args()
    print(f"JAX {jax.__version__}")
    print("| step | sizes | equations | operations | activations | share | gap | predicted time | solve CPU s |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, sizes in STEPS:
        module, _, function = name.partition(":")
        loss, values = getattr(importlib.import_module(f"benchmarks.jax_workloads.{module}"), function)(**sizes)
        start = f"| {name} | {' '.join(f'{size}={number}' for size, number in sizes.items()) or 'its own'} | {_equations(loss, values)}"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "step.graph.json.gz"
            save(recoup.jax.record(loss, *values, runs=0), path)
            for share in args.shares:
                print(f"{start} | {_solved(path, share)} |", flush=True)


def _solved(path: Path, share: float) -> str:
    """The cells of one solve."""
    recording = load(path)
    graphs = [recording.graph, *(body.graph for body in recording.bodies())]
    activations = sum(storage.kind == "activation" for graph in graphs for storage in graph.storages)
    counted = f"{sum(len(graph.ops) for graph in graphs)} | {activations} | {share:.0%}"
    budget = int(unplanned_peak_bytes(load(path)) * share)
    started = time.process_time()
    try:
        plan = recoup.jax.solve(recording, budget)
    except InfeasibleBudget:
        return f"{counted} | below the least found | | {time.process_time() - started:.2f}"
    seconds = time.process_time() - started
    gap = "none stated" if plan.gap is None else f"{plan.gap:.2%}"
    return f"{counted} | {gap} | {plan.step_seconds / plan.unplanned_step_seconds:.2f} | {seconds:.2f}"


def _equations(loss: Any, values: tuple[Any, ...]) -> int:
    return _count(jax.make_jaxpr(jax.value_and_grad(loss))(*values).jaxpr)


def _count(jaxpr: Any) -> int:
    return sum(1 + sum(map(_count, inner_jaxprs(eqn))) for eqn in jaxpr.eqns)


if __name__ == "__main__":
    main()
