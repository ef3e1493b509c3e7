"""A plan in words."""

from __future__ import annotations

from collections import Counter

from recoup.graph import StepGraph
from recoup.graph.tiled import tiled
from recoup.plan import Plan
from recoup.plan.words import decisions_in_words, promise_in_words
from recoup.simulate import simulate_plan
from recoup.solve.moments import moment_in_words, standing_in_words
from recoup.units import format_bytes

__all__ = ["explain"]


def explain(graph: StepGraph, plan: Plan) -> str:
    """What a plan does to its step: budget, peak, time, gap, binding moment, decisions, and what could not be dropped.

    Raises:
        PlanMismatch: the plan does not belong to the graph.
    """
    simulation = simulate_plan(graph, plan)
    graph = tiled(graph, plan.tiles_by_module)
    lines = [
        *promise_in_words(plan),
        f"peak      {moment_in_words(graph, simulation)}",
        f"          {standing_in_words(graph, simulation)}",
        *decisions_in_words(plan),
    ]
    lines.extend(_refused(graph))
    return "\n".join(lines)


def _refused(graph: StepGraph) -> list[str]:
    """Saved forward activations that cannot be rebuilt, by reason."""
    saved = {save.ref.storage for save in graph.saves}
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for v in sorted(saved):
        storage = graph.storages[v]
        if storage.kind == "activation" and storage.replayable:
            counts[storage.replayable] += 1
            sizes[storage.replayable] += storage.bytes
    if not counts:
        return []
    lines = ["kept because it cannot be rebuilt bit for bit:"]
    lines.extend(f"  {counts[reason]} x {reason}, {format_bytes(size)}" for reason, size in sizes.most_common())
    return lines
