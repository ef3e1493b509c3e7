"""The backward pass with replays, as the executor runs it.

Unpack events go in time order. Unpacking a dropped storage replays, in the recorded order, what it needs and what is
not *held* already. A copy that a replay makes is held, or it is *transient* and goes with its last reader in that
replay, to be rebuilt when it is needed again:

- What was asked for is held. So is anything whose plan does not say otherwise.
- A storage with ``held_from[v] = u`` is held only once the pass has asked for ``u``.

A held copy stays until nothing in the pass may ask for it any more: its own unpack events, and the operations that
read it as long as one of their results is still to be made and held (a reference count over the recipe; it never
rises within a pass). One that was unpacked lives on until its save is released.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    released: int = -1


@dataclass(slots=True)
class Replayed:
    """What the replays of a step did.

    ``ops`` are the replayed operations in order; replay ``q`` ran for unpack event ``events[q]``, at gap ``gaps[q]``, with
    ``live[q]`` bytes of copies (its own fresh outputs and its scratch included).
    """

    ops: list[int] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    gaps: list[int] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)


def run_backward(index: Replays, recompute: frozenset[int], held_from: Mapping[int, int]) -> Replayed:
    """Replay the whole step's dropped storages; returns what ran and which copies lived when."""
    done = Replayed()
    run = _Run(index, recompute, held_from, done)
    events = ((number, event) for number, event in enumerate(index.events) if event.storage in recompute)
    for _, grouped in groupby(events, key=lambda item: item[1].backward):
        batch = list(grouped)
        run.begin([event for _, event in batch])
        for number, event in batch:
            run.unpack(number, event)
    run.begin([])
    return done


class _Run:
    """The executor's state: held copies, what may still be asked for, copies that autograd still holds."""

    def __init__(self, index: Replays, recompute: frozenset[int], held_from: Mapping[int, int], done: Replayed) -> None:
        self.index, self.recompute, self.held_from, self.done = index, recompute, held_from, done
        self.held: dict[int, Copy] = {}
        # How many unpack events and active operations may still ask for each dropped storage.
        self.asks: dict[int, int] = {}
        # For how many storages each operation is still to be replayed; at zero it asks for nothing more.
        self.pending: dict[int, int] = {}
        self.reached: set[int] = set()
        # Held storages that were made beside other results, with the writes in place that have yet to run.
        self.unfinished: dict[int, list[int]] = {}
        # Found when they are first asked for: the dropped storages that an operation reads, and that a storage is made from.
        self.dropped_reads: dict[int, tuple[int, ...]] = {}
        self.dropped_inputs: dict[int, tuple[int, ...]] = {}
        self.live = 0
        self.gap = 0
        self.number = -1
        # Copies let go of that a save holds: bytes to free, by gap.
        self.expiring: dict[int, int] = {}

    def begin(self, events: list[Event]) -> None:
        """Enter a backward pass: let go of everything, count anew."""
        if events:
            self._advance(events[0].gap)
        for v in list(self.held):
            self._let_go(v)
        self.reached = set()
        self.unfinished = {}
        self.asks, self.pending = {}, {}
        for event in events:
            self.asks[event.storage] = self.asks.get(event.storage, 0) + 1
        for v in self.index.needed(set(self.asks), self.recompute):
            for op in self.index.ops_of[v]:
                self.pending[op] = self.pending.get(op, 0) + 1
        for op in self.pending:
            for u in self._read(op):
                self.asks[u] = self.asks.get(u, 0) + 1

    def unpack(self, number: int, event: Event) -> None:
        """One unpack event of a dropped storage."""
        self._advance(event.gap)
        self.number = number
        v = event.storage
        self.reached.add(v)
        if v not in self.held or v in self.unfinished:
            self._rebuild(v)
        if v in self.held:
            copy = self.held[v]
            copy.released = max(copy.released, event.released_at)
        self._no_longer_ask([v])

    def _advance(self, gap: int) -> None:
        self.gap = gap
        if self.expiring:
            for until in [until for until in self.expiring if until <= gap]:
                self.live -= self.expiring.pop(until)

    def _read(self, op: int) -> tuple[int, ...]:
        """The dropped storages that an operation reads."""
        found = self.dropped_reads.get(op)
        if found is None:
            found = self.dropped_reads[op] = tuple(u for u in self.index.foreign[op] if u in self.recompute)
        return found

    def _needs(self, v: int) -> tuple[int, ...]:
        """The dropped storages that a dropped one is made from."""
        found = self.dropped_inputs.get(v)
        if found is None:
            found = self.dropped_inputs[v] = tuple(u for u in self.index.inputs_of[v] if u in self.recompute)
        return found

    def _rebuild(self, v: int) -> None:
        wanted = self._wanted(v)
        if self.unfinished:
            todo = sorted({op for u in wanted for op in self._missing(u)})
        else:
            todo = sorted({op for u in wanted for op in self.index.ops_of[u]})
        beside = self._beside(todo, wanted)
        held, held_from, reached = self.held, self.held_from, self.reached
        holding = {u for u in (*wanted, *beside) if u == v or u in held or held_from.get(u, v) in reached}
        # Transient copies go with their last reader in this replay.
        reads: dict[int, int] = {}
        if passing := wanted - holding:
            for op in todo:
                for u in self._read(op):
                    if u in passing:
                        reads[u] = reads.get(u, 0) + 1
        if beside:
            ran = set(todo)
            for u in beside:
                left = [op for op in self.index.ops_of[u] if op not in ran]
                if u in holding and left:
                    self.unfinished[u] = left
        self._replay(todo, holding, reads)
        for u in wanted if self.unfinished else ():
            self.unfinished.pop(u, None)

    def _missing(self, v: int) -> Sequence[int]:
        """The operations that have yet to run to have a storage."""
        return self.unfinished.get(v, ()) if v in self.held else self.index.ops_of[v]

    def _wanted(self, v: int) -> set[int]:
        wanted, stack, held, unfinished = {v}, [v], self.held, self.unfinished
        while stack:
            w = stack.pop()
            needs = (u for op in unfinished[w] for u in self.index.reads[op] if u in self.recompute) if w in unfinished else self._needs(w)
            for u in needs:
                if u not in wanted and (u not in held or u in unfinished):
                    wanted.add(u)
                    stack.append(u)
        return wanted

    def _beside(self, todo: list[int], wanted: set[int]) -> list[int]:
        """Other dropped storages that these operations make, which may be asked for later."""
        made = (u for op in todo if op in self.index.joint for u in self.index.produced[op])
        return [u for u in made if u in self.recompute and u not in wanted and u not in self.held and self.asks.get(u, 0) > 0]

    def _replay(self, todo: list[int], holding: set[int], reads: dict[int, int]) -> None:
        """Run these operations; ``reads`` says of each transient copy how often it is still to be read."""
        index, done, held, gap = self.index, self.done, self.held, self.gap
        produced, made_bytes, scratch = index.produced, index.produced_bytes, index.scratch
        transient: dict[int, Copy] = {}
        for number, op in enumerate(todo, len(done.ops)):
            self.live += made_bytes[op]
            done.ops.append(op)
            done.events.append(self.number)
            done.gaps.append(gap)
            done.live.append(self.live + scratch.item(op))
            for v in produced[op]:
                copy = Copy(v, gap, number)
                done.copies.append(copy)
                if v in holding:
                    held[v] = copy
                elif reads.get(v, 0):
                    transient[v] = copy
                else:
                    self._end(copy)
            for v in index.own[op]:
                if v in holding and op in index.ops_of[v]:
                    self._no_longer_ask(self._made(op))
            for u in self._read(op) if reads else ():
                if u in reads:
                    reads[u] -= 1
                    if not reads[u] and u in transient:
                        self._end(transient.pop(u))

    def _made(self, op: int) -> Sequence[int]:
        """An operation has been replayed for one more storage that is held; what it asks for no longer."""
        self.pending[op] -= 1
        return () if self.pending[op] else self._read(op)

    def _no_longer_ask(self, storages: Sequence[int]) -> None:
        """One reason less to have these storages, and where it was the last one, to have what they are rebuilt from."""
        left = list(storages)
        while left:
            v = left.pop()
            self.asks[v] -= 1
            if self.asks[v]:
                continue
            for op in self._missing(v):
                left.extend(self._made(op))
            self.unfinished.pop(v, None)
            if v in self.held:
                self._let_go(v)

    def _let_go(self, v: int) -> None:
        copy = self.held.pop(v)
        if copy.released > self.gap:
            copy.until = copy.released
            self.expiring[copy.released] = self.expiring.get(copy.released, 0) + self.index.bytes[v]
        else:
            self._end(copy)

    def _end(self, copy: Copy) -> None:
        copy.last, copy.until = len(self.done.ops), self.gap
        self.live -= self.index.bytes[copy.storage]
