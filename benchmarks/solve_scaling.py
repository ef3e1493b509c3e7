"""How solving grows with depth: seconds, memory and gap for synthetic transformers of ten to a thousand blocks.

    python -m benchmarks.solve_scaling --blocks 10,100,1000 --figure docs/solve-scaling.png

Each solve has a process of its own, so that its peak memory is its own and nothing is known beforehand. Steps of up to 48
blocks are also solved for all ten budgets of the frontier, in another process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

# A process starts with the peak memory of the one that made it: what is large (torch, matplotlib, the graphs) is imported
# where it is used, and not in this one before all is measured.

__all__ = ["Row", "main"]

_WHOLE_FRONTIER = 48
_TESTS = Path(__file__).resolve().parent.parent / "tests"


@dataclass(frozen=True, slots=True)
class Row:
    """One step.

    Attributes:
        blocks, ops: of the step; ``ops`` counts forward and backward operations.
        gear, gap, relative_time: of the plan; '' and None if nothing fits.
        seconds, cpu_seconds: of one solve, from the graph to the plan.
        before_mib, peak_mib: the most memory of the process before it solved, the graph in it, and in all.
        frontier_seconds, frontier_gap: of ten budgets together, and the largest gap among them; None where it was not asked for.
    """

    blocks: int
    ops: int
    gear: str
    gap: float | None
    relative_time: float | None
    seconds: float
    cpu_seconds: float
    before_mib: float
    peak_mib: float
    frontier_seconds: float | None = None
    frontier_gap: float | None = None


def transformer(blocks: int) -> Any:
    """The synthetic step; its generator lives beside the tests, which are no package."""
    sys.path.insert(0, str(_TESTS))
    import graphs

    return graphs.transformer(blocks)


def one_solve(blocks: int, budget: str, gear: str, time_limit: float) -> Row:
    """One budget."""
    from recoup.errors import InfeasibleBudget
    from recoup.solve import solve

    graph = transformer(blocks)
    before_mib, started, started_cpu = _most_mib(), time.perf_counter(), time.process_time()
    try:
        plan = solve(graph, budget, gear=gear, time_limit_seconds=time_limit)
        answer = plan.gear, plan.gap, plan.step_seconds / plan.unplanned_step_seconds
    except InfeasibleBudget:
        answer = "", None, None
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
    return Row(blocks, len(graph.ops), *answer, seconds, cpu_seconds, before_mib, _most_mib())


def one_frontier(blocks: int, gear: str, time_limit: float) -> dict[str, float | None]:
    """All budgets, as fields of a row."""
    from recoup.solve import frontier

    graph, started = transformer(blocks), time.perf_counter()
    points = frontier(graph, strategies=["optimal"], gear=gear, time_limit_seconds=time_limit)
    seconds = time.perf_counter() - started
    return {"frontier_seconds": seconds, "frontier_gap": max((point.gap for point in points if point.gap is not None), default=None)}


def _most_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def alone(work: Callable[[], Any]) -> Any:
    """What some work returns, done in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work)


def measure(blocks: int, options: argparse.Namespace) -> Row:
    """The row of one step."""
    sys.stderr.write(f"{blocks} blocks\n")
    row = alone(partial(one_solve, blocks, options.budget, options.gear, options.time_limit))
    if blocks > _WHOLE_FRONTIER:
        return row
    return Row(**{**asdict(row), **alone(partial(one_frontier, blocks, options.gear, options.time_limit))})


def rows_table(rows: Iterable[Row], budget: str) -> Table:
    """All rows."""
    table = Table(title=f"One solve at {budget} of the unplanned peak, and the frontier of ten budgets")
    for header in ("blocks", "operations", "seconds", "CPU s", "before", "peak MiB", "gear", "time", "gap", "frontier s", "largest gap"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        amounts = f"{row.seconds:.2f}", f"{row.cpu_seconds:.2f}", f"{row.before_mib:.0f}", f"{row.peak_mib:.0f}"
        time_ratio = "does not fit" if row.relative_time is None else f"{row.relative_time:.3f}"
        whole = "-" if row.frontier_seconds is None else f"{row.frontier_seconds:.1f}"
        table.add_row(
            str(row.blocks), str(row.ops), *amounts, row.gear or "-", time_ratio, _percent(row.gap), whole, _percent(row.frontier_gap)
        )
    return table


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def draw(rows: Sequence[Row], path: Path, budget: str) -> None:
    """Seconds and peak memory against blocks, each with a line of slope 1 through its first point."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _line(left, [(row.blocks, row.seconds) for row in rows], "one solve, wall", 0)
    _line(left, [(row.blocks, row.cpu_seconds) for row in rows], "one solve, CPU", 1)
    _line(left, [(row.blocks, row.frontier_seconds) for row in rows if row.frontier_seconds], "frontier of ten budgets, wall", 2)
    _line(right, [(row.blocks, row.peak_mib) for row in rows], "peak of the process", 0)
    _dress(left, "seconds", rows[0].blocks, rows[-1].blocks, rows[0].cpu_seconds)
    _dress(right, "MiB", rows[0].blocks, rows[-1].blocks, rows[0].peak_mib)
    left.set_title(f"optimal at {budget} of the unplanned peak", fontsize=12, loc="left")
    figure.savefig(path, dpi=200)
    sys.stderr.write(f"Wrote {path}\n")


def _line(axes: Any, places: Sequence[tuple[float, float | None]], label: str, number: int) -> None:
    colour, marker, style = (("#0072B2", "o", "-"), ("#D55E00", "s", "--"), ("#009E73", "^", "-."))[number]
    if places:
        look = {"color": colour, "marker": marker, "linestyle": style, "markerfacecolor": "white", "markersize": 7}
        axes.loglog(*zip(*places, strict=True), **look, markeredgewidth=1.4, label=label)


def _dress(axes: Any, unit: str, first: int, last: int, value: float) -> None:
    axes.loglog([first, last], [value, value * last / first], color="0.45", linewidth=1, linestyle=(0, (2, 2)), label="slope 1", zorder=1)
    axes.set_xlabel("blocks of the transformer")
    axes.set_ylabel(unit)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper left")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark, prints its table and draws its picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", default="10,30,100,300,1000", help="numbers of blocks, separated by commas (default: %(default)s)")
    parser.add_argument("--budget", default="40%", help="as for recoup.solve (default: 40%%)")
    parser.add_argument("--gear", default="auto", choices=("auto", "live", "static"))
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of each solve (default: %(default)s)")
    parser.add_argument("--figure", type=Path, help="draw there (PNG, PDF or SVG)")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args(argv)
    rows = [measure(int(blocks), options) for blocks in options.blocks.split(",")]
    Console(width=None if sys.stdout.isatty() else 140).print(rows_table(rows, options.budget))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if options.figure:
        draw(rows, options.figure, options.budget)


if __name__ == "__main__":
    main()
