"""recoup longest: find the longest sequence, or the largest batch, that fits a budget.

Records a few small sizes, searches on a model of the step, runs the answer, and writes its plan.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from recoup.cli.arguments import add_output, add_sizes, add_solver, check_solver, derived_name, free_to_write, wrote
from recoup.cli.console import Console
from recoup.cli.offloading import add_offload, check_offload, wanted_of
from recoup.cli.workload import load_workload, parse_sizes
from recoup.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this verb."""
    parser.add_argument("source", metavar="FILE.py:FUNCTION", help="the workload")
    parser.add_argument("--over", required=True, metavar="NAME", help="the size to grow, such as sequence or batch")
    add_sizes(parser)
    add_solver(parser)
    add_offload(parser)
    parser.add_argument("--least", type=int, default=1, metavar="N", help="the least size that is an answer (default: 1)")
    parser.add_argument("--most", type=int, metavar="N", help="the largest size that is an answer, or run at all")
    parser.add_argument("--multiple", type=int, default=1, metavar="N", help="of which the answer is a multiple (default: 1)")
    parser.add_argument("--sizes", type=_listed, metavar="LIST", help="three or more sizes to record (default: some small ones)")
    parser.add_argument("--tokens", type=int, default=1, metavar="N", help="tokens of a step for each unit of the size (default: 1)")
    parser.add_argument(
        "--check", choices=("auto", "compared", "alone"), default="auto", help="run the answer beside the unplanned step, or by itself"
    )
    add_output(parser, "the plan")


def run(args: argparse.Namespace, console: Console) -> int:
    """Finds the size, writes its plan; 3 if no size fits."""
    check_solver(args)
    check_offload(args)
    if args.over in parse_sizes(args.set):
        raise UsageError(f"{args.over} is what is looked for; it cannot be given by --set too")
    path = free_to_write(Path(args.output) if args.output else derived_name(args.source, ".plan.json"), args.force)

    import msgspec

    from recoup.cli.facts import longest_facts
    from recoup.longest import longest
    from recoup.plan.file import save_plan
    from recoup.report.text import longest_summary
    from recoup.solve import explain

    console.message(f"Looking for the largest {args.over} of {args.source} within {args.budget}")
    names = ("over", "sizes", "least", "most", "multiple", "strategy", "gear", "allow", "check", "tokens", "host_budget", "disk_budget")
    options = {name: getattr(args, name) for name in names}
    options["offload"] = wanted_of(args) or None
    with console.progress("longest") as progress:
        found = longest(_maker(args), args.budget, **options, progress=progress)
    save_plan(found.plan, path)
    facts = longest_facts(found) | {"plan": msgspec.to_builtins(found.plan)}
    console.data(facts, longest_summary(found), "", explain(found.graph, found.plan))
    wrote(console, path)
    return 0


def _maker(args: argparse.Namespace) -> Callable[..., tuple[nn.Module, Callable[[], object]]]:
    """The workload as a function of one size, the others set."""

    def make(**sizes: int) -> tuple[nn.Module, Callable[[], object]]:
        workload = load_workload(args.source, [*args.set, *(f"{name}={size}" for name, size in sizes.items())])
        return workload.model, workload.step

    return make


def _listed(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))
