"""The backward pass with replays, as the executor runs it.

Unpack events go in time order. Within one backward pass a memo holds rebuilt copies, and ``left`` counts how often
each dropped storage is still needed: once for each of its unpack events, and once for each operation of the pass's
replay closure that reads it from outside. Unpacking a dropped storage replays what is missing from the memo in the
recorded order. A copy leaves the memo at its last use; one that was unpacked lives on until its save is released.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

from recoup.simulate.index import Event, Replays

__all__ = ["NEVER", "Copy", "Replayed", "run_backward"]

NEVER = 1 << 60


@dataclass(slots=True)
class Copy:
    """A rebuilt storage, made at gap ``gap`` by replay ``first``, gone at gap ``until``.

    ``last`` is the first replay that no longer finds it, NEVER where it goes between two recorded operations.
    """

    storage: int
    gap: int
    first: int
    last: int = NEVER
    until: int = NEVER
    held: int = -1


@dataclass(slots=True)
class Replayed:
    """What the replays of a step did.

    ``ops`` are the replayed operations in order; replay ``q`` ran at gap ``gaps[q]`` with ``live[q]`` bytes of copies
    (its own fresh outputs and its scratch included).
    """

    ops: list[int] = field(default_factory=list)
    gaps: list[int] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)


def run_backward(index: Replays, recompute: frozenset[int]) -> Replayed:
    """Replay the whole step's dropped storages; returns what ran and which copies lived when."""
    done = Replayed()
    events = [event for event in index.events if event.storage in recompute]
    run = _Run(index, recompute, done)
    for _, grouped in groupby(events, key=lambda event: event.backward):
        batch = list(grouped)
        run.begin(batch)
        for event in batch:
            run.unpack(event)
    run.begin([])
    return done


class _Run:
    """The executor's state: memo, use counts, copies that autograd still holds."""

    def __init__(self, index: Replays, recompute: frozenset[int], done: Replayed) -> None:
        self.index, self.recompute, self.done = index, recompute, done
        self.memo: dict[int, Copy] = {}
        self.left: dict[int, int] = {}
        self.live = 0
        self.gap = 0
        # Copies out of the memo that a save holds: bytes to free, by gap.
        self.expiring: dict[int, int] = {}

    def begin(self, events: list[Event]) -> None:
        """Enter a backward pass: clear the memo, count the uses anew."""
        if events:
            self._advance(events[0].gap)
        for v in list(self.memo):
            self._leave(v)
        left: dict[int, int] = {}
        for event in events:
            left[event.storage] = left.get(event.storage, 0) + 1
        ops = {op for v in self.index.needed(set(left), self.recompute) for op in self.index.ops_of[v]}
        for op in ops:
            for u in self.index.foreign[op]:
                if u in self.recompute:
                    left[u] = left.get(u, 0) + 1
        self.left = left

    def unpack(self, event: Event) -> None:
        """One unpack event of a dropped storage."""
        self._advance(event.gap)
        v = event.storage
        if v not in self.memo:
            for op in self._todo(v):
                self._replay(op)
        copy = self.memo.get(v)
        if copy is not None:
            copy.held = max(copy.held, event.released_at)
        self._used(v)

    def _advance(self, gap: int) -> None:
        self.gap = gap
        for until in [until for until in self.expiring if until <= gap]:
            self.live -= self.expiring.pop(until)

    def _todo(self, v: int) -> list[int]:
        found, stack = {v}, [v]
        while stack:
            for u in self.index.inputs_of[stack.pop()]:
                if u in self.recompute and u not in found and u not in self.memo:
                    found.add(u)
                    stack.append(u)
        return sorted({op for u in found for op in self.index.ops_of[u]})

    def _replay(self, op: int) -> None:
        index, done, memo = self.index, self.done, self.memo
        number = len(done.ops)
        self.live += index.produced_bytes[op]
        done.ops.append(op)
        done.gaps.append(self.gap)
        done.live.append(self.live + int(index.scratch[op]))
        for v in index.produced[op]:
            copy = Copy(v, self.gap, number)
            done.copies.append(copy)
            if v in self.recompute and self.left.get(v, 0) > 0 and v not in memo:
                memo[v] = copy
            else:
                copy.last, copy.until = number + 1, self.gap
                self.live -= index.bytes[v]
        for u in index.foreign[op]:
            if u in self.recompute:
                self._used(u)

    def _used(self, v: int) -> None:
        self.left[v] = self.left.get(v, 0) - 1
        if self.left[v] == 0 and v in self.memo:
            self._leave(v)

    def _leave(self, v: int) -> None:
        copy = self.memo.pop(v)
        if copy.held > self.gap:
            copy.until = copy.held
            self.expiring[copy.held] = self.expiring.get(copy.held, 0) + self.index.bytes[v]
        else:
            copy.last, copy.until = len(self.done.ops), self.gap
            self.live -= self.index.bytes[v]
