"""recoup show: print a recorded graph or a plan for people to read.

A graph: in short, by operations, by what stands at its peak, or, with a plan, over the seconds of the planned step. A plan: what it
promises and decides.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from recoup.cli.arguments import free_to_write, wrote
from recoup.cli.console import Console
from recoup.errors import PlanMismatch, UsageError

if TYPE_CHECKING:
    from recoup.graph import StepGraph

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this verb."""
    parser.add_argument("file", metavar="FILE", help="a graph or a plan")
    parser.add_argument("--peak", action="store_true", help="what stands at the peak of the step (graph)")
    parser.add_argument("--plan", metavar="FILE", help="with --peak or --timeline: of the step under this plan")
    parser.add_argument(
        "--timeline", metavar="FILE", type=Path, help="with --plan: draw bytes, transfers and replays over time (.png, .svg or .pdf)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite a picture that exists")
    parser.add_argument("--module", type=int, default=2, metavar="DEPTH", help="with --peak: parts of the module path (default: 2)")
    parser.add_argument("--ops", action="store_true", help="every operation (graph)")
    parser.add_argument("--limit", type=int, metavar="N", help="the most lines of a section")


def run(args: argparse.Namespace, console: Console) -> int:
    """Shows the file, whichever of the two it is."""
    import msgspec

    from recoup.graph.store import read_file

    if args.module < 1 or (args.limit is not None and args.limit < 0):
        raise UsageError("--module must be at least 1 and --limit at least 0")
    if args.plan and not (args.peak or args.timeline):
        raise UsageError("--plan goes with --peak or --timeline")
    if args.timeline:
        if not args.plan or args.peak or args.ops:
            raise UsageError("--timeline shows a graph under a plan; give --plan too, and neither --peak nor --ops")
        free_to_write(args.timeline, args.force)
    try:
        fields = msgspec.json.decode(read_file(args.file), type=dict[str, msgspec.Raw]).keys()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PlanMismatch(f"{args.file} is neither a step graph nor a plan: {error}") from error
    if "recording" in fields:
        from recoup.cli import jax_steps

        if args.peak or args.ops or args.plan:
            raise UsageError(f"{args.file} is a recorded JAX step; --peak, --timeline and --ops go with a graph")
        jax_steps.show(console, jax_steps.recording_of(args.file, console))
    elif "graph" in fields:
        _show_graph(args, console)
    elif "decisions" in fields or "strategy" in fields:
        _show_plan(args, console)
    else:
        raise PlanMismatch(f"{args.file} is neither a step graph nor a plan: it has no field graph, strategy or decisions")
    return 0


def _show_graph(args: argparse.Namespace, console: Console) -> None:
    from recoup.cli.facts import graph_facts
    from recoup.graph.store import load
    from recoup.graph.text import print_graph
    from recoup.report.text import graph_summary, peak_table

    graph = load(args.file)
    if args.timeline:
        _show_timeline(args, console, graph)
    elif args.peak:
        from recoup.plan.file import load_plan
        from recoup.simulate import attribution, simulate, simulate_plan

        simulation = simulate_plan(graph, load_plan(args.plan)) if args.plan else simulate(graph)
        places = attribution(graph, simulation, args.module)
        facts = {
            "peak_bytes": simulation.peak_bytes,
            "peak_site": simulation.peak_site,
            "places": [{"place": place, "bytes": count} for place, count in places],
        }
        limit = 20 if args.limit is None else args.limit
        console.data(facts, f"peak at {simulation.peak_site}", "", peak_table(places, simulation.peak_bytes, limit=limit))
    elif args.ops and not console.json:
        console.plain(print_graph(graph, limit=args.limit))
    else:
        facts = graph_facts(graph)
        if args.ops:
            import msgspec

            facts["ops"] = msgspec.to_builtins(graph.ops[: args.limit])
        console.data(facts, graph_summary(graph))


def _show_timeline(args: argparse.Namespace, console: Console, graph: StepGraph) -> None:
    from recoup.plan.file import load_plan
    from recoup.report.lanes import timeline_facts, timeline_summary
    from recoup.report.timeline import timeline_figure
    from recoup.simulate import timeline_of

    plan = load_plan(args.plan)
    timeline = timeline_of(graph, plan)
    timeline_figure(graph, plan, timeline, args.timeline)
    console.data(timeline_facts(graph, plan, timeline), timeline_summary(graph, plan, timeline))
    wrote(console, args.timeline)


def _show_plan(args: argparse.Namespace, console: Console) -> None:
    import msgspec

    from recoup.plan.file import load_plan
    from recoup.report.text import plan_summary

    if args.peak or args.ops or args.timeline:
        raise UsageError(f"{args.file} is a plan; --peak, --timeline and --ops go with a graph")
    plan = load_plan(args.file)
    console.data(msgspec.to_builtins(plan), plan_summary(plan, limit=20 if args.limit is None else args.limit))
