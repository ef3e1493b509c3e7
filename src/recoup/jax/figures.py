"""What a planned loop takes and holds, and the graph of a region with these figures filled in.

For a body with residuals of ``r`` bytes a turn, forward and backward seconds ``f`` and ``b`` (replays in ``b``), and N turns:

- unsplit: stack ``N r``, seconds ``N f`` and ``N b``;
  what stands inside a turn are copies of its parts of the stack as well, each from where the backward first reads it to where it
  last does, and at every replay that starts from it (``recoup.jax.running`` takes them then);
- in stretches of K turns: stack ``ceil(N / K) c`` with ``c`` the carry's bytes, and in the backward one stretch at a time is run
  forward and back, itself split further or not: ``N f`` seconds more, and the stretch's stack as scratch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from recoup.graph import Op, Ref, Save, StepGraph, Storage, View
from recoup.graph.site import site_of
from recoup.jax.recording import Body
from recoup.plan.capabilities import JIT
from recoup.simulate.index import replays
from recoup.simulate.judge import Run, run

__all__ = ["Figures", "Way", "figures_of", "kept_storages", "residual_bytes", "with_loops"]


@dataclass(frozen=True, slots=True)
class Figures:
    """A loop in the region around it.

    Attributes:
        stack_bytes: what the forward hands to the backward.
        forward_seconds: of all turns.
        backward_seconds: of all turns, replays included.
        forward_scratch_bytes: what stands inside the forward.
        backward_scratch_bytes: what stands inside the backward, beside the stack.
    """

    stack_bytes: int
    forward_seconds: float
    backward_seconds: float
    forward_scratch_bytes: int
    backward_scratch_bytes: int

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, eq=False)
class Way:
    """One way to run a loop: what its body recomputes, how it is split, how the loops within run, and the figures of it."""

    body: Body
    graph: StepGraph
    recompute: frozenset[int]
    stretches: tuple[int, ...]
    inner: Mapping[str, Way] = field(default_factory=dict)
    figures: Figures = Figures(0, 0.0, 0.0, 0, 0)


def kept_storages(graph: StepGraph, recompute: frozenset[int]) -> frozenset[int]:
    """Activations that the forward hands to the backward: what is saved and not recomputed, and what replays start from."""
    index = replays(graph)
    kept = {save.ref.storage for save in graph.saves} - recompute
    stack, seen = [v for v in recompute if index.saves_of[v]], set()
    while stack:
        v = stack.pop()
        if v in seen:
            continue
        seen.add(v)
        for u in index.inputs_of[v]:
            if u in recompute:
                stack.append(u)
            else:
                kept.add(u)
    return frozenset(v for v in kept if index.is_activation[v])


def residual_bytes(graph: StepGraph, recompute: frozenset[int]) -> int:
    """Bytes of what the forward hands to the backward."""
    return sum(graph.storages[v].bytes for v in kept_storages(graph, recompute))


def figures_of(body: Body, graph: StepGraph, recompute: frozenset[int], stretches: tuple[int, ...]) -> Figures:
    """The figures of one way to run a loop; ``graph`` is the body's, its own loops filled in."""
    return _repeated(_turn(body, graph, recompute), body, body.turns, stretches)


def _turn(body: Body, graph: StepGraph, recompute: frozenset[int]) -> Figures:
    planned = run(graph, recompute)
    forward = sum(op.seconds for op in graph.ops if op.phase == "forward")
    at, middle = planned.bytes_at - _in_stacks_alone(planned, recompute), graph.forward_end
    above = [int(part.max()) - body.outside_bytes if len(part) else 0 for part in (at[:middle], at[middle:])]
    return Figures(residual_bytes(graph, recompute), forward, planned.seconds(JIT) - forward, max(above[0], 0), max(above[1], 0))


def _in_stacks_alone(planned: Run, recompute: frozenset[int]) -> NDArray[np.int64]:
    """For each operation the bytes of what the simulation has alive, but stands only in the stack then."""
    index, graph = planned.index, planned.index.graph
    replayed: dict[int, list[int]] = {}
    for op, gap in zip(planned.replayed.ops, planned.replayed.gaps, strict=True):
        for v in index.foreign[op]:
            replayed.setdefault(v, []).append(min(gap, index.count - 1))
    direct: dict[int, list[int]] = {}
    for op in graph.ops:
        for v in index.reads[op.id]:
            direct.setdefault(v, []).append(op.id)
    slices = [storage.id for storage in graph.storages if storage.born < 0 and storage.kind == "input"]
    found = np.zeros(index.count, dtype=np.int64)
    for v in (*kept_storages(graph, recompute), *slices):
        start, end = max(int(index.born[v]), 0), int(planned.ends[v])
        alone = np.zeros(index.count, dtype=bool)
        alone[start:end] = True
        reads = direct.get(v, [])
        early = [op for op in reads if op < graph.forward_end]
        late = [op for op in reads if op >= graph.forward_end]
        alone[start : (max([start, *early]) if index.is_activation[v] else graph.forward_end - 1) + 1] = False
        if late:
            alone[late[0] : late[-1] + 1] = False
        alone[replayed.get(v, [])] = False
        found += alone * index.bytes[v]
    return found


def _repeated(one: Figures, body: Body, turns: int, stretches: tuple[int, ...]) -> Figures:
    if not stretches:
        return Figures(
            turns * one.stack_bytes, turns * one.forward_seconds, turns * one.backward_seconds, one.forward_scratch_bytes,
            one.backward_scratch_bytes,
        )  # fmt: skip
    length = min(stretches[0], turns)
    inner = _repeated(one, body, length, stretches[1:])
    # Splitting deeper reruns the forward once more for each level.
    inside = inner.backward_seconds + inner.forward_seconds
    scratch = inner.stack_bytes + max(inner.forward_scratch_bytes, inner.backward_scratch_bytes)
    return Figures(
        -(-turns // length) * body.carry_bytes, turns * one.forward_seconds, inside * turns / length, one.forward_scratch_bytes, scratch
    )


def with_loops(graph: StepGraph, ways: Mapping[str, Way]) -> StepGraph:
    """The graph of a region with its loops' operations and stacks as these ways make them."""
    for name, way in ways.items():
        graph = _with_loop(graph, name, way.figures)
    return graph


def _with_loop(graph: StepGraph, name: str, figures: Figures) -> StepGraph:
    ops = list(graph.ops)
    places = {op.phase: op.id for op in ops if op.module == name and op.target == "scan"}
    forward, backward = places["forward"], places.get("backward")
    ops[forward] = _filled(ops[forward], figures.forward_seconds, figures.forward_scratch_bytes)
    if backward is None:
        return msgspec.structs.replace(graph, ops=tuple(ops))
    ops[backward] = _filled(ops[backward], figures.backward_seconds, figures.backward_scratch_bytes)
    site = site_of(name, 0, "stack", 0)
    stack = next((storage.id for storage in graph.storages if storage.site == site), None)
    if stack is None:
        return _with_stack(graph, ops, forward, backward, site, figures.stack_bytes)
    return _with_stack_of(graph, ops, stack, figures.stack_bytes)


def _filled(op: Op, seconds: float, scratch: int) -> Op:
    """A loop's operation with its figures; scratch that a correction put there stays."""
    return msgspec.structs.replace(op, seconds=seconds, scratch_bytes=op.scratch_bytes + scratch)


def _with_stack_of(graph: StepGraph, ops: list[Op], stack: int, count: int) -> StepGraph:
    """The stack that is there, of another size: all that goes through it is seen as bytes."""
    view = View((count,), (1,), 0, "uint8")

    def resized(refs: tuple[Ref, ...]) -> tuple[Ref, ...]:
        return tuple(dict.fromkeys(Ref(stack, ref.version, view) if ref.storage == stack else ref for ref in refs))

    storages = list(graph.storages)
    storages[stack] = msgspec.structs.replace(storages[stack], bytes=count)
    changed = tuple(
        msgspec.structs.replace(op, inputs=resized(op.inputs), outputs=resized(op.outputs))
        if any(ref.storage == stack for ref in (*op.inputs, *op.outputs))
        else op
        for op in ops
    )
    saves = tuple(msgspec.structs.replace(save, ref=Ref(stack, 0, view)) if save.ref.storage == stack else save for save in graph.saves)
    return msgspec.structs.replace(graph, ops=changed, storages=tuple(storages), saves=saves)


def _with_stack(graph: StepGraph, ops: list[Op], forward: int, backward: int, site: str, count: int) -> StepGraph:
    if not count:
        return msgspec.structs.replace(graph, ops=tuple(ops))
    number = len(graph.storages)
    ref = Ref(number, 0, View((count,), (1,), 0, "uint8"))
    ops[forward] = msgspec.structs.replace(ops[forward], outputs=(*ops[forward].outputs, ref))
    ops[backward] = msgspec.structs.replace(ops[backward], inputs=(*ops[backward].inputs, ref))
    storage = Storage(
        id=number, bytes=count, kind="activation", site=site, producer=forward, born=forward, dies=backward + 1, unheld_dies=forward + 1,
        replayable="",
    )  # fmt: skip
    saves = (*graph.saves, Save(ref=ref, packed_at=forward + 1, unpacked_at=(backward,), released_at=backward + 1))
    order = tuple(sorted(range(len(saves)), key=lambda place: saves[place].unpacked_at[0]))
    return msgspec.structs.replace(graph, ops=tuple(ops), storages=(*graph.storages, storage), saves=saves, unpack_order=order)
