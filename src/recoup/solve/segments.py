"""The segments that the named strategies think in: the repeated blocks of the model, or what comes nearest."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, sqrt

from recoup.graph import StepGraph

__all__ = ["merged", "segments"]


def segments(graph: StepGraph) -> list[frozenset[int]]:
    """Forward operations by segment, in the order of the step.

    ``graph.blocks`` if it has any; else the numbered children of the module with the most of them; else cuts of the
    forward into about sqrt(operations) parts of equal time.
    """
    found: dict[str, set[int]] = {block: set() for block in graph.blocks or _numbered_children(graph)}
    for op in graph.ops:
        if op.phase == "forward":
            for path in _paths(op.module):
                if path in found:
                    found[path].add(op.id)
    parts = [frozenset(ops) for ops in found.values() if ops]
    return sorted(parts, key=min) if len(parts) > 1 else _equal_cuts(graph)


def merged(parts: list[frozenset[int]]) -> list[frozenset[int]]:
    """Segments of about sqrt(n) consecutive parts each."""
    size = max(ceil(sqrt(len(parts))), 1)
    return [frozenset().union(*parts[start : start + size]) for start in range(0, len(parts), size)]


def _paths(module: str) -> Iterator[str]:
    """A module path and those of the modules around it."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def _numbered_children(graph: StepGraph) -> tuple[str, ...]:
    children: dict[str, dict[int, None]] = {}
    for op in graph.ops:
        if op.phase != "forward":
            continue
        parts = op.module.split(".")
        for place, part in enumerate(parts):
            if part.isdigit():
                children.setdefault(".".join(parts[:place]), {})[int(part)] = None
    if not children:
        return ()
    parent, numbers = max(children.items(), key=lambda item: len(item[1]))
    return tuple(f"{parent}.{number}" if parent else str(number) for number in numbers) if len(numbers) > 1 else ()


def _equal_cuts(graph: StepGraph) -> list[frozenset[int]]:
    forward = [op for op in graph.ops if op.phase == "forward"]
    parts = max(round(sqrt(len(forward))), 1)
    total = sum(op.seconds for op in forward) or 1.0
    cuts: list[list[int]] = [[] for _ in range(parts)]
    spent = 0.0
    for op in forward:
        cuts[min(int(parts * spent / total), parts - 1)].append(op.id)
        spent += op.seconds
    return [frozenset(ops) for ops in cuts if ops]
