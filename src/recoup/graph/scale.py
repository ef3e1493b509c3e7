"""A step at any size, from recordings of it at a few sizes of one knob, such as the sequence or the batch.

The step must be the same at every size: the same operations, wiring, lives and saves. Only amounts may differ:

- Bytes, scratch, flops and the numbers in the signature are polynomials in the size of at most the second degree, in
  exact integers through the smallest, the middle and the largest recording (Newton's divided differences), rounded up
  and never negative. Where a curve bends down, which is granularity and no law, the line through the smallest and the
  largest recording stands instead, which is no less beyond them. Scratch and flops never fall.
- Seconds of an operation are a least-squares fit with coefficients of at least 0 on 1, n and n**2, up to the degree in
  which its flops and the bytes that it touches grow.
- The time of the step is to the sum of its operations as in the largest recording.

A scaled graph is there to be simulated and solved, and neither reads a view's sizes and strides. So that the graph is
well formed at every size, each view of it covers its storage as flat bytes; printed constants are of the largest recording.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations

import msgspec
import numpy as np
from numpy.typing import NDArray

from recoup.errors import UsageError
from recoup.graph.peak import peak_bytes
from recoup.graph.step import Op, Ref, StepGraph, View

__all__ = ["Growth", "ScaledStep"]

_DEGREE = 2
_TERMS = tuple(terms for count in range(1, _DEGREE + 2) for terms in combinations(range(_DEGREE + 1), count))
_NUMBER = re.compile(r"([0-9]+)")
_OP_FIELDS = ("site", "target", "mutates", "flags", "module", "call", "phase")
_STORAGE_FIELDS = ("kind", "site", "producer", "writes", "born", "dies", "unheld_dies", "replayable")
_SAVE_FIELDS = ("packed_at", "unpacked_at", "released_at")
_STEP_FIELDS = ("unpack_order", "backwards", "blocks", "root_calls", "frontend", "device")


@dataclass(frozen=True, slots=True)
class Growth:
    """An amount over the size n: ``start + (slope * (n - first) + bend * (n - first) * (n - second)) / scale``."""

    first: int
    second: int
    scale: int
    start: int
    slope: int
    bend: int

    @classmethod
    def through(cls, sizes: Sequence[int], values: Sequence[int]) -> Growth:
        """The polynomial through three points; the line through the outer two if they bend down."""
        (x0, x1, x2), (y0, y1, y2) = sizes, values
        scale = (x1 - x0) * (x2 - x1) * (x2 - x0)
        bend = (y2 - y1) * (x1 - x0) - (y1 - y0) * (x2 - x1)
        if bend < 0:
            return cls(x0, x1, scale, y0, (y2 - y0) * (x1 - x0) * (x2 - x1), 0)
        return cls(x0, x1, scale, y0, (y1 - y0) * (x2 - x1) * (x2 - x0), bend)

    @property
    def degree(self) -> int:
        """0 for a constant, 1 for a line, 2 for a parabola."""
        return 2 if self.bend else 1 if self.slope else 0

    def at(self, size: int) -> int:
        """The amount at a size, rounded up; not negative."""
        step = self.slope + self.bend * (size - self.second)
        return max(self.start - (-step * (size - self.first)) // self.scale, 0)


@dataclass(frozen=True, slots=True)
class ScaledStep:
    """A model of a step over one knob; make it with :meth:`through`.

    Attributes:
        over: the knob's name.
        recordings: the recorded graphs by size, smallest first.
    """

    over: str
    recordings: dict[int, StepGraph]
    _bytes: tuple[Growth, ...]
    _scratch: tuple[Growth, ...]
    _flops: tuple[Growth, ...]
    _signature: tuple[str | Growth, ...]
    _seconds: NDArray[np.float64]

    @classmethod
    def through(cls, recordings: Mapping[int, StepGraph], over: str = "size") -> ScaledStep:
        """The model of a step from recordings at three or more sizes.

        Raises:
            UsageError: there are fewer than three, a size is not positive, or the step is not the same at all sizes; the
                message names the first difference.
        """
        by_size = dict(sorted(recordings.items()))
        sizes = list(by_size)
        if len(sizes) < 3 or sizes[0] < 1:
            raise UsageError(f"a step is scaled from recordings at three or more positive sizes of {over}, got {sizes}")
        for size in sizes[1:]:
            _demand_same(over, sizes[0], by_size[sizes[0]], size, by_size[size])
        knots = _knots(sizes)
        graphs = [by_size[size] for size in knots]
        storages = tuple(Growth.through(knots, [item.bytes for item in items]) for items in zip(*(g.storages for g in graphs), strict=True))
        flops = tuple(_rising(knots, [op.flops for op in ops]) for ops in zip(*(g.ops for g in graphs), strict=True))
        return cls(
            over=over,
            recordings=by_size,
            _bytes=storages,
            _scratch=tuple(_rising(knots, [op.scratch_bytes for op in ops]) for ops in zip(*(g.ops for g in graphs), strict=True)),
            _flops=flops,
            _signature=_signature_growth(knots, [graph.signature for graph in graphs]),
            _seconds=_fitted_seconds(by_size, [_degree(op, storages, flops) for op in graphs[0].ops]),
        )

    @property
    def errors(self) -> dict[int, float]:
        """:meth:`error` of each recording that the polynomials are not taken through: a fourth one, say."""
        knots = _knots(list(self.recordings))
        return {size: self.error(size, graph) for size, graph in self.recordings.items() if size not in knots}

    def at(self, size: int) -> StepGraph:
        """The step at a size; its measured peak is not known."""
        largest = next(reversed(self.recordings.values()))
        amounts = [growth.at(size) for growth in self._bytes]
        views = [View((count,), (1,), 0, "uint8") for count in amounts]
        seconds = [float(value) for value in self._seconds @ _powers(size, max(self.recordings))]
        recorded = sum(op.seconds for op in largest.ops)
        return msgspec.structs.replace(
            largest,
            ops=tuple(self._op(op, size, views, seconds[op.id]) for op in largest.ops),
            storages=tuple(msgspec.structs.replace(item, bytes=amounts[item.id]) for item in largest.storages),
            saves=tuple(msgspec.structs.replace(save, ref=_flat(save.ref, views)) for save in largest.saves),
            signature="".join(part if isinstance(part, str) else str(part.at(size)) for part in self._signature),
            step_seconds=largest.step_seconds * sum(seconds) / recorded if recorded else largest.step_seconds,
            measured_peak_bytes=None,
            # Rows of a region grow as the storage of its input does.
            tileable=tuple(
                msgspec.structs.replace(region, rows=amounts[region.source] * region.rows // max(largest.storages[region.source].bytes, 1))
                for region in largest.tileable
            ),
            name=f"{self.over}={size}",
        )

    def error(self, size: int, graph: StepGraph) -> float:
        """How far the modelled peak of the unplanned step lies above a recorded one, as a share of that."""
        recorded = peak_bytes(graph)
        return (peak_bytes(self.at(size)) - recorded) / max(recorded, 1)

    def _op(self, op: Op, size: int, views: list[View], seconds: float) -> Op:
        return msgspec.structs.replace(
            op,
            inputs=tuple(_flat(ref, views) for ref in op.inputs),
            outputs=tuple(_flat(ref, views) for ref in op.outputs),
            seconds=seconds,
            flops=self._flops[op.id].at(size),
            scratch_bytes=self._scratch[op.id].at(size),
            provenance="modelled",
        )


def _knots(sizes: Sequence[int]) -> tuple[int, int, int]:
    """The sizes that polynomials are taken through."""
    return sizes[0], sizes[len(sizes) // 2], sizes[-1]


def _flat(ref: Ref, views: list[View]) -> Ref:
    return Ref(ref.storage, ref.version, views[ref.storage])


def _rising(sizes: Sequence[int], values: Sequence[int]) -> Growth:
    """A growth that is no less at a size than at any smaller one."""
    return Growth.through(sizes, list(accumulate(values, max)))


def _signature_growth(sizes: Sequence[int], texts: Sequence[str]) -> tuple[str | Growth, ...]:
    """A signature in parts: text as it is, and numbers as they grow (those of dtypes do not)."""
    parts = zip(*(_NUMBER.split(text) for text in texts), strict=True)
    return tuple(Growth.through(sizes, [int(text) for text in part]) if place % 2 else part[0] for place, part in enumerate(parts))


def _degree(op: Op, storages: Sequence[Growth], flops: Sequence[Growth]) -> int:
    """The degree in which an operation's time may grow."""
    if "attention" in op.target and not flops[op.id].start:
        # Fused attention holds no matrix, and on some devices its flops are not counted; yet it computes the whole square.
        return _DEGREE
    return max([flops[op.id].degree, *(storages[ref.storage].degree for ref in (*op.inputs, *op.outputs))])


def _powers(size: NDArray[np.float64] | float, largest: int) -> NDArray[np.float64]:
    """1, n and n**2 in units of the largest recorded size, one row for each."""
    return np.stack([(np.asarray(size, dtype=np.float64) / largest) ** power for power in range(_DEGREE + 1)])


def _fitted_seconds(recordings: Mapping[int, StepGraph], degrees: Sequence[int]) -> NDArray[np.float64]:
    """For each operation the three coefficients of its time: every set of terms is tried, so the least squares are exact.

    Errors count relative to the size, lest the largest recording alone decides.
    """
    weights = 1 / np.array(list(recordings), dtype=np.float64)
    powers = _powers(np.array(list(recordings), dtype=np.float64), max(recordings)) * weights
    seconds = np.array([[op.seconds for op in graph.ops] for graph in recordings.values()]) * weights[:, None]
    best = np.zeros((len(degrees), _DEGREE + 1))
    least = np.full(len(degrees), np.inf)
    for terms in _TERMS:
        found = np.linalg.lstsq(powers[list(terms)].T, seconds, rcond=None)[0]
        residual = np.square(powers[list(terms)].T @ found - seconds).sum(axis=0)
        better = (found >= 0).all(axis=0) & (np.array(degrees) >= max(terms)) & (residual < least)
        least[better] = residual[better]
        best[better] = 0
        best[np.ix_(better, terms)] = found[:, better].T
    return best


def _demand_same(over: str, size: int, graph: StepGraph, other_size: int, other: StepGraph) -> None:
    difference = _difference(graph, other)
    if difference:
        raise UsageError(
            f"the step at {over}={other_size} is not that at {over}={size}: {difference}; give sizes between which only amounts differ"
        )


def _difference(graph: StepGraph, other: StepGraph) -> str:
    """The first thing other than an amount in which two steps differ, '' if there is none."""
    for op, found in zip(graph.ops, other.ops, strict=False):
        difference = _field_difference(op, found, _OP_FIELDS) or _wiring_difference(op, found)
        if difference:
            return f"operation {op.id}, {op.site}: {difference}"
    for storage, found in zip(graph.storages, other.storages, strict=False):
        difference = _field_difference(storage, found, _STORAGE_FIELDS)
        if difference:
            return f"storage {storage.id} {storage.site}: {difference}"
    for number, (save, found) in enumerate(zip(graph.saves, other.saves, strict=False)):
        difference = _field_difference(save, found, _SAVE_FIELDS) or _wires_difference("ref", (save.ref,), (found.ref,))
        if difference:
            return f"saved tensor {number}: {difference}"
    for name in ("ops", "storages", "saves"):
        count, found_count = len(getattr(graph, name)), len(getattr(other, name))
        if count != found_count:
            return f"{count} {name} there, {found_count} here"
    difference = _field_difference(graph, other, _STEP_FIELDS)
    if not difference and _NUMBER.sub("", graph.signature) != _NUMBER.sub("", other.signature):
        return _field_difference(graph, other, ("signature",))
    return difference


def _field_difference(one: msgspec.Struct, other: msgspec.Struct, names: Sequence[str]) -> str:
    for name in names:
        there, here = getattr(one, name), getattr(other, name)
        if there != here:
            return f"{name} {there!r} there, {here!r} here"
    return ""


def _wiring_difference(op: Op, other: Op) -> str:
    return _wires_difference("inputs", op.inputs, other.inputs) or _wires_difference("outputs", op.outputs, other.outputs)


def _wires_difference(what: str, refs: Sequence[Ref], others: Sequence[Ref]) -> str:
    there, here = ([f"%{ref.storage}@{ref.version}" for ref in side] for side in (refs, others))
    return f"{what} {there} there, {here} here" if there != here else ""
