"""The ways to run a loop that are worth having: a menu of (stack bytes, scratch bytes, seconds), none beaten by another.

At a price of ``p`` seconds a byte the best plan of a body is a minimum of replay seconds plus ``p`` times residual bytes, an
integer program of one turn, since seconds and bytes both count once for every turn. A sweep of prices gives the lower convex
hull; splitting into stretches adds what lies below the carries of all turns (Chen et al. 2016, https://arxiv.org/abs/1604.06174).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from recoup.graph import StepGraph
from recoup.jax.figures import Figures, Way, figures_of, residual_bytes, with_loops
from recoup.jax.recording import Body
from recoup.plan.capabilities import JIT
from recoup.solve.choice import prune
from recoup.solve.program import Row
from recoup.solve.survey import survey_of

__all__ = ["Menu", "combinations", "menu_of", "priced", "prices_of", "sized_way"]

_PRICES = 14
_SPLITS = 3
_STEPS = 12
_NODES = 200
_DEEP = 64
_SECONDS = 1.0
_CACHE_KEY = "_recoup_menus"


class Menu:
    """The ways of one loop, the fastest first.

    Attributes:
        ways: none as slow or slower and as large or larger in stack and in scratch than another.
    """

    def __init__(self, ways: Sequence[Way]) -> None:
        self.ways = _unbeaten(ways)

    def at(self, price: float) -> Way:
        """The best way where a byte of stack costs ``price`` seconds."""
        return min(self.ways, key=lambda way: (way.figures.seconds + price * way.figures.stack_bytes, way.figures.stack_bytes))


def prices_of(graphs: Sequence[StepGraph]) -> list[float]:
    """Prices from one at which nothing cheap is recomputed to one at which everything is, in equal ratios."""
    rates = [
        graph.ops[storage.producer].seconds / storage.bytes
        for graph in graphs
        for storage in graph.storages
        if storage.kind == "activation" and storage.producer is not None and storage.bytes and graph.ops[storage.producer].seconds > 0
    ]
    if not rates:
        return [1.0]
    low, high = min(rates) / 2, max(rates) * 64
    return [low * (high / low) ** (place / (_PRICES - 1)) for place in range(_PRICES)]


def menu_of(body: Body, prices: Sequence[float]) -> Menu:
    """All ways of a loop that are worth having, the loops within included; made once for the same prices, and kept on the body."""
    made = body.__dict__.setdefault(_CACHE_KEY, {})
    key = tuple(prices)
    if key not in made:
        made[key] = _menu(body, prices)
    return made[key]


def _menu(body: Body, prices: Sequence[float]) -> Menu:
    inner = {loop.name: menu_of(loop, prices) for loop in body.loops}
    seen: set[tuple[frozenset[int], tuple[int, ...]]] = set()
    whole: list[Way] = []
    for price in (0.0, *prices):
        ways = {name: menu.at(price) for name, menu in inner.items()}
        graph = with_loops(body.graph, ways)
        recompute = priced(graph, price)
        key = (recompute, tuple(id(way) for way in ways.values()))
        if key not in seen:
            seen.add(key)
            whole.append(Way(body, graph, recompute, (), ways, figures_of(body, graph, recompute, ())))
    hull = Menu(whole).ways
    return Menu([*whole, *_between(body, hull), *_split(body, hull)])


def _between(body: Body, hull: Sequence[Way]) -> list[Way]:
    """Ways of sizes in equal steps from the least stack to the largest: prices alone reach the corners of the convex hull."""
    sizes = [way.figures.stack_bytes // body.turns for way in hull]
    low, high = min(sizes), max(sizes)
    limits = {low + (high - low) * part // _STEPS for part in range(1, _STEPS)}
    return [way for limit in sorted(limits) if (way := sized_way(body, hull, limit)) is not None]


def sized_way(body: Body, known: Sequence[Way], limit: int) -> Way | None:
    """The fastest way of a body whose turn hands over at most ``limit`` bytes, loops within as in the next known way; None if none."""
    smaller = [way for way in known if not way.stretches and way.figures.stack_bytes <= limit * body.turns]
    near = max(smaller, key=lambda way: way.figures.stack_bytes, default=None)
    if near is None:
        return None
    recompute = _sized(near.graph, limit)
    if recompute is None or recompute == near.recompute:
        return None
    return Way(body, near.graph, recompute, (), near.inner, figures_of(body, near.graph, recompute, ()))


def _sized(graph: StepGraph, limit: int) -> frozenset[int] | None:
    """What to recompute so that the forward hands over at most ``limit`` bytes, at the least time: one row of memory."""
    survey = survey_of(graph, JIT)
    program, frame = survey.program, survey.frame
    standing = {save.ref.storage for save in graph.saves} - frame.dropping
    fixed = sum(graph.storages[v].bytes for v in standing if survey.index.is_activation[v])
    row = Row(graph.forward_end, fixed, tuple(sorted({*frame.needed, *program.hold})), (), True)
    found = program.solve([row], limit, _SECONDS, 1e-4, _NODES)
    if found.recompute is None:
        return None
    recompute = prune(survey.index, found.recompute)
    return recompute if residual_bytes(graph, recompute) <= limit else None


def priced(graph: StepGraph, price: float) -> frozenset[int]:
    """What to recompute where each kept byte costs ``price`` seconds."""
    if not price:
        return frozenset()
    survey = survey_of(graph, JIT)
    found = survey.program.priced(price, _SECONDS) if survey.frame.needed else frozenset()
    # Without an answer in time, keeping all is a plan too.
    return frozenset() if found is None else prune(survey.index, found)


def _split(body: Body, whole: Sequence[Way]) -> list[Way]:
    """The same ways in stretches: about the square root of the turns, and for long loops in two levels."""
    chosen = whole if len(whole) <= _SPLITS else [whole[round(place * (len(whole) - 1) / (_SPLITS - 1))] for place in range(_SPLITS)]
    found = []
    for way in chosen:
        for stretches in _stretches(body, max(way.figures.stack_bytes // body.turns, 1)):
            figures = figures_of(body, way.graph, way.recompute, stretches)
            found.append(Way(body, way.graph, way.recompute, stretches, way.inner, figures))
    return found


def _stretches(body: Body, turn_bytes: int) -> list[tuple[int, ...]]:
    """Lengths around the best: N/K carries against K stacks stand least at ``K = sqrt(N c / r)``."""
    turns = body.turns
    if turns < 4:
        return []
    best = math.sqrt(turns * max(body.carry_bytes, 1) / turn_bytes)
    single = {_even(turns, best * factor) for factor in (0.5, 1.0, 2.0)}
    double = {(_even(turns, turns ** (2 / 3)), round(turns ** (1 / 3)))} if turns >= _DEEP else set()
    return [*((length,) for length in sorted(single) if 1 < length < turns), *double]


def _even(turns: int, length: float) -> int:
    """The divisor of the turns next to a length, or the length where no divisor is near: a rest takes a loop of its own."""
    length = min(max(length, 2), turns / 2)
    divisor = min((one for one in range(2, turns) if turns % one == 0), key=lambda one: abs(math.log(one / length)), default=0)
    return divisor if divisor and 0.6 < divisor / length < 1.6 else round(length)


def _unbeaten(ways: Sequence[Way]) -> list[Way]:
    """Ways that no other beats in seconds, stack and scratch at once."""
    kept: list[Way] = []
    for way in sorted(ways, key=lambda way: (way.figures.seconds, way.figures.stack_bytes, _scratch(way.figures))):
        if not any(_beats(other.figures, way.figures) for other in kept):
            kept.append(way)
    return kept


def _scratch(figures: Figures) -> int:
    return max(figures.forward_scratch_bytes, figures.backward_scratch_bytes)


def _beats(one: Figures, other: Figures) -> bool:
    return one.stack_bytes <= other.stack_bytes and _scratch(one) <= _scratch(other)


def combinations(menus: Mapping[str, Menu], prices: Sequence[float]) -> list[dict[str, Way]]:
    """One way for each loop at every price, without repeats; then all splits, the least stack last."""
    found: dict[tuple[int, ...], dict[str, Way]] = {}
    for price in (0.0, *prices):
        ways = {name: menu.at(price) for name, menu in menus.items()}
        found.setdefault(tuple(id(way) for way in ways.values()), ways)
    base = list(found.values())
    for name, menu in menus.items():
        for way in menu.ways:
            for ways in (base[0], base[-1]):
                mixed = {**ways, name: way}
                found.setdefault(tuple(id(one) for one in mixed.values()), mixed)
    return list(found.values())
