"""The printed form of a step graph: one line per operation, stable, for people to read and tests to compare.

    %12 f32[4,256,64] = blocks.0.fc1/addmm(%3@0, w:blocks.0.fc1.weight) 1.20ms 256KiB saved recompute-ok

``%12`` is storage 12, ``%3@1`` its version after one write in place; what stood before the step goes by its kind
(``w`` parameter, ``b`` buffer, ``g`` gradient, ``i`` input, ``o`` outside) and name. After the arguments stand the
time, the bytes of fresh storages, whether autograd saves them, and whether they can be rebuilt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from recoup.graph.peak import peak_bytes
from recoup.graph.step import Op, Ref, StepGraph, Storage, View
from recoup.units import format_bytes, format_seconds

__all__ = ["print_graph"]

_LETTERS = {"parameter": "w", "buffer": "b", "gradient": "g", "input": "i", "outside": "o", "activation": "a"}
_DTYPE = re.compile(r"^(bfloat|float|complex|uint|int)([0-9].*)$")
_SHORT = {"bfloat": "bf", "float": "f", "complex": "c", "uint": "u", "int": "i"}
_CONSTANT_LENGTH = 24


def print_graph(graph: StepGraph, *, limit: int | None = None) -> str:
    """The graph as text: a head, what stood before the step, then the operations in order.

    Args:
        graph: a well-formed graph (``recoup.graph.rules``).
        limit: the most lines to print of each section; None prints all.
    """
    saved = frozenset(save.ref.storage for save in graph.saves)
    residents = [storage for storage in graph.storages if storage.born < 0]
    lines = [*_head(graph), "", f"residents {_tight(graph.resident_bytes)}"]
    lines += _limited((_resident(storage) for storage in residents), len(residents), limit)
    for phase, ops in _sections(graph.ops):
        lines += ["", phase, *_limited((_op(graph, op, saved) for op in ops), len(ops), limit)]
    return "\n".join(lines) + "\n"


def _head(graph: StepGraph) -> Iterator[str]:
    yield f"{graph.name} {graph.frontend} on {graph.device} {graph.fingerprint}"
    counts = f"{len(graph.ops)} operations, {len(graph.storages)} storages, {len(graph.saves)} saves"
    step = _seconds(graph.step_seconds) if graph.step_seconds else "not timed"
    yield f"{counts}, peak {_tight(peak_bytes(graph))}, step {step}"


def _sections(ops: tuple[Op, ...]) -> Iterator[tuple[str, list[Op]]]:
    """Runs of operations of one phase: phases may come and go in a step."""
    run: list[Op] = []
    for op in ops:
        if run and op.phase != run[0].phase:
            yield run[0].phase, run
            run = []
        run.append(op)
    if run:
        yield run[0].phase, run


def _limited(lines: Iterable[str], count: int, limit: int | None) -> Iterator[str]:
    for place, line in enumerate(lines):
        if limit is not None and place >= limit:
            yield f"  ... {count - limit} more"
            return
        yield f"  {line}"


def _resident(storage: Storage) -> str:
    return f"{_name(storage)} {storage.kind} {_tight(storage.bytes)}"


def _op(graph: StepGraph, op: Op, saved: frozenset[int]) -> str:
    storages = graph.storages
    fresh = [storages[ref.storage] for ref in op.outputs if storages[ref.storage].producer == op.id]
    arguments = [_ref(storages[ref.storage], ref) for ref in op.inputs]
    arguments += [_shortened(constant) for constant in op.constants]
    outputs = ", ".join(_output(storages[ref.storage], ref, op) for ref in op.outputs)
    words = [f"{outputs} = " if outputs else "", f"{op.site}({', '.join(arguments)}) {_seconds(op.seconds)}"]
    words += [f" {text}" for text in _remarks(graph, op, fresh, saved)]
    return "".join(words)


def _remarks(graph: StepGraph, op: Op, fresh: list[Storage], saved: frozenset[int]) -> Iterator[str]:
    distinct = {storage.id: storage for storage in fresh}.values()
    if distinct:
        yield _tight(sum(storage.bytes for storage in distinct))
    if op.scratch_bytes:
        yield f"scratch {_tight(op.scratch_bytes)}"
    if op.mutates:
        yield "writes " + ",".join(_name(graph.storages[storage]) for storage in op.mutates)
    if op.flags:
        yield f"[{','.join(op.flags)}]"
    if any(storage.id in saved for storage in distinct):
        yield "saved"
    if op.phase == "forward":
        reasons = sorted({storage.replayable for storage in distinct if storage.kind == "activation"})
        if reasons:
            yield "recompute-ok" if reasons == [""] else "keep: " + "; ".join(reason for reason in reasons if reason)


def _output(storage: Storage, ref: Ref, op: Op) -> str:
    name = _name(storage) if storage.producer == op.id else _ref(storage, ref)
    return f"{name} {_shape(ref.view)}"


def _ref(storage: Storage, ref: Ref) -> str:
    version = f"@{ref.version}" if ref.version or storage.born >= 0 else ""
    return f"{_name(storage)}{version}"


def _name(storage: Storage) -> str:
    if storage.born >= 0:
        return f"%{storage.id}"
    return f"{_LETTERS[storage.kind]}:{storage.site or f'%{storage.id}'}"


def _shape(view: View) -> str:
    match = _DTYPE.match(view.dtype)
    dtype = _SHORT[match[1]] + match[2] if match else view.dtype
    return f"{dtype}[{','.join(map(str, view.size))}]"


def _shortened(constant: str) -> str:
    return constant if len(constant) <= _CONSTANT_LENGTH else constant[: _CONSTANT_LENGTH - 3] + "..."


def _tight(count: int) -> str:
    return format_bytes(count).replace(" ", "")


def _seconds(seconds: float) -> str:
    return format_seconds(seconds).replace(" ", "")
