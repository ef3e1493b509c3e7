"""Choosing what to recompute: ``solve``, the strategies, the frontier, plans in words."""

from recoup.solve.entry import solve, strategies_by_name
from recoup.solve.explain import explain
from recoup.solve.frontier import FrontierPoint, frontier
from recoup.solve.least import least_peak
from recoup.solve.named import Named
from recoup.solve.optimal import Optimal
from recoup.solve.strategy import Choice, Effort, Price, Problem, Strategy

__all__ = [
    "Choice",
    "Effort",
    "FrontierPoint",
    "Named",
    "Optimal",
    "Price",
    "Problem",
    "Strategy",
    "explain",
    "frontier",
    "least_peak",
    "solve",
    "strategies_by_name",
]
