"""Which regions to run in tiles, and in how many: a search over tilings, each with the solver's own choice of what to recompute.

Each tiling makes a step of its own (``recoup.graph.tiled``), on which every strategy works as on any other. A proven bound on
the time of each comes first, from the linear program; tilings are then solved from the lowest bound on, until no bound is
below the best plan.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import structs

from recoup.errors import UsageError
from recoup.graph import StepGraph
from recoup.graph.site import collapse
from recoup.graph.tiled import piece_rows, tiled
from recoup.graph.tiles import LOSS, TileRegion
from recoup.plan import Capabilities, Decision, Plan
from recoup.simulate import Simulation, simulate
from recoup.solve.entry import Decided, best_of, bound_of, decide_all
from recoup.solve.planning import gap_of
from recoup.solve.strategy import Problem, Progress, Strategy
from recoup.units import format_bytes

__all__ = ["Tiled", "best_tiling", "check_allowed", "tileable_sites", "tiles_in_words", "tilings", "with_tiles"]

Tiling = dict[str, int]
_ALLOWED = ("tile",)
_LOSS_PIECES = (2, 4, 8, 16, 32, 64, 128, 256)
_MODULE_PIECES = (2, 4, 8, 16, 32)
_ROWS = 8  # that a piece has at least: smaller ones cost more time than they save bytes
_KEPT = 2  # tilings of losses that go on to be combined with tilings of modules


@dataclass(frozen=True, slots=True)
class Tiled:
    """The best plan over all tilings that were looked at.

    Attributes:
        tiles: pieces by site, empty if none helps.
        graph: the step under that tiling.
        best: what was decided on it.
        bound: no plan under any tiling that was looked at takes less seconds; None if nothing is proven.
    """

    tiles: Tiling
    graph: StepGraph
    best: Decided
    bound: float | None


def check_allowed(allow: Sequence[str]) -> bool:
    """Whether tiles are allowed.

    Raises:
        UsageError: something else is asked for.
    """
    unknown = [name for name in allow if name not in _ALLOWED]
    if unknown or isinstance(allow, str):
        raise UsageError(f"allow takes names among {', '.join(_ALLOWED)}, as in allow=('tile',), not {allow!r}")
    return "tile" in allow


def tileable_sites(graph: StepGraph) -> tuple[str, ...]:
    """Sites all of whose calls may run in tiles, in the order of the step."""
    refused = {region.site for region in graph.tileable if region.reason}
    return tuple(dict.fromkeys(region.site for region in graph.tileable if region.site not in refused))


def best_tiling(
    graph: StepGraph,
    budget_bytes: int,
    strategy: Strategy,
    executors: Sequence[Capabilities],
    seconds: float,
    progress: Progress | None = None,
) -> Tiled:
    """The fastest plan within the budget over tilings; over the budget, and with the least peak, only if none fits."""
    search = _Search(graph, budget_bytes, strategy, executors, seconds, progress)
    return search.run()


@dataclass(slots=True)
class _Search:
    graph: StepGraph
    budget_bytes: int
    strategy: Strategy
    executors: Sequence[Capabilities]
    seconds: float
    progress: Progress | None
    started: float = field(default_factory=time.perf_counter)
    bounds: dict[tuple[tuple[str, int], ...], float] = field(default_factory=dict)
    found: list[tuple[Tiling, Decided]] = field(default_factory=list)

    def run(self) -> Tiled:
        losses, modules = _losses(self.graph), _modules(self.graph)
        if simulate(self.graph).peak_bytes <= self.budget_bytes:
            self._solve({})
            return self._result()
        self._bound({})
        for tiling in losses:
            self._bound(tiling)
        for chosen in [{}, *self._lowest(losses)]:
            for tiling in modules:
                self._bound(chosen | tiling)
        for key in sorted(self.bounds, key=lambda key: (self.bounds[key], len(key))):
            if self.bounds[key] >= self._best_seconds():
                break
            self._solve(dict(key))
        if not any(decided.feasible for _, decided in self.found):
            # Nothing fits: what needs the least, with the smallest pieces, says how far away that is.
            self._solve((losses[-1] if losses else {}) | (modules[-1] if modules else {}))
        return self._result()

    def _lowest(self, tilings: list[Tiling]) -> list[Tiling]:
        known = [tiling for tiling in tilings if _key(tiling) in self.bounds]
        return sorted(known, key=lambda tiling: self.bounds[_key(tiling)])[:_KEPT] or tilings[-1:]

    def _left(self) -> float:
        return max(self.seconds - (time.perf_counter() - self.started), 0.0)

    def _bound(self, tiling: Tiling) -> None:
        """A bound on the time of any plan under a tiling; half of the time is for bounds."""
        if self._left() < self.seconds / 2 and self.bounds:
            return
        graph = tiled(self.graph, tiling)
        self._tell(len(self.bounds), f"bounding {tiles_in_words(tiling) or 'no tiles'}")
        of = bound_of(self.strategy)
        if of is None:
            self.bounds[_key(tiling)] = simulate(graph).step_seconds
            return
        limit = self.seconds / 20
        bound = min(of(Problem(graph, self.budget_bytes, executor, limit)) for executor in self.executors)
        if bound < float("inf"):
            self.bounds[_key(tiling)] = bound

    def _solve(self, tiling: Tiling) -> None:
        if any(known == tiling for known, _ in self.found):
            return
        self._tell(len(self.found), f"solving {tiles_in_words(tiling) or 'no tiles'}")
        limit = max(self._left() / 2, self.seconds / 10)
        self.found.append((tiling, best_of(decide_all(tiled(self.graph, tiling), self.budget_bytes, self.strategy, self.executors, limit))))

    def _best_seconds(self) -> float:
        return min((decided.simulation.step_seconds for _, decided in self.found if decided.feasible), default=float("inf"))

    def _result(self) -> Tiled:
        # The first of equals: tilings come with few pieces first.
        best = best_of([decided for _, decided in self.found])
        tiling = next(tiling for tiling, decided in self.found if decided is best)
        bounds = dict(self.bounds)
        for known, decided in self.found:
            if decided.choice.bound_seconds is not None and decided.choice.recompute:
                bounds[_key(known)] = max(bounds.get(_key(known), 0.0), decided.choice.bound_seconds)
        bound = min(bounds.values(), default=None) if bound_of(self.strategy) is not None else None
        if bound is not None:
            bound = min(bound, best.simulation.step_seconds)
        return Tiled(tiling, tiled(self.graph, tiling), best, bound)

    def _tell(self, done: int, text: str) -> None:
        if self.progress is not None:
            self.progress(done, done + 1, text)


def _key(tiling: Tiling) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(tiling.items()))


def tiles_in_words(tiling: Tiling) -> str:
    """Such as ``lm_head/cross_entropy in 8, model.layers.[0-9].mlp in 4``; '' for no tiles."""
    return ", ".join(f"{pattern} in {tiling[sites[0]]}" for pattern, sites in collapse(tiling))


def tilings(graph: StepGraph) -> list[Tiling]:
    """A few tilings to compare over many budgets: none, then more and more."""
    losses, modules = _losses(graph), _modules(graph)
    chosen: list[Tiling] = [{}, *losses[1:4:2]]
    if modules:
        widest = losses[min(3, len(losses) - 1)] if losses else {}
        chosen.append(widest | modules[min(2, len(modules) - 1)])
    return chosen


def _losses(graph: StepGraph) -> list[Tiling]:
    sites = [site for site in tileable_sites(graph) if site.endswith(LOSS)]
    return _uniform(graph, sites, _LOSS_PIECES)


def _modules(graph: StepGraph) -> list[Tiling]:
    """All modules of the kind whose tiling frees most, and all modules of all kinds."""
    kinds: dict[object, list[str]] = {}
    weight: dict[object, int] = {}
    for region in _first_calls(graph):
        if not region.site.endswith(LOSS):
            kind = region.samples, len(region.forward)
            kinds.setdefault(kind, []).append(region.site)
            weight[kind] = weight.get(kind, 0) + made_bytes(graph, region)
    if not kinds:
        return []
    heaviest = kinds[max(kinds, key=lambda kind: weight[kind])]
    every = [site for sites in kinds.values() for site in sites]
    found = _uniform(graph, heaviest, _MODULE_PIECES)
    if len(kinds) > 1:
        found += _uniform(graph, every, (_MODULE_PIECES[1], _MODULE_PIECES[-2]))
    return found


def _first_calls(graph: StepGraph) -> list[TileRegion]:
    sites = set(tileable_sites(graph))
    first: dict[str, TileRegion] = {}
    for region in graph.tileable:
        if region.site in sites:
            first.setdefault(region.site, region)
    return list(first.values())


def _uniform(graph: StepGraph, sites: Sequence[str], pieces: Sequence[int]) -> list[Tiling]:
    rows = min((region.rows for region in graph.tileable if region.site in sites), default=0)
    return [dict.fromkeys(sites, count) for count in pieces if rows // count >= _ROWS or count == pieces[0] <= rows] if sites else []


def made_bytes(graph: StepGraph, region: TileRegion) -> int:
    """Bytes of all that a region makes in the forward."""
    ops = set(region.forward)
    return sum(storage.bytes for storage in graph.storages if storage.producer in ops)


def with_tiles(graph: StepGraph, plan: Plan, chosen: Tiled, unplanned: Simulation) -> Plan:
    """A plan made for the step under a tiling, as a plan for the step itself."""
    decisions = []
    rows = {region.site: region.rows for region in graph.tileable}
    made = {region.site: made_bytes(graph, region) for region in _first_calls(graph)}
    for pattern, sites in collapse(chosen.tiles):
        count = chosen.tiles[sites[0]]
        size = piece_rows(rows[sites[0]], count)
        own = made[sites[0]]
        why = f"{count} pieces of {size} rows, about {format_bytes(own // count)} at a time of {format_bytes(own)}"
        decisions.append(
            Decision(
                site=pattern,
                action="tile",
                bytes=sum(made[site] for site in sites),
                why=why,
                tiles=count,
            )
        )
    bound = chosen.bound if chosen.tiles else plan.bound_seconds or None
    return structs.replace(
        plan,
        fingerprint=graph.fingerprint,
        unplanned_peak_bytes=unplanned.peak_bytes,
        unplanned_step_seconds=unplanned.step_seconds,
        bound_seconds=bound or 0.0,
        gap=gap_of(plan.step_seconds, bound),
        decisions=(*decisions, *plan.decisions),
    )
