"""When a storage occupies memory if it is kept, and when if it is recomputed.

All windows are true of every plan: memory that any plan with that decision must hold at those operations. The
estimates that a simulation teaches beyond them are kept apart, in the rows of ``recoup.solve.program``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recoup.plan import Capabilities
from recoup.simulate.index import Replays
from recoup.simulate.judge import alive_bytes
from recoup.solve.choice import droppable

__all__ = ["Windows", "rebuilt_spans", "windows"]

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """The decisions of a step and their memory.

    Attributes:
        dropping: storages that the executor may drop.
        needed: those of them that the backward unpacks: kept or recomputed.
        optional: activations that a plan may hold for a replay, or leave: not unpacked by the backward.
        held: for each decided storage the operations [start, end) at which keeping it costs its bytes.
        rebuilt: for each needed storage the operations at which recomputing it costs its bytes, one span for each pass.
        base: bytes at each operation that no decision changes, scratch included.
        base_across: bytes across each gap that no decision changes.
    """

    dropping: frozenset[int]
    needed: frozenset[int]
    optional: frozenset[int]
    held: dict[int, Span]
    rebuilt: dict[int, tuple[Span, ...]]
    base: NDArray[np.int64]
    base_across: NDArray[np.int64]


def windows(index: Replays, executor: Capabilities) -> Windows:
    """The windows of one step for one executor."""
    dropping = droppable(index, executor)
    needed = frozenset(v for v in dropping if v in index.unpacked)
    idle = frozenset(v for v in dropping if v not in needed and index.saves_of[v])
    unsaved = frozenset(
        storage.id
        for storage in index.graph.storages
        if storage.kind == "activation" and not index.saves_of[storage.id] and _is_forward(index, storage.producer)
    )
    held = {v: (int(index.unheld[v]), int(index.dies[v])) for v in needed | idle}
    least = _least_holds(index, dropping)
    held.update({u: (int(index.dies[u]), least[u]) for u in unsaved if u in least and least[u] > index.dies[u]})
    ends = index.dies.copy()
    for v in needed | idle:
        ends[v] = index.unheld[v]
    during, across = alive_bytes(index, ends)
    return Windows(dropping, needed, idle | unsaved, held, rebuilt_spans(index, needed), during + index.scratch, across)


def _is_forward(index: Replays, producer: int | None) -> bool:
    return producer is not None and index.graph.ops[producer].phase == "forward"


def _least_holds(index: Replays, dropping: frozenset[int]) -> dict[int, int]:
    """For each storage the earliest gap until which a replay that reads it would hold it."""
    least: dict[int, int] = {}
    roots = sorted((v for v in dropping if index.saves_of[v]), key=lambda v: index.released[v])
    # Earliest releases first: whoever reaches a storage first gives its least hold. A saved storage that is dropped
    # is held by its own saves, so that the walk does not go on through it with an earlier release than its own.
    for root in roots:
        stack, seen = [root], {root}
        while stack:
            for u in index.inputs_of[stack.pop()]:
                if u in least or u in seen:
                    continue
                seen.add(u)
                least[u] = min(index.released[root], index.count)
                if u in dropping and not index.saves_of[u]:
                    stack.append(u)
    return least


def rebuilt_spans(index: Replays, needed: frozenset[int]) -> dict[int, tuple[Span, ...]]:
    """For each storage the operations at which its copies stand at least, one span for each backward pass."""
    spans: dict[tuple[int, int], Span] = {}
    for event in index.events:
        if event.storage in needed:
            start, end = spans.get((event.storage, event.backward), (event.gap, 0))
            spans[(event.storage, event.backward)] = (min(start, event.gap), max(end, event.released_at))
    rebuilt: dict[int, list[Span]] = {}
    for (v, _), span in spans.items():
        rebuilt.setdefault(v, []).append(span)
    return {v: tuple(found) for v, found in rebuilt.items()}
