"""recoup record: run a step a few times and write down what it did.

Writes a step graph (JSON, gzipped) that the other verbs read without running the step again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from recoup.cli.arguments import add_output, add_sizes, derived_name, free_to_write, wrote
from recoup.cli.console import Console
from recoup.cli.sources import record_workload
from recoup.cli.workload import JaxWorkload, any_workload
from recoup.errors import UsageError

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this verb."""
    parser.add_argument("source", metavar="FILE.py:FUNCTION", help="the workload")
    add_sizes(parser)
    parser.add_argument("--runs", type=int, default=3, help="how often to run the step for its times (default: 3)")
    add_output(parser, "the graph")


def run(args: argparse.Namespace, console: Console) -> int:
    """Records the workload, writes the graph, and says what was recorded."""
    if args.runs < 1:
        raise UsageError(f"--runs must be at least 1, got {args.runs}")
    path = free_to_write(Path(args.output) if args.output else derived_name(args.source, ".graph.json.gz"), args.force)
    workload = any_workload(args.source, args.set)
    if isinstance(workload, JaxWorkload):
        from recoup.cli import jax_steps

        return jax_steps.record(args, console, workload, path)
    graph = record_workload(workload, console, runs=args.runs)

    from recoup.cli.facts import graph_facts
    from recoup.graph.store import save
    from recoup.report.text import graph_summary

    save(graph, path)
    console.data(graph_facts(graph), graph_summary(graph))
    wrote(console, path)
    return 0
