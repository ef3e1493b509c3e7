"""Compute that runs while transfers do, and how much of it gets done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["Ending", "Window", "product_on", "until"]

_WIDTH = 256  # of the matrices: a product takes some hundred microseconds on one core


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
    """

    seconds: float
    calls: int

    @property
    def rate(self) -> float:
        """Calls a second."""
        return self.calls / self.seconds


def product_on(device: torch.device) -> Callable[[], None]:
    """A product of two small matrices on the device, to its end."""
    left, target = torch.rand(_WIDTH, _WIDTH, device=device), torch.empty(_WIDTH, _WIDTH, device=device)

    def product() -> None:
        torch.mm(left, left, out=target)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    return product


def until(compute: Callable[[], None], start: Callable[[], Sequence[Ending]], *, at_least_seconds: float = 0.0) -> Window:
    """Calls ``compute`` until all that ``start`` has started is done, and for some time at least."""
    begun = time.perf_counter()
    transfers, calls, ended = start(), 0, 0
    while True:
        while ended < len(transfers) and transfers[ended].done():
            ended += 1
        now = time.perf_counter() - begun
        if ended == len(transfers) and now >= at_least_seconds:
            return Window(now, calls)
        compute()
        calls += 1
