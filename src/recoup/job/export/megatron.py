"""Megatron-LM: recompute flags, with those of the layout.

Megatron-LM recomputes modules in every layer, or whole layers, the first so many of each virtual stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from recoup.job.export.candidates import Setting, by_layer, by_tensors
from recoup.job.job import Job

__all__ = ["layout_flags", "settings"]

# What ``--recompute-modules`` names, by the tensors that it drops.
_MODULES = {
    "core_attn": ("scores", "probs", "dropped", "mask", "mixed", "sums"),
    "layernorm": ("norm1", "norm2"),
    "mlp": ("fc_wide", "fc_gate", "fc_up", "act"),
    "mla_up_proj": ("q", "k", "v", "q_rope", "k_rope"),
    "moe_act": ("expert_act",),
    "moe": ("dispatched", "routing", "probabilities", "expert_wide", "expert_gate", "expert_up", "expert_act", "expert_down", "combined"),
    "shared_experts": ("shared_fc_wide", "shared_fc_gate", "shared_fc_up", "shared_act"),
}


def settings(job: Job) -> Iterator[Setting]:
    """Every recomputation that the flags can say."""
    yield by_tensors(job, "", ())
    names = list(_useful(job))
    for count in range(1, len(names) + 1):
        for chosen in combinations(names, count):
            dropped = [tensor for name in chosen for tensor in _MODULES[name]]
            text = f"--recompute-granularity selective --recompute-modules {' '.join(chosen)}"
            yield by_tensors(job, text, dropped)
    full, none = job.recipe("full"), job.recipe("none")
    for count in range(1, max(sum(n for _, n in runs) for stage in job.stages for runs in stage.chunks) + 1):
        text = f"--recompute-granularity full --recompute-method block --recompute-num-layers {count}"
        yield by_layer(job, text, lambda index, place, kind, count=count: full[kind] if place < count else none[kind])


def _useful(job: Job) -> Iterator[str]:
    model = job.model
    yield "core_attn"
    yield "layernorm"
    if not model.experts or model.dense_layers or model.moe_every > 1:
        yield "mlp"
    if model.latent_rank:
        yield "mla_up_proj"
    if model.experts:
        yield "moe_act"
        yield "moe"
    if model.shared_ffn:
        yield "shared_experts"


def layout_flags(job: Job) -> str:
    """The layout as flags."""
    layout = job.layout
    flags = [
        f"--tensor-model-parallel-size {layout.tensor}", f"--pipeline-model-parallel-size {layout.pipeline}",
        f"--micro-batch-size {layout.micro_batch}", f"--global-batch-size {layout.global_batch}", f"--seq-length {layout.sequence}",
    ]  # fmt: skip
    if layout.sequence_parallel:
        flags.append("--sequence-parallel")
    if layout.context > 1:
        flags.append(f"--context-parallel-size {layout.context}")
    if layout.chunks > 1:
        flags.append(f"--num-layers-per-virtual-pipeline-stage {job.model.layers // layout.pipeline // layout.chunks}")
    if layout.expert > 1:
        flags.append(f"--expert-model-parallel-size {layout.expert} --expert-tensor-parallel-size {layout.in_expert}")
    if layout.zero:
        flags.append("--use-distributed-optimizer")
    return " ".join(flags)
