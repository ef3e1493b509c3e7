"""How far down can recomputation go? A deep GPT-2 at the least peak that a plan was found for, simulated and run.

    python -m benchmarks.floor --layers 48

Gradients stand before the step and are added to, so that what rises above the standing bytes are activations, copies of
them, and what the backward itself makes. The budgets are shares above the least peak, counted from the standing bytes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.budgets import gradients_equal
from benchmarks.measuring import Advance, arguments, chosen_workloads, mebibytes, progress_bar, ratio, restart_with, write
from benchmarks.workloads import load
from recoup.errors import UsageError
from recoup.graph import StepGraph
from recoup.graph.store import load as load_graph
from recoup.plan import Plan
from recoup.plan.capabilities import capabilities
from recoup.simulate import Simulation, simulate, simulate_plan
from recoup.solve import least_peak, solve
from recoup.torch import record
from recoup.verify import verify

__all__ = ["Row", "main"]

ABOVE = (0.02, 0.05, 0.1, 0.25)
SIZES = {"layers": 48, "width": 128, "sequence": 128, "batch": 8, "dropout": 0.0}
TINY = {"layers": 6, "width": 32, "sequence": 16, "batch": 2, "dropout": 0.0}
# The profiler's events, one or more for each replay, would lie in the holes that freed tensors leave in the heap, and tensors take ever
# fresh memory, tens of gigabytes in all. This gives each tensor pages of its own.
_OWN_PAGES = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
_ACTIVATIONS = ("activation", "kept for replay", "recomputed")


@dataclass(frozen=True, slots=True)
class Row:
    """One plan.

    Attributes:
        plan: what it is.
        above_bytes: its peak above what stands before the step.
        activation_bytes: of those at the peak, activations and copies of them.
        gradient_bytes, scratch_bytes: gradients and temporaries of the backward; memory inside the operation.
        relative_time: simulated, over the unplanned step.
        replays: operations replayed, repeats counted.
        gap: how far the time can be from the least; None without a bound.
        seconds: of solving.
        measured_above_bytes, gradients_equal, verified: of the step that was run; None for plans that were not.
    """

    plan: str
    above_bytes: int
    activation_bytes: int
    gradient_bytes: int
    scratch_bytes: int
    relative_time: float
    replays: int
    gap: float | None = None
    seconds: float = 0.0
    measured_above_bytes: int | None = None
    gradients_equal: bool | None = None
    verified: bool | None = None


def workload(options: argparse.Namespace) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """The GPT-2 that the command line asks for, its gradients standing."""
    asked = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    sizes: dict[str, Any] = {**(TINY if options.tiny else SIZES), **asked, "accumulate": True}
    return load("gpt2", **sizes)


def row_of(name: str, graph: StepGraph, simulation: Simulation, plan: Plan | None = None) -> Row:
    """A simulated plan, what stands at its peak by kind."""
    at_peak = dict.fromkeys((*_ACTIVATIONS, "gradient or temporary", "scratch", "resident"), 0)
    for _, count, state in simulation.live_at_peak:
        at_peak[state] += count
    return Row(
        plan=name,
        above_bytes=simulation.peak_bytes - graph.resident_bytes,
        activation_bytes=sum(at_peak[state] for state in _ACTIVATIONS),
        gradient_bytes=at_peak["gradient or temporary"],
        scratch_bytes=at_peak["scratch"],
        relative_time=simulation.step_seconds / simulate(graph).step_seconds,
        replays=simulation.replayed_ops,
        gap=plan.gap if plan else None,
        seconds=plan.solve_seconds if plan else 0.0,
    )


def planned(name: str, graph: StepGraph, plan: Plan) -> Row:
    """The row of a plan."""
    return row_of(name, graph, simulate_plan(graph, plan), plan)


def measure(graph: StepGraph, options: argparse.Namespace, advance: Advance) -> tuple[list[Row], Plan]:
    """The rows of all plans, and the plan with the least peak."""
    gear = options.gear
    rows = [row_of("unplanned", graph, simulate(graph)), planned("every block", graph, solve(graph, strategy="every_block", gear=gear))]
    advance("least peak")
    started = time.perf_counter()
    least, _ = least_peak(graph, capabilities(gear))
    plan = solve(graph, least, gear=gear, time_limit_seconds=options.time_limit)
    rows.append(replace(planned("least peak", graph, plan), seconds=time.perf_counter() - started))
    for share in ABOVE:
        advance(f"{share:.0%} above")
        budget = graph.resident_bytes + int((least - graph.resident_bytes) * (1 + share))
        rows.append(planned(f"{share:.0%} above it", graph, solve(graph, budget, gear=gear, time_limit_seconds=options.time_limit)))
    return rows, plan


def run_for_real(row: Row, graph: StepGraph, plan: Plan, options: argparse.Namespace) -> Row:
    """The row with its plan applied to the model, run and compared with the unplanned step."""
    model, step = workload(options)
    found = verify(model, step, plan, steps=1)
    measured = None if found.peak_bytes is None else found.peak_bytes - graph.resident_bytes
    return replace(row, measured_above_bytes=measured, gradients_equal=gradients_equal(found.checks), verified=found.passed)


def rows_table(rows: Sequence[Row], graph: StepGraph) -> Table:
    """All rows, bytes in MiB."""
    table = Table(title=f"{graph.name}: MiB above the {mebibytes(graph.resident_bytes)} MiB that stand before the step")
    for header in ("plan", "peak", "activations", "gradients", "scratch", "time", "replays", "gap", "solve s", "measured", "bits"):
        table.add_column(header, justify="left" if header == "plan" else "right")
    for row in rows:
        amounts = (row.above_bytes, row.activation_bytes, row.gradient_bytes, row.scratch_bytes)
        equal = {None: "-", True: "equal", False: "DIFFER"}[row.gradients_equal]
        gap = "-" if row.gap is None else f"{row.gap:.1%}"
        table.add_row(
            row.plan, *(f"{count / 2**20:.2f}" for count in amounts), ratio(row.relative_time), str(row.replays), gap, f"{row.seconds:.1f}",
            "-" if row.measured_above_bytes is None else f"{row.measured_above_bytes / 2**20:.2f}", equal,
        )  # fmt: skip
    return table


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark and prints its table."""
    parser = arguments(__doc__ or "", workloads=["gpt2"])
    for name in ("layers", "width", "sequence", "dropout"):
        parser.add_argument(f"--{name}", type=type(SIZES[name]), help=f"of the GPT-2 (default: {SIZES[name]}, batch {SIZES['batch']})")
    parser.add_argument("--gear", choices=("live", "static"), default="static")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of each solve (default: %(default)s)")
    parser.add_argument("--graph", type=Path, help="a recording of just this step, instead of recording it")
    parser.add_argument("--run", action=argparse.BooleanOptionalAction, default=True, help="run the plan with the least peak (slow)")
    options = parser.parse_args(argv)
    if chosen_workloads(options) != ["gpt2"] or options.caching_allocator:
        raise UsageError("this benchmark is about gpt2 alone, and chooses its own malloc")
    if options.run:
        restart_with(_OWN_PAGES)
    with progress_bar(4 + len(ABOVE)) as advance:
        advance("recording")
        graph = load_graph(options.graph) if options.graph else _recorded(options)
        rows, plan = measure(graph, options, advance)
        if options.run:
            advance("running the least peak")
            rows[2] = run_for_real(rows[2], graph, plan, options)
    write(options, rows, [rows_table(rows, graph)])


def _recorded(options: argparse.Namespace) -> StepGraph:
    model, step = workload(options)
    return record(step, model=model, name="gpt2")


if __name__ == "__main__":
    main()
