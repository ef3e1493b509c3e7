"""A planned job as tables for terminals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from recoup.job.advice import Change
from recoup.job.curve import Point
from recoup.job.job import Estimate
from recoup.job.memory import StageMemory
from recoup.job.plan import JobPlan
from recoup.job.stages import total_parameters
from recoup.job.sweep import Outcome
from recoup.report.job_facts import layer_ranges
from recoup.units import format_bytes, format_seconds

__all__ = ["changes_table", "curve_table", "job_summary", "layers_table", "memory_table", "named_table", "sweep_table"]

_GIB = 2**30
_STAGES = 12
_WIDE = 90


def job_summary(plan: JobPlan) -> Text:
    """What is planned and what it takes, a few lines."""
    job, estimate = plan.job, plan.estimate
    step, cost = estimate.step, estimate.dollars_per_billion_tokens
    parameters, active = total_parameters(job.model), total_parameters(job.model, active=True)
    seen = f", {active / 1e9:.1f} billion of them for each token" if active != parameters else ""
    proven = f"at most {plan.gap:.2%} above the least" if plan.gap else "the least"
    each = estimate.tokens_per_second / job.layout.devices
    rest = f"exchange {format_seconds(step.exposed)}, optimizer {format_seconds(step.optimizer)}"
    lines = [
        f"{job.model.name}: {parameters / 1e9:.1f} billion parameters{seen}, on {job.layout.devices} {job.device.name}",
        f"layout    {job.layout.in_words}",
        f"step      {format_seconds(estimate.step_seconds)}, of which pipeline idle {format_seconds(step.idle)}, {rest}",
        f"added     {format_seconds(step.recompute)} to the slowest stage by recomputation and copies",
        f"speed     {estimate.tokens_per_second:,.0f} tokens/s, {each:,.0f} on each device; MFU {estimate.mfu:.1%}, HFU {estimate.hfu:.1%}",
        f"memory    {format_bytes(estimate.peak_bytes)} of {format_bytes(plan.limit_bytes)} on the fullest device",
        f"proof     {proven} for these ways to run a layer",
    ]
    if cost is not None:
        lines.append(f"cost      {cost:,.0f} dollars for a billion tokens")
    return Text("\n".join(lines))


def memory_table(plan: JobPlan) -> Table:
    """Memory by stage and kind, in GiB."""
    table = Table(title="Memory of a device by stage (GiB)", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("stage", justify="right")
    memory = plan.estimate.memory
    kinds = [kind for kind in memory[0].by_kind if any(one.by_kind[kind] for one in memory)]
    for kind in kinds:
        table.add_column(kind, justify="right")
    table.add_column("total", justify="right")
    for place in _shown(len(memory)):
        table.add_row(*_memory_row(place, memory, kinds))
    return table


def _shown(count: int) -> list[int | None]:
    """All stages, or the first and last ones with a gap."""
    if count <= _STAGES:
        return list(range(count))
    half = _STAGES // 2
    return [*range(half), None, *range(count - half, count)]


def _memory_row(place: int | None, memory: Sequence[StageMemory], kinds: Sequence[str]) -> list[str]:
    if place is None:
        return ["..."] * (len(kinds) + 2)
    sizes = memory[place].by_kind
    return [str(place), *(f"{sizes[kind] / _GIB:.2f}" for kind in kinds), f"{memory[place].total / _GIB:.2f}"]


def layers_table(plan: JobPlan) -> Table:
    """What is done with which layers."""
    table = Table(title="Plan by layer", box=box.SIMPLE_HEAD, title_justify="left")
    for header in ("stage", "layers"):
        table.add_column(header, justify="right")
    table.add_column("recompute", max_width=_WIDE)
    table.add_column("offload")
    for header in ("kept by a micro-batch", "held", "added"):
        table.add_column(header, justify="right")
    for place in _shown(len(plan.job.stages)):
        if place is None:
            table.add_row(*["..."] * 7)
            continue
        for line in layer_ranges(plan.job.stages[place], plan.estimate.groups[place]):
            table.add_row(str(place), *_layer_cells(line))
    return table


def _layer_cells(line: dict[str, Any]) -> list[str]:
    layers = str(line["first"]) if line["first"] == line["last"] else f"{line['first']}-{line['last']}"
    return [
        layers, ", ".join(line["recompute"]) or "nothing", ", ".join(line["offload"]), format_bytes(line["kept_bytes"]),
        str(line["micro_batches_held"]), format_seconds(line["added_seconds"]),
    ]  # fmt: skip


def named_table(plan: JobPlan) -> Table:
    """The plan beside the named recipes at the same layout."""
    table = Table(title="The same layout with other recipes", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("recipe")
    for header in ("step", "peak", "MFU", "HFU"):
        table.add_column(header, justify="right")
    table.add_column("fits")
    rows: list[tuple[str, Estimate]] = [("this plan", plan.estimate), *plan.named.items()]
    for name, found in rows:
        fits = "yes" if found.peak_bytes <= plan.limit_bytes else "no"
        table.add_row(
            name, format_seconds(found.step_seconds), format_bytes(found.peak_bytes), f"{found.mfu:.1%}", f"{found.hfu:.1%}", fits
        )
    return table


def changes_table(changes: Sequence[Change], limit_bytes: int) -> Table:
    """Changes of one thing, ranked."""
    table = Table(title="What to change, one thing at a time", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("change")
    for header in ("speed", "step", "peak"):
        table.add_column(header, justify="right")
    for change in changes:
        speed = "does not fit" if not change.fits else f"{change.speedup - 1:+.1%}" if change.speedup else "fits"
        over = "" if change.fits else f" ({format_bytes(change.peak_bytes - limit_bytes)} too much)"
        step = format_seconds(change.step_seconds) if change.step_seconds is not None else ""
        table.add_row(change.what, speed, step, format_bytes(change.peak_bytes) + over)
    return table


def curve_table(points: Sequence[Point]) -> Table:
    """The least time for each limit."""
    table = Table(title="Memory against time", box=box.SIMPLE_HEAD, title_justify="left")
    for header in ("limit", "peak", "step", "relative"):
        table.add_column(header, justify="right")
    for point in points:
        table.add_row(
            format_bytes(point.limit_bytes), format_bytes(point.peak_bytes), format_seconds(point.step_seconds),
            f"{point.relative_time:.3f}"
        )  # fmt: skip
    return table


def sweep_table(outcomes: Sequence[Outcome], most: int) -> Table:
    """The fastest layouts."""
    table = Table(title="Fastest layouts", box=box.SIMPLE_HEAD, title_justify="left")
    headers = (
        "tokens/s",
        "step",
        "MFU",
        "peak",
        "recompute",
        "tensor",
        "seq",
        "context",
        "pipeline",
        "schedule",
        "data",
        "expert",
        "ZeRO",
        "micro",
    )
    for header in headers:
        table.add_column(header, justify="right")
    for item in [item for item in outcomes if item.fits][:most]:
        layout = item.layout
        schedule = f"{layout.schedule}{f' {layout.chunks}' if layout.chunks > 1 else ''}" if layout.pipeline > 1 else ""
        numbers = (
            layout.tensor, "yes" if layout.sequence_parallel else "", layout.context, layout.pipeline, schedule, layout.data, layout.expert,
            layout.zero, layout.micro_batch,
        )  # fmt: skip
        table.add_row(
            f"{item.tokens_per_second:,.0f}", format_seconds(item.step_seconds), f"{item.mfu:.1%}", format_bytes(item.peak_bytes),
            f"{item.added_share:.1%}", *map(str, numbers),
        )  # fmt: skip
    return table
