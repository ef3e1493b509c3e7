"""Moments of a simulated step, as a person reads them."""

from __future__ import annotations

from recoup.graph import StepGraph
from recoup.simulate import Simulation, attribution
from recoup.units import format_bytes

__all__ = ["moment_in_words", "standing_in_words"]


def moment_in_words(graph: StepGraph, simulation: Simulation) -> str:
    """Where the peak stands: the operation, and for a replay what it is done for."""
    if not graph.ops:
        return "before the first operation"
    after = graph.ops[simulation.peak_moment.at]
    if simulation.peak_in_replay:
        done = "fetched" if simulation.peak_op < 0 else "replayed"
        return f"while {simulation.peak_site} is {done}, before {after.site} of the {after.phase}"
    return f"at {after.site} of the {after.phase}"


def standing_in_words(graph: StepGraph, simulation: Simulation, depth: int = 3, limit: int = 4) -> str:
    """What stands at the peak, the largest places first."""
    places = attribution(graph, simulation, depth)
    said = [f"{place} {format_bytes(count)}" for place, count in places[:limit]]
    rest = sum(count for _, count in places[limit:])
    return ", ".join([*said, *([f"other {format_bytes(rest)}"] if rest else [])]) or "no bytes"
