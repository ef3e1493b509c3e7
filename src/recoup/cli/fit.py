"""recoup fit: record, solve, apply and verify a step in one go.

Writes the plan that was verified.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from recoup.cli.arguments import add_output, add_sizes, add_solver, check_solver, derived_name, free_to_write, refuse_allow, wrote
from recoup.cli.console import Console
from recoup.cli.offloading import add_offload, check_offload, links_for, refuse_offload
from recoup.cli.workload import JaxWorkload, any_workload

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this verb."""
    parser.add_argument("source", metavar="FILE.py:FUNCTION", help="the workload")
    add_sizes(parser)
    add_solver(parser)
    add_offload(parser)
    add_output(parser, "the plan")


def run(args: argparse.Namespace, console: Console) -> int:
    """Fits the workload into the budget; 3 if the planned step does not verify."""
    check_solver(args)
    check_offload(args)
    path = free_to_write(Path(args.output) if args.output else derived_name(args.source, ".plan.json"), args.force)
    workload = any_workload(args.source, args.set)
    if isinstance(workload, JaxWorkload):
        from recoup.cli import jax_steps

        refuse_offload(args)
        refuse_allow(args)
        console.message(f"Fitting {workload.name} into {args.budget}")
        return jax_steps.fit(args, console, workload, path)

    import msgspec

    from recoup.cli.facts import verification_facts
    from recoup.fitting import fit
    from recoup.plan.file import save_plan
    from recoup.report.text import verification_summary
    from recoup.solve import explain

    links = links_for(args, console, workload)
    away: dict[str, Any] = {"offload": links, "host_budget": args.host_budget, "disk_budget": args.disk_budget}
    console.message(f"Fitting {workload.name} into {args.budget}")
    with console.progress("fit") as progress:
        options: dict[str, Any] = {"strategy": args.strategy, "gear": args.gear, "allow": args.allow, **away}
        applied = fit(workload.model, workload.step, args.budget, **options, progress=progress)
    applied.remove()
    plan, verification = applied.plan, applied.verification
    save_plan(plan, path)
    facts = {"plan": msgspec.to_builtins(plan), "verification": verification_facts(verification)}
    console.data(facts, explain(applied.graph, plan), "", verification_summary(verification))
    wrote(console, path)
    return 0 if verification.passed else 3
