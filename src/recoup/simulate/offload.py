"""Offloaded storages: when they leave memory, and how the backward asks for them.

Rules, the same for the simulator and the executors:

1. A storage is put on its way out when autograd first saves it. At most ``write_window_bytes`` (or one storage) are on their way at
   once: a put waits for room. So what is certain, whatever the link does, is that a storage has left when later puts needed its room.
2. It comes back by a *fetch*, an operation that reads nothing and makes the storage. A fetch is issued when it is asked for, or ahead of
   that: after every unpacking, in the reverse order of the puts, as long as ``read_window_bytes`` (or one storage) have been fetched
   and not asked for yet.
3. What has not left yet when it is asked for is taken from memory, once its write has ended.

A fetch has the number ``v - len(storages)``: below all operations, so that fetches come first in a rebuild.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from recoup.cost import OffloadLink
from recoup.graph import StepGraph
from recoup.plan import Capabilities
from recoup.simulate.index import Replays

__all__ = ["Offload", "forced_out", "offload_violations", "offloadable", "puts_of", "waiting_bytes", "with_fetches"]

_CACHE_KEY = "_recoup_offloadable"


@dataclass(frozen=True, slots=True)
class Offload:
    """What is offloaded, and how it moves.

    Attributes:
        storages: ids of the offloaded storages.
        link: where to, at which figures.
        write_window_bytes: at most so many bytes, or one storage, are on their way out at once.
        read_window_bytes: at most so many bytes, or one storage, are fetched ahead of their use.
        limit_bytes: what may wait there at once, None for no limit; a budget that whoever chose this has kept to.
    """

    storages: frozenset[int]
    link: OffloadLink
    write_window_bytes: int
    read_window_bytes: int
    limit_bytes: int | None = None


def puts_of(graph: StepGraph, storages: frozenset[int]) -> list[tuple[int, int]]:
    """When each storage is put on its way, as (gap, storage), in order."""
    first: dict[int, int] = {}
    for save in graph.saves:
        if save.ref.storage in storages:
            first.setdefault(save.ref.storage, save.packed_at)
    return [(gap, v) for v, gap in first.items()]


def waiting_bytes(index: Replays, link: OffloadLink, storages: Iterable[int]) -> int:
    """What these storages take at the end of a link."""
    return sum(link.waiting_bytes(index.bytes[v]) for v in storages)


def forced_out(index: Replays, offload: Offload) -> dict[int, int]:
    """The gap at which each storage has left memory for certain; storages that nothing forces out are not named."""
    forced: dict[int, int] = {}
    on_the_way: deque[int] = deque()
    total = 0
    for gap, v in puts_of(index.graph, offload.storages):
        count = index.bytes[v]
        while on_the_way and total + count > offload.write_window_bytes:
            oldest = on_the_way.popleft()
            total -= index.bytes[oldest]
            forced[oldest] = gap
        on_the_way.append(v)
        total += count
    return forced


def with_fetches(index: Replays, storages: frozenset[int]) -> Replays:
    """The index in which these storages come back by a fetch instead of by replays."""
    if not storages:
        return index
    total = len(index.bytes)
    found = copy.copy(index)
    found.ops_of = list(index.ops_of)
    found.inputs_of = list(index.inputs_of)
    empty: list[tuple[int, ...]] = [()] * total
    found.reads, found.foreign = [*index.reads, *empty], [*index.foreign, *empty]
    found.own = [*index.own, *([frozenset()] * total)]
    found.produced, found.produced_bytes = [*index.produced, *empty], [*index.produced_bytes, *([0] * total)]
    found.scratch = np.concatenate([index.scratch, np.zeros(total, dtype=np.int64)])
    for v in storages:
        fetch = v - total
        found.ops_of[v], found.inputs_of[v] = (fetch,), ()
        found.own[fetch], found.produced[fetch], found.produced_bytes[fetch] = frozenset((v,)), (v,), index.bytes[v]
    return found


def offloadable(index: Replays) -> frozenset[int]:
    """The storages that executors can offload, each looked at by itself."""
    found: frozenset[int] | None = index.graph.__dict__.get(_CACHE_KEY)
    if found is None:
        found = frozenset(storage.id for storage in index.graph.storages if not _refusal(index, storage.id))
        index.graph.__dict__[_CACHE_KEY] = found
    return found


def offload_violations(index: Replays, offload: Offload, recompute: frozenset[int], executor: Capabilities) -> list[str]:
    """What the executor cannot run of this, one sentence each."""
    graph, found = index.graph, []
    if offload.link.target not in executor.offload_targets:
        found.append(f"the {executor.name} gear cannot offload to {offload.link.target}")
    if graph.root_calls > 1:
        found.append(f"a step that calls the model {graph.root_calls} times cannot be offloaded; recompute instead")
    for v in sorted(offload.storages):
        if not 0 <= v < len(graph.storages):
            found.append(f"storage {v} is not in the step {graph.name!r}")
            continue
        name = graph.storages[v].site or f"storage {v}"
        if v in recompute:
            found.append(f"{name} is both recomputed and offloaded")
        elif refusal := _refusal(index, v):
            found.append(f"{name} cannot be offloaded: {refusal}")
    return found


def _refusal(index: Replays, v: int) -> str:
    """Why a storage cannot be offloaded, '' if it can."""
    graph, storage = index.graph, index.graph.storages[v]
    if storage.kind != "activation" or storage.producer is None:
        return f"it is a {storage.kind}, not an activation that the step makes"
    if graph.ops[storage.producer].phase != "forward" or graph.ops[storage.producer].module == "~":
        return "no module of the model made it in the forward"
    if storage.movable:
        return storage.movable
    if v not in index.unpacked:
        return "the backward never asks autograd for it"
    saves = [graph.saves[number] for number in index.saves_of[v]]
    if len({save.ref.version for save in saves}) > 1 or any(op >= saves[0].packed_at for op in storage.writes):
        return "it is written in place after autograd saved it"
    if any(graph.ops[max(save.packed_at - 1, 0)].module == "~" for save in saves):
        return "it is also saved outside of the model"
    return ""
