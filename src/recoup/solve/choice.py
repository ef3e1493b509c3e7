"""Making a set of dropped storages one that an executor can run and that holds nothing idle."""

from __future__ import annotations

from recoup.plan import Capabilities
from recoup.simulate.index import Replays

__all__ = ["droppable", "prune", "runnable"]


_CACHE_KEY = "_recoup_droppable"


def droppable(index: Replays, executor: Capabilities) -> frozenset[int]:
    """The storages that this executor may drop, each looked at by itself."""
    cache: dict[Capabilities, frozenset[int]] = index.graph.__dict__.setdefault(_CACHE_KEY, {})
    if executor not in cache:
        cache[executor] = frozenset(storage.id for storage in index.graph.storages if _droppable(index, storage.id, executor))
    return cache[executor]


def _droppable(index: Replays, v: int, executor: Capabilities) -> bool:
    graph, storage = index.graph, index.graph.storages[v]
    if storage.kind != "activation" or storage.replayable or storage.producer is None:
        return False
    if not executor.replays_random and any("random" in graph.ops[op].flags for op in index.ops_of[v]):
        return False
    return executor.keeps_unsaved or not any(graph.storages[u].kind == "outside" and not index.saves_of[u] for u in index.inputs_of[v])


def runnable(index: Replays, recompute: frozenset[int], executor: Capabilities) -> frozenset[int]:
    """The choice with those storages kept after all that the executor cannot drop, and with the useless ones left out."""
    chosen = set(recompute & droppable(index, executor))
    if not executor.keeps_unsaved:
        while refused := {v for v in chosen if any(_unheld(index, u, chosen) for u in index.inputs_of[v])}:
            chosen -= refused
    return prune(index, frozenset(chosen))


def _unheld(index: Replays, u: int, chosen: set[int]) -> bool:
    return index.is_activation[u] and u not in chosen and not index.saves_of[u]


def prune(index: Replays, recompute: frozenset[int]) -> frozenset[int]:
    """The choice without what nobody asks for: dropped storages that neither a save nor a replay needs."""
    return frozenset(index.needed({v for v in recompute if index.saves_of[v]}, recompute))
