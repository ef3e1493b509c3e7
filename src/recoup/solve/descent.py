"""Local search on simulated plans: keep more where there is room, drop more where there is none."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from recoup.plan import Capabilities
from recoup.simulate.index import Replays
from recoup.simulate.judge import Run
from recoup.solve.choice import runnable

__all__ = ["Judged", "judge", "keep_more", "lower_peak"]


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """A choice with its simulated peak and time."""

    recompute: frozenset[int]
    peak_bytes: int
    step_seconds: float
    run: Run


def judge(index: Replays, recompute: frozenset[int], executor: Capabilities) -> Judged:
    """The choice, made runnable, and simulated."""
    chosen = runnable(index, recompute, executor)
    run = Run(index, chosen)
    return Judged(chosen, int(run.bytes_at.max(initial=0)), run.seconds(executor), run)


def keep_more(index: Replays, start: Judged, executor: Capabilities, budget: int, seconds: float, tries: int = 300) -> Judged:
    """Keep dropped storages after all, dearest first, while the simulated peak stays within the budget; stops after ``seconds``."""
    best, deadline = start, time.perf_counter() + seconds
    for v in sorted(start.recompute, key=lambda v: (-_saved_seconds(index, v), v)):
        if v not in best.recompute or not _room(index, best, v, budget):
            continue
        tries -= 1
        if tries < 0 or time.perf_counter() > deadline:
            break
        found = judge(index, best.recompute - {v}, executor)
        if found.peak_bytes <= budget and found.step_seconds < best.step_seconds:
            best = found
    return best


def _saved_seconds(index: Replays, v: int) -> float:
    return sum(index.graph.ops[op].seconds for op in index.ops_of[v])


def _room(index: Replays, best: Judged, v: int, budget: int) -> bool:
    """Whether the bytes of a storage fit while it is held and no copy of it is alive yet."""
    start = int(index.unheld[v])
    made = min((copy.gap for copy in best.run.replayed.copies if copy.storage == v), default=index.count)
    end = min(int(index.dies[v]), made) if index.saves_of[v] else made
    if end <= start:
        return True
    return int(best.run.bytes_at[start:end].max(initial=0)) + index.bytes[v] <= budget


def lower_peak(index: Replays, start: Judged, executor: Capabilities, dropping: frozenset[int], tries: int = 200) -> Judged:
    """Drop what stands at the peak, or keep what is rebuilt there, as long as the peak falls."""
    best = start
    while tries > 0:
        better = None
        for choice in _moves(index, best, dropping):
            tries -= 1
            found = judge(index, choice, executor)
            if (found.peak_bytes, found.step_seconds) < (best.peak_bytes, best.step_seconds) and found.recompute != best.recompute:
                better = found
                break
            if tries <= 0:
                break
        if better is None:
            break
        best = better
    return best


def _moves(index: Replays, best: Judged, dropping: frozenset[int]) -> list[frozenset[int]]:
    at = int(np.argmax(best.run.bytes_at))
    recorded, copies = best.run.live(best.run.moment(at))
    biggest = sorted({v for v in recorded if v in dropping and v not in best.recompute}, key=lambda v: (-index.bytes[v], v))
    moves = [best.recompute | {v} for v in biggest[:24]]
    # Dropping one storage may only pay together with what it is made from.
    moves.extend(best.recompute | _cone(index, v, dropping) for v in biggest[:8])
    rebuilt = sorted({v for v in copies if v in best.recompute}, key=lambda v: (-index.bytes[v], v))
    moves.extend(best.recompute - {v} for v in rebuilt[:24])
    return moves


def _cone(index: Replays, v: int, dropping: frozenset[int]) -> frozenset[int]:
    return frozenset({v, *(u for u in index.inputs_of[v] if u in dropping and not index.saves_of[u])})
