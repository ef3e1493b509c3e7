"""Pipeline schedules: how many micro-batches each stage holds, and how long it waits.

With p stages, counted from 0, M micro-batches in groups of g (p unless said), and a stage's forward F, backward for data B and for
weights W (seconds of one micro-batch through all of a device's layers):

| schedule | held by stage i, in chunks | idle seconds |
| --- | --- | --- |
| gpipe | M | (p - 1) (F + B + W) |
| 1f1b | min(M, p - i) | (p - 1) (F + B + W) |
| interleaved, v chunks | min(M v, 2 (p - i - 1) + (v - 1) g + 1) | (p - 1) (F + B + W) / v |
| zb-h1 | min(M, p) | (p - 1) (F + B - W) |
| zb-h2 | min(M, 2 p - 1) | (p - 1) (F + B - 2 W) |

1f1b and interleaved as in Narayanan et al. 2021 (arXiv:2104.04473) and Megatron-LM's schedules; the first stage then holds
``L (1 + (p - 1) / (p v))`` layers (Korthikanti et al. 2022, section 4.2.3). Zero bubble: Qi et al. 2023 (arXiv:2401.10241, table 2).
"""

from __future__ import annotations

from recoup.job.layout import Layout

__all__ = ["held_chunks", "held_of_chunk", "pipeline_seconds"]


def held_chunks(layout: Layout, stage: int) -> int:
    """How many (micro-batch, chunk) pairs a stage holds at its fullest."""
    stages, batches = layout.pipeline, layout.micro_batches
    if layout.schedule == "gpipe":
        return batches
    if layout.schedule == "interleaved":
        return min(batches * layout.chunks, 2 * (stages - stage - 1) + (layout.chunks - 1) * layout.grouped + 1)
    if layout.schedule == "zb-h1":
        return min(batches, stages)
    if layout.schedule == "zb-h2":
        return min(batches, 2 * stages - 1)
    return min(batches, stages - stage)


def held_of_chunk(layout: Layout, stage: int) -> tuple[int, ...]:
    """How many micro-batches of each of its chunks a stage holds at its fullest; the sum is ``held_chunks``.

    Interleaving takes the micro-batches in groups: each chunk sees one before the next does, and after the last the first again.
    """
    left = held_chunks(layout, stage)
    held = [0] * layout.chunks
    group = layout.grouped if layout.chunks > 1 else max(left, 1)
    place = 0
    while left > 0:
        taken = min(left, group)
        held[place % layout.chunks] += taken
        left -= taken
        place += 1
    return tuple(held)


def pipeline_seconds(layout: Layout, forward: list[float], data: list[float], weight: list[float]) -> tuple[float, float]:
    """Seconds of all micro-batches through the pipeline, and of these the idle ones of the slowest stage.

    Args:
        layout: with its schedule.
        forward: of one micro-batch, by stage.
        data: of its backward, what the stage before waits for (recomputation and exposed collectives included).
        weight: of its backward, gradients of weights.

    The slowest stage runs without a gap once the pipeline is full; filling and draining pass through the others.
    """
    each = [f + b + w for f, b, w in zip(forward, data, weight, strict=True)]
    slowest = max(range(len(each)), key=lambda stage: each[stage])
    others = [stage for stage in range(len(each)) if stage != slowest]
    taken = {"zb-h1": 2.0, "zb-h2": 3.0}.get(layout.schedule, 0.0)
    idle = sum(max(each[stage] - taken * weight[stage], 0.0) for stage in others) / layout.chunks
    return layout.micro_batches * each[slowest] + idle, idle
