"""A Recoup plan of one stage: decisions by site, layers collapsed into ranges, with the budget it was made for.

Sites are those of the modelled layers. The executor takes a plan only for the step that it was solved on, so what carries over
to a recorded model is the budget: ``recoup fit --budget`` finds there what this plan finds here.
"""

from __future__ import annotations

from collections.abc import Iterator

from recoup.errors import UsageError
from recoup.graph.site import collapse
from recoup.job.memory import Group
from recoup.job.plan import JobPlan
from recoup.job.stages import Stage
from recoup.job.workshop import layer_of
from recoup.plan import Decision, Plan
from recoup.units import format_seconds

__all__ = ["stage_plan"]


def stage_plan(plan: JobPlan, stage: int = 0) -> Plan:
    """The plan of one stage.

    Raises:
        UsageError: there is no such stage, or it offloads, which plan files do not say.
    """
    job = plan.job
    if not 0 <= stage < len(job.stages):
        raise UsageError(f"the pipeline has stages 0 to {len(job.stages) - 1}, not {stage}")
    groups = plan.estimate.groups[stage]
    if any(group.way.offload for group in groups):
        raise UsageError("this plan offloads activations, which a Recoup plan file does not say; plan without offload")
    memory, seconds = plan.estimate.memory[stage], plan.estimate.stages[stage]
    plain = plan.named["none"]
    decisions = tuple(_decisions(plan, job.stages[stage], groups))
    return Plan(
        frontend="job", fingerprint=_fingerprint(plan),
        environment={"device": job.device.name, "model": job.model.name, "stage": str(stage)},
        strategy="job", budget_bytes=plan.limit_bytes, peak_bytes=memory.total, step_seconds=seconds.total,
        unplanned_peak_bytes=plain.memory[stage].total, unplanned_step_seconds=plain.stages[stage].total,
        bound_seconds=seconds.total / (1 + plan.gap), gap=plan.gap, decisions=decisions,
    )  # fmt: skip


def _fingerprint(plan: JobPlan) -> str:
    kinds = dict.fromkeys(plan.job.model.kinds)
    return "+".join(layer_of(plan.job.shape, kind, plan.job.device, plan.job.numbers.product).graph.fingerprint for kind in kinds)


def _decisions(plan: JobPlan, stage: Stage, groups: tuple[Group, ...]) -> Iterator[Decision]:
    """For each tensor the layers in which it is recomputed, as one range."""
    job = plan.job
    dropped: dict[tuple[str, str], list[int]] = {}
    sizes: dict[tuple[str, str], tuple[int, float]] = {}
    places = dict(enumerate(stage.starts))
    for group in groups:
        layer = layer_of(job.shape, group.kind, job.device, job.numbers.product)
        layers = range(places[group.chunk], places[group.chunk] + group.count)
        places[group.chunk] += group.count
        for row, price in zip(layer.table.rows, layer.prices.rows, strict=True):
            for tensor in row.makes:
                if tensor.name in group.way.recompute and tensor.name in layer.table.saved:
                    key = (row.module, tensor.name)
                    dropped.setdefault(key, []).extend(layers)
                    sizes[key] = (tensor.bytes, price.forward_seconds)
    for (module, name), layers in dropped.items():
        size, seconds = sizes[module, name]
        pattern = collapse(f"layers.{place}.{module}/{name}" for place in layers)[0][0]
        yield Decision(site=pattern, action="recompute", bytes=size * len(layers), why=f"rebuilt in {format_seconds(seconds)}")
