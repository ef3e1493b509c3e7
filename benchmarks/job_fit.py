"""Fits the constants that no measurement of a kernel gives, on the fitted rows alone, and prints them.

    python -m benchmarks.job_fit

Each constant is named with the rows it is fitted on. The least mean absolute error is sought one constant at a time, over and
over, on a grid of 1 %. Results stand in ``src/recoup/cost/devices.json`` and ``benchmarks/job_rows.py``; nothing reads this at run time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from benchmarks import job_rows
from benchmarks.job_rows import DATA, Row
from recoup.cost.device import Device
from recoup.job.job import Job

__all__ = ["Constant", "fit", "main"]

_ROUNDS = 3
_SPREAD = range(-30, 31)
_BACKWARD = 0.86  # of fused attention's forward efficiency, as assumed for H100

Setter = Callable[[Job, float], Job]


@dataclass(frozen=True, slots=True)
class Constant:
    """One constant: its name, where it begins, the rows it is fitted on, and how a job is made with another value."""

    name: str
    start: float
    rows: Callable[[Row], bool]
    set: Setter


def _matmul(device: str, field: str) -> Setter:
    def change(job: Job, value: float) -> Job:
        if job.device.name != device:
            return job
        shape = msgspec.structs.replace(job.device.matmul, **{field: value})
        return replace(job, device=msgspec.structs.replace(job.device, matmul=shape))

    return change


def _attention(device: str) -> Setter:
    def change(job: Job, value: float) -> Job:
        if job.device.name != device:
            return job
        return replace(job, device=msgspec.structs.replace(job.device, attention=_ceilings(job.device, value)))

    return change


def _ceilings(device: Device, forward: float) -> object:
    ends = {
        name: msgspec.structs.replace(getattr(device.attention, name), ceiling=forward * share)
        for name, share in (("forward", 1.0), ("backward", _BACKWARD))
    }
    return msgspec.structs.replace(device.attention, **ends)


def _kernels(field: str, devices: Sequence[str]) -> Setter:
    def change(job: Job, value: float) -> Job:
        if job.device.name not in devices:
            return job
        return replace(job, kernels=msgspec.structs.replace(job.kernels, **{field: value}))

    return change


def _in(table: str, *groups: str) -> Callable[[Row], bool]:
    return lambda row: row.use == "fitted" and row.table == table and row.group in groups


_A100 = ("a100-80g", "a100-40g")
_A100_GROUPS = ("a100-80gb bf16", "a100-40gb bf16")


CONSTANTS = (
    Constant("a100-40g matmul.ceiling", 0.77, _in("llm-foundry MPT", "a100-40gb bf16"), _matmul("a100-40g", "ceiling")),
    Constant("MPT on A100: attention_share", 0.5, _in("llm-foundry MPT", *_A100_GROUPS), _kernels("attention_share", _A100)),
    Constant("MPT on A100: hidden_share", 0.9, _in("llm-foundry MPT", *_A100_GROUPS), _kernels("hidden_share", _A100)),
    Constant("h100 matmul.ceiling", 0.62, _in("llm-foundry MPT", "h100-80gb bf16"), _matmul("h100", "ceiling")),
    Constant("MPT on H100: hidden_share", 0.5, _in("llm-foundry MPT", "h100-80gb bf16"), _kernels("hidden_share", ("h100",))),
    Constant("MPT on H100: attention_share", 0.5, _in("llm-foundry MPT", "h100-80gb bf16"), _kernels("attention_share", ("h100",))),
    Constant("h100 matmul.fp8_tensor", 0.7, _in("llm-foundry MPT", "h100-80gb fp8"), _matmul("h100", "fp8_tensor")),
    Constant("h100-96g-500w matmul.ceiling", 0.55, _in("torchtitan", "h100 bf16"), _matmul("h100-96g-500w", "ceiling")),
    Constant("h100-96g-500w attention.forward.ceiling", 0.22, _in("torchtitan", "h100 fp8", "h100 bf16"), _attention("h100-96g-500w")),
    Constant("h100-96g-500w matmul.fp8_tensor", 0.7, _in("torchtitan", "h100 fp8"), _matmul("h100-96g-500w", "fp8_tensor")),
    Constant("h100-96g-500w matmul.fp8_row", 0.4, _in("torchtitan", "h100 fp8"), _matmul("h100-96g-500w", "fp8_row")),
    Constant(
        "torchtitan: tensor_hidden_share", 0.8, _in("torchtitan", "h100 fp8", "h100 bf16"),
        _kernels("tensor_hidden_share", ("h100-96g-500w",))
    ),
    Constant("h200 matmul.fp8_tensor", 0.7, _in("torchtitan", "h200 fp8"), _matmul("h200", "fp8_tensor")),
)  # fmt: skip


def fit(folder: Path = DATA) -> Iterator[tuple[Constant, float, int, float]]:
    """Each constant with its value, the rows it was fitted on, and their mean absolute error."""
    rows = [*job_rows.mpt(folder), *job_rows.torchtitan(folder)]
    jobs = {id(row): row.job() for row in rows}
    values = {constant.name: constant.start for constant in CONSTANTS}

    def error(constant: Constant, value: float) -> float:
        trial = values | {constant.name: value}
        chosen = [row for row in rows if constant.rows(row)]
        return sum(abs(_predicted(row, jobs[id(row)], trial) / row.published - 1) for row in chosen) / len(chosen)

    for _ in range(_ROUNDS):
        for constant in CONSTANTS:
            tried = [values[constant.name] * (1 + step / 100) for step in _SPREAD]
            values[constant.name] = min(tried, key=lambda value: error(constant, value))
    for constant in CONSTANTS:
        yield constant, values[constant.name], sum(map(constant.rows, rows)), error(constant, values[constant.name])


def _predicted(row: Row, job: Job, values: dict[str, float]) -> float:
    for constant in CONSTANTS:
        job = constant.set(job, values[constant.name])
    return row.of(job.estimate(row.recipe))


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the constants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the tables (default: %(default)s)")
    for constant, value, count, error in fit(parser.parse_args(argv).data):
        print(f"{constant.name:45} {value:.4f}  on {count} rows, mean absolute error {error:.2%}")


if __name__ == "__main__":
    main()
