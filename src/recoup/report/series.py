"""Frontier points gathered by strategy, as tables and figures show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recoup.solve import FrontierPoint

__all__ = ["Series", "series_of"]


@dataclass(frozen=True, slots=True)
class Series:
    """The feasible points of one strategy.

    Attributes:
        name: the strategy.
        label: the strategy as a person reads it.
        places: distinct (time relative to the unplanned step, predicted peak in bytes), fastest first.
    """

    name: str
    label: str
    places: tuple[tuple[float, int], ...]


def series_of(points: Sequence[FrontierPoint]) -> tuple[Series, ...]:
    """One series for each strategy that has a feasible point: ``optimal`` first, the others as they come."""
    places: dict[str, set[tuple[float, int]]] = {}
    for point in points:
        if point.feasible:
            places.setdefault(point.strategy, set()).add((point.relative_time, point.predicted_peak_bytes))
    names = sorted(places, key=lambda name: name != "optimal")
    return tuple(Series(name, name.replace("_", " "), tuple(sorted(places[name]))) for name in names)
