"""torchtitan: its activation checkpointing section and degrees, as TOML.

torchtitan checkpoints no layer, every layer, every k-th layer, or in each layer all but attention and every other product.
"""

from __future__ import annotations

from collections.abc import Iterator

from recoup.job.export.candidates import Setting, by_layer
from recoup.job.job import Job

__all__ = ["layout_section", "settings"]


def settings(job: Job) -> Iterator[Setting]:
    """Every recomputation that the section can say."""
    none, block, alternate = job.recipe("none"), job.recipe("block"), job.recipe("alternate")
    yield by_layer(job, '[activation_checkpoint]\nmode = "none"', lambda index, place, kind: none[kind])
    yield by_layer(
        job, '[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "op"', lambda index, place, kind: alternate[kind]
    )  # fmt: skip
    yield by_layer(job, '[activation_checkpoint]\nmode = "full"', lambda index, place, kind: block[kind])
    for every in range(2, 9):
        text = f'[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "{every}"'
        # It counts layers from 1 and checkpoints those that the number divides.
        yield by_layer(job, text, lambda index, place, kind, every=every: none[kind] if (place + 1) % every else block[kind])


def layout_section(job: Job) -> str:
    """The degrees as a section."""
    layout = job.layout
    shard = layout.sharded if layout.zero == 3 else 1
    lines = [
        "[parallelism]", f"data_parallel_shard_degree = {max(shard // layout.context, 1)}",
        f"data_parallel_replicate_degree = {layout.data // max(shard // layout.context, 1)}", f"tensor_parallel_degree = {layout.tensor}",
        f"pipeline_parallel_degree = {layout.pipeline}", f"context_parallel_degree = {layout.context}",
        f"expert_parallel_degree = {layout.expert}", "", "[training]", f"local_batch_size = {layout.global_batch // layout.data}",
        f"seq_len = {layout.sequence}",
    ]  # fmt: skip
    return "\n".join(lines)
