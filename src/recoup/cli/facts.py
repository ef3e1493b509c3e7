"""Results as JSON values, for ``--format json``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from recoup.graph.peak import peak_bytes
from recoup.graph.step import StepGraph

if TYPE_CHECKING:
    from recoup.longest import Longest
    from recoup.report.text import Checked, Verified
    from recoup.solve import FrontierPoint

__all__ = ["POINT_FIELDS", "check_facts", "graph_facts", "longest_facts", "point_facts", "verification_facts"]

POINT_FIELDS = (
    "strategy",
    "gear",
    "budget_bytes",
    "predicted_peak_bytes",
    "measured_peak_bytes",
    "step_seconds",
    "relative_time",
    "gap",
    "feasible",
    "price_seconds_per_byte",
    "binding",
    "tiles",
)
_VERIFICATION_FIELDS = (
    "passed",
    "peak_bytes",
    "predicted_peak_bytes",
    "unplanned_peak_bytes",
    "step_seconds",
    "unplanned_step_seconds",
    "relative_time",
)
_LONGEST_FIELDS = (
    "over",
    "size",
    "budget_bytes",
    "predicted_peak_bytes",
    "measured_peak_bytes",
    "step_seconds",
    "tokens",
    "seconds_per_token",
    "next_size",
    "next_least_bytes",
    "unplanned_size",
    "unplanned_step_seconds",
    "unplanned_seconds_per_token",
    "compared_at",
    "model_error",
)


def graph_facts(graph: StepGraph) -> dict[str, Any]:
    """A graph in a few numbers."""
    return {
        "name": graph.name,
        "frontend": graph.frontend,
        "device": graph.device,
        "fingerprint": graph.fingerprint,
        "signature": graph.signature,
        "operations": len(graph.ops),
        "storages": len(graph.storages),
        "saves": len(graph.saves),
        "blocks": list(graph.blocks),
        "peak_bytes": peak_bytes(graph),
        "measured_peak_bytes": graph.measured_peak_bytes,
        "resident_bytes": graph.resident_bytes,
        "step_seconds": graph.step_seconds,
    }


def point_facts(point: FrontierPoint) -> dict[str, Any]:
    """One point of a frontier."""
    return {name: getattr(point, name) for name in POINT_FIELDS}


def check_facts(checks: Sequence[Checked]) -> list[dict[str, Any]]:
    """Checks with their verdicts."""
    return [{"name": check.name, "passed": check.passed, "detail": check.detail} for check in checks]


def verification_facts(verification: Verified) -> dict[str, Any]:
    """A verification, its checks included."""
    return {name: getattr(verification, name) for name in _VERIFICATION_FIELDS} | {"checks": check_facts(verification.checks)}


def longest_facts(found: Longest) -> dict[str, Any]:
    """The largest size within a budget, with what it costs."""
    facts = {name: getattr(found, name) for name in _LONGEST_FIELDS}
    return facts | {"recorded_sizes": list(found.recorded_sizes), "verification": verification_facts(found.verification)}
