"""Which layers each stage of the pipeline has, and which parameters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from recoup.job.layer import head_table, input_table, layer_table
from recoup.job.layout import Kernels, Layout
from recoup.job.model import Model
from recoup.job.shape import Shape
from recoup.job.table import Table

__all__ = ["Parameters", "Stage", "parameters_of", "stages_of", "total_parameters"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of the pipeline.

    Attributes:
        index: from 0.
        chunks: for each virtual stage the kinds of its layers and how many of each, in order.
        first: whether it has the embedding.
        last: whether it has the head.
        starts: for each virtual stage the index of its first layer.
    """

    index: int
    chunks: tuple[tuple[tuple[str, int], ...], ...]
    first: bool
    last: bool
    starts: tuple[int, ...]

    @property
    def layers(self) -> dict[str, int]:
        """How many layers of each kind."""
        counts: Counter[str] = Counter()
        for chunk in self.chunks:
            for kind, count in chunk:
                counts[kind] += count
        return dict(counts)


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters on one device.

    Attributes:
        dense: all but experts'.
        experts: of routed experts, which have fewer replicas.
    """

    dense: int
    experts: int = 0

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(self.dense + other.dense, self.experts + other.experts)

    def times(self, count: int) -> Parameters:
        """Of so many layers."""
        return Parameters(self.dense * count, self.experts * count)

    @property
    def total(self) -> int:
        """Both."""
        return self.dense + self.experts


def stages_of(model: Model, layout: Layout) -> tuple[Stage, ...]:
    """The stages of a layout that has been checked: virtual stage j of stage i is chunk ``j * pipeline + i`` of the layers."""
    kinds, found = model.kinds, []
    sizes = _sizes(model, layout)
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    for index in range(layout.pipeline):
        places = [chunk * layout.pipeline + index for chunk in range(layout.chunks)]
        chunks = tuple(_runs(kinds[starts[place] : starts[place] + sizes[place]]) for place in places)
        found.append(Stage(index, chunks, index == 0, index == layout.pipeline - 1, tuple(starts[place] for place in places)))
    return tuple(found)


def _sizes(model: Model, layout: Layout) -> list[int]:
    parts = layout.pipeline * layout.chunks
    if layout.edge_layers is None:
        return [model.layers // parts] * parts
    first, last = layout.edge_layers
    return [first, *([(model.layers - first - last) // (parts - 2)] * (parts - 2)), last]


def _runs(kinds: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    runs: list[tuple[str, int]] = []
    for kind in kinds:
        if runs and runs[-1][0] == kind:
            runs[-1] = (kind, runs[-1][1] + 1)
        else:
            runs.append((kind, 1))
    return tuple(runs)


def of_table(table: Table) -> Parameters:
    """Parameters of a table's rows on one device."""
    dense = sum(row.whole + (0 if row.experts else row.weights) for row in table.rows)
    return Parameters(dense, sum(row.weights for row in table.rows if row.experts))


def parameters_of(shape: Shape, stage: Stage) -> Parameters:
    """Parameters of one stage on one device. Tied words are held by both ends of the pipeline, once if these are one."""
    total = Parameters(0)
    for kind, count in stage.layers.items():
        total += of_table(layer_table(shape, kind)).times(count)
    if stage.first:
        total += of_table(input_table(shape))
    if stage.last:
        total += of_table(head_table(shape))
        if shape.model.tied and not stage.first:
            total += Parameters(-(-shape.model.vocab // shape.tensor) * shape.model.hidden)
    return total


def total_parameters(model: Model, active: bool = False) -> int:
    """Parameters of the whole model; ``active`` counts only the routed experts that a token sees."""
    shape = Shape(model, Kernels(), 1, False, 1, 1, 1, 1, max(model.positions, 8))
    stage = Stage(0, (model.runs,), True, True, (0,))
    counted = parameters_of(shape, stage)
    share = model.experts_per_token / model.experts if active and model.experts else 1.0
    return counted.dense + round(counted.experts * share)
