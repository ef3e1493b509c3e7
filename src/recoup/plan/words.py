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
    for action, title in (("recompute", "recompute"), ("offload", _away(plan)), ("keep", "keep for replays")):
        lines.extend(_decided([decision for decision in plan.decisions if decision.action == action], title))
    lines.extend(
        f"split {loop} into stretches of {', then '.join(map(str, lengths))} turns" for loop, lengths in sorted(plan.stretches.items())
    )
    if plan.drops_nothing:
        lines.append("recompute nothing: the step is left as it is")
    return lines


def _away(plan: Plan) -> str:
    """Where offloaded storages wait, and over what."""
    if plan.traffic is None:
        return "offload to the host"
    link = plan.traffic.link
    rates = f"{link.write_bytes_per_second / 1e9:.2f} GB/s out, {link.read_bytes_per_second / 1e9:.2f} GB/s back, {link.provenance}"
    return f"offload to {'disk' if link.target == 'disk' else 'the host'}{f' at {link.where}' if link.where else ''} ({rates})"


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
