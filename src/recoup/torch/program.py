"""A static program: what a live call captured, as plain data, ready to be run without a dispatch mode.

Every tensor that a replay reads and does not rebuild must be found again by hooks alone: a parameter or buffer by
name, an argument of the call by place, or an activation that autograd itself saves, by its place among the saved
tensors. What a call needs beyond that cannot be run statically, and :class:`NotStatic` says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from recoup.torch.capture import Argument, Captured, Milestone, Version
from recoup.torch.holding import Held, Leaf, named
from recoup.torch.live import LiveSession, storage_key
from recoup.torch.offload.outbox import Moved, fetch
from recoup.torch.probe import Probe, probe_of
from recoup.torch.views import Layout

__all__ = ["LeafRead", "LeafSource", "NotStatic", "Program", "SavedTensor", "StaticOp", "VersionRead", "compile_program"]


class NotStatic(Exception):
    """A live call cannot be turned into a static program; the text is the reason. Never leaves this package."""


class VersionRead(NamedTuple):
    """An argument laid on a version that the program makes."""

    version: int
    layout: Layout


class LeafRead(NamedTuple):
    """An argument laid on a leaf."""

    leaf: int
    layout: Layout


class LeafSource(NamedTuple):
    """Where to find a leaf: ``parameter`` and ``buffer`` by module path and name, ``input`` and ``saved`` by place."""

    kind: str
    path: str
    name: str
    place: int


class SavedTensor(NamedTuple):
    """One saved tensor, in the order in which autograd packs them.

    ``version`` is what it is a layout on if it is dropped, -1 if it is kept; ``leaf`` the leaf that a kept one
    provides, -1 if none; ``leaves`` what a dropped one is rebuilt from, ``moves`` the offloaded versions among that.
    """

    size: torch.Size
    dtype: torch.dtype
    version: int
    layout: Layout
    leaf: int
    leaves: tuple[int, ...]
    moves: tuple[int, ...]
    probe: Probe | None
    site: str


class StaticOp(NamedTuple):
    """One operation to replay."""

    func: Callable[..., object]
    arguments: tuple[object, ...]
    keywords: tuple[tuple[str, object], ...]
    inputs: tuple[int, ...]
    overwrites: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Program:
    """All that a static call needs to know; two calls that ran alike have equal programs.

    Attributes:
        ops: operations to replay, in the order of the forward.
        maker: for each version the operation that makes it.
        nbytes: for each version its size.
        asks: for each version how often a whole backward pass may ask for it: its saves, and operations that read it.
        pending: for each operation how many versions that are asked for it makes.
        held_from: for each version the milestone from which on it is held; -1 for always.
        milestones: for each version the milestone that asking for it reaches; -1 for none.
        leaves: where the leaves are found.
        leaf_reads: for each leaf how many dropped tensors are rebuilt from it.
        move_reads: for each offloaded version how many dropped tensors are it or are rebuilt from it.
        saved: what autograd packs.
    """

    ops: tuple[StaticOp, ...]
    maker: tuple[int, ...]
    nbytes: tuple[int, ...]
    asks: tuple[int, ...]
    pending: tuple[int, ...]
    held_from: tuple[int, ...]
    milestones: tuple[int, ...]
    leaves: tuple[LeafSource, ...]
    leaf_reads: tuple[int, ...]
    move_reads: dict[int, int]
    saved: tuple[SavedTensor, ...]


def compile_program(session: LiveSession, model: torch.nn.Module, inputs: dict[int, int]) -> Program:
    """The static program of a live call whose forward is over and whose backward has not begun.

    Args:
        session: the live call.
        model: whose parameters and buffers can be found again by name.
        inputs: places of the call's tensor arguments by storage, as they were before the call.

    Raises:
        NotStatic: something that a replay reads cannot be found again by hooks alone.
    """
    return _Compiler(session, model, inputs).compile()


class _Compiler:
    def __init__(self, session: LiveSession, model: torch.nn.Module, inputs: dict[int, int]) -> None:
        assert session.packs is not None
        self.packs = session.packs
        self.named = _named_storages(model)
        self.inputs = inputs
        self.saved_keys = _saved_storages(self.packs)
        self.versions: dict[int, int] = {}
        self.order: list[Version] = []
        self.leaves: dict[int, int] = {}
        self.milestones: dict[int, int] = {}
        self.sources: list[LeafSource] = []

    def compile(self) -> Program:
        captured = self._closure()
        places = {op.sequence: place for place, op in enumerate(captured)}
        ops = tuple(self._op(op) for op in captured)
        needs = self._needs(ops)
        saved = tuple(self._saved(place, source, layout, needs) for place, (source, layout) in enumerate(self.packs))
        asks = [0] * len(self.order)
        leaf_reads = [0] * len(self.sources)
        move_reads: Counter[int] = Counter()
        for tensor in saved:
            if tensor.version >= 0:
                asks[tensor.version] += 1
                move_reads.update(tensor.moves)
                for leaf in tensor.leaves:
                    leaf_reads[leaf] += 1
        for op in ops:
            for version in (*op.inputs, *(before for before, _ in op.overwrites)):
                asks[version] += 1
        maker = tuple(places[version.op.sequence] for version in self.order)
        pending = Counter(place for place, count in zip(maker, asks, strict=True) if count)
        return Program(
            ops=ops,
            maker=maker,
            nbytes=tuple(version.nbytes for version in self.order),
            asks=tuple(asks),
            pending=tuple(pending[place] for place in range(len(ops))),
            held_from=tuple(self._milestone(version.held_from) for version in self.order),
            milestones=tuple(self._milestone(version.milestone) for version in self.order),
            leaves=tuple(self.sources),
            leaf_reads=tuple(leaf_reads),
            move_reads=dict(move_reads),
            saved=saved,
        )

    def _milestone(self, milestone: Milestone | None) -> int:
        return -1 if milestone is None else self.milestones.setdefault(id(milestone), len(self.milestones))

    def _closure(self) -> list[Captured]:
        """The operations that rebuild everything dropped, in order; numbers the versions."""
        ops: dict[int, Captured] = {}
        stack = [source for source, _ in self.packs if isinstance(source, Version)]
        while stack:
            op = stack.pop().op
            if op.sequence in ops:
                continue
            if op.generator is not None:
                raise NotStatic(f"{op.site} draws random numbers, which only the live gear can draw again")
            ops[op.sequence] = op
            stack.extend(op.inputs)
            stack.extend(before for before, _ in op.overwrites)
        captured = [ops[sequence] for sequence in sorted(ops)]
        for op in captured:
            for _, ref in (*op.outputs, *op.overwrites):
                version = ref()
                if version is not None and id(version) not in self.versions:
                    self.versions[id(version)] = len(self.order)
                    self.order.append(version)
        return captured

    def _op(self, op: Captured) -> StaticOp:
        number = self.versions
        return StaticOp(
            op.func,
            tuple(self._argument(value) for value in op.arguments),
            tuple((name, self._argument(value)) for name, value in op.keywords.items()),
            tuple(number[id(version)] for version in op.inputs),
            tuple((number[id(before)], number[id(after)]) for before, ref in op.overwrites if (after := ref()) is not None),
            tuple((place, number[id(version)]) for place, ref in op.outputs if (version := ref()) is not None),
        )

    def _argument(self, value: object) -> object:
        if isinstance(value, Argument):
            if isinstance(value.source, Version):
                return VersionRead(self.versions[id(value.source)], value.layout)
            return LeafRead(self._leaf(value.source), value.layout)
        if isinstance(value, list):
            return tuple(self._argument(item) for item in value)
        # What a fetch fetches is of one call; the program knows it by its version.
        return None if isinstance(value, Moved) else value

    def _leaf(self, leaf: Leaf) -> int:
        number = self.leaves.get(id(leaf))
        if number is None:
            number = self.leaves[id(leaf)] = len(self.sources)
            self.sources.append(self._source(leaf))
        return number

    def _source(self, leaf: Leaf) -> LeafSource:
        if leaf.base is not None or leaf.held.tensor is None:
            raise NotStatic(f"{_called(leaf)} is written in place, or held by other saved-tensor hooks")
        if leaf.key in self.named:
            return self.named[leaf.key]
        place = self.saved_keys.get((leaf.key, leaf.held.version))
        if place is not None:
            return LeafSource("saved", "", "", place)
        if leaf.key in self.inputs:
            return LeafSource("input", "", "", self.inputs[leaf.key])
        raise NotStatic(f"{_called(leaf)} is kept for replays only; without a dispatch mode nothing sees it")

    def _needs(self, ops: tuple[StaticOp, ...]) -> list[tuple[frozenset[int], frozenset[int]]]:
        """For each version the leaves, and the offloaded versions, that it is rebuilt from, through other versions too."""
        needs: list[tuple[frozenset[int], frozenset[int]]] = [(frozenset(), frozenset())] * len(self.order)
        for op in ops:
            leaves = {read.leaf for read in _flat((*op.arguments, *(value for _, value in op.keywords))) if isinstance(read, LeafRead)}
            moves = {version for _, version in op.outputs} if op.func is fetch else set()
            for version in (*op.inputs, *(before for before, _ in op.overwrites)):
                leaves |= needs[version][0]
                moves |= needs[version][1]
            for version in (*(version for _, version in op.outputs), *(after for _, after in op.overwrites)):
                needs[version] = frozenset(leaves), frozenset(moves)
        return needs

    def _saved(self, place: int, source: Version | Held, layout: Layout, needs: list[tuple[frozenset[int], frozenset[int]]]) -> SavedTensor:
        if isinstance(source, Version):
            number = self.versions[id(source)]
            leaves, moves = (tuple(sorted(found)) for found in needs[number])
            return SavedTensor(layout.size, layout.dtype, number, layout, -1, leaves, moves, probe_of(layout), source.site)
        leaf = next((number for number, found in enumerate(self.sources) if found.kind == "saved" and found.place == place), -1)
        return SavedTensor(layout.size, layout.dtype, -1, layout, leaf, (), (), None, "")


def _called(leaf: Leaf) -> str:
    tensor = leaf.base if leaf.base is not None else leaf.held.tensor
    return "a tensor" if tensor is None else named(leaf.name, tensor)


def _flat(values: tuple[object, ...]) -> list[object]:
    return [item for value in values for item in (_flat(value) if type(value) is tuple else [value])]


def _named_storages(model: torch.nn.Module) -> dict[int, LeafSource]:
    found: dict[int, LeafSource] = {}
    for path, module in model.named_modules():
        for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in table.items():
                if (
                    tensor is not None
                    and tensor.layout is torch.strided
                    and type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
                ):
                    found.setdefault(storage_key(tensor), LeafSource(kind, path, name, -1))
    return found


def _saved_storages(packs: list[tuple[Version | Held, Layout]]) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    for place, (source, _) in enumerate(packs):
        if isinstance(source, Held) and source.tensor is not None and source.tensor.layout is torch.strided:
            found.setdefault((storage_key(source.tensor), source.version), place)
    return found
