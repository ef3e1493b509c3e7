"""A plan in words."""

from __future__ import annotations

from collections import Counter

from recoup.graph import StepGraph
from recoup.plan import Decision, Plan
from recoup.simulate import simulate_plan
from recoup.solve.moments import moment_in_words, standing_in_words
from recoup.units import format_bytes, format_seconds

__all__ = ["explain"]

_SHOWN = 8


def explain(graph: StepGraph, plan: Plan) -> str:
    """What a plan does to its step: budget, peak, time, gap, binding moment, decisions, and what could not be dropped.

    Raises:
        PlanMismatch: the plan does not belong to the graph.
    """
    simulation = simulate_plan(graph, plan)
    lines = [*_promise(plan), f"peak      {moment_in_words(graph, simulation)}", f"          {standing_in_words(graph, simulation)}"]
    for action, title in (("recompute", "recompute"), ("keep", "keep for replays")):
        lines.extend(_decided([decision for decision in plan.decisions if decision.action == action], title))
    if plan.drops_nothing:
        lines.append("recompute nothing: the step is left as it is")
    lines.extend(_refused(graph))
    return "\n".join(lines)


def _promise(plan: Plan) -> list[str]:
    budget = format_bytes(plan.budget_bytes) if plan.budget_bytes else "none"
    share = plan.peak_bytes / max(plan.unplanned_peak_bytes, 1)
    slower = plan.step_seconds / plan.unplanned_step_seconds - 1 if plan.unplanned_step_seconds else 0.0
    proof = "not bounded" if plan.gap is None else "proven least" if plan.gap == 0 else f"at most {plan.gap:.2%} above the least"
    return [
        f"{plan.strategy} in the {plan.gear} gear",
        f"budget    {budget}",
        f"peak      {format_bytes(plan.peak_bytes)}, {share:.0%} of the unplanned {format_bytes(plan.unplanned_peak_bytes)}",
        (
            f"time      {format_seconds(plan.step_seconds)}, {slower:+.1%} on the unplanned"
            f" {format_seconds(plan.unplanned_step_seconds)}; {proof}"
        ),
    ]


def _decided(decisions: list[Decision], title: str) -> list[str]:
    if not decisions:
        return []
    total = sum(decision.bytes for decision in decisions)
    lines = [f"{title}: {format_bytes(total)} in {len(decisions)} groups"]
    biggest = sorted(decisions, key=lambda decision: -decision.bytes)
    width = max(len(decision.site) for decision in biggest[:_SHOWN])
    lines.extend(f"  {decision.site:<{width}}  {format_bytes(decision.bytes):>9}  {decision.why}" for decision in biggest[:_SHOWN])
    rest = biggest[_SHOWN:]
    if rest:
        lines.append(f"  and {len(rest)} more, {format_bytes(sum(decision.bytes for decision in rest))}")
    return lines


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
