"""Recoup beside what people do today, at the peak that each of them reaches.

    python -m benchmarks.peers --workloads gpt2,resnet --repeats 7

For each workload, in one process: the plain step and each peer of ``peer_strategies``; then Recoup in both gears with each
peer's measured peak as its budget. Peaks are measured over the whole step, times are medians of alternating rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.table import Table

from benchmarks.measuring import Advance, Timing, arguments, chosen_workloads, mebibytes, progress_bar, ratio, rounds, sizes, write
from benchmarks.peer_strategies import PEERS, Inapplicable
from benchmarks.workloads import load
from recoup.errors import InfeasibleBudget
from recoup.torch.meter import measure_peak

__all__ = ["Row", "main"]

GEARS = ("live", "static")


@dataclass(frozen=True, slots=True)
class Row:
    """One variant of one workload.

    Attributes:
        workload, variant: names.
        gear: ``live`` or ``static`` for Recoup, '' for a peer.
        peer: the peer whose measured peak is the budget, '' for a peer itself.
        chosen: Recoup, left to choose, takes this gear.
        budget_bytes, predicted_peak_bytes, measured_peak_bytes: None where there is none.
        step_seconds: median of the rounds.
        spread: distance of the quartiles over the median.
        relative_time: ``step_seconds`` over that of the plain step.
        peer_ratio: ``step_seconds`` over that of the peer.
        gap: how far the plan can be from the optimum.
        note: what else must be said, such as why there is no number.
    """

    workload: str
    variant: str
    gear: str = ""
    peer: str = ""
    chosen: bool = False
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    step_seconds: float | None = None
    spread: float | None = None
    relative_time: float | None = None
    peer_ratio: float | None = None
    gap: float | None = None
    note: str = ""


LEARNING_STEPS = 4
"""Steps before anything is measured: the static gear learns from three live ones."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A row in the making, and the context that its step is measured in (None if it does not run)."""

    row: Row
    enter: Callable[[], AbstractContextManager[object]] | None


def peer_entries(name: str, model: torch.nn.Module, step: Callable[[], object], advance: Advance) -> list[_Entry]:
    """The plain step and each peer, with the peak measured, or the reason why there is none."""
    entries = []
    for peer, enter in PEERS.items():
        advance(f"{name}: peak of {peer}")
        notes: list[str] = []
        row = Row(name, peer)
        try:
            with enter(model, step, notes):
                peak_bytes = measure_peak(step, model)
        except Inapplicable as reason:
            entries.append(_Entry(replace(row, note=f"not applicable: {reason}"), None))
        except Exception as error:  # a peer that breaks on a model is a result, and goes into the table
            entries.append(_Entry(replace(row, note=f"fails: {type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"), None))
        else:
            row = replace(row, measured_peak_bytes=peak_bytes, note="; ".join(notes))
            entries.append(_Entry(row, partial(enter, model, step, [])))
    return entries


def recoup_entries(graph: Any, model: torch.nn.Module, step: Callable[[], object], peer: Row, advance: Advance) -> list[_Entry]:
    """Recoup in both gears under a budget equal to the peer's measured peak; the gear it chooses is marked."""
    from recoup.solve import solve
    from recoup.torch import apply

    assert peer.measured_peak_bytes is not None
    budget_bytes = peer.measured_peak_bytes
    try:
        chosen = solve(graph, budget_bytes, gear="auto").gear
    except InfeasibleBudget:
        chosen = ""
    entries = []
    for gear in GEARS:
        advance(f"{peer.workload}: recoup {gear} at the peak of {peer.variant}")
        row = Row(peer.workload, f"recoup {gear}", gear, peer.variant, gear == chosen, budget_bytes)
        try:
            plan = solve(graph, budget_bytes, gear=gear)
        except InfeasibleBudget as error:
            entries.append(_Entry(replace(row, note=f"does not fit: needs {mebibytes(error.least_bytes)} MiB"), None))
            continue
        applied = apply(model, plan, gear=gear)
        with applied:
            for _ in range(LEARNING_STEPS):
                step()
            peak_bytes = measure_peak(step, model)
        note = "drops nothing" if plan.drops_nothing else "OVER BUDGET" if peak_bytes > budget_bytes else ""
        row = replace(row, predicted_peak_bytes=plan.peak_bytes, measured_peak_bytes=peak_bytes, gap=plan.gap, note=note)
        entries.append(_Entry(row, lambda applied=applied: applied))  # entered again and again; what the static gear learnt stays
    return entries


def timed(entries: Sequence[_Entry], step: Callable[[], object], options: argparse.Namespace, advance: Advance) -> list[Row]:
    """The rows with times and ratios: all entries that run, round robin."""
    keys = [f"{entry.row.variant} @ {entry.row.peer}" if entry.row.peer else entry.row.variant for entry in entries]
    variants = {key: entry.enter for key, entry in zip(keys, entries, strict=True) if entry.enter is not None}
    timings = rounds(step, variants, repeats=options.repeats, warm=options.warm, advance=advance)
    base = timings["plain"].median_seconds
    return [_with_time(entry.row, timings.get(key), base, timings.get(entry.row.peer)) for key, entry in zip(keys, entries, strict=True)]


def _with_time(row: Row, timing: Timing | None, base_seconds: float, peer: Timing | None) -> Row:
    if timing is None:
        return row
    peer_ratio = None if peer is None else timing.median_seconds / peer.median_seconds
    seconds = timing.median_seconds
    return replace(row, step_seconds=seconds, spread=timing.spread, relative_time=seconds / base_seconds, peer_ratio=peer_ratio)


def measure(name: str, options: argparse.Namespace, advance: Advance) -> list[Row]:
    """All rows of one workload."""
    model, step = load(name, tiny=options.tiny, **sizes(options))
    entries = peer_entries(name, model, step, advance)
    if not options.peers_only:
        from recoup.torch import record

        advance(f"{name}: recording")
        graph = record(step, model=model, name=name)
        for peer in [entry.row for entry in entries if entry.enter is not None and entry.row.variant != "plain"]:
            entries += recoup_entries(graph, model, step, peer, advance)
    return timed(entries, step, options, advance)


def rows_table(rows: Iterable[Row]) -> Table:
    """Every variant of every workload."""
    table = Table(title="Peak and time of a step; time is relative to the plain step")
    table.add_column("workload")
    table.add_column("variant")
    for header in ("measured MiB", "predicted MiB", "time / plain", "spread"):
        table.add_column(header, justify="right")
    table.add_column("note")
    last = ""
    for row in rows:
        if last and row.workload != last:
            table.add_section()
        variant = f"{row.variant}{' *' if row.chosen else ''} at {row.peer}" if row.peer else row.variant
        numbers = (mebibytes(row.measured_peak_bytes), mebibytes(row.predicted_peak_bytes), ratio(row.relative_time), ratio(row.spread))
        table.add_row("" if row.workload == last else row.workload, variant, *numbers, row.note)
        last = row.workload
    return table


def comparison_table(rows: Sequence[Row]) -> Table:
    """Recoup's time over each peer's, at the peer's measured peak."""
    table = Table(title="Recoup's time / the peer's time at the peer's measured peak (below 1: Recoup is faster)")
    for header in ("workload", "peer"):
        table.add_column(header)
    for header in ("peer MiB", "live", "static", "chosen", "chosen MiB / peer MiB"):
        table.add_column(header, justify="right")
    for peer in rows:
        pair = {row.gear: row for row in rows if row.workload == peer.workload and row.peer == peer.variant}
        if peer.peer or not pair:
            continue
        chosen = next((row for row in pair.values() if row.chosen), None)
        cells = [ratio(pair[gear].peer_ratio) if pair[gear].step_seconds else "does not fit" for gear in GEARS]
        if chosen is None or chosen.measured_peak_bytes is None or peer.measured_peak_bytes is None:
            cells += ["does not fit", "-"]
        else:
            cells += [f"{ratio(chosen.peer_ratio)} {chosen.gear}", ratio(chosen.measured_peak_bytes / peer.measured_peak_bytes)]
        table.add_row(peer.workload, peer.variant, mebibytes(peer.measured_peak_bytes), *cells)
    return table


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark and prints its tables."""
    parser = arguments(__doc__ or "", repeats=7)
    parser.add_argument("--warm", type=int, default=1, help="untimed steps before each timed one (default: %(default)s)")
    parser.add_argument("--peers-only", action="store_true", help="leave Recoup out")
    options = parser.parse_args(argv)
    names = chosen_workloads(options)
    peaks = len(PEERS) + (0 if options.peers_only else 1 + len(GEARS) * (len(PEERS) - 1))
    variants = len(PEERS) + (0 if options.peers_only else len(GEARS) * (len(PEERS) - 1))
    with progress_bar(len(names) * (peaks + variants * options.repeats)) as advance:
        rows = [row for name in names for row in measure(name, options, advance)]
    write(options, rows, [rows_table(rows)] if options.peers_only else [rows_table(rows), comparison_table(rows)])


if __name__ == "__main__":
    main()
