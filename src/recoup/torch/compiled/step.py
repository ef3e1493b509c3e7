"""One step graph for a step that runs several compiled graphs, or one graph several times.

Forwards stand in the order of their calls, backwards in the opposite order. What one call hands to a later one is one
storage, found by the memory it lies in, and so is its gradient, which the later call's backward hands back. Each backward
begins with ``recoup.outside``, for what else turns the call's results into their gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from recoup.graph import Op, Ref, Save, StepGraph, Storage
from recoup.torch.compiled.joint import Joint

__all__ = ["Call", "combined", "site_in"]

_SHARED = "its graph is called more than once in a step on the same parameters"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a compiled graph in a step.

    Attributes:
        joint: its joint graph.
        prefix: what its sites begin with: the path of the module that owns the graph's parameters; '' for the whole model.
        turn: tells graphs with the same prefix apart.
        inputs: for each input of the graph the memory it lay in; 0 where that is not known.
        outputs: for each result of the forward the memory it lies in; 0 where that is not known.
        held: for each result whether it outlives the backward; all do where it is empty.
    """

    joint: Joint
    prefix: str = ""
    turn: int = 0
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    held: tuple[bool, ...] = ()


def site_in(site: str, prefix: str = "", turn: int = 0) -> str:
    """A site of one graph as a site of the step: below the module that owns the graph, its number as that of a call."""
    if not site:
        return site
    path, slash, rest = site.partition("/")
    inner = path.removeprefix("~")
    whole = ("~" if path != inner else "") + ".".join(part for part in (prefix, inner) if part)
    return f"{whole}{'@' + str(turn) if turn else ''}{slash}{rest}"


def combined(calls: Sequence[Call], *, standing_bytes: int = 0, beside_bytes: int = 0, name: str = "compiled") -> StepGraph:
    """The step that makes these calls in this order and then runs their backward passes.

    Args:
        calls: in the order in which they ran.
        standing_bytes: what stands before the step and during all of it, parameters and inputs of the graphs included.
        beside_bytes: what stands beside these all the while.
        name: what reports call the step.
    """
    return _Combining(calls, standing_bytes, beside_bytes).graph(name)


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
    def __init__(self, calls: Sequence[Call], standing_bytes: int, beside_bytes: int) -> None:
        self.calls = calls
        self.beside_bytes = beside_bytes
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
        # Results that the user lets go of before the backward is over.
        self.let_go: set[int] = set()
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

    def graph(self, name: str) -> StepGraph:
        for number, call in enumerate(self.calls):
            self._storages(number, call)
        self._hand_back()
        for number in range(len(self.calls)):
            self._ops(number, forward=True)
        for number in reversed(range(len(self.calls))):
            self._ops(number, forward=False)
        self._reads()
        storages = [self._storage(v, life) for v, life in enumerate(self.lives)]
        storages += self._rest(storages)
        saves, order = self._saves(storages)
        return StepGraph(
            ops=tuple(self.ops),
            storages=tuple(storages),
            saves=saves,
            unpack_order=order,
            backwards=(self.starts[-1][1],),
            name=name,
            frontend="torch-compile",
            step_seconds=sum(op.seconds for op in self.ops),
        )

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
        if len(call.joint.results) == len(call.held):
            self.let_go |= {ids[v] for v, kept in zip(call.joint.results, call.held, strict=True) if v is not None and not kept}

    def _hand_back(self) -> None:
        """The gradient of a result that one later call took is the storage that this call's backward leaves it in."""
        takers: dict[int, list[tuple[int, int]]] = {}
        for number, call in enumerate(self.calls):
            for place, v in enumerate(call.joint.inputs):
                if v is not None:
                    takers.setdefault(self.ids[number][v], []).append((number, place))
        same: dict[int, int] = {}
        for number, call in enumerate(self.calls):
            for tangent, result in call.joint.tangents:
                made = None if result is None or result >= len(call.joint.results) else call.joint.results[result]
                taken = [] if made is None else takers.get(self.ids[number][made], [])
                if len(taken) == 1 and taken[0][0] > number:
                    later, place = taken[0]
                    back = self.calls[later].joint.gradients[place]
                    if back is not None:
                        same[self.ids[number][tangent]] = self.ids[later][back]
        left = [v for v in range(len(self.lives)) if v not in same]
        place_of = {v: number for number, v in enumerate(left)}
        self.lives = [self.lives[v] for v in left]
        self.ids = [[place_of[same.get(v, v)] for v in ids] for ids in self.ids]
        self.let_go = {place_of[v] for v in self.let_go if v in place_of}

    def _life(self, number: int, storage: Storage) -> _Life:
        graph = self.calls[number].joint.graph
        last = len(graph.ops)
        producer = None if storage.producer is None else self._place(number, storage.producer)
        site = site_in(storage.site, self.calls[number].prefix, self.turns[number])
        if self.shared[number]:
            storage = msgspec.structs.replace(storage, replayable=storage.replayable or _SHARED, movable=storage.movable or _SHARED)
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
        owners = [number for number, ids in enumerate(self.ids) if v in ids]
        joint = self.calls[max(owners)].joint
        if life.producer >= self.starts[-1][1]:
            # A gradient: of a parameter, or handed back to the call before.
            own = self.ids[max(owners)].index(v)
            inner = any(own == back and place not in joint.static_inputs for place, back in enumerate(joint.gradients))
            return max(last, self.starts[max(owners) - 1][1] + 1) if inner and max(owners) > 0 else self.count
        # A later call may have taken it over, or the user let it go; else the user has it.
        return last if len(owners) > 1 or v in self.let_go else self.count

    def _rest(self, storages: list[Storage]) -> list[Storage]:
        """What stands beside the graphs' own inputs, as one storage."""
        left = max(self.standing_bytes - sum(storage.bytes for storage in storages if storage.born < 0), 0) + self.beside_bytes
        if not left:
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
