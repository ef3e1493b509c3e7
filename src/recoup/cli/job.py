"""recoup job: plan a run on many accelerators without one at hand.

Says memory by stage, what each layer should keep, recompute and offload, the time of a step, and what to change.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recoup.cli.arguments import free_to_write, wrote
from recoup.cli.console import Console
from recoup.cli.job_arguments import add_job_arguments, degrees_given, job_of
from recoup.errors import InfeasibleBudget, UsageError
from recoup.units import parse_bytes

if TYPE_CHECKING:
    from recoup.job.job import Job
    from recoup.job.plan import JobPlan
    from recoup.job.sweep import Outcome

__all__ = ["configure", "run"]

_EXPORTS = ("megatron", "torchtitan", "maxtext", "recoup")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this verb."""
    add_job_arguments(parser)
    ask = parser.add_argument_group("what to say and write")
    ask.add_argument("--sweep", action="store_true", help="plan every layout of the devices and list the fastest")
    ask.add_argument("--most", type=int, default=20, metavar="N", help="layouts to list (default: 20)")
    ask.add_argument("--no-advice", action="store_true", help="leave out what to change")
    ask.add_argument("--curve", action="store_true", help="add the trade-off of memory against time")
    ask.add_argument("--figure", metavar="FILE", help="draw memory by stage and the trade-off (png, pdf, svg)")
    ask.add_argument("--export", choices=_EXPORTS, help="write the plan as settings of a trainer, or as a Recoup plan of one stage")
    ask.add_argument("--stage", type=int, default=0, metavar="N", help="stage of --export recoup (default: 0)")
    ask.add_argument("--output", "-o", metavar="FILE", help="where to write --export (default: stdout)")
    ask.add_argument("--force", action="store_true", help="overwrite files that exist")


def run(args: argparse.Namespace, console: Console) -> int:
    """Plans the job; 3 if it does not fit."""
    if args.output and not args.export:
        raise UsageError("--output is where --export is written; give --export too")
    for name in (args.figure, args.output):
        if name:
            free_to_write(Path(name), args.force)
    job = _priced(job_of(args), args.price)
    limit = parse_bytes(args.limit) if args.limit else job.device.memory_bytes - job.device.reserved_bytes
    if args.sweep:
        return _sweep(job, limit, args, console)
    if not degrees_given(args) and not args.job:
        job = _fastest(job, limit, console)
    return _plan(job, limit, args, console)


def _priced(job: Job, dollars: float | None) -> Job:
    import msgspec

    if dollars is None:
        return job
    if dollars <= 0:
        raise UsageError(f"--price must be positive, got {dollars}")
    return replace(job, device=msgspec.structs.replace(job.device, dollars_per_hour=dollars))


def _plan(job: Job, limit: int, args: argparse.Namespace, console: Console) -> int:
    from recoup.job.advice import way_out
    from recoup.job.plan import plan_job

    try:
        plan = plan_job(job, limit)
    except InfeasibleBudget as error:
        cure = way_out(job, limit)
        raise InfeasibleBudget(
            f"{error}; {cure}", budget_bytes=error.budget_bytes, least_bytes=error.least_bytes, moment=error.moment
        ) from error
    if args.export:
        return _export(plan, args, console)
    _tell(plan, args, console)
    return 0


def _tell(plan: JobPlan, args: argparse.Namespace, console: Console) -> None:
    from recoup.job.advice import advise
    from recoup.job.curve import curve
    from recoup.report.job import changes_table, job_summary, layers_table, memory_table, named_table
    from recoup.report.job_facts import changes_facts, curve_facts, plan_facts

    facts: dict[str, Any] = plan_facts(plan)
    shown: list[Any] = [job_summary(plan), memory_table(plan), layers_table(plan), named_table(plan)]
    if not args.no_advice:
        changes = advise(plan.job, plan.limit_bytes)
        facts["changes"] = changes_facts(changes)
        shown.append(changes_table(changes, plan.limit_bytes))
    points = curve(plan.job) if args.curve or args.figure else ()
    if args.curve:
        from recoup.report.job import curve_table

        facts["curve"] = curve_facts(points)
        shown.append(curve_table(points))
    console.data(facts, *shown)
    if args.figure:
        from recoup.report.job_figure import job_figure

        job_figure(plan, points, args.figure)
        wrote(console, Path(args.figure))


def _export(plan: JobPlan, args: argparse.Namespace, console: Console) -> int:
    from recoup.job.export import export

    found = export(plan, args.export, args.stage)
    if args.output:
        Path(args.output).write_text(found.text)
        wrote(console, Path(args.output))
    elif console.json:
        console.data({"format": found.format, "settings": found.text, "peak_bytes": found.peak_bytes, "step_seconds": found.step_seconds})
    else:
        console.plain(found.text)
    if found.slower:
        console.message(f"The plan itself is faster: these settings take {found.slower:+.1%} of its step time")
    return 0


def _outcomes(job: Job, limit: int, console: Console) -> tuple[list[Outcome], int]:
    from recoup.job.sweep import layouts, sweep

    candidates = list(layouts(job.model, job.layout, job.layout.devices, job.device))
    with console.progress("sweep") as progress:
        return sweep(
            job.model, candidates, job.device, job.kernels, job.numbers, limit_bytes=limit, fixed_bytes=job.fixed_bytes, progress=progress
        )


def _sweep(job: Job, limit: int, args: argparse.Namespace, console: Console) -> int:
    from recoup.report.job import sweep_table
    from recoup.report.job_facts import sweep_facts

    found, refused = _outcomes(job, limit, console)
    fitting = [item for item in found if item.fits]
    console.message(f"{len(found)} layouts planned, {len(fitting)} fit; {refused} more do not split the model evenly")
    if not fitting:
        raise _nothing(job, limit, found)
    console.data(sweep_facts(fitting[: args.most]), sweep_table(found, args.most))
    return 0


def _fastest(job: Job, limit: int, console: Console) -> Job:
    """The job in the fastest layout that fits."""

    found, _ = _outcomes(job, limit, console)
    if not found or not found[0].fits:
        raise _nothing(job, limit, found)
    console.message(f"No layout given; of {len(found)} the fastest is {found[0].layout.in_words}")
    return replace(job, layout=found[0].layout)


def _nothing(job: Job, limit: int, found: list[Outcome]) -> InfeasibleBudget:
    from recoup.units import format_bytes

    least = min(found, key=lambda item: item.peak_bytes, default=None)
    nearest = f"the nearest, {least.layout.in_words}, takes {format_bytes(least.peak_bytes)}" if least else "none splits the model evenly"
    return InfeasibleBudget(
        f"no layout of {job.layout.devices} {job.device.name} fits {format_bytes(limit)}: {nearest}; take more"
        " devices, or shorter sequences",
        budget_bytes=limit, least_bytes=least.peak_bytes if least else 0, moment="",
    )  # fmt: skip
