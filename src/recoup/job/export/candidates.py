"""Settings that a trainer can run, judged on a job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from recoup.job.dishes import Dish, dish
from recoup.job.job import Estimate, Job
from recoup.job.memory import Group
from recoup.job.schedule import held_of_chunk
from recoup.job.stages import Stage
from recoup.job.workshop import layer_of

__all__ = ["Setting", "best_setting", "by_layer", "by_tensors"]


@dataclass(frozen=True)
class Setting:
    """One setting: its text, and what it does at each stage."""

    text: str
    groups: tuple[tuple[Group, ...], ...]


def by_layer(job: Job, text: str, pick: Callable[[int, int, str], Dish]) -> Setting:
    """A setting that says for each layer how it is run; ``pick(index, place in its virtual stage, kind)``."""
    return Setting(text, tuple(_stage(job, stage, pick) for stage in job.stages))


def _stage(job: Job, stage: Stage, pick: Callable[[int, int, str], Dish]) -> tuple[Group, ...]:
    held = held_of_chunk(job.layout, stage.index)
    groups: list[Group] = []
    for chunk, (start, runs) in enumerate(zip(stage.starts, stage.chunks, strict=True)):
        kinds = [kind for kind, count in runs for _ in range(count)]
        counted = Counter((kind, pick(start + place, place, kind)) for place, kind in enumerate(kinds))
        groups += [Group(kind, chunk, count, held[chunk], way) for (kind, way), count in counted.items()]
    return tuple(groups)


def by_tensors(job: Job, text: str, names: Iterable[str], *, keep: bool = False) -> Setting:
    """A setting that recomputes tensors of these names in every layer, or with ``keep`` all but these."""
    wanted = frozenset(names)
    ways: dict[str, Dish] = {}
    for kind in dict.fromkeys(job.model.kinds):
        layer = layer_of(job.shape, kind, job.device, job.numbers.product)
        made = frozenset(tensor.name for row in layer.table.rows for tensor in row.makes)
        ways[kind] = dish(layer, made - wanted if keep else made & wanted, hide=job.kernels.hide_recompute)
    return by_layer(job, text, lambda index, place, kind: ways[kind])


def best_setting(job: Job, limit_bytes: int, settings: Iterable[Setting]) -> tuple[Setting, Estimate] | None:
    """The fastest setting that fits, with its estimate; None if none does."""
    judged = [(setting, job.estimate_of(setting.groups)) for setting in settings]
    fitting = [(setting, estimate) for setting, estimate in judged if estimate.peak_bytes <= limit_bytes]
    return min(fitting, key=lambda item: (item[1].step_seconds, item[1].peak_bytes), default=None)
