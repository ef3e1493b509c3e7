"""Planning a job: every stage solved under its own micro-batches in flight, judged beside the named recipes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recoup.errors import InfeasibleBudget
from recoup.job.choose import Choice, Slot, choose, least_bytes
from recoup.job.dishes import NAMED, Dish
from recoup.job.job import Estimate, Job
from recoup.job.layer import head_table
from recoup.job.memory import Group, StageMemory, head_bytes
from recoup.job.schedule import held_of_chunk
from recoup.job.stages import Stage
from recoup.job.workshop import menu_of
from recoup.units import format_bytes

__all__ = ["JobPlan", "Shortfall", "plan_job", "quick_plan", "shortfall"]


@dataclass(frozen=True)
class JobPlan:
    """What to run, and what it takes.

    Attributes:
        job: what was planned.
        limit_bytes: what each device may hold.
        estimate: memory and time of the plan.
        gap: how far the slowest stage's micro-batch can be from the least, relative to it: proven for these menus.
        named: the named recipes at the same layout, for comparison.
    """

    job: Job
    limit_bytes: int
    estimate: Estimate
    gap: float
    named: Mapping[str, Estimate]

    @property
    def fitting(self) -> dict[str, Estimate]:
        """Those of the named recipes that fit."""
        return {name: found for name, found in self.named.items() if found.peak_bytes <= self.limit_bytes}


@dataclass(frozen=True, slots=True)
class Shortfall:
    """The fullest stage at the least that any choice takes.

    Attributes:
        stage: its index.
        least_bytes: of one of its devices.
        states_bytes: weights, gradients and optimizer of these.
    """

    stage: int
    least_bytes: int
    states_bytes: int


def plan_job(job: Job, limit_bytes: int | None = None) -> JobPlan:
    """The fastest plan within the memory of each device.

    Args:
        job: model, layout, kernels, numbers and device.
        limit_bytes: what a device may hold; by default its memory less what it reserves.

    Raises:
        InfeasibleBudget: some stage does not fit, whatever is recomputed; the error says which, and by how much.
    """
    limit = job.device.memory_bytes - job.device.reserved_bytes if limit_bytes is None else limit_bytes
    choices = [_stage_choice(job, stage, limit) for stage in job.stages]
    chosen = [choice for choice in choices if choice is not None]
    if len(chosen) < len(choices):
        raise _infeasible(job, limit)
    estimate = job.estimate_of(tuple(choice.groups for choice in chosen))
    assert estimate.peak_bytes <= limit, "a choice was larger than the room that it was given"
    named = {name: job.estimate(name) for name in NAMED}
    return JobPlan(job, limit, estimate, _gap(estimate, chosen), named)


def quick_plan(job: Job, limit_bytes: int) -> tuple[Estimate | None, int]:
    """The estimate of the plan, and its peak; or None, and the least bytes that the job takes."""
    choices = [_stage_choice(job, stage, limit_bytes) for stage in job.stages]
    if None in choices:
        return None, shortfall(job).least_bytes
    estimate = job.estimate_of(tuple(choice.groups for choice in choices if choice is not None))
    return estimate, estimate.peak_bytes


def shortfall(job: Job) -> Shortfall:
    """The stage that needs most at its least, and how much that is."""
    return max((_least_of(job, stage) for stage in job.stages), key=lambda found: found.least_bytes)


def menus_of(job: Job) -> dict[str, tuple[Dish, ...]]:
    """The ways to run each kind of layer of the job."""
    return {kind: menu_of(job.shape, kind, job.device, job.numbers.product) for kind in dict.fromkeys(job.model.kinds)}


def _stage_choice(job: Job, stage: Stage, limit: int) -> Choice | None:
    return choose(_slots(job, stage), menus_of(job), limit - _standing(job, stage), _head(job, stage))


def _slots(job: Job, stage: Stage) -> tuple[Slot, ...]:
    held = held_of_chunk(job.layout, stage.index)
    return tuple(Slot(kind, chunk, count, held[chunk]) for chunk, runs in enumerate(stage.chunks) for kind, count in runs)


def _head(job: Job, stage: Stage) -> int:
    return head_bytes(head_table(job.shape), job.shape) if stage.last else 0


def _standing(job: Job, stage: Stage) -> int:
    """Bytes of a stage that no choice changes."""
    return _bare(job, stage).total - _head(job, stage)


def _bare(job: Job, stage: Stage) -> StageMemory:
    """Memory of a stage without its layers."""
    return job.memory(stage, tuple(Group(slot.kind, slot.chunk, 0, slot.held, _EMPTY) for slot in _slots(job, stage)))


_EMPTY = Dish("empty", frozenset(), frozenset(), 0, 0, 0, 0.0, 0)


def _least_of(job: Job, stage: Stage) -> Shortfall:
    bare = _bare(job, stage)
    least = bare.total - _head(job, stage) + least_bytes(_slots(job, stage), menus_of(job), _head(job, stage))
    return Shortfall(stage.index, least, bare.weights + bare.gradients + bare.optimizer)


def _gap(estimate: Estimate, choices: list[Choice]) -> float:
    """Of the slowest stage: seconds above the bound, relative to it."""
    slowest = max(range(len(choices)), key=lambda place: estimate.stages[place].total)
    choice, total = choices[slowest], estimate.stages[slowest].total
    bound = total - choice.seconds + choice.bound_seconds
    return max(total / bound - 1, 0.0) if bound else 0.0


def _infeasible(job: Job, limit: int) -> InfeasibleBudget:
    found = shortfall(job)
    over = found.least_bytes - limit
    return InfeasibleBudget(
        f"stage {found.stage} of {job.layout.pipeline} does not fit {format_bytes(limit)}: with all that can be recomputed it takes"
        f" {format_bytes(found.least_bytes)} on each device, {format_bytes(over)} too much, of which {format_bytes(found.states_bytes)} are"
        " weights, gradients and optimizer states",
        budget_bytes=limit, least_bytes=found.least_bytes, moment=f"stage {found.stage}",
    )  # fmt: skip
