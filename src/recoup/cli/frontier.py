"""recoup frontier: find the step's time for each peak, over budgets and strategies.

Prints a table; draws a figure, writes CSV, and measures some of the points if asked.
"""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recoup.cli.arguments import GEARS, add_allow, add_sizes, free_to_write, is_graph_file, refuse_allow, wrote
from recoup.cli.console import Console
from recoup.cli.offloading import add_offload, check_offload, links_for, refuse_offload
from recoup.cli.sources import graph_of, jax_source
from recoup.errors import UsageError
from recoup.units import parse_budget

if TYPE_CHECKING:
    from recoup.cli.workload import JaxWorkload
    from recoup.graph.step import StepGraph
    from recoup.solve import FrontierPoint

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this verb."""
    parser.add_argument("source", metavar="GRAPH|FILE.py:FUNCTION", help="a recorded graph, or a workload to record")
    add_sizes(parser)
    parser.add_argument("--budgets", type=_listed, metavar="LIST", help="such as 40%%,60%%,2GiB (default: about ten that can be met)")
    parser.add_argument("--strategies", type=_listed, metavar="LIST", help="names with commas (default: optimal, those of one plan, rotor)")
    parser.add_argument("--gear", choices=GEARS, default="auto", help="how plans are run (default: the faster one)")
    add_offload(parser)
    add_allow(parser)
    parser.add_argument("--measure", type=int, default=0, metavar="K", help="apply and measure K of the points (workload only)")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the frontier (.png, .pdf or .svg)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the points as CSV")
    parser.add_argument("--force", action="store_true", help="overwrite files that exist")


def run(args: argparse.Namespace, console: Console) -> int:
    """Computes, measures, shows and writes the frontier."""
    _check(args)
    check_offload(args)
    source = jax_source(args)
    if source is not None:
        refuse_offload(args)
        refuse_allow(args)
        return _of_jax(args, console, source)
    graph, workload = graph_of(args, console)

    from recoup.cli.facts import point_facts
    from recoup.report.text import frontier_table
    from recoup.solve import frontier

    free = None
    if workload is not None and "auto" in (args.budgets or ()):
        from recoup.torch.free import free_bytes

        free = free_bytes(workload.model)
    options: dict[str, Any] = {"budgets": args.budgets, "strategies": args.strategies, "gear": args.gear, "allow": args.allow}
    options |= {"offload": links_for(args, console, workload), "host_budget": args.host_budget, "disk_budget": args.disk_budget}
    options["free_bytes"] = free
    with console.progress("frontier") as progress:
        points = frontier(graph, **options, progress=progress)
    measured: tuple[FrontierPoint, ...] = ()
    if workload is not None and args.measure:
        from recoup.cli.measure import measure_points

        with console.progress("measure") as progress:
            measured = measure_points(workload, graph, points, args.measure, progress, args.allow)
    facts = {"points": [point_facts(point) for point in points], "measured": [point_facts(point) for point in measured]}
    extra = ("", "measured", frontier_table(measured)) if measured else ()
    console.data(facts, frontier_table(points), *extra)
    _write(args, console, graph, points, measured)
    return 0 if any(point.feasible for point in points) else 3


def _of_jax(args: argparse.Namespace, console: Console, source: str | JaxWorkload) -> int:
    from recoup.cli.facts import point_facts
    from recoup.cli.jax_steps import frontier_points, recording_of
    from recoup.report.text import frontier_table

    recording = recording_of(source, console)
    points = frontier_points(args, recording)
    console.data({"points": [point_facts(point) for point in points], "measured": []}, frontier_table(points))
    _write(args, console, recording.graph, points, ())
    return 0 if any(point.feasible for point in points) else 3


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _check(args: argparse.Namespace) -> None:
    """Refuses before the work what would fail after it."""
    from recoup.solve.entry import strategy_of

    for path in (args.figure, args.csv):
        if path is not None:
            free_to_write(path, args.force)
    for budget in args.budgets or ():
        parse_budget(budget)
    for strategy in args.strategies or ():
        strategy_of(strategy)
    if args.measure < 0:
        raise UsageError(f"--measure must not be negative, got {args.measure}")
    if args.measure and is_graph_file(args.source):
        raise UsageError("--measure runs the step; give a workload FILE.py:FUNCTION, not a recorded graph")


def _write(
    args: argparse.Namespace, console: Console, graph: StepGraph, points: Sequence[FrontierPoint], measured: Sequence[FrontierPoint]
) -> None:
    if args.csv is not None:
        from recoup.graph.store import write_file

        write_file(args.csv, _csv([*points, *measured]).encode())
        wrote(console, args.csv)
    if args.figure is not None:
        from recoup.graph.peak import peak_bytes
        from recoup.report.figure import frontier_figure

        frontier_figure(points, args.figure, title=graph.name, measured=measured, unplanned_peak_bytes=peak_bytes(graph))
        wrote(console, args.figure)


def _csv(points: Sequence[FrontierPoint]) -> str:
    from recoup.cli.facts import POINT_FIELDS, point_facts

    text = io.StringIO()
    writer = csv.DictWriter(text, POINT_FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(point_facts(point) for point in points)
    return text.getvalue()
