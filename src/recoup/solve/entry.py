"""``solve``: from a step graph and a budget to a plan, always simulated."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from recoup.cost import OffloadLink
from recoup.errors import InfeasibleBudget, UsageError
from recoup.graph import StepGraph
from recoup.graph.site import collapse
from recoup.plan import STATIC, Capabilities, Plan, gears_of
from recoup.simulate import Simulation, simulate
from recoup.solve.checkmate import Checkmate
from recoup.solve.classics import Revolve, Rotor
from recoup.solve.hierarchy import Hierarchy
from recoup.solve.moments import moment_in_words, standing_in_words
from recoup.solve.named import NAMED
from recoup.solve.offload import Joint, joint_of, routes_of
from recoup.solve.optimal import Optimal, bound_seconds
from recoup.solve.planning import plan_of
from recoup.solve.strategy import Choice, Effort, Problem, Progress, Strategy
from recoup.solve.warm import Warm
from recoup.units import Budget, format_bytes, parse_budget

__all__ = ["Decided", "best_of", "bound_of", "decide", "decide_all", "executors_of", "solve", "strategies_by_name", "strategy_of"]


@dataclass(frozen=True, slots=True)
class Decided:
    """A strategy's answer for one executor, simulated.

    Attributes:
        executor: for which it is.
        choice: what was chosen.
        simulation: what it gives.
        feasible: whether the simulated peak is within the budget (always, without one).
    """

    executor: Capabilities
    choice: Choice
    simulation: Simulation
    feasible: bool


def solve(
    graph: StepGraph,
    budget: str | int | Budget | None = None,
    *,
    strategy: str | Strategy = "optimal",
    gear: str = "auto",
    allow: Sequence[str] = (),
    time_limit_seconds: float = 20.0,
    free_bytes: int | None = None,
    progress: Progress | None = None,
    offload: OffloadLink | Sequence[OffloadLink] | None = None,
    host_budget: str | int | None = None,
    disk_budget: str | int | None = None,
    effort: Effort = "full",
) -> Plan:
    """A plan whose simulated peak is within the budget.

    With ``offload`` activations may also wait in the host's memory or on disk. The plan is never slower than the one that
    recomputes alone, nor than the one that offloads alone.

    Args:
        graph: the recorded step.
        budget: the peak allowed: ``6GiB``, ``60%`` of the simulated unplanned peak, ``auto`` or bytes; None only for named strategies.
        strategy: ``optimal``, a named one, or an object of the protocol ``Strategy``.
        gear: ``live``, ``static``, or ``auto`` for the faster of the plans of both.
        allow: what a plan may do beyond keeping and recomputing: ``("tile",)`` to run token-wise regions in tiles, which changes the
            order of sums in weight gradients.
        time_limit_seconds: how long to search; when it runs out the best plan so far is returned.
        free_bytes: what the device can give, for ``auto``.
        progress: called with (done, total, text).
        offload: the link that activations may be offloaded over, as measured, or several of which the plan uses one.
        host_budget: most bytes that may wait in the host's memory at once, such as ``16GiB``; without it there is no limit.
        disk_budget: most bytes that may wait on disk at once.
        effort: ``full``, or ``quick`` for a search that takes tenths of a second and may end a percent or two further from the optimum.

    Raises:
        UsageError: the budget, strategy, gear or effort is malformed, or the gear or strategy cannot offload.
        InfeasibleBudget: no plan within the budget was found; the error has the least peak found, in bytes.
        PlanMismatch: a strategy chose what the executor cannot run.
    """
    from recoup.solve.tiling import best_tiling, check_allowed, with_tiles  # solves each tiling, so it imports this module

    started = time.perf_counter()
    if effort not in get_args(Effort):
        raise UsageError(f"effort is 'full' or 'quick', not {effort!r}")
    chosen, executors = strategy_of(strategy), executors_of(gear, graph.frontend)
    chosen = joint_of(chosen, routes_of(offload, host_budget, disk_budget, executors))
    tiling = check_allowed(allow)
    unplanned = simulate(graph)
    budget_bytes = None if budget is None else parse_budget(budget).resolve(unplanned.peak_bytes, free_bytes)
    if tiling and budget_bytes is not None:
        found = best_tiling(graph, budget_bytes, chosen, executors, time_limit_seconds, progress)
        if not found.best.feasible:
            raise _infeasible(found.graph, budget_bytes, chosen.name, found.best, unplanned)
        plan = plan_of(
            found.graph, found.best.choice, found.best.simulation, found.best.executor, unplanned,
            strategy=chosen.name, budget_bytes=budget_bytes, solve_seconds=time.perf_counter() - started,
        )  # fmt: skip
        return with_tiles(graph, plan, found, unplanned)
    best = best_of(decide_all(graph, budget_bytes, chosen, executors, time_limit_seconds, progress, effort=effort))
    if not best.feasible:
        assert budget_bytes is not None
        raise _infeasible(graph, budget_bytes, chosen.name, best, unplanned)
    return plan_of(
        graph, best.choice, best.simulation, best.executor, unplanned,
        strategy=chosen.name, budget_bytes=budget_bytes or 0, solve_seconds=time.perf_counter() - started,
    )  # fmt: skip


def bound_of(strategy: Strategy) -> Callable[[Problem], float] | None:
    """What proves a lower bound on the seconds of all plans that a strategy chooses from, infinite if none fits; None if nothing does."""
    return bound_seconds if isinstance(strategy, Optimal) else strategy.bound_seconds if isinstance(strategy, Joint) else None


def decide_all(
    graph: StepGraph,
    budget_bytes: int | None,
    strategy: Strategy,
    executors: Sequence[Capabilities],
    seconds: float,
    progress: Progress | None = None,
    warm: Warm | None = None,
    effort: Effort = "full",
) -> list[Decided]:
    """What a strategy chooses for several executors, in ``seconds`` altogether.

    ``optimal`` and ``joint`` take first the one with the lower bound; the other may give up where its bound is above the first one's
    plan.
    """
    order, started = list(executors), time.perf_counter()
    bound = bound_of(strategy)
    if bound is not None and budget_bytes is not None and len(order) > 1:
        bounds = {executor: bound(Problem(graph, budget_bytes, executor, seconds / len(order) / 2, warm=warm)) for executor in order}
        order.sort(key=lambda executor: bounds[executor])
    found: list[Decided] = []
    for place, executor in enumerate(order):
        left = max(seconds - (time.perf_counter() - started), 0.0) / (len(order) - place)
        useless = min((one.simulation.step_seconds for one in found if one.feasible), default=float("inf"))
        found.append(decide(graph, budget_bytes, strategy, executor, left, progress, useless, warm, effort))
    return found


def decide(
    graph: StepGraph,
    budget_bytes: int | None,
    strategy: Strategy,
    executor: Capabilities,
    seconds: float,
    progress: Progress | None = None,
    useless_seconds: float = float("inf"),
    warm: Warm | None = None,
    effort: Effort = "full",
) -> Decided:
    """What a strategy chooses for one executor, and what the simulator says of it.

    Raises:
        PlanMismatch: the strategy chose what the executor cannot run.
    """
    choice = strategy.choose(Problem(graph, budget_bytes, executor, seconds, progress, useless_seconds, warm, effort))
    simulation = simulate(graph, choice.recompute, executor, choice.held_from, choice.offload)
    return Decided(executor, choice, simulation, budget_bytes is None or simulation.peak_bytes <= budget_bytes)


def best_of(found: list[Decided]) -> Decided:
    """The fastest that is feasible (then the least peak, then the static gear); without one the least peak."""
    feasible = [item for item in found if item.feasible]
    if feasible:
        return min(feasible, key=lambda item: (item.simulation.step_seconds, item.simulation.peak_bytes, item.executor.name != STATIC.name))
    return min(found, key=lambda item: item.simulation.peak_bytes)


def executors_of(gear: str, frontend: str = "torch-eager") -> tuple[Capabilities, ...]:
    """The executors that a gear's name allows for the graphs of a front-end; ``auto`` allows all that there are.

    Raises:
        UsageError: no gear of that front-end has that name.
    """
    known = {executor.name: (executor,) for executor in gears_of(frontend)} | {"auto": gears_of(frontend)}
    if gear not in known:
        raise UsageError(f"no gear is called {gear!r}; there are {', '.join(known)}")
    return known[gear]


def strategies_by_name() -> dict[str, Strategy]:
    """All strategies that have a name, ``optimal`` first."""
    return {strategy.name: strategy for strategy in (Optimal(), *NAMED, Rotor(), Revolve(), Hierarchy(), Checkmate())}


def strategy_of(strategy: str | Strategy) -> Strategy:
    """A strategy by name, or as it is.

    Raises:
        UsageError: no strategy has that name; the message lists those there are.
    """
    if not isinstance(strategy, str):
        return strategy
    known = strategies_by_name()
    if strategy not in known:
        raise UsageError(f"no strategy is called {strategy!r}; there are {', '.join(known)}")
    return known[strategy]


def _infeasible(graph: StepGraph, budget_bytes: int, name: str, best: Decided, unplanned: Simulation) -> InfeasibleBudget:
    simulation = best.simulation
    moment = moment_in_words(graph, simulation)
    share = simulation.peak_bytes / max(unplanned.peak_bytes, 1)
    other = "" if name in ("optimal", "joint") else ", strategy='optimal'"
    gear = ", gear='live'" if best.executor.name == STATIC.name else ""
    sites = dict.fromkeys(region.site for region in graph.tileable if not region.reason)
    tiles = f", or allow tiles (allow=('tile',), --allow tile) of {', '.join(pattern for pattern, _ in collapse(sites))}" if sites else ""
    return InfeasibleBudget(
        f"no plan of strategy {name!r} fits {format_bytes(budget_bytes)} in the {best.executor.name} gear"
        f"{f' ({best.choice.note})' if best.choice.note else ''}: the least peak found is {format_bytes(simulation.peak_bytes)}"
        f" ({simulation.peak_bytes} bytes, {share:.0%} of the unplanned {format_bytes(unplanned.peak_bytes)}), {moment}, where"
        f" {standing_in_words(graph, simulation)} stand; allow that much, or try a smaller batch, shorter inputs{other}{gear}{tiles}",
        budget_bytes=budget_bytes,
        least_bytes=simulation.peak_bytes,
        moment=moment,
    )
