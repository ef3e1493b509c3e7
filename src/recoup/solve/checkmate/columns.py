"""Linear expressions, and an integer program as it grows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from recoup.solve.linear import Entry

__all__ = ["CONSTANT", "ONE", "Columns", "Terms", "added", "both", "less", "weighed"]

Terms = dict[int, float]
"""Coefficients by column, the constant under ``CONSTANT``."""
CONSTANT = -1
ONE: Terms = {CONSTANT: 1.0}


def weighed(parts: Iterable[tuple[float, Terms]]) -> Terms:
    """The sum of factors times expressions."""
    total: Terms = {}
    for factor, terms in parts:
        for column, value in terms.items():
            total[column] = total.get(column, 0.0) + factor * value
    return {column: value for column, value in total.items() if value}


def added(parts: Iterable[Terms]) -> Terms:
    """The sum of expressions."""
    return weighed((1.0, terms) for terms in parts)


def less(terms: Terms, other: Terms) -> Terms:
    """The difference of two expressions."""
    return weighed([(1.0, terms), (-1.0, other)])


def both(one: Terms, other: Terms) -> Terms:
    """What the product of two expressions that are 0 or 1 is no less than, and reaches where it is 1."""
    return weighed([(1.0, one), (1.0, other), (-1.0, ONE)])


class Columns:
    """Columns between 0 and 1, and rows: each entry's sum is no less than its limit."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.integer: list[bool] = []
        self.entries: list[Entry] = []
        self._covers: dict[Hashable, Terms] = {}

    def column(self, integer: bool = False) -> Terms:
        """A new one, as an expression."""
        self.cost.append(0.0)
        self.integer.append(integer)
        return {len(self.cost) - 1: 1.0}

    def charge(self, terms: Terms, cost: float) -> None:
        """Add to the objective."""
        for column, value in terms.items():
            self.cost[column] += cost * value

    def at_least(self, greater: Terms, smaller: Terms) -> None:
        """One row."""
        terms = less(greater, smaller)
        constant = terms.pop(CONSTANT, 0.0)
        self.entries.append((list(terms), list(terms.values()), -constant))

    def cover(self, key: Hashable, parts: Callable[[], Iterable[Terms]]) -> Terms:
        """The column of this key; at first sight, a new one that is no less than each part (parts may ask for it themselves)."""
        if key not in self._covers:
            self._covers[key] = self.column()
            for terms in parts():
                self.at_least(self._covers[key], terms)
        return self._covers[key]

    def largest(self, parts: list[Terms]) -> Terms:
        """No less than 0 and each part; a part without a constant is taken not to be negative."""
        if len(parts) == 1 and CONSTANT not in parts[0]:
            return parts[0]
        return self.cover(tuple(tuple(sorted(terms.items())) for terms in parts), lambda: parts) if parts else {}
