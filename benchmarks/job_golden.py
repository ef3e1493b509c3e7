"""Peak memory of Megatron-LM's functional tests, predicted and recorded.

    python -m benchmarks.job_golden
    python -m benchmarks.job_golden --rows FILE.csv    # other rows of the same form

A case's other arguments are read from ``megatron_case_flags.csv`` (their configuration, no result). What is recorded is the
largest allocation on the last rank, which has the last stage of the pipeline: so that is what is predicted. One constant is
fitted on the fitted rows, for each kind of device: what stands beside the model (workspaces, buffers). Cases are split by
their place among all cases, so that no case is in both halves.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.job_rows import DATA, read
from recoup.cost import device
from recoup.errors import UsageError
from recoup.job.job import Job
from recoup.job.layout import Kernels, Layout, Numbers
from recoup.job.model import Model

__all__ = ["FIXED_BYTES", "Golden", "golden_rows", "main"]

_MIB = 2**20
# Beside the model on each device: medians of what the fitted rows have beyond the prediction, by this program.
FIXED_BYTES = {"a100": 81 * _MIB, "h100": 113 * _MIB, "gb200": 111 * _MIB}
# Copies that permuting tokens leaves in Megatron-LM's unfused dispatchers; the whole number nearest to the fitted rows.
EXPERT_COPIES = 3
_WORDS = {"bert": 30522, "t5": 30522}
_GPT_WORDS = 50257
_PLACES = 4


@dataclass(frozen=True, slots=True)
class Golden:
    """One recorded peak.

    Attributes:
        case: the test.
        environment: where it ran.
        kind: ``dense`` or ``moe``.
        use: ``fitted`` or ``held out``.
        recorded_bytes: the peak.
        predicted_bytes: without what stands beside the model; None if the planner does not model the case.
        why: the reason if it does not.
        device: ``a100``, ``h100`` or ``gb200``.
    """

    case: str
    environment: str
    kind: str
    use: str
    recorded_bytes: int
    predicted_bytes: int | None
    why: str
    device: str

    def error(self, fixed: dict[str, int]) -> float:
        """Relative error of the prediction with what stands beside the model."""
        assert self.predicted_bytes is not None
        return (self.predicted_bytes + fixed[self.device]) / self.recorded_bytes - 1


def golden_rows(path: Path = DATA / "megatron_golden_memory.csv") -> list[Golden]:
    """Every row of the table, predicted."""
    flags = {row["case"]: {key: value for key, value in row.items() if value} for row in read("megatron_case_flags.csv")}
    rows = read(path.name, path.parent)
    places = {case: place for place, case in enumerate(sorted({row["case"] for row in rows}))}
    return [_golden(row, flags.get(row["case"], {}), places[row["case"]]) for row in rows]


def _golden(row: dict[str, str], flags: dict[str, str], place: int) -> Golden:
    values = {key: value for key, value in row.items() if value} | flags
    environment = row["env"]
    where = next(name for name in ("gb200", "h100", "a100", "") if name in environment or not name) or "a100"
    predicted, why = None, _unmodelled(row["case"], values)
    if not why:
        try:
            predicted = _predicted(row["case"], values, environment, where)
        except UsageError as error:
            why = str(error)
    return Golden(
        row["case"], environment, "moe" if "num-experts" in values else "dense", "fitted" if place % _PLACES in (0, 3) else "held out",
        int(row["mem_max_allocated_bytes"]), predicted, why, where,
    )  # fmt: skip


def _unmodelled(case: str, values: dict[str, str]) -> str:
    """Why the planner has nothing to say of a case, '' if it has."""
    if case.startswith("mimo"):
        return "two models, one of images"
    if "grpo" in case:
        return "reinforcement learning: other copies of the model stand beside it"
    if values.get("is-hybrid-model") or case.startswith("nemotron"):
        return "state-space layers"
    if "distill" in case:
        return "a teacher model stands beside it"
    if values.get("pipeline-model-parallel-layout"):
        return "a pipeline layout given by hand"
    if values.get("mtp-num-layers"):
        return "multi-token prediction"
    return ""


def _predicted(case: str, values: dict[str, str], environment: str, where: str) -> int:
    model = golden_model(case, values)
    job = Job(
        model,
        _layout(case, values, model, environment),
        device({"a100": "a100-80g", "h100": "h100"}.get(where, where)),
        *_rest(case, values, environment),
    )
    # Gradients of logits wait in two bytes, of two micro-batches, if the product that reads them is put off.
    waiting = 2 if "defer_embedding_wgrad" in case else 0
    logits = 2 * job.shape.tokens * (model.vocab // job.layout.tensor)
    recipe = {"full": "full", "selective": "selective"}.get(values.get("recompute-granularity", ""), "none")
    return job.estimate(recipe).memory[-1].total + waiting * logits


def golden_model(case: str, values: dict[str, str]) -> Model:
    """The model of a case, with Megatron-LM's defaults."""
    number = lambda key, default=0: int(values.get(key, default) or default)  # noqa: E731
    hidden, tensor = number("hidden-size"), number("tensor-model-parallel-size", 1)
    gated = values.get("swiglu") == "true"
    family = family_of(case)
    words = number("vocab-size") or _WORDS.get(family, _GPT_WORDS)
    if "release" in case and family in ("gpt",):
        words = 256000
    elif family == "mixtral":
        words = 32000 if "mixtral" in case else 129280
    multiple = number("make-vocab-size-divisible-by", 128) * tensor
    rope = values.get("position-embedding-type") == "rope"
    latent = values.get("multi-latent-attention") == "true"
    bias = values.get("disable-bias-linear") != "true"
    return Model(
        name=case, layers=number("num-layers"), hidden=hidden, heads=number("num-attention-heads"), kv_heads=number("num-query-groups"),
        head_dim=number("v-head-dim", 128) if latent else number("kv-channels"),
        ffn=number("ffn-hidden-size") or (int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden), gated=gated,
        vocab=-(-words // multiple) * multiple, tied=values.get("untie-embeddings-and-output-weights") != "true",
        positions=0 if rope else number("max-position-embeddings", values.get("seq-length", 0)), rope=rope,
        norm="rmsnorm" if values.get("normalization") == "RMSNorm" else "layernorm", bias=bias,
        attention_dropout=float(values.get("attention-dropout", 0.1)) > 0, hidden_dropout=float(values.get("hidden-dropout", 0.1)) > 0,
        causal=family != "bert", experts=number("num-experts"),
        experts_per_token=number("moe-router-topk", 2) if "num-experts" in values else 0,
        expert_ffn=number("moe-ffn-hidden-size"), shared_ffn=number("moe-shared-expert-intermediate-size"), dense_layers=_dense(values),
        query_rank=number("q-lora-rank") if latent else 0, latent_rank=number("kv-lora-rank", 32) if latent else 0,
        rope_dim=number("qk-pos-emb-head-dim", 64) if latent else 0, head_products=2 if family == "bert" else 0,
    )  # fmt: skip


def _dense(values: dict[str, str]) -> int:
    found = re.match(r"\(?\[0\]\*(\d+)", values.get("moe-layer-freq", ""))
    return int(found[1]) if found else 0


def _layout(case: str, values: dict[str, str], model: Model, environment: str) -> Layout:
    number = lambda key, default=1: int(values.get(key, default) or default)  # noqa: E731
    tensor, pipeline, context = (
        number("tensor-model-parallel-size"),
        number("pipeline-model-parallel-size"),
        number("context-parallel-size"),
    )
    expert = number("expert-model-parallel-size")
    in_expert = number("expert-tensor-parallel-size", tensor)
    devices = 64 if "release" in case else 4 if "1node" in case or "1N4G" in case else 8
    least = max(-(-expert * in_expert // (tensor * context)), 1)
    data = max(devices // (tensor * pipeline * context), least)
    edges = None
    if "decoder-first-pipeline-num-layers" in values:
        edges = (number("decoder-first-pipeline-num-layers"), number("decoder-last-pipeline-num-layers"))
    per, virtual = values.get("num-layers-per-virtual-pipeline-stage"), values.get("num-virtual-stages-per-pipeline-rank")
    chunks = model.layers // pipeline // int(per) if per else int(virtual or 1)
    if values.get("account-for-embedding-in-pipeline-split") == "true":
        edges = (model.layers // (pipeline * chunks), model.layers // (pipeline * chunks))
    micro = number("micro-batch-size")
    batch = number("global-batch-size", 0) or 64 * micro * data
    instances = number("num-distributed-optimizer-instances")
    if values.get("use-megatron-fsdp") == "true":
        zero = 3
    elif "muon" in values.get("optimizer", ""):
        zero = 0  # its states are not sharded, and take what Adam's do
    else:
        zero = 1 if values.get("use-distributed-optimizer") == "true" else 0
    return Layout(
        tensor=tensor, sequence_parallel=values.get("sequence-parallel") == "true" and tensor > 1, context=context, pipeline=pipeline,
        chunks=chunks, group=number("microbatch-group-size-per-virtual-pipeline-stage", 0) if chunks > 1 else 0,
        schedule="interleaved" if chunks > 1 else "1f1b", data=data, expert=expert,
        expert_tensor=in_expert if "num-experts" in values else 0, zero=zero, shard=data * context // instances if instances > 1 else 0,
        micro_batch=micro,
        global_batch=max(batch // (micro * data), 1) * micro * data, sequence=number("seq-length"), edge_layers=edges,
    )  # fmt: skip


def _rest(case: str, values: dict[str, str], environment: str) -> tuple[Kernels, Numbers]:
    attention = values.get("attention-backend", "")
    if attention in ("unfused", "local"):
        explicit = True
    elif attention in ("flash", "fused") or values.get("use-flash-attn") == "true":
        explicit = False
    else:
        # Not said: the local implementation has only the explicit kernel, and so has Transformer Engine in the oldest environment.
        explicit = (
            values.get("transformer-impl", "local" if case.startswith("gpt") else "transformer_engine") == "local"
            or "dracooci" in environment
        )
    loss = "compiled" if values.get("cross-entropy-loss-fusion") == "true" else "inplace"
    copies = 0 if family_of(case) == "mixtral" else EXPERT_COPIES
    kernels = Kernels(attention="explicit" if explicit else "flash", loss=loss, expert_copies=copies)
    return kernels, Numbers(gradient_bytes=2 if values.get("fp16") == "true" else 4)


def family_of(case: str) -> str:
    """The folder of a case."""
    return case.split("/")[0]


def fitted(rows: Sequence[Golden]) -> dict[str, int]:
    """What stands beside the model on each kind of device: the median over the fitted rows."""
    found: dict[str, int] = {}
    for name, start in FIXED_BYTES.items():
        left = [
            row.recorded_bytes - row.predicted_bytes for row in rows if row.use == "fitted" and row.predicted_bytes and row.device == name
        ]
        found[name] = round(statistics.median(left)) if left else start
    return found


def summary(rows: Sequence[Golden], fixed: dict[str, int]) -> list[str]:
    """Errors by kind and use: rows, median, share within 10 %."""
    lines = []
    for kind in ("dense", "moe"):
        for use in ("fitted", "held out"):
            errors = [abs(row.error(fixed)) for row in rows if row.kind == kind and row.use == use and row.predicted_bytes]
            missing = sum(row.kind == kind and row.use == use and row.predicted_bytes is None for row in rows)
            if errors:
                near = sum(error <= 0.1 for error in errors) / len(errors)
                lines.append(
                    f"{kind:5} {use:8} {len(errors):4} rows, median {statistics.median(errors):.2%},"
                    f" within 10 %: {near:.1%}; {missing} not modelled"
                )
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Prints every row and the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", type=Path, default=DATA / "megatron_golden_memory.csv", help="table of the same form (default: %(default)s)"
    )
    parser.add_argument(
        "--fit", action="store_true", help="print the constants fitted on the fitted rows, instead of taking those that stand"
    )
    options = parser.parse_args(argv)
    rows = golden_rows(options.rows)
    fixed = fitted(rows) if options.fit else FIXED_BYTES
    for row in rows:
        shown = f"{row.error(fixed):+.1%}" if row.predicted_bytes else row.why
        predicted = (row.predicted_bytes or 0) + fixed[row.device] if row.predicted_bytes else 0
        print(
            f"{row.use:8} {row.kind:5} {row.environment:24} {predicted / _MIB:9.0f} {row.recorded_bytes / _MIB:9.0f} MiB"
            f" {shown:8} {row.case}"
        )
    print({name: f"{value / _MIB:.1f} MiB" for name, value in fixed.items()})
    print("\n".join(summary(rows, fixed)))


if __name__ == "__main__":
    main()
