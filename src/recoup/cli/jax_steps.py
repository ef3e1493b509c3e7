"""What the verbs do with a JAX step: a loss and its arguments instead of a model and a step."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recoup.cli.arguments import is_graph_file, wrote
from recoup.cli.console import Console
from recoup.cli.workload import JaxWorkload
from recoup.errors import InfeasibleBudget, UsageError

if TYPE_CHECKING:
    from recoup.jax.recording import Recording
    from recoup.solve import FrontierPoint

__all__ = ["fit", "frontier_points", "is_recording", "record", "recording_facts", "recording_of", "solve", "verify"]

_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)


def is_recording(source: str) -> bool:
    """Whether a file is a recorded JAX step."""
    import msgspec

    from recoup.graph.store import read_file

    if not is_graph_file(source):
        return False
    try:
        return "recording" in msgspec.json.decode(read_file(source), type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        # The reader of the other kind says what is wrong with it.
        return False


def recording_of(source: str | JaxWorkload, console: Console, runs: int = 3) -> Recording:
    """A recording from a file, or of a workload that is recorded now."""
    from recoup.jax.recording import load

    if isinstance(source, str):
        return load(source)
    from recoup.jax import record as record_step

    console.message(f"Recording {source.name}")
    return record_step(source.loss, *source.args, **source.options, runs=runs, name=source.name)


def recording_facts(recording: Recording) -> dict[str, Any]:
    """A recording in a few numbers."""
    from recoup.cli.facts import graph_facts
    from recoup.jax.solving import unplanned_peak_bytes

    loops = [{"name": body.name, "turns": body.turns, "operations": len(body.graph.ops)} for body in recording.bodies()]
    return graph_facts(recording.graph) | {
        "fingerprint": recording.fingerprint,
        "operations": recording.operations,
        "peak_bytes": unplanned_peak_bytes(recording),
        "residual_bytes": recording.unplanned_residual_bytes,
        "loops": loops,
    }


def record(args: argparse.Namespace, console: Console, workload: JaxWorkload, path: Path) -> int:
    """Records a loss and writes the recording."""
    from recoup.jax.recording import save

    recording = recording_of(workload, console, args.runs)
    save(recording, path)
    show(console, recording)
    wrote(console, path)
    return 0


def show(console: Console, recording: Recording) -> None:
    """What was recorded, in a few lines."""
    from recoup.report.text import graph_summary

    facts = recording_facts(recording)
    loops = [f"loop  {loop['name']}, {loop['turns']} turns of {loop['operations']} operations" for loop in facts["loops"]]
    console.data(facts, graph_summary(recording.graph), *loops)


def solve(args: argparse.Namespace, console: Console, source: str | JaxWorkload, path: Path) -> int:
    """Solves a recorded JAX step, writes the plan, and explains it."""
    import msgspec

    from recoup.jax import solve as solve_step
    from recoup.plan.file import save_plan

    plan = solve_step(recording_of(source, console), args.budget, strategy=args.strategy, time_limit_seconds=args.time_limit)
    save_plan(plan, path)
    if console.json:
        console.data(msgspec.to_builtins(plan))
    else:
        console.plain(plan.explain())
    wrote(console, path)
    return 0


def fit(args: argparse.Namespace, console: Console, workload: JaxWorkload, path: Path) -> int:
    """Fits a loss into the budget."""
    import msgspec

    from recoup.cli.facts import verification_facts
    from recoup.jax import fit as fit_step
    from recoup.plan.file import save_plan
    from recoup.report.text import verification_summary

    with console.progress("fit") as progress:
        fitted = fit_step(
            workload.loss,
            *workload.args,
            **workload.options,
            budget=args.budget,
            strategy=args.strategy,
            name=workload.name,
            progress=progress,
        )
    save_plan(fitted.plan, path)
    facts = {"plan": msgspec.to_builtins(fitted.plan), "verification": verification_facts(fitted.verification)}
    console.data(facts, fitted.plan.explain(), "", verification_summary(fitted.verification))
    wrote(console, path)
    return 0


def verify(args: argparse.Namespace, console: Console, workload: JaxWorkload) -> int:
    """Verifies a plan on a loss; 3 if it does not hold."""
    from recoup.cli.facts import verification_facts
    from recoup.jax import verify as verify_step
    from recoup.plan.file import load_plan
    from recoup.report.text import verification_summary

    plan = load_plan(args.plan)
    console.message(f"Verifying {args.plan} on {workload.name}")
    verification = verify_step(workload.loss, plan, *workload.args, **workload.options)
    console.data(verification_facts(verification), verification_summary(verification))
    return 0 if verification.passed else 3


def frontier_points(args: argparse.Namespace, recording: Recording) -> tuple[FrontierPoint, ...]:
    """Points for the budgets asked for, by default shares of the unplanned peak, and of each named strategy."""
    from recoup.jax.solving import unplanned_peak_bytes

    if args.measure:
        raise UsageError("--measure runs PyTorch steps; recoup fit measures a plan of a JAX step")
    whole = recording.graph.measured_peak_bytes or unplanned_peak_bytes(recording)
    budgets: Sequence[str | int] = args.budgets or [int(whole * share) for share in _SHARES]
    found = [_point(recording, strategy, budget) for strategy in args.strategies or ("optimal",) for budget in budgets]
    return tuple(found)


def _point(recording: Recording, strategy: str, budget: str | int) -> FrontierPoint:
    from recoup.jax import solve as solve_step
    from recoup.solve import FrontierPoint

    try:
        plan = solve_step(recording, budget, strategy=strategy)
    except InfeasibleBudget as error:
        return FrontierPoint(strategy, "jit", error.budget_bytes, error.least_bytes, None, 0.0, 0.0, None, False)
    relative = plan.step_seconds / plan.unplanned_step_seconds
    return FrontierPoint(
        strategy, "jit", plan.budget_bytes, plan.peak_bytes, None, plan.step_seconds, relative, plan.gap, True, plan.price_seconds_per_byte
    )
