"""Seconds: of a whole step, of several steps side by side, and of single operations.

A median of alternating runs is what planned and unplanned steps are compared by: what slows the machine for a while
slows both.
"""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch

from recoup.errors import UsageError

__all__ = ["Clock", "CpuClock", "CudaClock", "Times", "alternate", "clock_for", "least_seconds", "synchronizer", "time_step"]


@dataclass(frozen=True, slots=True)
class Times:
    """Measured seconds of one step.

    Attributes:
        median_seconds: the median of ``all``.
        all: each run's seconds, in the order in which they ran.
    """

    median_seconds: float
    all: tuple[float, ...]


def synchronizer(device: torch.device | str) -> Callable[[], None]:
    """What waits for all work of a device; on CPU there is nothing to wait for."""
    device = torch.device(device)
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def time_step(step: Callable[[], object], repeats: int = 7, warmup: int = 2, synchronize: Callable[[], None] | None = None) -> float:
    """Median seconds of ``repeats`` runs of a step, after ``warmup`` runs that do not count.

    Raises:
        UsageError: ``repeats`` is less than one.
    """
    return alternate({"step": step}, repeats=repeats, warmup=warmup, synchronize=synchronize)["step"].median_seconds


def alternate(
    steps: Mapping[str, Callable[[], object]],
    repeats: int = 7,
    warmup: int = 1,
    progress: Callable[[int, int, str], object] | None = None,
    synchronize: Callable[[], None] | None = None,
) -> dict[str, Times]:
    """Times steps in turn, one run of each a round, so that none has the machine at a better hour.

    ``progress(done, total, text)`` is called after each run.

    Raises:
        UsageError: ``repeats`` is less than one.
    """
    if repeats < 1:
        raise UsageError(f"a step is timed at least once, got repeats={repeats}")
    wait = synchronize if synchronize is not None else lambda: None
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    total = (warmup + repeats) * len(steps)
    done = 0
    for run in range(warmup + repeats):
        for name, step in steps.items():
            taken = _once(step, wait)
            if run >= warmup:
                seconds[name].append(taken)
            done += 1
            if progress is not None:
                progress(done, total, f"timing {name}")
    return {name: Times(statistics.median(taken), tuple(taken)) for name, taken in seconds.items()}


def least_seconds(call: Callable[[], object], repeats: int, synchronize: Callable[[], None], enough: float = float("inf")) -> float:
    """The least seconds of several runs of one call; no further run once even the least is longer than ``enough``."""
    best = float("inf")
    for _ in range(repeats):
        best = min(best, _once(call, synchronize))
        if best > enough:
            break
    return best


def _once(step: Callable[[], object], wait: Callable[[], None]) -> float:
    wait()
    start = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - start


class Clock(ABC):
    """Times single operations without stopping the device between them."""

    @abstractmethod
    def now(self) -> object:
        """A moment, to be given to :meth:`seconds`."""

    @abstractmethod
    def seconds(self, start: object, stop: object) -> float:
        """Seconds between two moments of :meth:`now`; may wait for the device, so ask when the step is over."""


@final
class CpuClock(Clock):
    """The process's monotonic clock."""

    def now(self) -> object:
        """Seconds of the process's clock."""
        return time.perf_counter()

    def seconds(self, start: object, stop: object) -> float:
        """The difference."""
        assert isinstance(start, float)
        assert isinstance(stop, float)
        return stop - start


@final
class CudaClock(Clock):
    """Events on the current CUDA stream. Not measured on a GPU yet."""

    def now(self) -> object:
        """An event recorded on the stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: object, stop: object) -> float:
        """The device's own time between two events."""
        assert isinstance(start, torch.cuda.Event)
        assert isinstance(stop, torch.cuda.Event)
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3


def clock_for(device: torch.device | str) -> Clock:
    """The clock of a device: events on CUDA, the process's clock elsewhere."""
    return CudaClock() if torch.device(device).type == "cuda" else CpuClock()
