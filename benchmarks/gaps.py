"""How near to the proven best are plans? Time and gap over ten budgets of each reference workload.

    python -m benchmarks.gaps --workloads gpt2,unet

The budgets go in equal steps from the least peak that was found to the unplanned peak, as those of ``recoup.frontier`` do.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.measuring import Advance, arguments, chosen_workloads, mebibytes, progress_bar, sizes, write
from benchmarks.workloads import WORKLOADS, load
from recoup.graph import StepGraph
from recoup.graph.store import load as load_graph
from recoup.simulate import simulate
from recoup.solve import FrontierPoint, frontier
from recoup.torch import record

__all__ = ["Row", "main"]

_SMALL = 0.01
_POINTS = 10


@dataclass(frozen=True, slots=True)
class Row:
    """One workload.

    Attributes:
        workload: its name.
        ops: operations of the recorded step.
        unplanned_peak_bytes: simulated.
        points: of ``optimal``, from the smallest budget to the largest.
        seconds: for all points together, the search for the least peak included.
    """

    workload: str
    ops: int
    unplanned_peak_bytes: int
    points: tuple[FrontierPoint, ...]
    seconds: float


def step_graph(name: str, options: argparse.Namespace) -> StepGraph:
    """The step of a workload, recorded or read."""
    if options.graphs is not None:
        return load_graph(options.graphs / f"{name}.json")
    model, step = load(name, tiny=options.tiny, **sizes(options))
    return record(step, model=model, name=name)


def measure(name: str, options: argparse.Namespace, advance: Advance) -> Row:
    """The row of one workload."""
    advance(f"{name}: recording")
    graph = step_graph(name, options)
    advance(f"{name}: solving")
    started = time.perf_counter()
    points = frontier(graph, strategies=["optimal"], gear=options.gear, time_limit_seconds=options.time_limit)
    return Row(name, len(graph.ops), simulate(graph).peak_bytes, points, time.perf_counter() - started)


def rows_table(rows: Sequence[Row]) -> Table:
    """All rows, one line each for times, gaps and gears."""
    table = Table(title="Ten budgets from the least peak found to the unplanned peak: relative time, proven gap, gear")
    for header in ("workload", "ops", "least MiB", "unplanned"):
        table.add_column(header)
    for place in range(_POINTS):
        table.add_column(str(place), justify="right")
    table.add_column("seconds", justify="right")
    for row in rows:
        cells = [f"{point.relative_time:.3f}\n{_percent(point.gap)}\n{point.gear}" for point in row.points]
        least, unplanned = mebibytes(row.points[0].budget_bytes), mebibytes(row.unplanned_peak_bytes)
        cells += [""] * (_POINTS - len(cells))
        table.add_row(row.workload, str(row.ops), least, unplanned, *cells, f"{row.seconds:.1f}")
        table.add_section()
    table.caption = summary(rows)
    return table


def summary(rows: Sequence[Row]) -> str:
    """How many points are proven to be near the best, and which is the furthest."""
    points = [(row.workload, place, point) for row in rows for place, point in enumerate(row.points)]
    near = [point for *_, point in points if point.gap is not None and point.gap <= _SMALL]
    workload, place, worst = max(points, key=lambda item: float("inf") if item[2].gap is None else item[2].gap)
    return (
        f"{len(near)} of {len(points)} points have a proven gap of {_SMALL:.0%} or less;"
        f" the largest is {_percent(worst.gap)}, {workload} at budget {place}"
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark and prints its table."""
    parser = arguments(__doc__ or "", workloads=[name for name in WORKLOADS if name != "text"])
    parser.add_argument("--graphs", type=Path, help="read NAME.json from this folder (recoup.save_graph wrote it) instead of recording")
    parser.add_argument("--gear", choices=("auto", "live", "static"), default="auto")
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds of each point (default: %(default)s)")
    options = parser.parse_args(argv)
    names = chosen_workloads(options)
    with progress_bar(2 * len(names)) as advance:
        rows = [measure(name, options, advance) for name in names]
    write(options, rows, [rows_table(rows)])


if __name__ == "__main__":
    main()
