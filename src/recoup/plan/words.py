"""A plan in words, as far as the plan alone knows."""

from __future__ import annotations

from recoup.plan.plan import Decision, Plan
from recoup.units import format_bytes, format_seconds

__all__ = ["decisions_in_words", "price_in_words", "promise_in_words"]

_SHOWN = 8
_MIB = 1 << 20


def promise_in_words(plan: Plan) -> list[str]:
    """Strategy, budget, peak, time with its proof, and what more memory would save."""
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
        *price_in_words(plan),
    ]


def price_in_words(plan: Plan) -> list[str]:
    """What one more MiB of budget would save, and where memory binds; nothing if the plan does not know."""
    if plan.price_seconds_per_byte is None:
        return []
    saved = format_seconds(plan.price_seconds_per_byte * _MIB)
    return [f"price     one more MiB would save {saved} a step", *(f"          binds at {line}" for line in plan.binding)]


def decisions_in_words(plan: Plan) -> list[str]:
    """What is recomputed and what is kept for replays, the largest groups first."""
    lines: list[str] = []
    for action, title in (
        ("tile", "run in tiles"),
        ("recompute", "recompute"),
        ("offload", f"offload to {_target(plan)}"),
        ("keep", "keep for replays"),
    ):
        lines.extend(_decided([decision for decision in plan.decisions if decision.action == action], title))
    lines.extend(_traffic(plan))
    lines.extend(
        f"split {loop} into stretches of {', then '.join(map(str, lengths))} turns" for loop, lengths in sorted(plan.stretches.items())
    )
    if plan.drops_nothing:
        lines.append("recompute nothing: the step is left as it is")
    return lines


def _target(plan: Plan) -> str:
    return "disk" if plan.traffic is not None and plan.traffic.link.target == "disk" else "the host"


def _traffic(plan: Plan) -> list[str]:
    """How the offloaded bytes move, and what the step waits for them."""
    traffic = plan.traffic
    if traffic is None:
        return []
    link = traffic.link
    rates = f"{format_bytes(int(link.write_bytes_per_second))}/s out, {format_bytes(int(link.read_bytes_per_second))}/s back"
    windows = f"{format_bytes(traffic.write_window_bytes)} on their way out, {format_bytes(traffic.read_window_bytes)} fetched ahead"
    where = f" to {link.where}" if link.where else ""
    return [
        f"moves over a link{where} of {rates} ({link.provenance}), at most {windows}; waits {format_seconds(traffic.stall_seconds)} for it"
    ]


def _decided(decisions: list[Decision], title: str) -> list[str]:
    if not decisions:
        return []
    total = sum(decision.bytes for decision in decisions)
    lines = [f"{title}: {format_bytes(total)} in {len(decisions)} groups"]
    biggest = sorted(decisions, key=lambda decision: -decision.bytes)
    width = max(len(decision.site) for decision in biggest[:_SHOWN])
    lines.extend(f"  {decision.site:<{width}}  {format_bytes(decision.bytes):>9}  {_why(decision)}" for decision in biggest[:_SHOWN])
    rest = biggest[_SHOWN:]
    if rest:
        lines.append(f"  and {len(rest)} more, {format_bytes(sum(decision.bytes for decision in rest))}")
    return lines


def _why(decision: Decision) -> str:
    return f"{decision.why}; held from {decision.held_from}" if decision.held_from else decision.why
