"""A job: a model, a layout, kernels, numbers and a device; what it takes under a choice of recipes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from recoup.cost.device import Device
from recoup.errors import UsageError
from recoup.job.dishes import Dish
from recoup.job.layer import head_table, input_table, layer_table
from recoup.job.layout import Kernels, Layout, Numbers, check_layout
from recoup.job.memory import Group, StageMemory, stage_memory
from recoup.job.model import Model
from recoup.job.schedule import held_of_chunk
from recoup.job.shape import Shape
from recoup.job.stages import Parameters, Stage, of_table, parameters_of, stages_of
from recoup.job.step import StageSeconds, StepSeconds, stage_seconds, step_seconds
from recoup.job.workshop import recipe_of

__all__ = ["Estimate", "Job"]


@dataclass(frozen=True)
class Job:
    """What is to be run; checked when made.

    Attributes:
        model: what is trained.
        layout: how it is spread.
        device: on what.
        kernels: which kernels run.
        numbers: bytes of states, precision.
        fixed_bytes: context and workspaces that stand on each device beside all else.

    Raises:
        UsageError: the layout does not split the model evenly.
    """

    model: Model
    layout: Layout
    device: Device
    kernels: Kernels = field(default_factory=Kernels)
    numbers: Numbers = field(default_factory=Numbers)
    fixed_bytes: int = 0

    def __post_init__(self) -> None:
        check_layout(self.model, self.layout)
        self.device.rate(self.numbers.precision)
        if self.kernels.attention == "explicit" and self.layout.context > 1:
            raise UsageError("layout field `context`: context parallelism is modelled for kernels field `attention` flash, not explicit")

    @cached_property
    def shape(self) -> Shape:
        """What one device sees of a layer."""
        return Shape.of(self.model, self.kernels, self.layout)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Stages of the pipeline."""
        return stages_of(self.model, self.layout)

    @cached_property
    def parameters(self) -> tuple[Parameters, ...]:
        """Parameters on one device, by stage."""
        return tuple(parameters_of(self.shape, stage) for stage in self.stages)

    def groups(self, stage: Stage, way: dict[str, Dish]) -> tuple[Group, ...]:
        """A stage with each kind of layer run one way."""
        held = held_of_chunk(self.layout, stage.index)
        return tuple(
            Group(kind, chunk, count, held[chunk], way[kind]) for chunk, runs in enumerate(stage.chunks) for kind, count in runs
        )  # fmt: skip

    def recipe(self, name: str) -> dict[str, Dish]:
        """A named recipe for every kind of layer.

        Raises:
            KeyError: no recipe has that name.
        """
        kinds = dict.fromkeys(self.model.kinds)
        return {kind: recipe_of(self.shape, kind, self.device, self.numbers.product, name) for kind in kinds}

    def estimate(self, name: str) -> Estimate:
        """Memory and time with a named recipe everywhere: ``none``, ``selective``, ``full`` or ``alternate``.

        Raises:
            KeyError: no recipe has that name.
        """
        ways = self.recipe(name)
        return self.estimate_of(tuple(self.groups(stage, ways) for stage in self.stages))

    def estimate_of(self, groups: tuple[tuple[Group, ...], ...]) -> Estimate:
        """Memory and time with what each stage does."""
        memory = tuple(self.memory(stage, chosen) for stage, chosen in zip(self.stages, groups, strict=True))
        seconds = [self.seconds(stage, chosen) for stage, chosen in zip(self.stages, groups, strict=True)]
        units = [sum(stage.layers.values()) + stage.first + stage.last for stage in self.stages]
        step = step_seconds(
            self.shape, self.layout, self.kernels, self.numbers, self.device, seconds, list(self.parameters), units
        )  # fmt: skip
        return Estimate(self, groups, memory, tuple(seconds), step)

    def memory(self, stage: Stage, groups: tuple[Group, ...]) -> StageMemory:
        """Memory of one stage."""
        return stage_memory(
            self.shape, self.layout, self.numbers, stage, self.parameters[stage.index], self.largest_unit(stage), groups,
            input_table(self.shape), head_table(self.shape), self.fixed_bytes,
        )  # fmt: skip

    def largest_unit(self, stage: Stage) -> int:
        """Parameters of the largest part of a stage that sharding gathers whole: a layer, or an end."""
        tables = [layer_table(self.shape, kind) for kind in stage.layers]
        tables += [input_table(self.shape)] if stage.first else []
        tables += [head_table(self.shape)] if stage.last else []
        return max(of_table(table).total for table in tables)

    def seconds(self, stage: Stage, groups: tuple[Group, ...]) -> StageSeconds:
        """Seconds of one micro-batch through a stage."""
        return stage_seconds(self.shape, self.layout, self.device, self.numbers.product, stage, groups)

    def with_layout(self, **changes: object) -> Job:
        """The job under another layout.

        Raises:
            UsageError: it does not split the model evenly.
        """
        return Job(
            self.model, msgspec.structs.replace(self.layout, **changes), self.device, self.kernels, self.numbers, self.fixed_bytes
        )  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    """What a job takes.

    Attributes:
        job: of which.
        groups: what each stage does.
        memory: by stage.
        stages: seconds of one micro-batch, by stage.
        step: seconds of the step.
    """

    job: Job
    groups: tuple[tuple[Group, ...], ...]
    memory: tuple[StageMemory, ...]
    stages: tuple[StageSeconds, ...]
    step: StepSeconds

    @property
    def peak_bytes(self) -> int:
        """Of the fullest stage."""
        return max(one.total for one in self.memory)

    @property
    def step_seconds(self) -> float:
        """Of one step."""
        return self.step.total

    @property
    def tokens_per_second(self) -> float:
        """Of the whole job."""
        return self.job.layout.global_batch * self.job.layout.sequence / self.step.total

    @property
    def model_flops(self) -> float:
        """Operations of one step on one of the pipeline's replicas' devices together, without recomputation, by the usual count."""
        return sum(one.flops for one in self.stages) * self._passes

    @property
    def _passes(self) -> float:
        """Micro-batches that one replica sees; the last one may be smaller."""
        return self.job.layout.global_batch / (self.job.layout.data * self.job.layout.micro_batch)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: operations without recomputation over what the devices could do, attention counted whole."""
        return self.model_flops / (self.step.total * self.job.layout.pipeline * self.job.device.rate("bf16"))

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilization: recomputation counted too."""
        done = sum(one.flops + one.replay_flops for one in self.stages) * self._passes
        return done / (self.step.total * self.job.layout.pipeline * self.job.device.rate("bf16"))

    @property
    def dollars_per_billion_tokens(self) -> float | None:
        """Cost of training on 10^9 tokens; None if the device's price is not known."""
        price = self.job.device.dollars_per_hour
        return price / 3600 * self.job.layout.devices / self.tokens_per_second * 1e9 if price else None
