"""One step graph for a step that runs several compiled graphs, or one graph several times.

Forwards stand in the order of their calls, backwards in the opposite order. What one call hands to a later one is one
storage, found by the memory it lies in; each backward begins with ``recoup.outside``, which turns what came back from the
later calls into this call's gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from recoup.graph import Op, Ref, Save, StepGraph, Storage
from recoup.torch.compiled.joint import Joint

__all__ = ["Call", "Step", "combined", "site_in"]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a compiled graph in a step.

    Attributes:
        joint: its joint graph.
        prefix: what its sites begin with: the path of the module that owns the graph's parameters; '' for the whole model.
        turn: tells graphs with the same prefix apart.
        inputs: for each input of the graph the memory it lay in; 0 where that is not known.
        outputs: for each result of the forward the memory it lies in; 0 where that is not known.
    """

    joint: Joint
    prefix: str = ""
    turn: int = 0
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """The combined graph, and for each call the storage of the step that each of its own storages became."""

    graph: StepGraph
    storages: tuple[tuple[int, ...], ...]

    def choice_of(self, call: int, recompute: frozenset[int]) -> frozenset[int]:
        """What a choice for the step drops of one call's own storages."""
        return frozenset(v for v, whole in enumerate(self.storages[call]) if whole in recompute)


def site_in(site: str, prefix: str = "", turn: int = 0) -> str:
    """A site of one graph as a site of the step: below the module that owns the graph, its number as that of a call."""
    if not site:
        return site
    path, slash, rest = site.partition("/")
    inner = path.removeprefix("~")
    whole = ("~" if path != inner else "") + ".".join(part for part in (prefix, inner) if part)
    return f"{whole}{'@' + str(turn) if turn else ''}{slash}{rest}"


def combined(calls: Sequence[Call], *, standing_bytes: int = 0, name: str = "compiled") -> Step:
    """The step that makes these calls in this order and then runs their backward passes.

    Args:
        calls: in the order in which they ran.
        standing_bytes: what stands before the step and during all of it, parameters and inputs of the graphs included.
        name: what reports call the step.
    """
    return _Combining(calls, standing_bytes).step(name)


@dataclass(slots=True)
class _Life:
    """A storage of the step while it is put together."""

    source: Storage
    site: str
    producer: int | None
    dies: int
    unheld_dies: int
    stays: bool = False
    reads: list[int] = field(default_factory=list)


class _Combining:
    def __init__(self, calls: Sequence[Call], standing_bytes: int) -> None:
        self.calls = calls
        self.standing_bytes = standing_bytes
        self.outside = [call.joint.graph.backwards[0] for call in calls]
        self.ops: list[Op] = []
        self.lives: list[_Life] = []
        self.ids: list[list[int]] = []
        self.turns = self._turns()
        # Calls of one graph on the same parameters run the same compiled code: nothing of them can be decided apart.
        times = Counter((call.prefix, call.turn) for call in calls)
        self.shared = [times[call.prefix, call.turn] > 1 for call in calls]
        self.by_memory: dict[int, int] = {}
        # The first operation of each call's forward and backward in the step.
        self.starts: list[tuple[int, int]] = self._starts()
        self.count = sum(len(call.joint.graph.ops) for call in calls)

    def _turns(self) -> list[int]:
        """Each call's own number among those with its prefix; one that comes again has a number that no graph has."""
        taken = {(call.prefix, call.turn) for call in self.calls}
        seen: set[tuple[str, int]] = set()
        turns = []
        for call in self.calls:
            turn = call.turn
            while (call.prefix, turn) in seen or (turn != call.turn and (call.prefix, turn) in taken):
                turn += 1
            seen.add((call.prefix, turn))
            turns.append(turn)
        return turns

    def _starts(self) -> list[tuple[int, int]]:
        forwards, at = [], 0
        for outside in self.outside:
            forwards.append(at)
            at += outside
        backwards = [0] * len(self.calls)
        for number in reversed(range(len(self.calls))):
            backwards[number] = at
            at += len(self.calls[number].joint.graph.ops) - self.outside[number]
        return list(zip(forwards, backwards, strict=True))

    def _place(self, call: int, op: int) -> int:
        forward, backward = self.starts[call]
        return forward + op if op < self.outside[call] else backward + op - self.outside[call]

    def step(self, name: str) -> Step:
        for number, call in enumerate(self.calls):
            self._storages(number, call)
        for number in range(len(self.calls)):
            self._ops(number, forward=True)
        for number in reversed(range(len(self.calls))):
            self._ops(number, forward=False)
        self._reads()
        storages = [self._storage(v, life) for v, life in enumerate(self.lives)]
        storages += self._rest(storages)
        saves, order = self._saves(storages)
        graph = StepGraph(
            ops=tuple(self.ops),
            storages=tuple(storages),
            saves=saves,
            unpack_order=order,
            backwards=(self.starts[-1][1],),
            name=name,
            frontend="torch-compile",
            step_seconds=sum(op.seconds for op in self.ops),
        )
        return Step(graph, tuple(tuple(ids) for ids in self.ids))

    def _storages(self, number: int, call: Call) -> None:
        ids: list[int] = []
        graph = call.joint.graph
        memories = {v: memory for v, memory in zip(call.joint.inputs, call.inputs, strict=False) if v is not None}
        for storage in graph.storages:
            memory = memories.get(storage.id, 0)
            known = self.by_memory.get(memory) if memory else None
            if known is None:
                known = len(self.lives)
                self.lives.append(self._life(number, storage))
            ids.append(known)
            if memory:
                self.by_memory[memory] = known
        self.ids.append(ids)
        if len(call.joint.results) == len(call.outputs):
            self.by_memory |= {
                memory: ids[v] for v, memory in zip(call.joint.results, call.outputs, strict=True) if memory and v is not None
            }

    def _life(self, number: int, storage: Storage) -> _Life:
        graph = self.calls[number].joint.graph
        last = len(graph.ops)
        producer = None if storage.producer is None else self._place(number, storage.producer)
        site = site_in(storage.site, self.calls[number].prefix, self.turns[number])
        if self.shared[number] and not storage.replayable:
            storage = msgspec.structs.replace(storage, replayable="its graph is called more than once in a step on the same parameters")
        dies, unheld = (self._place(number, gap - 1) + 1 if gap < last else last for gap in (storage.dies, storage.unheld_dies))
        return _Life(storage, site, producer, dies, unheld, storage.dies >= last)

    def _ops(self, number: int, *, forward: bool) -> None:
        call, turn, outside = self.calls[number], self.turns[number], self.outside[number]
        ops = call.joint.graph.ops
        for op in ops[:outside] if forward else ops[outside:]:
            inputs, outputs = self._refs(number, op.inputs), self._refs(number, op.outputs)
            site, module = site_in(op.site, call.prefix, turn), site_in(f"{op.module}/", call.prefix).removesuffix("/")
            here = msgspec.structs.replace(op, id=len(self.ops), site=site, module=module, call=turn, inputs=inputs, outputs=outputs)
            self.ops.append(here)

    def _refs(self, number: int, refs: tuple[Ref, ...]) -> tuple[Ref, ...]:
        return tuple(msgspec.structs.replace(ref, storage=self.ids[number][ref.storage]) for ref in refs)

    def _reads(self) -> None:
        for op in self.ops:
            for ref in op.inputs:
                self.lives[ref.storage].reads.append(op.id)

    def _storage(self, v: int, life: _Life) -> Storage:
        source = life.source
        born = -1 if life.producer is None else life.producer
        dies = self._dies(v, life)
        unheld = dies if source.replayable else life.unheld_dies
        return msgspec.structs.replace(
            source, id=v, site=life.site, producer=life.producer, born=born, dies=dies, unheld_dies=min(unheld, dies)
        )

    def _dies(self, v: int, life: _Life) -> int:
        """When a storage is let go: with its last reader, or with the step if the user has it."""
        if life.producer is None:
            return self.count
        last = max([*life.reads, life.producer]) + 1
        if not life.stays:
            return life.dies
        owner, storage = next((number, ids.index(v)) for number, ids in enumerate(self.ids) if v in ids)
        if storage in self.calls[owner].joint.results and len({n for n, ids in enumerate(self.ids) if v in ids}) > 1:
            return last  # a later call took it over
        if life.source.kind == "gradient":
            return self.starts[owner][1] + len(self.calls[owner].joint.graph.ops) - self.outside[owner]
        if owner > 0 and storage in self.calls[owner].joint.input_gradients:
            return self.starts[owner - 1][1] + 1  # autograd hands it to the call before
        return self.count

    def _rest(self, storages: list[Storage]) -> list[Storage]:
        """What stands beside the graphs' own inputs, as one storage."""
        left = self.standing_bytes - sum(storage.bytes for storage in storages if storage.born < 0)
        if left <= 0:
            return []
        return [Storage(id=len(storages), bytes=left, kind="outside", site="", dies=self.count, unheld_dies=self.count)]

    def _saves(self, storages: list[Storage]) -> tuple[tuple[Save, ...], tuple[int, ...]]:
        saves: list[Save] = []
        unpacked: list[tuple[int, int]] = []
        first = self.starts[-1][1]
        for v, life in enumerate(self.lives):
            later = tuple(dict.fromkeys(op for op in life.reads if op >= first and self.ops[op].target != "recoup.outside"))
            if life.producer is None or life.producer >= first or not later:
                continue
            unpacked.extend((op, len(saves)) for op in later)
            saves.append(Save(ref=self._ref(v, life), packed_at=life.producer + 1, unpacked_at=later, released_at=storages[v].dies))
        return tuple(saves), tuple(save for _, save in sorted(unpacked))

    def _ref(self, v: int, life: _Life) -> Ref:
        assert life.producer is not None
        return next(ref for ref in self.ops[life.producer].outputs if ref.storage == v)
