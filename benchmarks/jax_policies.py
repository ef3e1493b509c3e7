"""A scanned GPT under Recoup and under JAX's own policies, in one run: compiled memory, recomputed work, time.

    python -m benchmarks.jax_policies --figure docs/jax-policies.png

Each policy is put on the body of the scan, where it works. Recoup is given each policy's compiled peak as its budget, and some budgets
between. Recomputed work is counted in the jaxpr of the step, loops by their turns: what it has beyond the unplanned step's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import recoup.jax
from benchmarks.jax_workloads import gpt
from recoup.errors import RecoupError
from recoup.jax.costs import flops_of
from recoup.jax.residuals import Compiled, compiled_memory

_MIB = 2**20
POLICIES = ("everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable")
SHARES = (0.8, 0.6, 0.45, 0.3)


@dataclass
class Point:
    """One step: its name, compiled memory, work beyond the unplanned step's, and seconds."""

    name: str
    compiled: Compiled
    flops: int
    budget: int = 0
    seconds: float = 0.0


def main() -> None:
    """Prints the table and draws the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES, help="of the unplanned peak, for budgets between the policies'")
    parser.add_argument("--processor-time", action="store_true", help="seconds of the processor: for a core that other programs share")
    args = parser.parse_args()
    loss, values = gpt.scanned()
    plain = _point("unplanned", loss, values)
    base = plain.flops
    points = [plain, *(_point(name, _under(name), values) for name in POLICIES)]
    whole = plain.compiled.peak_bytes
    peaks = {point.compiled.peak_bytes for point in points} | {int(whole * share) for share in args.shares}
    for peak in sorted((peak for peak in peaks if peak < whole), reverse=True):
        try:
            fitted = recoup.jax.fit(loss, *values, budget=peak, runs=0, measure=False)
        except RecoupError as error:
            print(f"recoup at {peak / _MIB:.1f} MiB: {error}")
            continue
        points.append(_point("recoup", fitted, values, peak))
        print(f"recoup at {peak / _MIB:.1f} MiB: {points[-1].compiled.peak_bytes / _MIB:.1f} MiB", file=sys.stderr, flush=True)
    _time(points, values, args.rounds, time.process_time if args.processor_time else time.perf_counter)
    print(f"JAX {jax.__version__} on {jax.default_backend()}")
    print("| step | budget MiB | peak MiB | temp MiB | recomputed GFLOP | time |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for point in points:
        budget = f"{point.budget / _MIB:.1f}" if point.budget else ""
        memory = f"{point.compiled.peak_bytes / _MIB:.1f} | {point.compiled.temp_bytes / _MIB:.1f}"
        print(f"| {point.name} | {budget} | {memory} | {(point.flops - base) / 1e9:.2f} | {point.seconds / plain.seconds:.2f} |")
    if args.figure:
        _draw(points, args.figure)


def _under(policy: str) -> Callable[..., Any]:
    chosen = getattr(jax.checkpoint_policies, policy)
    block = gpt._block

    def loss(params: Any, tokens: Any) -> Any:
        x = params["embedding"][tokens] + params["positions"]
        body = jax.checkpoint(lambda x, one: (block(x, one, 4), None), policy=chosen, prevent_cse=False)
        return gpt._cross_entropy(jax.lax.scan(body, x, params["blocks"])[0], params, tokens)

    return loss


def _point(name: str, loss: Callable[..., Any], values: tuple[Any, ...], budget: int = 0) -> Point:
    step = jax.value_and_grad(loss)
    return Point(name, compiled_memory(step, values), sum(map(flops_of, jax.make_jaxpr(step)(*values).eqns)), budget)


def _time(points: list[Point], values: tuple[Any, ...], rounds: int, clock: Callable[[], float]) -> None:
    times: list[list[float]] = [[] for _ in points]
    for _ in range(rounds):
        for point, taken in zip(points, times, strict=True):
            start = clock()
            jax.block_until_ready(point.compiled.run(*values))
            taken.append(clock() - start)
    for point, taken in zip(points, times, strict=True):
        point.seconds = statistics.median(taken)


def _draw(points: list[Point], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.2, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharex=True)
    plain, ours = points[0], sorted((point for point in points if point.name == "recoup"), key=lambda point: point.compiled.peak_bytes)
    peaks = [point.compiled.peak_bytes / _MIB for point in ours]
    marks = {
        "unplanned": "*",
        "everything_saveable": "P",
        "dots_saveable": "s",
        "dots_with_no_batch_dims_saveable": "^",
        "nothing_saveable": "D",
    }
    for axes, value in ((left, lambda point: (point.flops - plain.flops) / 1e9), (right, lambda point: point.seconds / plain.seconds)):
        axes.plot(peaks, [value(point) for point in ours], "o-", color="#0072B2", linewidth=2, label="recoup")
        for place, point in enumerate(point for point in points if point.name != "recoup"):
            colour = ("black", "#E69F00", "#D55E00", "#009E73", "#CC79A7")[place]
            axes.plot([point.compiled.peak_bytes / _MIB], [value(point)], marks[point.name], color=colour, markersize=9, label=point.name)
        axes.set_xlabel("peak of the compiled step (MiB)")
        axes.grid(color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(left=0)
    left.set_ylabel("recomputed work (GFLOP)")
    right.set_ylabel("time relative to the unplanned step")
    right.set_ylim(bottom=0)
    left.legend(frameon=False, fontsize=8)
    figure.suptitle("Scanned GPT, 8 layers: Recoup and the policies of jax.checkpoint", x=0.01, ha="left", fontsize=12)
    figure.savefig(path, dpi=200)


if __name__ == "__main__":
    main()
