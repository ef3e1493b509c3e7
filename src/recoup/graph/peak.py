"""The peak of the step as recorded: what is alive during each operation, and the most of it."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from recoup.graph.step import StepGraph

__all__ = ["alive_bytes", "corrected", "peak_bytes", "peak_op", "with_scratch"]


def alive_bytes(graph: StepGraph) -> NDArray[np.int64]:
    """Bytes that stand during each operation, its scratch included: one number per operation."""
    count = len(graph.ops)
    change = np.zeros(count + 1, dtype=np.int64)
    if graph.storages:
        sizes = np.array([storage.bytes for storage in graph.storages], dtype=np.int64)
        born = np.array([max(storage.born, 0) for storage in graph.storages], dtype=np.int64)
        dies = np.array([storage.dies for storage in graph.storages], dtype=np.int64)
        np.add.at(change, born, sizes)
        np.subtract.at(change, dies, sizes)
    scratch = np.array([op.scratch_bytes for op in graph.ops], dtype=np.int64)
    return np.cumsum(change)[:count] + scratch


def peak_bytes(graph: StepGraph) -> int:
    """The most bytes that stand during one operation, resident bytes and scratch included."""
    alive = alive_bytes(graph)
    return int(alive.max()) if alive.size else graph.resident_bytes


def peak_op(graph: StepGraph) -> int | None:
    """The operation at which the peak stands, the first if there are several; None for a step of no operations."""
    alive = alive_bytes(graph)
    return int(alive.argmax()) if alive.size else None


def with_scratch(graph: StepGraph, count: int) -> StepGraph:
    """The graph with that many bytes more at every moment."""
    return msgspec.structs.replace(
        graph, ops=tuple(msgspec.structs.replace(op, scratch_bytes=op.scratch_bytes + count) for op in graph.ops)
    )


def corrected(graph: StepGraph) -> StepGraph:
    """What the allocator saw above the graph's own peak is counted at every moment, so that no peak is promised too low."""
    missing = (graph.measured_peak_bytes or 0) - peak_bytes(graph)
    return with_scratch(graph, missing) if missing > 0 else graph
