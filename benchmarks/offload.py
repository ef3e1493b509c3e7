"""What offloading to a disk gains: plans that only recompute, only offload, and both, run for real at the same budgets.

    python -m benchmarks.offload --offload-dir /scratch --threads 1

The link to the directory is measured first, beside compute, as ``recoup doctor`` does. All plans of a workload and its unplanned step
are then timed in turn in one run. A fourth plan, over a link that hides everything, is simulated alone. A disk serves whoever asks:
give the program a machine to itself, and a core beside those that ``--threads`` names.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.budgets import gradients_equal
from benchmarks.disk import add_disk, disk_link
from benchmarks.measuring import Advance, arguments, chosen_workloads, mebibytes, progress_bar, rounds, sizes, write
from benchmarks.offload_report import FAST, JOINT, MOVES, RECOMPUTES, Row, arithmetic_table, link_text, peaks_table, times_table
from benchmarks.workloads import load
from recoup.cli.workload import parse_sizes
from recoup.cost import OffloadLink
from recoup.errors import InfeasibleBudget, UsageError
from recoup.graph import StepGraph
from recoup.plan import Plan
from recoup.simulate import simulate, timeline_of
from recoup.solve import solve
from recoup.solve.offload import Joint, Routes
from recoup.torch import Applied, apply, measure_peak, record
from recoup.torch.promotion import WARM_UP_CALLS
from recoup.verify import verify

__all__ = ["main", "measure"]

_FAST = 1e15  # bytes a second


@dataclass(frozen=True, slots=True)
class _Entry:
    """A row in the making, and its plan at work (None where it is not run)."""

    row: Row
    applied: Applied | None = None

    @property
    def key(self) -> str:
        return f"{self.row.plan} at {self.row.budget}"


def measure(name: str, link: OffloadLink, options: argparse.Namespace, advance: Advance) -> list[Row]:
    """The rows of one workload."""
    model, step = load(name, tiny=options.tiny, **sizes(options), **parse_sizes(options.set))
    advance(f"{name}: recording")
    graph = record(step, model=model, name=name)
    if options.keep is not None:
        from recoup.graph.store import save

        save(graph, options.keep / f"{name}.graph.json.gz")
    entries = []
    for share in options.shares:
        blank = _blank(name, share, graph, measure_peak(step, model), link)
        for plan_name in (RECOMPUTES, MOVES, JOINT, FAST):
            advance(f"{name}: {plan_name} at {blank.budget}")
            entries.append(_entry(replace(blank, plan=plan_name), graph, model, step, link, options))
    return _timed(entries, step, options, advance)


def _blank(name: str, share: float, graph: StepGraph, unplanned_bytes: int, link: OffloadLink) -> Row:
    """What all plans of a budget share."""
    unplanned = simulate(graph)
    budget_bytes = int(share * unplanned.peak_bytes)
    short = max(unplanned_bytes - budget_bytes, 0)
    forward = float(timeline_of(graph, _nothing(graph)).unplanned.backward_seconds)
    ways = link.write_seconds(short), link.read_seconds(short)
    return Row(name, f"{share:.0%}", "", budget_bytes, unplanned_bytes, unplanned.step_seconds, forward, *ways)


def _nothing(graph: StepGraph) -> Plan:
    return solve(graph, strategy="none")


def _solved(row: Row, graph: StepGraph, link: OffloadLink, seconds: float) -> Plan:
    options: dict[str, Any] = {"time_limit_seconds": seconds}
    if row.plan == RECOMPUTES:
        return solve(graph, row.budget_bytes, **options)
    if row.plan == FAST:
        link = msgspec.structs.replace(
            link, write_bytes_per_second=_FAST, read_bytes_per_second=_FAST, latency_seconds=0.0, drag=0.0, provenance="assumed"
        )
    return solve(graph, row.budget_bytes, strategy=Joint(Routes((link,)), recomputing=row.plan != MOVES), **options)


def _entry(
    row: Row, graph: StepGraph, model: torch.nn.Module, step: Callable[[], object], link: OffloadLink, options: argparse.Namespace
) -> _Entry:
    """A plan found, and, but for that of the fast link, compared with the unplanned step and its peak measured."""
    try:
        plan = _solved(row, graph, link, options.seconds)
    except InfeasibleBudget as error:
        least = error.least_bytes
        return _Entry(replace(row, note=f"does not fit: {mebibytes(least)} MiB is the least ({least / row.unplanned_peak_bytes:.0%})"))
    if options.keep is not None:
        plan.save(options.keep / f"{row.workload}-{row.budget.strip('%')}-{row.plan.replace(', ', '-').replace(' ', '-')}.plan.json")
    traffic = plan.traffic
    moved = [graph.storages[move.storage].bytes for move in timeline_of(graph, plan).moves if move.direction == "write"]
    row = replace(
        row,
        link=link_text(link) if traffic else "",
        gear=plan.gear,
        gap=plan.gap,
        predicted_peak_bytes=plan.peak_bytes,
        predicted_relative_time=plan.step_seconds / plan.unplanned_step_seconds,
        offloaded_bytes=sum(moved),
        link_seconds=sum(link.write_seconds(count) + link.read_seconds(count) for count in moved),
        predicted_stall_seconds=traffic.stall_seconds if traffic else None,
    )
    if row.plan == FAST:
        return _Entry(replace(row, note="simulated alone"))
    compared = verify(model, step, plan, measure=False, offload_to=options.offload_dir)
    failed = [f"{check.name}: {check.detail}" for check in compared.checks if not check.passed]
    applied = apply(model, plan, offload_to=options.offload_dir)
    assert isinstance(applied, Applied)
    with applied:
        for _ in range(WARM_UP_CALLS + 1):
            step()
        peak_bytes = measure_peak(step, model)
    failed += ["OVER BUDGET"] if peak_bytes > row.budget_bytes else []
    equal = compared.passed and gradients_equal(compared.checks)
    return _Entry(replace(row, measured_peak_bytes=peak_bytes, gradients_equal=equal, note="; ".join(failed)), applied)


def _timed(entries: Sequence[_Entry], step: Callable[[], object], options: argparse.Namespace, advance: Advance) -> list[Row]:
    """The rows with times: all plans that run and the unplanned step, round robin."""
    waited: dict[str, list[float]] = {}

    def entering(entry: _Entry, applied: Applied) -> Callable[[], AbstractContextManager[object]]:
        def enter() -> AbstractContextManager[object]:
            waited.setdefault(entry.key, []).append(applied.report().waited_seconds)
            return applied

        return enter

    variants: dict[str, Callable[[], AbstractContextManager[object]]] = {"unplanned": nullcontext}
    variants |= {entry.key: entering(entry, entry.applied) for entry in entries if entry.applied is not None}
    timings = rounds(step, variants, repeats=options.repeats, warm=options.warm, advance=advance)
    base = timings["unplanned"].median_seconds
    found = []
    for entry in entries:
        row, timing = replace(entry.row, unplanned_seconds=base), timings.get(entry.key)
        if timing is not None and entry.applied is not None:
            steps = options.repeats * (options.warm + 1)
            stall = (entry.applied.report().waited_seconds - waited[entry.key][0]) / steps if row.offloaded_bytes else None
            row = replace(row, relative_time=timing.median_seconds / base, spread=timing.spread, measured_stall_seconds=stall)
        found.append(row)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark and prints its tables."""
    parser = arguments(__doc__ or "", repeats=7, workloads=("gpt2", "llama"))
    add_disk(parser)
    parser.add_argument("--shares", type=float, nargs="+", default=(0.5, 0.3), help="budgets over the unplanned peak (default: 0.5 0.3)")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of each solve (default: %(default)s)")
    parser.add_argument("--warm", type=int, default=1, help="untimed steps before each timed one (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a size of the workloads (repeatable)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep graphs and plans there")
    options = parser.parse_args(argv)
    names = chosen_workloads(options)
    if options.warm < 1:
        raise UsageError("--warm must be 1 or more: the first step over a link makes its file")
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    link = disk_link(options)
    sys.stderr.write(f"{link_text(link)}\n")
    options.measured_link, options.load_before = link_text(link), _load()  # among what the numbers depend on
    with progress_bar(len(names) * (1 + len(options.shares) * (4 + 3 * options.repeats) + options.repeats)) as advance:
        rows = [row for name in names for row in measure(name, link, options, advance)]
    options.load_after = _load()
    sys.stderr.write(f"load of the machine before: {options.load_before}, after: {options.load_after}\n")
    write(options, rows, [peaks_table(rows), times_table(rows), arithmetic_table(rows)])


def _load() -> str:
    return " ".join(f"{one:.1f}" for one in os.getloadavg())


if __name__ == "__main__":
    main()
