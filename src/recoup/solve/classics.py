"""The classical strategies for chains, on the segments of the step: ``rotor`` and ``revolve``.

``rotor`` (Beaumont et al. 2019, arXiv:1911.13214) keeps all or nothing of each segment and holds boundaries from the best
moments on: the optimal persistent schedule of a chain. ``revolve`` (Griewank and Walther 2000, ACM TOMS 26) takes all
segments as equal and keeps nothing inside: checkpoints at binomial distances, as many as fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from recoup.simulate.index import replays
from recoup.solve.binomial import checkpoints
from recoup.solve.chain import Schedule
from recoup.solve.hierarchy import Links, chain_budget, links_of
from recoup.solve.menu import Dish
from recoup.solve.strategy import Choice, Problem

__all__ = ["Revolve", "Rotor"]

_CACHE_KEY = "_recoup_rotor"


@dataclass(frozen=True, slots=True)
class Rotor:
    """The optimal persistent schedule that keeps all or nothing of each segment."""

    name: str = "rotor"
    takes_budgets: bool = True

    def choose(self, problem: Problem) -> Choice:
        """The schedule that the simulator finds within the budget; the least peak if there is none.

        Raises:
            UsageError: there is no budget, or the step is no single chain of one forward and one backward.
        """
        budget = chain_budget(problem, self.name)
        cache = problem.graph.__dict__.setdefault(_CACHE_KEY, {})
        if problem.executor not in cache:
            cache[problem.executor] = _all_or_nothing(links_of(replays(problem.graph), problem.executor))
        links: Links = cache[problem.executor]
        return (links.within(budget) or links.least()).choice


@dataclass(frozen=True, slots=True)
class Revolve:
    """Binomial checkpoints over the segments, nothing kept inside."""

    name: str = "revolve"
    takes_budgets: bool = True

    def choose(self, problem: Problem) -> Choice:
        """The schedule with the most checkpoints that the simulator finds within the budget; the least peak if there is none.

        Raises:
            UsageError: there is no budget, or the step is no single chain of one forward and one backward.
        """
        budget = chain_budget(problem, self.name)
        links = links_of(replays(problem.graph), problem.executor)
        nothing = [min(range(len(dishes)), key=lambda way: _emptiness(dishes[way])) for dishes in links.dishes]
        fits, least = None, links.judged(_binomial(nothing, 1))
        low, high = 1, len(links.chain)
        while low <= high:
            slots = (low + high) // 2
            found = links.judged(_binomial(nothing, slots))
            least = min(least, found, key=lambda one: one.peak_bytes)
            if found.peak_bytes <= budget:
                fits, low = found, slots + 1
            else:
                high = slots - 1
        return (fits or least).choice


def _all_or_nothing(full: Links) -> Links:
    dishes = [[*dict.fromkeys((min(menu, key=_fullness), min(menu, key=_emptiness)))] for menu in full.dishes]
    return Links(full.index, full.executor, full.frame, dishes)


def _fullness(dish: Dish) -> tuple[int, float]:
    return len(dish.dropped), dish.way.seconds


def _emptiness(dish: Dish) -> tuple[int, float]:
    """Of the ways that keep nothing the fastest: copies held from the segment's own stage on."""
    return dish.way.kept_bytes, dish.way.seconds


def _binomial(ways: list[int], slots: int) -> Schedule:
    n = len(ways)
    return Schedule(0.0, tuple(ways), tuple(range(n)), checkpoints(n, slots))
