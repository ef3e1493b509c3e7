"""recoup solve: choose what to recompute so that the peak stays within a budget.

Reads a recorded graph, or records a workload first; writes a plan.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from recoup.cli.arguments import add_output, add_sizes, add_solver, check_solver, derived_name, free_to_write, refuse_allow, wrote
from recoup.cli.console import Console
from recoup.cli.offloading import add_offload, check_offload, links_for, refuse_offload
from recoup.cli.sources import graph_of, jax_source

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this verb."""
    parser.add_argument("source", metavar="GRAPH|FILE.py:FUNCTION", help="a recorded graph, or a workload to record")
    add_sizes(parser)
    add_solver(parser, required=False)
    add_offload(parser)
    parser.add_argument("--time-limit", type=float, default=20.0, metavar="SECONDS", help="of the solver (default: 20)")
    add_output(parser, "the plan")


def run(args: argparse.Namespace, console: Console) -> int:
    """Solves, writes the plan, and explains it."""
    budget = check_solver(args)
    check_offload(args)
    path = free_to_write(Path(args.output) if args.output else derived_name(args.source, ".plan.json"), args.force)
    source = jax_source(args)
    if source is not None:
        from recoup.cli import jax_steps

        refuse_offload(args)
        refuse_allow(args)
        return jax_steps.solve(args, console, source, path)
    graph, workload = graph_of(args, console)

    import msgspec

    from recoup.plan.file import save_plan
    from recoup.solve import explain, solve

    # A graph alone does not know the device it will run on.
    free = None
    if workload is not None and budget is not None and budget.kind == "auto":
        from recoup.torch.free import free_bytes

        free = free_bytes(workload.model)
    options: dict[str, Any] = {"strategy": args.strategy, "gear": args.gear, "allow": args.allow, "free_bytes": free}
    options |= {"offload": links_for(args, console, workload), "host_budget": args.host_budget, "disk_budget": args.disk_budget}
    options["time_limit_seconds"] = args.time_limit
    with console.progress("solve") as progress:
        plan = solve(graph, budget, **options, progress=progress)
    save_plan(plan, path)
    if console.json:
        console.data(msgspec.to_builtins(plan))
    else:
        console.plain(explain(graph, plan))
    wrote(console, path)
    return 0
