"""What a step graph must satisfy: the executable specification of ``recoup.graph.step``.

- Ids are positions. Sites of operations are unique, and so are sites of activations.
- An operation reads a storage only after it was written and before it dies, at the version that stands then.
- A storage is born with its producer, is written by just the operations that say so, and outlives its last use.
- Without what autograd holds it would have died no later, and after its last use in the forward.
- A save names a version that stood when it was packed; packed <= unpacked <= released <= the storage's death.
- Unpacking happens in the order of ``unpack_order``, in a backward pass.
- No view reaches beyond its storage. Only an activation of the forward can be rebuilt.

Phases need not be in order: a step may ask for gradients inside its forward.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from recoup.graph.step import Op, Ref, Save, StepGraph, Storage, View

__all__ = ["RuleViolation", "Violation", "check", "extent_bytes", "itemsize", "violations"]

FLAGS = frozenset({"random", "effect", "collective", "decision", "uninitialised", "opaque", "sync"})
_SHOWN = 20
_BITS = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule: its name, where it is broken, and how."""

    rule: str
    where: str
    detail: str

    def __str__(self) -> str:
        return f"{self.rule} at {self.where}: {self.detail}"


class RuleViolation(ValueError):
    """A step graph is not well formed: a fault of whoever made it, not of the user.

    Attributes:
        violations: every broken rule.
    """

    def __init__(self, name: str, found: tuple[Violation, ...]) -> None:
        more = f"\n  and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        lines = "".join(f"\n  {violation}" for violation in found[:_SHOWN])
        super().__init__(f"graph {name!r} breaks {len(found)} rule{'s' if len(found) > 1 else ''}:{lines}{more}")
        self.violations = found


def check(graph: StepGraph) -> None:
    """Passes if the graph is well formed; time linear in its size.

    Raises:
        RuleViolation: it is not; the error lists every broken rule and where.
    """
    found = violations(graph)
    if found:
        raise RuleViolation(graph.name, found)


def violations(graph: StepGraph) -> tuple[Violation, ...]:
    """Every rule that the graph breaks; rules on what happens are only asked once ids and references hold."""
    broken = tuple(_ids(graph))
    if broken:
        return broken
    found = [*_sites(graph), *_backwards(graph)]
    for op in graph.ops:
        found.extend(_op(graph, op))
    found.extend(_writes_match(graph))
    for storage in graph.storages:
        found.extend(_storage(graph, storage))
    for index, save in enumerate(graph.saves):
        found.extend(_save(graph, index, save))
    found.extend(_unpacking(graph))
    return tuple(found)


def itemsize(dtype: str) -> int:
    """Bytes of one element, read off the dtype's name: ``float32`` is 4, ``bool`` is 1, sub-byte types count as one byte."""
    bits = _BITS.search(dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


def extent_bytes(view: View) -> int:
    """Bytes from the start of the storage to the end of the view's last element; 0 for an empty view."""
    if 0 in view.size:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(view.size, view.stride, strict=True))
    return (view.offset + last + 1) * itemsize(view.dtype)


def _ids(graph: StepGraph) -> Iterator[Violation]:
    for place, op in enumerate(graph.ops):
        if op.id != place:
            yield Violation("ids are positions", f"ops[{place}]", f"id is {op.id}")
        for ref in (*op.inputs, *op.outputs):
            yield from _known(graph, ref.storage, f"op {place}")
        for storage in op.mutates:
            yield from _known(graph, storage, f"op {place}")
    for place, storage in enumerate(graph.storages):
        if storage.id != place:
            yield Violation("ids are positions", f"storages[{place}]", f"id is {storage.id}")
        named = (*storage.writes, *(() if storage.producer is None else (storage.producer,)))
        for op in named:
            if not 0 <= op < len(graph.ops):
                yield Violation("references exist", f"storage {place}", f"names operation {op} of {len(graph.ops)}")
    for place, save in enumerate(graph.saves):
        yield from _known(graph, save.ref.storage, f"save {place}")
    for place, save in enumerate(graph.unpack_order):
        if not 0 <= save < len(graph.saves):
            yield Violation("references exist", f"unpack_order[{place}]", f"names save {save} of {len(graph.saves)}")


def _known(graph: StepGraph, storage: int, where: str) -> Iterator[Violation]:
    if not 0 <= storage < len(graph.storages):
        yield Violation("references exist", where, f"names storage {storage} of {len(graph.storages)}")


def _sites(graph: StepGraph) -> Iterator[Violation]:
    yield from _unique("operation sites are unique", (op.site for op in graph.ops))
    yield from _unique("activation sites are unique", (item.site for item in graph.storages if item.kind == "activation"))


def _unique(rule: str, sites: Iterable[str]) -> Iterator[Violation]:
    for site, count in Counter(sites).items():
        if count > 1:
            yield Violation(rule, repr(site), f"named {count} times")


def _backwards(graph: StepGraph) -> Iterator[Violation]:
    gaps = graph.backwards
    if list(gaps) != sorted(gaps) or any(not 0 <= gap <= len(graph.ops) for gap in gaps):
        yield Violation("backward passes begin in order, within the step", "backwards", str(gaps))


def _op(graph: StepGraph, op: Op) -> Iterator[Violation]:
    where = f"op {op.id} {op.site}"
    if op.seconds < 0 or op.flops < 0 or op.scratch_bytes < 0:
        yield Violation("amounts are not negative", where, f"{op.seconds} s, {op.flops} flops, {op.scratch_bytes} scratch bytes")
    unknown = set(op.flags) - FLAGS
    if unknown:
        yield Violation("flags are known", where, ", ".join(sorted(unknown)))
    for ref in op.inputs:
        yield from _input(graph.storages[ref.storage], op, ref, where)
    for ref in op.outputs:
        storage = graph.storages[ref.storage]
        stands = bisect_right(storage.writes, op.id)
        if ref.version != stands:
            yield Violation("outputs are the version that stands", where, f"returns %{storage.id}@{ref.version}, but @{stands} stands")
        yield from _alive(storage, op, where)
        yield from _fits(storage, ref.view, where)
    for written in op.mutates:
        yield from _alive(graph.storages[written], op, where)


def _input(storage: Storage, op: Op, ref: Ref, where: str) -> Iterator[Violation]:
    if storage.producer is not None and storage.producer >= op.id:
        yield Violation("nothing is read before it is written", where, f"reads %{storage.id}, which operation {storage.producer} makes")
        return
    stands = bisect_left(storage.writes, op.id)
    if ref.version != stands:
        yield Violation("a read names the version that stands", where, f"reads %{storage.id}@{ref.version}, but @{stands} stands")
    yield from _alive(storage, op, where)
    yield from _fits(storage, ref.view, where)


def _alive(storage: Storage, op: Op, where: str) -> Iterator[Violation]:
    if not storage.born <= op.id < storage.dies:
        detail = f"uses %{storage.id}, which lives from {storage.born} to gap {storage.dies}"
        yield Violation("a storage lives from its first write to its last use", where, detail)
    elif op.phase == "forward" and op.id >= storage.unheld_dies:
        detail = f"uses %{storage.id} in the forward, yet it is said to live to gap {storage.unheld_dies} when not saved"
        yield Violation("what the forward uses does not hang on saves", where, detail)


def _fits(storage: Storage, view: View, where: str) -> Iterator[Violation]:
    if len(view.size) != len(view.stride):
        yield Violation("views lie within their storage", where, f"{len(view.size)} sizes, {len(view.stride)} strides")
    elif extent_bytes(view) > storage.bytes:
        detail = f"a view of %{storage.id} ends at byte {extent_bytes(view)} of {storage.bytes}"
        yield Violation("views lie within their storage", where, detail)


def _writes_match(graph: StepGraph) -> Iterator[Violation]:
    said: list[set[int]] = [set() for _ in graph.storages]
    for op in graph.ops:
        for storage in op.mutates:
            said[storage].add(op.id)
    for storage in graph.storages:
        if list(storage.writes) != sorted(said[storage.id]):
            detail = f"writes {list(storage.writes)}, but the operations that say they write it are {sorted(said[storage.id])}"
            yield Violation("writes are in order and both sides agree", f"storage {storage.id}", detail)


def _storage(graph: StepGraph, storage: Storage) -> Iterator[Violation]:
    where = f"storage {storage.id} {storage.site}".rstrip()
    end = len(graph.ops)
    if storage.bytes < 0:
        yield Violation("amounts are not negative", where, f"{storage.bytes} bytes")
    if not (-1 <= storage.born < max(end, 1) and storage.born < storage.unheld_dies <= storage.dies <= end) and end:
        detail = f"born {storage.born}, unheld_dies {storage.unheld_dies}, dies {storage.dies}, {end} operations"
        yield Violation("born < unheld_dies <= dies <= end", where, detail)
    if storage.producer is not None:
        if storage.born != storage.producer:
            yield Violation("a storage is born with its producer", where, f"born {storage.born}, producer {storage.producer}")
        if all(ref.storage != storage.id for ref in graph.ops[storage.producer].outputs):
            yield Violation("a producer returns what it makes", where, f"operation {storage.producer} does not return it")
        if storage.writes and storage.writes[0] <= storage.producer:
            yield Violation("writes come after the producer", where, f"producer {storage.producer}, writes {storage.writes}")
    elif storage.kind == "activation":
        yield Violation("an activation has a producer", where, "none")
    if storage.kind == "activation" and not storage.site:
        yield Violation("an activation has a site", where, "none")
    forward = storage.kind == "activation" and storage.producer is not None and graph.ops[storage.producer].phase == "forward"
    if storage.replayable == "" and not forward:
        yield Violation("only an activation of the forward is replayable", where, storage.kind)


def _save(graph: StepGraph, index: int, save: Save) -> Iterator[Violation]:
    storage = graph.storages[save.ref.storage]
    where = f"save {index} of %{storage.id} {storage.site}".rstrip()
    gaps = (save.packed_at, *save.unpacked_at, save.released_at)
    if list(gaps) != sorted(gaps) or gaps[0] < 0 or gaps[-1] > len(graph.ops):
        yield Violation("packed <= unpacked <= released, within the step", where, str(gaps))
    if not storage.born < save.packed_at and storage.born >= 0:
        yield Violation("nothing is saved before it is written", where, f"packed at gap {save.packed_at}, born {storage.born}")
    if save.released_at > storage.dies:
        yield Violation("a save holds its storage", where, f"released at gap {save.released_at}, storage dies at {storage.dies}")
    stands = bisect_left(storage.writes, save.packed_at)
    if save.ref.version != stands:
        yield Violation("a save names the version that stands", where, f"@{save.ref.version}, but @{stands} stands when packed")
    yield from _fits(storage, save.ref.view, where)


def _unpacking(graph: StepGraph) -> Iterator[Violation]:
    taken: Counter[int] = Counter()
    clock = graph.backwards[0] if graph.backwards else len(graph.ops) + 1
    for place, index in enumerate(graph.unpack_order):
        times = graph.saves[index].unpacked_at
        nth = taken[index]
        taken[index] += 1
        where = f"unpack_order[{place}]"
        if nth >= len(times):
            yield Violation("unpack_order lists each unpacking once", where, f"save {index} is unpacked {len(times)} times")
        elif times[nth] < clock:
            yield Violation("unpacking is in order, in a backward pass", where, f"save {index} at gap {times[nth]}, after gap {clock}")
        else:
            clock = times[nth]
    for index, save in enumerate(graph.saves):
        if taken[index] < len(save.unpacked_at):
            detail = f"listed {taken[index]} times, unpacked {len(save.unpacked_at)} times"
            yield Violation("unpack_order lists each unpacking once", f"save {index}", detail)
