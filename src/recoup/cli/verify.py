"""recoup verify: run a workload planned and unplanned, and compare everything.

Gradients and buffers bit by bit, the measured peak with the prediction and the budget, the time of both.
"""

from __future__ import annotations

import argparse
from typing import Any

from recoup.cli.arguments import GEARS, add_sizes
from recoup.cli.console import Console
from recoup.cli.workload import JaxWorkload, any_workload
from recoup.errors import UsageError

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this verb."""
    parser.add_argument("source", metavar="FILE.py:FUNCTION", help="the workload")
    add_sizes(parser)
    parser.add_argument("--plan", required=True, metavar="FILE", help="the plan to verify")
    parser.add_argument("--steps", type=int, default=1, help="how many steps in a row to compare (default: 1)")
    parser.add_argument("--offload-to", metavar="DIR", help="where activations go that the plan offloads to disk (default: as in the plan)")
    parser.add_argument("--gear", choices=GEARS[1:], help="run the plan in this gear (default: the plan's own)")


def run(args: argparse.Namespace, console: Console) -> int:
    """Verifies the plan; 3 if it does not hold."""
    from recoup.plan.file import load_plan

    if args.steps < 1:
        raise UsageError(f"--steps must be at least 1, got {args.steps}")
    plan = load_plan(args.plan)
    workload = any_workload(args.source, args.set)
    if isinstance(workload, JaxWorkload):
        from recoup.cli import jax_steps

        return jax_steps.verify(args, console, workload)

    from recoup.cli.facts import verification_facts
    from recoup.report.text import verification_summary
    from recoup.verify import verify

    console.message(f"Verifying {args.plan} on {workload.name}")
    options: dict[str, Any] = {"steps": args.steps, "gear": args.gear, "offload_to": args.offload_to}
    with console.progress("verify") as progress:
        verification = verify(workload.model, workload.step, plan, **options, progress=progress)
    console.data(verification_facts(verification), verification_summary(verification))
    return 0 if verification.passed else 3
