"""Joint plans beside plans that only recompute and plans that only offload: simulated times and peaks, for one link.

    python -m benchmarks.offload_plans                          # records the transformer workloads, takes some minutes
    python -m benchmarks.offload_plans --graph llama.json       # steps recorded before

The link is that of a plain disk, as measured on one cloud machine, or the one in a file (``--link``). ``near`` is a budget a
twentieth of the way from the least feasible peak of joint plans to the unplanned peak. Times are relative to the unplanned step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from recoup.cost import OffloadLink
from recoup.errors import InfeasibleBudget
from recoup.graph import StepGraph
from recoup.graph.store import load as load_graph
from recoup.plan import Plan, gears_of
from recoup.simulate import simulate
from recoup.solve import Strategy, solve
from recoup.solve.offload import Joint, Routes
from recoup.units import format_bytes

__all__ = ["DISK", "Row", "main", "rows"]

WORKLOADS = ("gpt2", "llama", "bert", "t5", "vit")
DISK = OffloadLink(
    target="disk", write_bytes_per_second=2.0e9, read_bytes_per_second=1.1e9, latency_seconds=3e-4, staging_bytes=2 << 20, shared=True,
)  # fmt: skip
_NEAR = 0.05


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy at one budget.

    Attributes:
        workload, budget: names of the step and of the budget.
        budget_bytes: the budget.
        strategy: ``optimal`` recomputes alone.
        relative_time, peak_bytes: of the plan; None if nothing fits, and then ``peak_bytes`` is the least peak found.
        gap: how far the time is from a proven bound.
        gear: the executor it is for.
        stall_seconds, offloaded_bytes: what the step waits for the link, and what waits at its end.
        solve_seconds: the solver's time.
    """

    workload: str
    budget: str
    budget_bytes: int
    strategy: str
    relative_time: float | None
    peak_bytes: int
    gap: float | None = None
    gear: str = ""
    stall_seconds: float = 0.0
    offloaded_bytes: int = 0
    solve_seconds: float = 0.0


def rows(name: str, graph: StepGraph, link: OffloadLink, seconds: float) -> Iterator[Row]:
    """Three strategies at three budgets."""
    peak, joint = simulate(graph).peak_bytes, Joint(Routes((link,)))
    least = min(joint.least_peak_bytes(graph, executor) for executor in gears_of(graph.frontend))
    budgets = {"50%": peak // 2, "30%": int(peak * 0.3), "near": least + int((peak - least) * _NEAR)}
    strategies: tuple[str | Strategy, ...] = ("optimal", Joint(Routes((link,)), recomputing=False), joint)
    for label, budget in budgets.items():
        for strategy in strategies:
            title = strategy if isinstance(strategy, str) else strategy.name
            try:
                yield _row(name, label, title, solve(graph, budget, strategy=strategy, time_limit_seconds=seconds))
            except InfeasibleBudget as refused:
                yield Row(name, label, budget, title, None, refused.least_bytes)


def _row(name: str, label: str, title: str, plan: Plan) -> Row:
    traffic = plan.traffic
    return Row(
        name, label, plan.budget_bytes, title, plan.step_seconds / plan.unplanned_step_seconds, plan.peak_bytes, plan.gap, plan.gear,
        traffic.stall_seconds if traffic else 0.0, traffic.offloaded_bytes if traffic else 0, plan.solve_seconds,
    )  # fmt: skip


def recorded(name: str) -> StepGraph:
    """A workload at its default sizes, recorded."""
    from benchmarks.workloads import load
    from recoup.torch import record

    model, step = load(name)
    return record(step, model=model, name=name)


def table(found: Sequence[Row], link: OffloadLink) -> Table:
    """The rows, as a person reads them."""
    made = Table(title=f"{link.target}: {format_bytes(int(link.write_bytes_per_second))}/s out")
    for title in ("step", "budget", "strategy", "time", "peak", "gap", "gear", "stall", "moved", "solved in"):
        made.add_column(title, justify="left" if title in ("step", "strategy", "gear") else "right")
    for row in found:
        if row.relative_time is None:
            made.add_row(row.workload, row.budget, row.strategy, "does not fit", f"least {format_bytes(row.peak_bytes)}")
            continue
        made.add_row(
            row.workload, row.budget, row.strategy, f"{row.relative_time:.4f}", format_bytes(row.peak_bytes),
            "" if row.gap is None else f"{row.gap:.2%}", row.gear, f"{row.stall_seconds * 1e3:.1f} ms", format_bytes(row.offloaded_bytes),
            f"{row.solve_seconds:.1f} s",
        )  # fmt: skip
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="which to record")
    parser.add_argument("--graph", action="append", default=[], type=Path, help="a recorded step instead; may be given several times")
    parser.add_argument("--link", type=Path, help="JSON of a measured link")
    parser.add_argument("--seconds", type=float, default=20.0, help="time limit of each solve")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args(arguments)
    link = msgspec.json.decode(options.link.read_bytes(), type=OffloadLink) if options.link else DISK
    graphs = (
        ((path.stem, load_graph(path)) for path in options.graph)
        if options.graph
        else ((n, recorded(n)) for n in options.workloads.split(","))
    )
    found: list[Row] = []
    for name, graph in graphs:
        found.extend(rows(name, graph, link, options.seconds))
        if options.json:
            options.json.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")
    Console(width=140).print(table(found, link))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
