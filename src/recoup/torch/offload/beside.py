"""Compute that runs while transfers do, and how much of it gets done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["Ending", "Window", "until", "work_on"]

_WIDTH = 256  # of the matrices: a product takes some hundred microseconds on one core
_MATRICES = 32  # together more than most caches hold
_SUMMED = 4  # matrices summed beside each product, which gives elementwise operations a quarter of the time or so


class Ending(Protocol):
    """A transfer, as far as it is watched."""

    def done(self) -> bool:
        """Whether it has ended."""
        ...


@dataclass(frozen=True, slots=True)
class Window:
    """What was done in some time.

    Attributes:
        seconds: how long it took.
        calls: calls of the compute made in it.
        starting_seconds: what of ``seconds`` went into starting the transfers.
    """

    seconds: float
    calls: int
    starting_seconds: float = 0.0

    @property
    def working_seconds(self) -> float:
        """What was left for the compute."""
        return self.seconds - self.starting_seconds

    @property
    def rate(self) -> float:
        """Calls a second of the time that was left for them."""
        return self.calls / self.working_seconds


def work_on(device: torch.device) -> Callable[[], None]:
    """A piece of what a training step does, to its end: a product of two matrices and a sum of two others, of memory that no cache holds.

    Products that stay in a core's own cache hardly notice transfers, and say too little of what those cost a step.
    """
    matrices = torch.rand(_MATRICES, _WIDTH, _WIDTH, device=device)
    target, total = torch.empty(_WIDTH, _WIDTH, device=device), torch.empty(_SUMMED, _WIDTH, _WIDTH, device=device)
    turn = 0

    def work() -> None:
        nonlocal turn
        torch.mm(matrices[turn], matrices[turn + 1], out=target)
        torch.add(matrices[turn : turn + _SUMMED], matrices[turn + _SUMMED : turn + 2 * _SUMMED], out=total)
        turn = (turn + _SUMMED) % (_MATRICES - 2 * _SUMMED + 1)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    return work


def until(compute: Callable[[], None], start: Callable[[], Sequence[Ending]], *, at_least_seconds: float = 0.0) -> Window:
    """Calls ``compute`` until all that ``start`` has started is done, and for some time at least."""
    begun = time.perf_counter()
    transfers, calls, ended = start(), 0, 0
    starting = time.perf_counter() - begun
    while True:
        while ended < len(transfers) and transfers[ended].done():
            ended += 1
        now = time.perf_counter() - begun
        if ended == len(transfers) and now >= at_least_seconds:
            return Window(now, calls, starting)
        compute()
        calls += 1
