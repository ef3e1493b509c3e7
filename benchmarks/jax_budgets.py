"""Eight JAX workloads at budgets from the least that is met to the unplanned peak: residual bytes, compiled memory, gradients, time.

    python -m benchmarks.jax_budgets

A share is of the unplanned peak; ``floor`` is the least that any plan of the recorded step takes, and if XLA takes more, the least of
some steps above that is met.
One table row for each workload and budget. ``ratio`` is the compiled step's ``temp + output - alias`` over what the plan predicts of it.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

import jax
import recoup.jax
from recoup.errors import InfeasibleBudget, RecoupError
from recoup.jax.fitting import Fitted

WORKLOADS = (
    "gpt:workload",
    "gpt:scanned",
    "linen:workload",
    "nnx:workload",
    "equinox:workload",
    "cnn:workload",
    "rnn:workload",
    "moe:workload",
)
SHARES = ("floor", "40%", "60%", "75%", "90%")
_ABOVE = (1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.75)
_MIB = 2**20


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="*", default=WORKLOADS)
    parser.add_argument("--shares", nargs="*", default=SHARES)
    parser.add_argument("--untimed", action="store_true", help="run no step for its time: times are modelled, and the column is empty")
    args = parser.parse_args()
    print(f"JAX {jax.__version__} on {jax.default_backend()}; MiB")
    print(
        "| workload | share | budget | residual | unplanned residual | compiled peak | unplanned | predicted | ratio | time | gradients |"
    )
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    timing = {"runs": 0, "measure": False} if args.untimed else {}
    for name in args.workloads:
        module, _, function = name.partition(":")
        loss, values = getattr(importlib.import_module(f"benchmarks.jax_workloads.{module}"), function)()
        for share in args.shares:
            try:
                fitted = _least(loss, values, timing) if share == "floor" else recoup.jax.fit(loss, *values, budget=share, **timing)
                print(_row(name, share, fitted), flush=True)
            except RecoupError as error:
                print(f"| {name} | {share} | {type(error).__name__}: {str(error)[:110]} |", flush=True)


def _least(loss: Any, values: tuple[Any, ...], timing: dict[str, Any]) -> Fitted:
    recording = recoup.jax.record(loss, *values, runs=0)
    try:
        recoup.jax.solve(recording, recording.graph.resident_bytes + 1)
    except InfeasibleBudget as error:
        least = error.least_bytes
    for factor in _ABOVE:
        try:
            return recoup.jax.fit(loss, *values, budget=int(least * factor), **timing)
        except RecoupError as error:
            failure = error
    raise failure


def _row(name: str, share: str, fitted: Fitted) -> str:
    seen, plan = fitted.verification, fitted.plan
    given = seen.peak_bytes - seen.working_bytes
    ratio = seen.working_bytes / max(plan.peak_bytes - given, 1)
    check = next(check for check in seen.checks if check.name == "values and gradients")
    equal = "bitwise" if check.detail.startswith("equal bit by bit in") and ";" not in check.detail else "within compiling"
    residual = (seen.residual_bytes, seen.unplanned_residual_bytes)
    time = "" if seen.relative_time is None else f"{seen.relative_time:.2f}"
    numbers = (plan.budget_bytes, *residual, seen.peak_bytes, seen.unplanned_peak_bytes, plan.peak_bytes)
    if share == "floor":
        share = f"{plan.budget_bytes / seen.unplanned_peak_bytes:.0%}"
    cells = " | ".join(f"{number / _MIB:.1f}" for number in numbers)
    return f"| {name} | {share} | {cells} | {ratio:.2f} | {time} | {equal} |"


if __name__ == "__main__":
    main()
