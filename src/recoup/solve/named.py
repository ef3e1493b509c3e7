"""Named strategies: the known recipes, on one footing with ``optimal``.

Each makes one plan, whatever the budget is; whether it fits is for the simulation to say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from recoup.graph.site import op_name
from recoup.simulate.index import Replays, replays
from recoup.solve.choice import runnable
from recoup.solve.segments import merged, segments
from recoup.solve.strategy import Choice, Problem

__all__ = ["NAMED", "Named"]

# What selective recomputation keeps: results of matrix products and convolutions, dear to make for their size.
_DEAR = ("mm", "addmm", "linear", "convolution", "_convolution", "conv1d", "conv2d", "conv3d", "embedding", "addmv", "mv")


@dataclass(frozen=True, slots=True)
class Named:
    """A strategy that one function of the graph describes."""

    name: str
    rule: Callable[[Replays], frozenset[int]]
    takes_budgets: bool = False

    def choose(self, problem: Problem) -> Choice:
        """The rule's storages, less what the executor cannot drop."""
        index = replays(problem.graph)
        return Choice(runnable(index, self.rule(index), problem.executor))


def _nothing(index: Replays) -> frozenset[int]:
    return frozenset()


def _every_block(index: Replays) -> frozenset[int]:
    """All but what crosses block boundaries, in every block but the last, which would come back at once."""
    return _inner(index, segments(index.graph)[:-1])


def _sqrt(index: Replays) -> frozenset[int]:
    """All but what crosses the boundaries of segments of about sqrt(n) blocks (Chen et al. 2016, arXiv:1604.06174)."""
    return _inner(index, merged(segments(index.graph))[:-1])


def _selective(index: Replays) -> frozenset[int]:
    """Attention cores and cheap wide operations within blocks (Korthikanti et al. 2022, arXiv:2205.05198)."""
    ops = index.graph.ops
    inner = _inner(index, segments(index.graph))
    return frozenset(v for v in inner if not any(op_name(ops[op].target).split(".")[0] in _DEAR for op in index.ops_of[v]))


def _inner(index: Replays, parts: list[frozenset[int]]) -> frozenset[int]:
    """Storages that one of these parts makes and that no forward operation outside it reads."""
    graph = index.graph
    part_of = {op: number for number, part in enumerate(parts) for op in part}
    crossing = {
        v
        for op in graph.ops
        if op.phase == "forward"
        for v in (*index.reads[op.id], *op.mutates)
        if (producer := graph.storages[v].producer) is not None and part_of.get(producer) != part_of.get(op.id)
    }
    made = {storage.id for storage in graph.storages if storage.producer in part_of and storage.kind == "activation"}
    return frozenset(made - crossing)


NAMED: tuple[Named, ...] = (
    Named("none", _nothing),
    Named("every_block", _every_block),
    Named("sqrt", _sqrt),
    Named("selective", _selective),
)
