"""What a simulation says: the peak, where it stands, what stands there, and the time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from recoup.graph import StepGraph
from recoup.simulate.transfers import Transfers

__all__ = ["GENERATORS", "SCRATCH", "STAGING", "Moment", "Simulation", "State", "attribution"]

State = Literal["resident", "activation", "kept for replay", "recomputed", "fetched", "gradient or temporary", "scratch"]

SCRATCH = -1
"""The storage id that stands for an operation's scratch in ``live_at_peak``."""
GENERATORS = -2
"""The storage id that stands for captured generator states in ``live_at_peak``."""
STAGING = -3
"""The storage id that stands for the buffers of transfers in ``live_at_peak``."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A point of the planned step: during recorded operation ``at``, or during a replay at the gap before it.

    Attributes:
        at: the recorded operation.
        replay: number of the replay in the step, None during the recorded operation itself.
        op: the operation that runs: ``at``, or the replayed one.
    """

    at: int
    replay: int | None
    op: int


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """A simulated step.

    Attributes:
        peak_bytes: the most bytes alive at any moment.
        peak_op: the operation that runs at the peak (a replayed forward operation if ``peak_in_replay``).
        peak_site: its site.
        peak_in_replay: whether the peak stands while an operation is replayed.
        peak_moment: the place of the peak in the recorded step.
        step_seconds: time of the step, replays and the executor's overheads included.
        replayed_ops: how many operations were replayed, repeats counted.
        recomputed_bytes: bytes of the copies that replays made of dropped storages.
        bytes_at: for each recorded operation the most bytes alive during it and during the replays just before it.
        live_at_peak: what stands at the peak: (storage id, bytes, state); scratch has the id -1. Sums to ``peak_bytes``.
        moments: for each recorded operation the replay at which ``bytes_at`` stands, -1 for the operation itself.
        offloaded_bytes: what waits on the host or on disk, in whole pages.
        transfers: what moved over the link and when; None where nothing is offloaded.
    """

    peak_bytes: int
    peak_op: int
    peak_site: str
    peak_in_replay: bool
    peak_moment: Moment
    step_seconds: float
    replayed_ops: int
    recomputed_bytes: int
    bytes_at: NDArray[np.int64] = field(repr=False)
    live_at_peak: tuple[tuple[int, int, State], ...] = field(repr=False)
    moments: NDArray[np.int64] = field(repr=False)
    offloaded_bytes: int = 0
    transfers: Transfers | None = field(default=None, repr=False)


def attribution(graph: StepGraph, simulation: Simulation, depth: int = 2) -> list[tuple[str, int]]:
    """Bytes at the peak by place, largest first.

    Forward activations go by the first ``depth`` parts of their module path, all else by its kind or state.
    """
    totals: dict[str, int] = {}
    for number, count, state in simulation.live_at_peak:
        place = _place(graph, number, state, depth)
        totals[place] = totals.get(place, 0) + count
    return sorted(totals.items(), key=lambda item: (-item[1], item[0]))


def _place(graph: StepGraph, number: int, state: State, depth: int) -> str:
    if number == GENERATORS:
        return "generator states"
    if number == STAGING:
        return "buffers of transfers"
    if number == SCRATCH or state == "gradient or temporary":
        return state
    storage = graph.storages[number]
    if state == "resident":
        return storage.kind
    producer = storage.producer
    module = "" if producer is None else graph.ops[producer].module
    return ".".join(module.split(".")[:depth]) or "(root)"
