"""Published figures as jobs: every row of ``benchmarks/data`` that the planner can be asked about, with what was published.

Rows are split by their place: of each four of a group (a table's rows on one device and precision) the first and the last may be
used to fit constants; the other two are held out. ``Row.use`` says which: ``fitted``, ``held out``,
or ``none fitted`` for tables from which
no constant is taken at all.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from recoup.cost import device
from recoup.job.job import Estimate, Job
from recoup.job.layout import Kernels, Layout, Numbers
from recoup.job.model import Model
from recoup.job.presets import preset

__all__ = ["DATA", "FSDP", "Row", "korthikanti", "mpt", "read", "simumax", "torchtitan"]

DATA = Path(__file__).parent / "data"

# The attention kernels of 2023 reached less than those that the devices' data are about, and FSDP hid less; by benchmarks/job_fit.py.
MPT_KERNELS = {"a100": {"attention_share": 0.567, "hidden_share": 0.31}, "h100": {"attention_share": 0.495, "hidden_share": 0.355}}

# Asynchronous tensor parallelism in torchtitan, by benchmarks/job_fit.py.
TITAN_TENSOR_HIDDEN = 0.7455

# Sharded weights and states in four bytes; layers compute with copies in two.
FSDP = Numbers(weight_bytes=4, master_bytes=0, optimizer_bytes=8, gradient_bytes=4, reduced_bytes=4)


@dataclass(frozen=True, slots=True)
class Row:
    """One published figure.

    Attributes:
        table: where it stands.
        name: of the configuration.
        group: what it is reported with.
        use: ``fitted``, ``held out`` or ``none fitted``.
        figure: what was published, such as ``seconds`` or ``mfu``.
        published: its value.
        job: the configuration.
        recipe: what it recomputes.
        of: the same figure of an estimate.
    """

    table: str
    name: str
    group: str
    use: str
    figure: str
    published: float
    job: Callable[[], Job]
    recipe: str
    of: Callable[[Estimate], float]

    def predicted(self) -> float:
        """The figure as the planner says it."""
        return self.of(self.job().estimate(self.recipe))

    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted() / self.published - 1


def _use(place: int) -> str:
    return "fitted" if place % 4 in (0, 3) else "held out"


def read(name: str, folder: Path = DATA) -> list[dict[str, str]]:
    """Rows of a table."""
    with (folder / name).open(newline="") as file:
        return list(csv.DictReader(file))


def korthikanti(folder: Path = DATA) -> Iterator[Row]:
    """Iteration times of arXiv:2205.05198, table 5; no constant is fitted on any."""
    times = {row["model"]: row for row in read("korthikanti_table5_iteration.csv", folder)}
    for row in read("korthikanti_table3_configs.csv", folder):
        for recipe, column in (("full", "full_recompute_s"), ("selective", "selective_sp_s")):
            yield Row(
                "Korthikanti et al. 2022, table 5", f"{row['model']} {recipe}{' + sequence parallel' if recipe == 'selective' else ''}",
                "a100-80g", "none fitted", "seconds", float(times[row["model"]][column]),
                lambda row=row, recipe=recipe: korthikanti_job(row, sequence_parallel=recipe == "selective"), recipe,
                lambda estimate: estimate.step_seconds,
            )  # fmt: skip


def korthikanti_job(row: dict[str, str], *, sequence_parallel: bool) -> Job:
    """One of the four configurations."""
    sizes = {
        key: int(row[key]) for key in ("layers", "hidden", "heads", "seq", "vocab", "tp", "pp", "interleave", "global_batch", "micro_batch")
    }
    model = Model(
        name=row["model"], layers=sizes["layers"], hidden=sizes["hidden"], heads=sizes["heads"], vocab=sizes["vocab"],
        positions=sizes["seq"], attention_dropout=True, hidden_dropout=True,
    )  # fmt: skip
    chunks = sizes["interleave"]
    layout = Layout(
        tensor=sizes["tp"], pipeline=sizes["pp"], chunks=chunks, schedule="interleaved" if chunks > 1 else "1f1b",
        sequence_parallel=sequence_parallel, micro_batch=sizes["micro_batch"], global_batch=sizes["global_batch"], sequence=sizes["seq"],
    )  # fmt: skip
    return Job(model, layout, device("a100-80g"), Kernels(attention="explicit"))


def mpt(folder: Path = DATA) -> Iterator[Row]:
    """MPT under FSDP: model FLOPs utilization (github:mosaicml/llm-foundry, scripts/train/benchmarking)."""
    seen: dict[str, int] = {}
    for row in read("llm_foundry_mpt.csv", folder):
        group = f"{row['gpu'].replace('_', '-')} {'fp8' if 'fp8' in row['precision'] else 'bf16'}"
        place = seen[group] = seen.get(group, -1) + 1
        yield Row(
            "llm-foundry MPT", f"{row['model']} sequence {row['seq']}, {row['gpus']} devices, micro-batch {row['micro_batch']}", group,
            _use(place), "mfu", float(row["mfu"]) / 100, lambda row=row: mpt_job(row),
            "block" if row["act_ckpt"] == "True" else "none",
            lambda estimate: estimate.mfu / (2 if estimate.job.numbers.precision == "fp8" else 1),
        )  # fmt: skip


def mpt_job(row: dict[str, str]) -> Job:
    """One configuration of MPT; learned positions, biases, fused loss, no dropout."""
    sequence, gpus = int(row["seq"]), int(row["gpus"])
    model = replace(preset(f"mpt-{row['model']}"), positions=sequence)
    layout = Layout(
        data=gpus, zero=3, reshard=row["sharding"] == "FULL_SHARD", micro_batch=int(row["micro_batch"]),
        global_batch=int(row["global_batch"]), sequence=sequence,
    )  # fmt: skip
    name = {"a100_80gb": "a100-80g", "a100_40gb": "a100-40g", "h100_80gb": "h100"}[row["gpu"]]
    precision = "fp8" if "fp8" in row["precision"] else "bf16"
    numbers = Numbers(precision=precision, weight_bytes=4, master_bytes=0)
    return Job(model, layout, device(name), Kernels(loss="fused", **MPT_KERNELS[name[:4]]), numbers)


def torchtitan(folder: Path = DATA) -> Iterator[Row]:
    """Llama 3.1 in torchtitan: tokens a second on each device, and peak memory."""
    seen: dict[str, int] = {}
    for row in read("torchtitan_llama3.csv", folder):
        group = f"{row['hw'].split('-')[0].lower()} {'fp8' if row['precision'].startswith('fp8') else 'bf16'}"
        place = seen[group] = seen.get(group, -1) + 1
        name = (
            f"{row['model'].removeprefix('llama3.1-')} {row['gpus']} devices fsdp {row['fsdp']} tp {row['tp']}"
            f" pp {row['pp']} cp {row['cp']}"
            f" sequence {row['seq']} {row['ac']} {row['precision']}{' compiled' if row['compile'] == '1' else ''}"
            f"{' async' if row['async_tp'] == '1' else ''}{' ' + row['schedule'] if row['schedule'] else ''}"
        )
        use = _use(place)
        recipe = "block" if row["ac"] == "full" else "alternate"
        yield Row(
            "torchtitan", name, group, use, "tokens/s/device", float(row["tps_per_gpu"]), lambda row=row: torchtitan_job(row), recipe,
            lambda estimate: estimate.tokens_per_second / estimate.job.layout.devices,
        )  # fmt: skip
        if row["mem_gib"]:
            yield Row(
                "torchtitan memory", name, group, "none fitted", "GiB", float(row["mem_gib"]), lambda row=row: torchtitan_job(row), recipe,
                lambda estimate: estimate.peak_bytes / 2**30,
            )  # fmt: skip


def torchtitan_job(row: dict[str, str]) -> Job:
    """One configuration of torchtitan: FSDP2, loss in four bytes, element-wise kernels fused only when compiled."""
    model = preset(row["model"].replace("llama3.1", "llama3").lower())
    fsdp, tensor, pipeline, context = (int(row[key]) for key in ("fsdp", "tp", "pp", "cp"))
    compiled = row["compile"] == "1"
    # A pipeline cuts the local batch into as many micro-batches as it has stages.
    micro = int(row["local_batch"]) // pipeline
    interleaved = row["schedule"] == "Interleaved1F1B"
    parts, edges = pipeline * (2 if interleaved else 1), None
    if model.layers % parts:
        # The ends, with embedding and head, get one layer less.
        each = -(-model.layers // parts)
        edges = (each - 1, each - 1)
    layout = Layout(
        tensor=tensor, sequence_parallel=tensor > 1, context=context, pipeline=pipeline, data=fsdp, zero=3, reshard=pipeline == 1,
        edge_layers=edges,
        schedule="interleaved" if interleaved else "1f1b", chunks=2 if interleaved else 1,
        micro_batch=micro, global_batch=fsdp * int(row["local_batch"]), sequence=int(row["seq"]),
    )  # fmt: skip
    kernels = Kernels(
        fused_activation=compiled, fused_elementwise=compiled, fused_rope=compiled, fused_projections=False, gradient_sync="step",
        loss="inplace" if row["hw"].startswith("H200") else "plain",
        overlap_tensor=row["async_tp"] == "1", tensor_hidden_share=TITAN_TENSOR_HIDDEN,
    )  # fmt: skip
    precision, scaling = (
        "fp8" if row["precision"].startswith("fp8") else "bf16",
        "row" if row["precision"].endswith("rowwise") else "tensor",
    )
    numbers = Numbers(precision=precision, scaling=scaling, weight_bytes=4, master_bytes=0)
    return Job(model, layout, device("h200" if row["hw"].startswith("H200") else "h100-96g-500w"), kernels, numbers)


def simumax(folder: Path = DATA) -> Iterator[Row]:
    """Megatron-LM on B200 as SimuMax measured it: milliseconds and allocated GiB; no constant is fitted on any."""
    for row in read("simumax_b200.csv", folder):
        job = simumax_job(row["case"])
        if job is None:
            continue
        yield Row(
            "SimuMax B200", row["case"], "b200", "none fitted", "ms", float(row["real_ms"]), lambda job=job: job, "none",
            lambda estimate: estimate.step_seconds * 1000,
        )  # fmt: skip
        yield Row(
            "SimuMax B200 memory", row["case"], "b200", "none fitted", "GiB", float(row["real_alloc_gib"]), lambda job=job: job, "none",
            lambda estimate: estimate.peak_bytes / 2**30,
        )  # fmt: skip


def simumax_job(case: str) -> Job | None:
    """A configuration from its name, as ``llama3_70b_l12_tp4_pp1_dp2_mbc4_cef``: 8 devices, distributed optimizer, fused loss."""
    parts = case.split("_")
    numbers = {key: _number(parts, key) for key in ("l", "tp", "pp", "dp", "cp", "ep", "mbc", "seq")}
    model = _simumax_model(case, numbers["l"] or 1)
    tensor, context, data = numbers["tp"] or 1, numbers["cp"] or 1, numbers["dp"] or 1
    layout = Layout(
        tensor=tensor, sequence_parallel=tensor > 1, context=context, pipeline=numbers["pp"] or 1, data=data, expert=numbers["ep"] or 1,
        expert_tensor=1 if numbers["ep"] else 0, zero=1, micro_batch=1, global_batch=data * (numbers["mbc"] or 1),
        sequence=numbers["seq"] or 4096,
    )  # fmt: skip
    return Job(model, layout, device("b200"), Kernels(loss="fused", overlap_gradients=False))


def _number(parts: list[str], key: str) -> int | None:
    found = [part.removeprefix(key) for part in parts if part.startswith(key) and part.removeprefix(key).isdigit()]
    return int(found[0]) if found else None


def _simumax_model(case: str, layers: int) -> Model:
    if case.startswith("deepseekv3"):
        return replace(preset("deepseek-v3"), layers=layers, dense_layers=1)
    if "70b" in case:
        return replace(preset("llama3-70b"), layers=layers)
    return replace(preset("llama3-405b"), layers=layers, kv_heads=16)
