"""Arguments that several verbs share, and the names of files that they write."""

from __future__ import annotations

import argparse
from pathlib import Path

from recoup.cli.console import Console
from recoup.errors import UsageError
from recoup.units import Budget, parse_budget

__all__ = [
    "add_allow",
    "add_output",
    "add_sizes",
    "add_solver",
    "check_solver",
    "derived_name",
    "free_to_write",
    "is_graph_file",
    "refuse_allow",
    "wrote",
]

GEARS = ("auto", "live", "static", "compiled")
ALLOWED = ("tile",)


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """``--set NAME=VALUE``, for verbs that run a workload."""
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="pass a size to the workload (repeatable)")


def add_solver(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """``--budget`` (``required`` or not), ``--strategy`` and ``--gear``."""
    parser.add_argument("--budget", required=required, metavar="BUDGET", help="6GiB, 60%% of the unplanned peak, or auto")
    parser.add_argument("--strategy", default="optimal", help="who decides (default: optimal)")
    parser.add_argument("--gear", choices=GEARS, default="auto", help="how the plan is run (default: the faster one)")
    add_allow(parser)


def add_allow(parser: argparse.ArgumentParser) -> None:
    """``--allow``."""
    parser.add_argument(
        "--allow", action="append", default=[], choices=ALLOWED,
        help="let plans do more: tile runs token-wise regions in pieces, which changes the order of sums in weight gradients",
    )  # fmt: skip


def refuse_allow(args: argparse.Namespace) -> None:
    """For steps that cannot do more.

    Raises:
        UsageError: ``--allow`` is given.
    """
    if args.allow:
        raise UsageError(f"--allow {args.allow[0]} is for steps of PyTorch in eager mode; this one is of JAX")


def add_output(parser: argparse.ArgumentParser, what: str) -> None:
    """``--output`` and ``--force``."""
    parser.add_argument("--output", "-o", metavar="FILE", help=f"where to write {what} (default: a name derived from the input)")
    parser.add_argument("--force", action="store_true", help="overwrite files that exist")


def check_solver(args: argparse.Namespace) -> Budget | None:
    """The budget, if one is given: asked before the work, so that a typing error shows at once.

    Raises:
        UsageError: the budget does not parse, the strategy is not known, or ``optimal`` has no budget.
    """
    from recoup.solve.entry import strategy_of

    strategy_of(args.strategy)
    if args.budget is None and args.strategy == "optimal":
        raise UsageError("the strategy 'optimal' needs --budget, such as 6GiB or 60%")
    return None if args.budget is None else parse_budget(args.budget)


def is_graph_file(source: str) -> bool:
    """Whether a source names a recorded graph, not a workload."""
    return source.endswith((".json", ".json.gz"))


def derived_name(source: str, suffix: str) -> Path:
    """``train.py:workload`` or ``train.graph.json.gz`` as ``train`` + suffix, in the working folder."""
    name = Path(source if is_graph_file(source) else source.rpartition(":")[0]).name
    for ending in (".gz", ".json", ".graph", ".plan", ".py"):
        name = name.removesuffix(ending)
    return Path(name + suffix)


def free_to_write(path: Path, force: bool) -> Path:
    """The path, if it may be written: asked before the work, so that a long run is not lost.

    Raises:
        UsageError: it exists and ``force`` is not set, or its folder is not there.
    """
    if path.exists() and not force:
        raise UsageError(f"{path} exists; give another name with --output, or overwrite it with --force")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: no folder {path.parent}")
    return path


def wrote(console: Console, path: Path) -> None:
    """Says which file was written."""
    console.message(f"Wrote {path}")
