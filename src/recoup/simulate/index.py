"""What a step graph says about rebuilding, indexed once per graph.

``ops(v)`` of a storage are its producer and all its in-place writes, in order; an operation's inputs, seen from v,
are the storages it reads except v itself. An *event* is one unpacking of one save, at one gap; events come in the
order in which the backward unpacked. A *pass* is one backward pass.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from recoup.graph import StepGraph

__all__ = ["Event", "Replays", "replays"]

_CACHE_KEY = "_recoup_replays"


@dataclass(frozen=True, slots=True)
class Event:
    """One unpacking: at which gap, of which save and storage, in which backward pass, held until which gap."""

    gap: int
    save: int
    storage: int
    backward: int
    released_at: int


class Replays:
    """The index of one graph: immutable after construction; get it with :func:`replays`."""

    def __init__(self, graph: StepGraph) -> None:
        storages, ops = graph.storages, graph.ops
        self.graph = graph
        self.count = len(ops)
        self.bytes: list[int] = [storage.bytes for storage in storages]
        self.size: NDArray[np.int64] = np.array(self.bytes, dtype=np.int64)
        self.born: NDArray[np.int64] = np.array([max(storage.born, -1) for storage in storages], dtype=np.int64)
        self.dies: NDArray[np.int64] = np.array([min(storage.dies, self.count) for storage in storages], dtype=np.int64)
        self.unheld: NDArray[np.int64] = np.array([min(storage.unheld_dies, self.count) for storage in storages], dtype=np.int64)
        self.scratch: NDArray[np.int64] = np.array([op.scratch_bytes for op in ops], dtype=np.int64)
        self.reads: list[tuple[int, ...]] = [tuple(dict.fromkeys(ref.storage for ref in op.inputs)) for op in ops]
        self.ops_of: list[tuple[int, ...]] = [
            () if storage.producer is None else tuple(dict.fromkeys((storage.producer, *storage.writes))) for storage in storages
        ]
        self.is_activation: list[bool] = [storage.kind == "activation" for storage in storages]
        self._index_products()
        self._index_saves()
        self._index_events()
        self._index_frames()

    def _index_products(self) -> None:
        produced: list[list[int]] = [[] for _ in range(self.count)]
        makers: list[set[int]] = [set(op.mutates) for op in self.graph.ops]
        for storage in self.graph.storages:
            if storage.producer is not None:
                produced[storage.producer].append(storage.id)
            for op in self.ops_of[storage.id]:
                makers[op].add(storage.id)
        self.produced: list[tuple[int, ...]] = [tuple(ids) for ids in produced]
        self.produced_bytes: list[int] = [sum(self.bytes[v] for v in ids) for ids in produced]
        # What an operation makes or writes is its own: it is not one of the inputs that must be there before.
        self.own: list[frozenset[int]] = [frozenset(ids) for ids in makers]
        # The operations that make or write several storages.
        self.joint: frozenset[int] = frozenset(op for op, ids in enumerate(makers) if len(ids) > 1)
        self.foreign: list[tuple[int, ...]] = [tuple(v for v in self.reads[o] if v not in self.own[o]) for o in range(self.count)]
        self.inputs_of: list[tuple[int, ...]] = [
            tuple(dict.fromkeys(u for op in ops for u in self.reads[op] if u != v)) for v, ops in enumerate(self.ops_of)
        ]

    def _index_saves(self) -> None:
        self.saves_of: list[list[int]] = [[] for _ in self.graph.storages]
        # The gap at which the last save of a storage is released; -1 where nothing saves it.
        self.released: list[int] = [-1] * len(self.graph.storages)
        for number, save in enumerate(self.graph.saves):
            self.saves_of[save.ref.storage].append(number)
            self.released[save.ref.storage] = max(self.released[save.ref.storage], save.released_at)

    def _index_events(self) -> None:
        starts = sorted(self.graph.backwards)
        seen: dict[int, int] = {}
        events: list[Event] = []
        for number in self.graph.unpack_order:
            save = self.graph.saves[number]
            turn = seen.get(number, 0)
            seen[number] = turn + 1
            gap = save.unpacked_at[turn]
            events.append(Event(gap, number, save.ref.storage, max(bisect_right(starts, gap) - 1, 0), save.released_at))
        events.sort(key=lambda event: event.gap)
        self.events: tuple[Event, ...] = tuple(events)
        self.unpacked: frozenset[int] = frozenset(event.storage for event in events)

    def _index_frames(self) -> None:
        self.frame_of: list[tuple[str, int]] = [(op.module, op.call) for op in self.graph.ops]
        self.frame_ops: dict[tuple[str, int], int] = {}
        for op in self.graph.ops:
            if op.phase == "forward":
                self.frame_ops[(op.module, op.call)] = self.frame_ops.get((op.module, op.call), 0) + 1

    @property
    def base_seconds(self) -> float:
        """Time of the unplanned step."""
        return self.graph.step_seconds or sum(op.seconds for op in self.graph.ops)

    @cached_property
    def until_seconds(self) -> NDArray[np.float64]:
        """Seconds of the unplanned step until each gap, by the operations' own shares of it."""
        seconds = np.array([op.seconds for op in self.graph.ops])
        total = float(seconds.sum())
        return np.concatenate([[0.0], np.cumsum(seconds * (self.base_seconds / total if total else 1.0))])

    @property
    def turn(self) -> int:
        """The gap of the first unpacking, where the backward begins; the end of the step if there is none."""
        return self.events[0].gap if self.events else self.count

    def op_seconds(self, overhead_seconds: float) -> list[float]:
        """For each operation what replaying it takes, the executor's overhead included."""
        return [op.seconds + overhead_seconds for op in self.graph.ops]

    def closure_ops(self, recompute: frozenset[int]) -> set[int]:
        """The operations that rebuild the dropped storages, transitively (which are just the ``ops`` of each)."""
        return {op for v in recompute for op in self.ops_of[v]}

    def needed(self, roots: set[int], recompute: frozenset[int]) -> set[int]:
        """The dropped storages that rebuilding ``roots`` asks for, roots included."""
        found, stack = set(roots), list(roots)
        while stack:
            for u in self.inputs_of[stack.pop()]:
                if u in recompute and u not in found:
                    found.add(u)
                    stack.append(u)
        return found


def replays(graph: StepGraph) -> Replays:
    """The index of a graph, made on first use and kept on the graph itself, as its cached properties are."""
    index = graph.__dict__.get(_CACHE_KEY)
    if index is None:
        index = graph.__dict__[_CACHE_KEY] = Replays(graph)
    return index
