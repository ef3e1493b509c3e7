"""A graph from what the user names: a recorded file, or a workload that is recorded now."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from recoup.cli.arguments import is_graph_file
from recoup.cli.console import Console
from recoup.cli.workload import JaxWorkload, Workload, any_workload, load_workload
from recoup.errors import UsageError

if TYPE_CHECKING:
    from recoup.graph.step import StepGraph

__all__ = ["graph_of", "jax_source", "record_workload"]


def graph_of(args: argparse.Namespace, console: Console) -> tuple[StepGraph, Workload | None]:
    """The graph that ``args.source`` names, and the workload if it was one.

    Raises:
        UsageError: a size is given for a graph file, or as ``load_workload`` and ``load`` say.
    """
    if is_graph_file(args.source):
        from recoup.graph.store import load

        if args.set:
            raise UsageError("--set goes with a workload; a recorded graph has its sizes")
        return load(args.source), None
    workload = load_workload(args.source, args.set)
    return record_workload(workload, console), workload


def jax_source(args: argparse.Namespace) -> str | JaxWorkload | None:
    """The recording's file or the JAX workload that ``args.source`` names; None if it names something of PyTorch.

    Raises:
        UsageError: as ``any_workload`` says, or a size is given for a recording.
    """
    from recoup.cli.jax_steps import is_recording

    if is_graph_file(args.source):
        if is_recording(args.source) and args.set:
            raise UsageError("--set goes with a workload; a recorded step has its sizes")
        return args.source if is_recording(args.source) else None
    workload = any_workload(args.source, args.set)
    return workload if isinstance(workload, JaxWorkload) else None


def record_workload(workload: Workload, console: Console, *, runs: int = 3) -> StepGraph:
    """Records the workload's step.

    Raises:
        CaptureError: the step cannot be recorded, as when it has no backward pass.
    """
    from recoup.torch import record

    console.message(f"Recording {workload.name}")
    with console.progress("record") as progress:
        return record(workload.step, model=workload.model, runs=runs, name=workload.name, progress=progress)
