"""The frontier of a step: the least time for each peak, over budgets and strategies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from recoup.cost import OffloadLink
from recoup.graph import StepGraph
from recoup.graph.tiled import tiled
from recoup.plan import Capabilities
from recoup.simulate import Simulation, simulate
from recoup.simulate.index import replays
from recoup.solve.binding import binding_in_words
from recoup.solve.classics import Rotor
from recoup.solve.entry import Decided, best_of, decide_all, executors_of, strategy_of
from recoup.solve.holds import can_wait
from recoup.solve.least import least_judged, least_peak
from recoup.solve.named import NAMED
from recoup.solve.offload import Joint, routes_of
from recoup.solve.optimal import Optimal
from recoup.solve.planning import gap_of
from recoup.solve.strategy import Problem, Progress, Strategy, takes_budgets
from recoup.solve.tiling import check_allowed, tiles_in_words, tilings
from recoup.solve.warm import Warm
from recoup.units import Budget, parse_budget

__all__ = ["FrontierPoint", "frontier"]

_POINTS = 10


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One plan on the frontier.

    Attributes:
        strategy: who decided.
        gear: the executor it is for.
        budget_bytes: the budget; 0 for a strategy that has one plan whatever the budget is.
        predicted_peak_bytes: simulated peak; for an infeasible budget the least that was found.
        measured_peak_bytes: None until somebody measures.
        step_seconds: simulated time.
        relative_time: that over the time of the unplanned step.
        gap: how far the time can be from the least, None if not known.
        feasible: whether the peak is within the budget.
        price_seconds_per_byte: what one more byte of budget would save, by the linear program; None if not known.
        binding: where memory binds most, in words; '' if not known.
        tiles: what runs in tiles, with how many, in words; '' for nothing.
    """

    strategy: str
    gear: str
    budget_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int | None
    step_seconds: float
    relative_time: float
    gap: float | None
    feasible: bool
    price_seconds_per_byte: float | None = None
    binding: str = ""
    tiles: str = ""


def frontier(
    graph: StepGraph,
    budgets: Sequence[str | int | Budget] | None = None,
    strategies: Sequence[str | Strategy] | None = None,
    *,
    gear: str = "auto",
    allow: Sequence[str] = (),
    time_limit_seconds: float = 20.0,
    free_bytes: int | None = None,
    progress: Progress | None = None,
    offload: OffloadLink | Sequence[OffloadLink] | None = None,
    host_budget: str | int | None = None,
    disk_budget: str | int | None = None,
) -> tuple[FrontierPoint, ...]:
    """Points of ``optimal`` for each budget, and one of each other strategy; with ``offload`` also points of ``joint``.

    Args:
        graph: the recorded step.
        budgets: as for ``solve``; by default ten from the least feasible peak to the unplanned one.
        strategies: names or objects; by default ``optimal``, the fixed ones, and ``rotor`` where the step is a chain.
        gear: as for ``solve``.
        allow: as for ``solve``; with tiles each curve is the best of those of a few tilings.
        time_limit_seconds: for each point.
        free_bytes: what the device can give, for the budget ``auto``.
        progress: called with (points done, points in all, text).
        offload: as for ``solve``.
        host_budget: as for ``solve``.
        disk_budget: as for ``solve``.

    Over growing budgets the time of a strategy never rises: a plan for a smaller budget serves a larger one.

    Raises:
        UsageError: a budget, a strategy or the gear is malformed.
    """
    executors = executors_of(gear, graph.frontend)
    chosen = [strategy_of(strategy) for strategy in strategies] if strategies is not None else _default_strategies(graph)
    routes = routes_of(offload, host_budget, disk_budget, executors)
    joint = None if routes is None else Joint(routes)
    chosen = chosen if joint is None else [joint, *chosen]
    unplanned = simulate(graph)
    steps = {tiles_in_words(tiling): tiled(graph, tiling) for tiling in (tilings(graph) if check_allowed(allow) else [{}])}
    amounts = _amounts(list(steps.values()), budgets, executors, unplanned, free_bytes, joint)
    total = sum(len(amounts) if takes_budgets(strategy) else 1 for strategy in chosen)
    points: list[FrontierPoint] = []
    for strategy in chosen:
        if not takes_budgets(strategy):
            _tell(progress, len(points), total, strategy.name)
            best = best_of(decide_all(graph, None, strategy, executors, time_limit_seconds))
            points.append(_point(graph, strategy, 0, best, best.choice.bound_seconds, unplanned))
            continue
        done = len(points), total
        curves = [
            [
                replace(point, tiles=name)
                for point in _curve(step, strategy, amounts, executors, time_limit_seconds, unplanned, progress, done)
            ]
            for name, step in steps.items()
        ]
        points.extend(_best_point(same) for same in zip(*curves, strict=True))
    _tell(progress, total, total, "done")
    return tuple(points)


def _default_strategies(graph: StepGraph) -> list[Strategy]:
    return [Optimal(), *NAMED, *([Rotor()] if can_wait(replays(graph)) else [])]


def _best_point(points: Sequence[FrontierPoint]) -> FrontierPoint:
    """The fastest that fits, of those the one with least in tiles; without one the one with the least peak."""
    feasible = [point for point in points if point.feasible]
    return min(feasible, key=lambda point: point.step_seconds) if feasible else min(points, key=lambda point: point.predicted_peak_bytes)


def _amounts(
    steps: Sequence[StepGraph],
    budgets: Sequence[str | int | Budget] | None,
    executors: tuple[Capabilities, ...],
    unplanned: Simulation,
    free_bytes: int | None,
    joint: Joint | None,
) -> list[int]:
    """The budgets in bytes, smallest first."""
    peak = unplanned.peak_bytes
    if budgets is not None:
        return sorted({parse_budget(budget).resolve(peak, free_bytes) for budget in budgets})
    if joint is None:
        least = min(least_peak(step, executor)[0] for step in steps for executor in executors)
    else:
        least = min(joint.least_peak_bytes(step, executor) for step in steps for executor in executors)
    return sorted({least + (peak - least) * place // (_POINTS - 1) for place in range(_POINTS)})


def _curve(
    graph: StepGraph,
    strategy: Strategy,
    amounts: list[int],
    executors: tuple[Capabilities, ...],
    seconds: float,
    unplanned: Simulation,
    progress: Progress | None,
    done: tuple[int, int],
) -> list[FrontierPoint]:
    """One strategy over growing budgets, better plans carried up and proven bounds carried down."""
    plans: list[Decided] = []
    warm = Warm()
    if isinstance(strategy, Optimal):
        warm.plans = {executor: least_judged(Problem(graph, None, executor)) for executor in executors}
    bounds: list[dict[str, float]] = []
    for place, budget in enumerate(amounts):
        _tell(progress, done[0] + place, done[1], strategy.name)
        found = decide_all(graph, budget, strategy, executors, seconds, warm=warm)
        bounds.append({item.executor.name: item.choice.bound_seconds for item in found if item.choice.bound_seconds is not None})
        before = [plans[-1]] if plans and plans[-1].feasible else []
        plans.append(best_of([*found, *before]))
    # No plan within a budget is faster than the bound for a larger one.
    for smaller, larger in zip(reversed(bounds[:-1]), reversed(bounds[1:]), strict=True):
        for name, bound in larger.items():
            smaller[name] = max(smaller.get(name, bound), bound)
    return [
        _point(graph, strategy, budget, best, limits.get(best.executor.name), unplanned)
        for budget, best, limits in zip(amounts, plans, bounds, strict=True)
    ]


def _point(graph: StepGraph, strategy: Strategy, budget: int, best: Decided, bound: float | None, unplanned: Simulation) -> FrontierPoint:
    seconds = best.simulation.step_seconds
    choice = best.choice
    if choice.drops_nothing:
        bound = replays(graph).base_seconds
    return FrontierPoint(
        strategy=strategy.name,
        gear=best.executor.name,
        budget_bytes=budget,
        predicted_peak_bytes=best.simulation.peak_bytes,
        measured_peak_bytes=None,
        step_seconds=seconds,
        relative_time=seconds / unplanned.step_seconds if unplanned.step_seconds else 1.0,
        gap=gap_of(seconds, bound) if best.feasible else None,
        feasible=best.feasible,
        price_seconds_per_byte=choice.price.seconds_per_byte if choice.price else None,
        binding=next(iter(binding_in_words(graph, choice)), ""),
    )


def _tell(progress: Progress | None, done: int, total: int, text: str) -> None:
    if progress is not None:
        progress(done, total, text)
