"""``solve`` for a recorded step of JAX: the shared solvers on each region, and a choice of ways for its loops.

Without loops it is ``recoup.solve`` on the step's graph. With loops, each has a menu of ways; for every combination that prices
suggest, and in the end for each single exchange, the step around the loops is solved, the lowest bounds first, until no
combination can be faster than the best plan found.

The bound: what is kept stands at the end of the forward all at once, so with a price ``p`` on a byte no plan within the budget
takes less than ``min over plans (seconds + p * kept bytes) - p * (budget - what stands there anyway)``; by regions, since both sums
are sums over regions (Lagrangian relaxation; Everett 1963). The largest over all prices is reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from recoup.errors import InfeasibleBudget
from recoup.graph import StepGraph
from recoup.jax.figures import Way, figures_of, residual_bytes, with_loops
from recoup.jax.menus import Menu, combinations, menu_of, priced, prices_of, sized_way
from recoup.jax.offload import Link, with_offload
from recoup.jax.recording import Recording
from recoup.plan import Plan
from recoup.plan.capabilities import JIT
from recoup.simulate import simulate
from recoup.solve import solve as solve_graph
from recoup.solve.entry import Decided, decide, strategy_of
from recoup.solve.moments import moment_in_words
from recoup.solve.planning import gap_of, plan_of
from recoup.solve.strategy import Choice, Problem, Strategy
from recoup.units import Budget, format_bytes, parse_budget

__all__ = ["solve", "unplanned_peak_bytes"]

_SECONDS_A_COMBINATION = 2.0
_ROUNDING = 1e-5
_HOPELESS = 3

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, eq=False)
class _Found:
    """A plan of the whole step: the ways of its loops, and what the step around them does."""

    ways: Mapping[str, Way]
    graph: StepGraph
    decided: Decided

    @property
    def seconds(self) -> float:
        return self.decided.simulation.step_seconds


def solve(
    recording: Recording,
    budget: str | int | Budget | None = None,
    *,
    strategy: str | Strategy = "optimal",
    time_limit_seconds: float = 20.0,
    free_bytes: int | None = None,
    link: Link | None = None,
    progress: Progress | None = None,
) -> Plan:
    """A plan whose simulated peak is within the budget.

    Args:
        recording: the recorded step.
        budget: the peak allowed, arguments included: ``6GiB``, ``60%`` of the unplanned peak, ``auto`` or bytes.
        strategy: ``optimal``, a named one, or an object of the protocol ``Strategy``; it decides in every region.
        time_limit_seconds: how long to search; when it runs out the best plan so far is returned.
        free_bytes: what the device can give, for ``auto``.
        link: to the host's memory, where what is made again more slowly than it comes back is offloaded; None to offload nothing.
        progress: called with (done, total, text).

    Raises:
        UsageError: the budget or the strategy is malformed.
        InfeasibleBudget: no plan within the budget was found; the error has the least peak found, in bytes.
    """
    chosen = strategy_of(strategy)
    measured = recording.graph.measured_peak_bytes
    if budget is not None:
        # What XLA makes of the unplanned step is known; shares of the budget are shares of that.
        budget = parse_budget(budget).resolve(measured or unplanned_peak_bytes(recording), free_bytes)
        if measured is not None and measured <= budget and chosen.name == "optimal":
            return _as_it_is(recording, budget, measured)
    if not recording.loops:
        plan = solve_graph(
            recording.graph, budget, strategy=chosen, time_limit_seconds=time_limit_seconds, free_bytes=free_bytes, progress=progress
        )
        plan = msgspec.structs.replace(plan, fingerprint=recording.fingerprint)
        return plan if link is None else with_offload(recording, plan, link)
    return _Search(recording, budget, chosen, time_limit_seconds, free_bytes, progress).plan()


def _as_it_is(recording: Recording, budget_bytes: int, peak_bytes: int) -> Plan:
    """The plan of a step that fits by itself: XLA makes again what is cheap, and stays below what the graph says."""
    graph = with_loops(recording.graph, _keeping_all(recording))
    seconds = simulate(graph, executor=JIT).step_seconds
    return Plan(
        frontend="jax", fingerprint=recording.fingerprint, signature=graph.signature, environment=graph.environment, gear="jit",
        strategy="optimal", budget_bytes=budget_bytes, peak_bytes=peak_bytes, step_seconds=seconds, unplanned_peak_bytes=peak_bytes,
        unplanned_step_seconds=seconds, bound_seconds=seconds, gap=0.0, price_seconds_per_byte=0.0,
    )  # fmt: skip


def unplanned_peak_bytes(recording: Recording) -> int:
    """Simulated peak of the step that keeps all that its backward reads."""
    return simulate(with_loops(recording.graph, _keeping_all(recording)), executor=JIT).peak_bytes


def _keeping_all(recording: Recording) -> dict[str, Way]:
    return {body.name: menu_of(body, ()).ways[0] for body in recording.loops}


class _Search:
    """One search: the menus, the best plan so far, the bound."""

    def __init__(
        self, recording: Recording, budget: str | int | Budget | None, strategy: Strategy, seconds: float, free_bytes: int | None,
        progress: Progress | None,
    ) -> None:  # fmt: skip
        self.started, self.limit = time.perf_counter(), seconds
        self.recording, self.strategy, self.progress = recording, strategy, progress
        self.keeping = _keeping_all(recording)
        self.unplanned_graph = with_loops(recording.graph, self.keeping)
        self.unplanned = simulate(self.unplanned_graph, executor=JIT)
        self.budget = None if budget is None else parse_budget(budget).resolve(self.unplanned.peak_bytes, free_bytes)
        self.prices = prices_of([recording.graph, *(body.graph for body in recording.bodies())])
        self.best: _Found | None = None
        self.least: _Found | None = None

    def plan(self) -> Plan:
        """The best plan found, as data."""
        if self.budget is not None and self.unplanned.peak_bytes <= self.budget:
            nothing = Decided(JIT, Choice(frozenset(), self.unplanned.step_seconds), self.unplanned, True)
            return self._as_plan(_Found({}, self.unplanned_graph, nothing), self.unplanned.step_seconds)
        if self.strategy.name != "optimal":
            return self._named()
        menus = {body.name: menu_of(body, self.prices) for body in self.recording.loops}
        self._try_all(combinations(menus, self.prices))
        if self.best is None:
            raise self._infeasible()
        self._use_up(menus)
        bound = None if any(body.loops for body in self.recording.loops) else self._bound(menus)
        return self._as_plan(self.best, bound)

    def _named(self) -> Plan:
        """A strategy with a plan of its own decides region by region."""
        ways = {}
        for body in self.recording.loops:
            inner = {loop.name: menu_of(loop, ()).ways[0] for loop in body.loops}
            graph = with_loops(body.graph, inner)
            recompute = self.strategy.choose(Problem(graph, None, JIT)).recompute
            ways[body.name] = Way(body, graph, recompute, (), inner, figures_of(body, graph, recompute, ()))
        self._try_all([ways])
        if self.best is None:
            raise self._infeasible()
        return self._as_plan(self.best, None)

    def _try_all(self, found: Sequence[Mapping[str, Way]]) -> None:
        """Solve the step around each combination of ways, the one with the least seconds first, while one can still win.

        Where one operation alone takes more than the budget, no plan around it can help; if that is so of all combinations, those
        in which it takes least are solved for the least peak.
        """
        graphs = [(ways, with_loops(self.recording.graph, ways)) for ways in found]
        if self.budget is not None:
            floors = [_floor_bytes(graph) for _, graph in graphs]
            enough = max(self.budget, sorted(floors)[min(_HOPELESS, len(floors)) - 1] if min(floors) > self.budget else 0)
            graphs = [pair for pair, floor in zip(graphs, floors, strict=True) if floor <= enough]
        order = sorted(graphs, key=lambda pair: sum(op.seconds for op in pair[1].ops))
        for place, (ways, graph) in enumerate(order):
            fastest = sum(op.seconds for op in graph.ops)
            if self.best is not None and (fastest >= self.best.seconds or self._left() <= 0):
                return
            if self.progress is not None:
                self.progress(place, len(order), "solving around the loops")
            self._offer(_Found(ways, graph, self._decide(graph)))

    def _use_up(self, menus: Mapping[str, Menu]) -> None:
        """Give each loop in turn what the best plan leaves of the budget."""
        for name, menu in menus.items():
            best = self.best
            if best is None or self.budget is None or best.ways[name].stretches:
                continue
            room = self.budget - best.decided.simulation.peak_bytes
            body = best.ways[name].body
            way = sized_way(body, menu.ways, (best.ways[name].figures.stack_bytes + room) // body.turns)
            if way is not None and way.figures.seconds < best.ways[name].figures.seconds:
                self._try_all([{**best.ways, name: way}])

    def _decide(self, graph: StepGraph) -> Decided:
        limit = min(max(self._left(), 0.1), _SECONDS_A_COMBINATION)
        return decide(graph, self.budget, self.strategy, JIT, limit)

    def _left(self) -> float:
        return self.limit - (time.perf_counter() - self.started)

    def _offer(self, found: _Found) -> None:
        peak = found.decided.simulation.peak_bytes
        if self.least is None or peak < self.least.decided.simulation.peak_bytes:
            self.least = found
        if found.decided.feasible and (self.best is None or found.seconds < self.best.seconds):
            self.best = found

    def _bound(self, menus: Mapping[str, Menu]) -> float:
        """Lagrangian bound on the seconds of any plan within the budget; see the module."""
        assert self.budget is not None
        empty = {name: _weightless(menu.ways[0]) for name, menu in menus.items()}
        around = with_loops(self.recording.graph, empty)
        room = self.budget - around.resident_bytes
        return max(self._bound_at(price, menus, around, room) for price in (0.0, *self.prices))

    def _bound_at(self, price: float, menus: Mapping[str, Menu], around: StepGraph, room: int) -> float:
        recompute = priced(around, price)
        total = simulate(around, recompute, JIT).step_seconds + price * residual_bytes(around, recompute)
        for menu in menus.values():
            fastest, way = menu.ways[0].figures, menu.at(price).figures
            total += min(way.seconds + price * way.stack_bytes, fastest.seconds + fastest.forward_seconds)
        return (total - price * room) * (1 - _ROUNDING)

    def _as_plan(self, found: _Found, bound: float | None) -> Plan:
        decided = found.decided
        choice = Choice(decided.choice.recompute, bound, decided.choice.note, price=decided.choice.price)
        plan = plan_of(
            found.graph, choice, decided.simulation, JIT, self.unplanned, strategy=self.strategy.name, budget_bytes=self.budget or 0,
            solve_seconds=time.perf_counter() - self.started,
        )  # fmt: skip
        inside = [(way, _body_plan(way)) for way in _all_ways(found.ways)]
        bounded = min(bound, plan.step_seconds) if bound is not None else 0.0
        return msgspec.structs.replace(
            plan,
            fingerprint=self.recording.fingerprint,
            decisions=(*plan.decisions, *(decision for _, body in inside for decision in body.decisions)),
            stretches={way.body.name: way.stretches for way, _ in inside if way.stretches},
            bound_seconds=bounded,
            gap=gap_of(plan.step_seconds, bounded) if bound is not None else None,
        )

    def _infeasible(self) -> InfeasibleBudget:
        assert self.least is not None
        assert self.budget is not None
        simulation = self.least.decided.simulation
        moment = moment_in_words(self.least.graph, simulation)
        return InfeasibleBudget(
            f"no plan of strategy {self.strategy.name!r} fits {format_bytes(self.budget)}: the least peak found is"
            f" {format_bytes(simulation.peak_bytes)} ({simulation.peak_bytes} bytes), {moment}; allow that much, or try a smaller batch",
            budget_bytes=self.budget,
            least_bytes=simulation.peak_bytes,
            moment=moment,
        )


def _floor_bytes(graph: StepGraph) -> int:
    """The most that one operation takes with what it reads and makes, beside the arguments: no plan takes less."""
    resident, sizes = graph.resident_bytes, [0 if storage.born < 0 else storage.bytes for storage in graph.storages]
    return resident + max(
        (op.scratch_bytes + sum(sizes[v] for v in {ref.storage for ref in (*op.inputs, *op.outputs)}) for op in graph.ops), default=0
    )


def _weightless(way: Way) -> Way:
    """A loop that takes nothing and hands nothing over."""
    return Way(way.body, way.graph, way.recompute, (), way.inner)


def _all_ways(ways: Mapping[str, Way]) -> list[Way]:
    found = list(ways.values())
    for way in ways.values():
        found.extend(_all_ways(way.inner))
    return found


def _body_plan(way: Way) -> Plan:
    """The decisions within a loop, as a plan of one turn."""
    base, planned = simulate(way.graph, executor=JIT), simulate(way.graph, way.recompute, JIT)
    return plan_of(way.graph, Choice(way.recompute), planned, JIT, base, strategy="optimal", budget_bytes=0, solve_seconds=0.0)
