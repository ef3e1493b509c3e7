"""What all benchmarks share: rounds of alternating steps, a progress bar, and a table or JSON at the end.

Variants of a step are timed round robin in one process with a fixed number of threads, so that what slows the machine
for a while slows all of them. Ratios are of medians.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.workloads import WORKLOADS
from recoup.errors import UsageError

__all__ = [
    "Advance",
    "Timing",
    "arguments",
    "chosen_workloads",
    "environment",
    "mebibytes",
    "processor_seconds",
    "progress_bar",
    "ratio",
    "restart_with",
    "rounds",
    "sizes",
    "write",
]

Advance = Callable[[str], None]

# glibc returns large blocks to the system when they are freed, and each step pays for fresh pages; this keeps them.
_CACHING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one variant.

    Attributes:
        median_seconds: of all rounds.
        spread: distance of the quartiles over the median.
    """

    median_seconds: float
    spread: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """The median and spread of at least two measurements."""
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, (high - low) / median)


def rounds(
    run: Callable[[], object],
    variants: Mapping[str, Callable[[], AbstractContextManager[object]]],
    *,
    repeats: int,
    warm: int = 1,
    advance: Advance | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Times ``run`` under each variant, round robin.

    Each round begins with the next variant, so that none has a place of its own. A variant is entered anew each time and
    ``run`` runs ``warm`` times unmeasured inside it, so that no variant pays for its setting up; entering and leaving are
    not timed. ``clock`` tells seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    gc.collect()
    gc.freeze()  # what stands now stays: collections in between look at the steps' own objects alone
    try:
        for turn in range(repeats):
            for name, enter in _rotated(list(variants.items()), turn):
                if advance is not None:
                    advance(f"timing {name}")
                with enter():
                    seconds[name].append(_warm_then_timed(run, warm, clock))
    finally:
        gc.unfreeze()
    return {name: Timing.of(taken) for name, taken in seconds.items()}


def _rotated(items: list[Any], by: int) -> list[Any]:
    by %= len(items)
    return items[by:] + items[:by]


def _warm_then_timed(run: Callable[[], object], warm: int, clock: Callable[[], float]) -> float:
    for _ in range(warm):
        run()
    gc.collect()
    start = clock()
    run()
    return clock() - start


def processor_seconds() -> float:
    """Time of the processor that this process and the programs that it ran have taken: what others do at the same time adds nothing."""
    taken = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in taken)


def arguments(description: str, *, repeats: int | None = None, workloads: Iterable[str] = WORKLOADS) -> argparse.ArgumentParser:
    """The options that all benchmarks have; ``--repeats`` only with a default for it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(workloads), help="names, separated by commas (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="the tiny sizes, to try the benchmark itself")
    parser.add_argument("--batch", type=int, help="another batch size than each workload's own")
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats, help="timed rounds (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of PyTorch (default: all cores, %(default)s)")
    parser.add_argument(
        "--caching-allocator",
        action="store_true",
        help="start anew with a malloc that keeps freed memory (glibc): no page faults in the steps",
    )
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--out", type=Path, help="write there instead of to standard output")
    parser.add_argument("--json", type=Path, help="write the rows there as JSON too")
    return parser


def chosen_workloads(options: argparse.Namespace) -> list[str]:
    """The workloads asked for, after fixing the threads and, if asked for, starting anew under another malloc.

    Raises:
        UsageError: a name is unknown, or fewer than two rounds are asked for.
    """
    names = [name.strip() for name in options.workloads.split(",") if name.strip()]
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown or not names:
        raise UsageError(f"no workload is called {', '.join(unknown) or '(nothing)'}; there are {', '.join(WORKLOADS)}")
    if getattr(options, "repeats", 2) < 2:
        raise UsageError("--repeats must be 2 or more, for there to be a median and a spread")
    if options.caching_allocator:
        restart_with(_CACHING)
    torch.set_num_threads(options.threads)
    return names


def restart_with(settings: Mapping[str, str]) -> None:
    """Starts the program anew with these settings of malloc, which are read when a process starts; unless they are set."""
    if any(os.environ.get(name) != value for name, value in settings.items()):
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **settings})


@contextmanager
def progress_bar(total: int) -> Generator[Advance, None, None]:
    """A bar on standard error, if that is a terminal; ``advance(text)`` moves it by one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=total)

        def advance(text: str) -> None:
            progress.update(task, description=text, advance=1)

        yield advance


def environment(options: argparse.Namespace) -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "options": {name: value for name, value in vars(options).items() if name not in ("format", "out", "json")},
        "malloc": {name: value for name, value in sorted(os.environ.items()) if name.startswith("MALLOC_") or name == "LD_PRELOAD"},
    }


def mebibytes(count: int | None) -> str:
    """Bytes as MiB with one digit; a dash for none."""
    return "-" if count is None else f"{count / 2**20:.1f}"


def ratio(value: float | None) -> str:
    """A ratio with three digits after the point; a dash for none."""
    return "-" if value is None else f"{value:.3f}"


def write(options: argparse.Namespace, rows: Iterable[Any], tables: Iterable[Table]) -> None:
    """The rows as JSON, or the tables as text, on standard output or to ``--out``; the rows to ``--json`` too."""
    as_json = json.dumps({"environment": environment(options), "rows": [asdict(row) for row in rows]}, indent=1, default=str) + "\n"
    if options.format == "json":
        text = as_json
    else:
        buffer = io.StringIO()
        console = Console(file=buffer, width=180 if options.out or not sys.stdout.isatty() else None)
        for table in tables:
            console.print(table)
        text = buffer.getvalue()
    if options.out is None:
        sys.stdout.write(text)
    for path, content in ((options.out, text), (options.json, as_json)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
            sys.stderr.write(f"Wrote {path}\n")


def sizes(options: argparse.Namespace) -> dict[str, int]:
    """The sizes that the command line asks for, to go over a workload's own."""
    return {} if options.batch is None else {"batch": options.batch}
