"""Writes ``docs/accuracy.md``: every published figure, predicted and published, fitted and held-out rows apart.

    python -m benchmarks.job_accuracy
    python -m benchmarks.job_accuracy --data FOLDER --check     # other rows of the same tables: only the summary, on stdout

What stands between the marks of the page is written anew; the words around it are not touched.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import job_golden, job_rows
from benchmarks.job_golden import FIXED_BYTES, Golden
from benchmarks.job_rows import DATA, Row
from recoup.units import format_bytes

__all__ = ["main"]

PAGE = Path("docs/accuracy.md")
FIGURE = Path("docs/job-accuracy.png")
_BEGIN, _END = "<!-- measured:begin -->", "<!-- measured:end -->"
_USES = ("none fitted", "held out", "fitted")
_COLOURS = {"none fitted": "#0072B2", "held out": "#D55E00", "fitted": "#999999"}
_MARKERS = {"none fitted": "o", "held out": "s", "fitted": "x"}


def summary(rows: Sequence[Row]) -> list[str]:
    """One line for each table, group and use."""
    lines = [
        "| table | device, precision | rows | | mean absolute error | bias | largest |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for table in dict.fromkeys(row.table for row in rows):
        groups = dict.fromkeys(row.group for row in rows if row.table == table)
        for use in _USES:
            chosen = [row for row in rows if row.table == table and row.use == use]
            parts = [(group, [row for row in chosen if row.group == group]) for group in groups]
            parts = [(group, part) for group, part in parts if part]
            lines += [_line(table, group, use, part) for group, part in parts]
            if len(parts) > 1:
                lines.append(_line(table, "**all**", use, chosen))
    return lines


def _line(table: str, group: str, use: str, rows: Sequence[Row]) -> str:
    errors = [row.error() for row in rows]
    mean = statistics.mean(abs(error) for error in errors)
    largest = max(errors, key=abs)
    return f"| {table} | {group} | {use} | {len(rows)} | {mean:.2%} | {statistics.mean(errors):+.2%} | {largest:+.1%} |"


def listing(rows: Iterable[Row]) -> list[str]:
    """One line for each row."""
    lines = ["| configuration | device, precision | figure | predicted | published | error |", "| --- | --- | --- | ---: | ---: | ---: |"]
    for row in rows:
        lines.append(f"| {row.name} | {row.group} | {row.figure} | {row.predicted():.4g} | {row.published:.4g} | {row.error():+.1%} |")
    return lines


def recomputation(rows: Sequence[Row]) -> list[str]:
    """Points of MFU and HFU between predicted and published, with recomputation and without."""
    lines = ["| table | rows | | MFU, mean points off | HFU, mean points off |", "| --- | --- | ---: | ---: | ---: |"]
    for use in ("held out", "fitted"):
        for recipe, words in (("block", "with recomputation"), ("none", "without")):
            chosen = [row for row in rows if row.table == "llm-foundry MPT" and row.recipe == recipe and row.use == use]
            points = [100 * abs(row.predicted() - row.published) for row in chosen]
            # The table's HFU is MFU times 4/3 wherever anything is recomputed.
            factor = 4 / 3 if recipe == "block" else 1.0
            lines.append(
                f"| MPT {words} | {use} | {len(chosen)} | {statistics.mean(points):.2f} | {factor * statistics.mean(points):.2f} |"
            )
    return lines + _paper_points(rows)


def _paper_points(rows: Sequence[Row]) -> list[str]:
    """The same of the paper's times: utilization by the paper's operations, over predicted and over published seconds."""
    lines = []
    for recipe in ("full", "selective"):
        chosen = [row for row in rows if row.table.startswith("Korthikanti") and row.recipe == recipe]
        found = [(row.job().estimate(recipe), row.published) for row in chosen]
        mfu, hfu = (
            statistics.mean(100 * abs(getattr(one, name) * (1 - one.step_seconds / seconds)) for one, seconds in found)
            for name in ("mfu", "hfu")
        )
        lines.append(f"| Korthikanti et al. {recipe} | none fitted | {len(found)} | {mfu:.2f} | {hfu:.2f} |")
    return lines


def golden_summary(rows: Sequence[Golden]) -> list[str]:
    """Errors of peaks by kind and use."""
    lines = [
        "| Megatron-LM peaks | rows | modelled | median error | within 10 % | not modelled |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for kind in ("dense", "moe"):
        for use in ("held out", "fitted"):
            chosen = [row for row in rows if row.kind == kind and row.use == use]
            errors = [abs(row.error(FIXED_BYTES)) for row in chosen if row.predicted_bytes]
            if errors:
                near = sum(error <= 0.1 for error in errors) / len(errors)
                left = len(chosen) - len(errors)
                lines.append(f"| {kind} | {use} | {len(errors)} | {statistics.median(errors):.2%} | {near:.1%} | {left} |")
    return lines


def golden_listing(rows: Sequence[Golden]) -> list[str]:
    """One line for each row."""
    lines = ["| case | environment | rows | predicted | recorded | error |", "| --- | --- | --- | ---: | ---: | ---: |"]
    for row in rows:
        recorded = format_bytes(row.recorded_bytes)
        if row.predicted_bytes is None:
            lines.append(f"| {row.case} | {row.environment} | {row.use} | not modelled | {recorded} | {row.why} |")
        else:
            predicted = format_bytes(row.predicted_bytes + FIXED_BYTES[row.device])
            lines.append(f"| {row.case} | {row.environment} | {row.use} | {predicted} | {recorded} | {row.error(FIXED_BYTES):+.1%} |")
    return lines


def figure7() -> list[str]:
    """Figures 1 and 7 of the paper, computed beside published."""
    lines = ["| model | figure | published | computed |", "| --- | --- | ---: | ---: |"]
    ones = {row["model"]: row for row in job_rows.read("korthikanti_fig1_memory_GiB.csv")}
    sevens = {row["model"]: row for row in job_rows.read("korthikanti_fig7_act_pct.csv")}
    for row in job_rows.read("korthikanti_table3_configs.csv"):
        jobs = {split: job_rows.korthikanti_job(row, sequence_parallel=split) for split in (False, True)}
        for split, recipe, column in ((False, "none", "act_tp_baseline"), (True, "selective", "act_sp_selective")):
            computed = jobs[split].estimate(recipe).memory[0].activations / 2**30
            lines.append(f"| {row['model']} | 1, {column} (GiB) | {float(ones[row['model']][column]):.10g} | {computed:.10g} |")
        base = jobs[False].recipe("none")["dense"].kept_bytes
        for split, recipe, column in (
            (True, "none", "sp"),
            (False, "selective", "selective"),
            (True, "selective", "sp_selective"),
            (False, "full", "full"),
        ):
            share = 100 * jobs[split].recipe(recipe)["dense"].kept_bytes / base
            lines.append(f"| {row['model']} | 7, {column} (%) | {sevens[row['model']][column]} | {share:.2f} |")
    return lines


def page(rows: Sequence[Row], golden: Sequence[Golden]) -> list[str]:
    """All that is between the marks."""
    lines = ["## Time and memory, by table", "", *summary(rows), "", "![Predicted against published](job-accuracy.png)", ""]
    lines += [
        "## Recomputation",
        "",
        *recomputation(rows),
        "",
        "## Peaks of Megatron-LM's functional tests",
        "",
        *golden_summary(golden),
        "",
    ]
    lines += ["## Figures 1 and 7 of arXiv:2205.05198", "", *figure7(), ""]
    for use, title in (
        ("none fitted", "Rows of tables on which nothing is fitted"),
        ("held out", "Held-out rows"),
        ("fitted", "Fitted rows"),
    ):
        for table in dict.fromkeys(row.table for row in rows if row.use == use):
            lines += [f"## {title}: {table}", "", *listing(row for row in rows if row.use == use and row.table == table), ""]
    return [*lines, "## Every peak of Megatron-LM's functional tests", "", *golden_listing(golden)]


def draw(rows: Sequence[Row], golden: Sequence[Golden], path: Path) -> None:
    """Predicted over published, one panel for times and one for memory."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    times = [row for row in rows if row.figure != "GiB"]
    for use in _USES[::-1]:
        chosen = [(place, row) for place, row in enumerate(times) if row.use == use]
        _scatter(left, [place for place, _ in chosen], [1 + row.error() for _, row in chosen], use)
    known = [row for row in golden if row.predicted_bytes]
    for use in _USES[1:][::-1]:
        chosen = [row for row in known if row.use == use]
        _scatter(right, [row.recorded_bytes / 2**30 for row in chosen], [1 + row.error(FIXED_BYTES) for row in chosen], use)
    memory = [row for row in rows if row.figure == "GiB"]
    _scatter(right, [row.published for row in memory], [1 + row.error() for row in memory], "none fitted")
    _dress(left, "time, tokens a second, MFU: predicted over published", "row, by table", times)
    _dress(right, "peak memory: predicted over published", "published peak (GiB)", None)
    right.set_xscale("log")
    figure.savefig(path, dpi=160)


def _scatter(axes, places, ratios, use: str) -> None:
    axes.plot(places, ratios, linestyle="none", marker=_MARKERS[use], color=_COLOURS[use], markersize=4, alpha=0.8, label=use)


def _dress(axes, title: str, label: str, rows: Sequence[Row] | None) -> None:
    axes.axhline(1, color="black", linewidth=0.8)
    axes.axhspan(0.9, 1.1, color="0.93", zorder=0)
    axes.set_ylim(0.5, 1.5)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(label)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    for place, row in enumerate(rows or ()):
        if rows is not None and (not place or rows[place - 1].table != row.table):
            axes.axvline(place - 0.5, color="0.8", linewidth=0.8)
            axes.annotate(row.table.split(",")[0], (place, 0.53), fontsize=7, color="0.3", rotation=90, va="bottom")


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the page, or prints the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the tables (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="print the summary, write nothing")
    options = parser.parse_args(argv)
    tables = (job_rows.korthikanti, job_rows.mpt, job_rows.torchtitan, job_rows.simumax)
    rows = [row for table in tables for row in table(options.data)]
    golden = job_golden.golden_rows(options.data / "megatron_golden_memory.csv")
    if options.check:
        print("\n".join([*summary(rows), "", *recomputation(rows), "", *golden_summary(golden)]))
        return
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    after = rest.partition(_END)[2]
    PAGE.write_text(before + _BEGIN + "\n\n" + "\n".join(page(rows, golden)) + "\n\n" + _END + after)
    draw(rows, golden, FIGURE)
    print(f"Wrote {PAGE} and {FIGURE}")


if __name__ == "__main__":
    main()
