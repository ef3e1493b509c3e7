"""How far a sequence can grow inside the memory that a short one needs unplanned, and what that costs a token.

    python -m benchmarks.longer --offload-dir /scratch --threads 1

The budget of every length is the unplanned peak of the shortest. At each length the step is recorded, planned within it with
offloading and, where asked for, tiles, and verified: gradients, measured peak, planned and unplanned step timed in turn. Attention
grows with the square of the length in the unplanned step too, so that its time per token stands beside the planned one's.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from benchmarks.disk import add_disk, disk_link
from benchmarks.measuring import Advance, arguments, chosen_workloads, mebibytes, progress_bar, ratio, sizes, write
from benchmarks.workloads import load
from recoup.cost import OffloadLink
from recoup.errors import InfeasibleBudget
from recoup.simulate import simulate
from recoup.solve import solve
from recoup.torch import record
from recoup.verify import verify

__all__ = ["main", "measure", "table"]


@dataclass(frozen=True, slots=True)
class Row:
    """One length of one workload.

    Attributes:
        workload, length: which step.
        budget_bytes: the unplanned peak of the shortest length.
        unplanned_peak_bytes, predicted_peak_bytes, measured_peak_bytes: of the whole step.
        offloaded_bytes: what waits on the disk at once.
        tiles: whether a region ran in pieces.
        passed: whether all checks passed, bit for bit where there are no tiles.
        step_seconds, unplanned_step_seconds: medians, timed in turn.
        token_seconds_ratio: planned seconds per token over the unplanned ones of the shortest length.
        unplanned_token_seconds_ratio: the same of the unplanned step: what attention's growth costs.
        note: why there is no number.
    """

    workload: str
    length: int
    budget_bytes: int
    unplanned_peak_bytes: int
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    offloaded_bytes: int = 0
    tiles: bool = False
    passed: bool | None = None
    step_seconds: float | None = None
    unplanned_step_seconds: float | None = None
    token_seconds_ratio: float | None = None
    unplanned_token_seconds_ratio: float | None = None
    note: str = ""


def measure(name: str, link: OffloadLink, options: argparse.Namespace, advance: Advance) -> Iterator[Row]:
    """The rows of one workload, the shortest length first."""
    budget_bytes, base = 0, 0.0
    for length in sorted(options.lengths):
        advance(f"{name}: {length}")
        model, step = load(name, tiny=options.tiny, **sizes(options), sequence=length)
        graph = record(step, model=model, name=f"{name} {length}")
        peak = simulate(graph).peak_bytes
        budget_bytes = budget_bytes or peak
        row = Row(name, length, budget_bytes, peak)
        try:
            plan = solve(graph, budget_bytes, offload=link, allow=options.allow, time_limit_seconds=options.seconds)
        except InfeasibleBudget as error:
            yield replace(row, note=f"does not fit: {mebibytes(error.least_bytes)} MiB is the least")
            continue
        found = verify(model, step, plan, offload_to=options.offload_dir)
        planned, unplanned = found.step_seconds, found.unplanned_step_seconds
        assert planned is not None
        assert unplanned is not None
        base = base or unplanned / length
        yield replace(
            row,
            predicted_peak_bytes=plan.peak_bytes,
            measured_peak_bytes=found.peak_bytes,
            offloaded_bytes=plan.traffic.offloaded_bytes if plan.traffic else 0,
            tiles=bool(plan.tiles_by_module),
            passed=found.passed,
            step_seconds=planned,
            unplanned_step_seconds=unplanned,
            token_seconds_ratio=planned / length / base,
            unplanned_token_seconds_ratio=unplanned / length / base,
        )


def table(rows: Sequence[Row]) -> Table:
    """All rows."""
    made = Table(title="Longer sequences inside the unplanned peak of the shortest; time per token is relative to that step")
    for header in ("workload", "length", "budget MiB", "unplanned MiB", "predicted MiB", "measured MiB", "offloaded MiB", "tiles"):
        made.add_column(header, justify="left" if header == "workload" else "right")
    for header in ("time / unplanned", "time per token", "of the unplanned step", "verified"):
        made.add_column(header, justify="right")
    for row in rows:
        peaks = (row.budget_bytes, row.unplanned_peak_bytes, row.predicted_peak_bytes, row.measured_peak_bytes, row.offloaded_bytes)
        over = row.step_seconds / row.unplanned_step_seconds if row.step_seconds and row.unplanned_step_seconds else None
        times = (over, row.token_seconds_ratio, row.unplanned_token_seconds_ratio)
        verified = row.note or ("yes" if row.passed else "NO")
        made.add_row(row.workload, str(row.length), *map(mebibytes, peaks), "yes" if row.tiles else "no", *map(ratio, times), verified)
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark and prints its table."""
    parser = arguments(__doc__ or "", workloads=("llama",))
    add_disk(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=(256, 512, 1024, 2048), help="tokens (default: 256 512 1024 2048)")
    parser.add_argument("--allow", nargs="*", default=(), choices=("tile",), help="let plans run regions in tiles too")
    parser.add_argument("--seconds", type=float, default=30.0, help="time limit of each solve (default: %(default)s)")
    options = parser.parse_args(argv)
    names = chosen_workloads(options)
    link = disk_link(options)
    with progress_bar(len(names) * len(options.lengths)) as advance:
        rows = [row for name in names for row in measure(name, link, options, advance)]
    write(options, rows, [table(rows)])


if __name__ == "__main__":
    main()
