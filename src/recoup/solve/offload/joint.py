"""The strategy ``joint``: what to keep, to recompute and to offload, decided together.

Every search has in its pool what recomputation alone and offloading alone give, so that a joint plan is never slower than either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from recoup.errors import UsageError
from recoup.graph import StepGraph
from recoup.plan import Capabilities
from recoup.simulate.index import Replays, replays
from recoup.solve import optimal
from recoup.solve.choice import droppable
from recoup.solve.descent import judge_choice
from recoup.solve.least import least_judged
from recoup.solve.offload.bound import bound_seconds
from recoup.solve.offload.judged import JointJudged, joined, judge_joint
from recoup.solve.offload.least import joint_least
from recoup.solve.offload.moves import Space
from recoup.solve.offload.moving import moving_of
from recoup.solve.offload.routes import Routes
from recoup.solve.offload.search import Search
from recoup.solve.optimal import Optimal
from recoup.solve.strategy import Choice, Problem, Strategy, needed_budget
from recoup.solve.survey import survey_of

__all__ = ["Joint", "joint_of"]

# A step of that much more than its bound, relative to the unplanned one, is not worth searching on; in steps of few decisions any is.
_CONTENT, _ROUNDING, _FEW = 5e-4, 1e-9, 60
# A plan of recomputation that is so near the best one is a start for joint ones too.
_NEAR = 1.1
# What of the time the links have together; the rest is for recomputation alone, which most often needs none.
_SEARCHED = 0.7


@dataclass(frozen=True, slots=True)
class Joint:
    """Least time within the budget with the choices keep, recompute and offload.

    Attributes:
        routes: where activations may wait.
        recomputing: whether recomputation is a choice too.
    """

    routes: Routes
    recomputing: bool = True
    takes_budgets: bool = True

    @property
    def name(self) -> str:
        """What plans and reports call it."""
        return "joint" if self.recomputing else "offload_only"

    def choose(self, problem: Problem) -> Choice:
        """The best simulated plan found within the limits; over the budget only if none that fits was found."""
        return _Joint(problem, self).choose()

    def spaces(self, problem: Problem) -> list[Space]:
        """What can be chosen, for each link that is of use."""
        index, executor = replays(problem.graph), problem.executor
        if problem.graph.root_calls > 1:
            return []
        dropping = droppable(index, executor) if self.recomputing else frozenset()
        routes = self.routes
        found = [Space(index, dropping, moving_of(index, link), link, routes.cap(link)) for link in routes.of(executor)]
        return [space for space in found if space.moving.storages]

    def bound_seconds(self, problem: Problem) -> float:
        """A proven lower bound on the seconds of any plan within the budget; infinite if none fits."""
        return _Joint(problem, self).bound()

    def least_peak_bytes(self, graph: StepGraph, executor: Capabilities) -> int:
        """The least simulated peak of a joint plan that was found."""
        problem = Problem(graph, None, executor)
        return joint_least(problem, self.spaces(problem), self.recomputing).peak_bytes


class _Joint:
    """One choice: the best plan so far over all links."""

    def __init__(self, problem: Problem, asked: Joint) -> None:
        self.problem, self.asked, self.budget, self.executor = problem, asked, needed_budget(problem, asked.name), problem.executor
        self.index: Replays = replays(problem.graph)
        self.survey = survey_of(problem.graph, problem.executor)
        self.floor = self.survey.floor_seconds
        self.best: JointJudged | None = None

    def choose(self) -> Choice:
        if self._unplanned_fits():
            return Choice(frozenset(), self.index.base_seconds, "the unplanned step fits")
        spaces = self.asked.spaces(self.problem)
        bounds = {space: self._bound(space) for space in spaces}
        bound = min(bounds.values(), default=self.floor)
        if bound >= self.problem.useless_seconds < float("inf"):
            return Choice(frozenset(), bound, "another executor has a plan that no plan of this one can beat")
        worth = [space for space in spaces if bounds[space] < float("inf")]
        for place, space in enumerate(worth):
            self._search(space, bounds[space], self._share(len(worth) - place))
        if self.asked.recomputing:
            recomputed = self._recompute(bounds)
            # Without anything that can move a plan recomputes alone, and so does its bound.
            bound = bound if spaces else recomputed
        if self.best is None:
            least = joint_least(self.problem, spaces, self.asked.recomputing)
            if least.peak_bytes > self.budget:
                return replace(least.choice, note="no plan that fits was found")
            self._offer(least)
        assert self.best is not None
        return replace(self._limited(self.best.choice), bound_seconds=min(bound, self.best.step_seconds))

    def _limited(self, choice: Choice) -> Choice:
        """The choice with what may wait at the end of its link, for those who run it."""
        if choice.offload is None:
            return choice
        return replace(choice, offload=replace(choice.offload, limit_bytes=self.asked.routes.cap(choice.offload.link)))

    def bound(self) -> float:
        """The least bound of all links."""
        if self._unplanned_fits():
            return self.index.base_seconds
        return min((self._bound(space) for space in self.asked.spaces(self.problem)), default=self.floor)

    def _unplanned_fits(self) -> bool:
        return judge_joint(self.index, frozenset(), self.executor).peak_bytes <= self.budget

    def _bound(self, space: Space) -> float:
        return bound_seconds(
            self.index, self.executor, space.moving, space.link, space.cap, self.budget, self.floor,
            lambda: self.problem.remaining_seconds, self.asked.recomputing,
        )  # fmt: skip

    def _share(self, links: int) -> Callable[[], float]:
        """What is left, for one of so many links, of its part of the time; recomputation alone keeps a share for itself."""
        end = self.problem.remaining_seconds * (1 - (_SEARCHED if self.asked.recomputing else 1.0) / links)
        return lambda: self.problem.remaining_seconds - end

    def _search(self, space: Space, bound: float, remaining: Callable[[], float]) -> None:
        alone = self._from(replace(space, dropping=frozenset()), bound, remaining)
        alone.start()
        if alone.best is None:
            alone.polish(joint_least(self.problem, [space], recomputing=False))
        if alone.best is not None:
            self._offer(alone.best)
        if not self.asked.recomputing or alone.content():
            return
        search = self._from(space, bound, remaining)
        search.start(self._deep)
        if alone.best is not None and not search.content():
            search.polish(alone.best)
        search.exchange()
        search.anneal()
        if not search.content():
            search.enumerate()
        if search.best is not None:
            self._offer(search.best)

    def _deep(self) -> list[JointJudged]:
        """Plans that rebuild more than once, so that they fit where others do not."""
        links = self.survey.links
        nested = None if links is None else links.within(self.budget)
        return [joined(nested if nested is not None else least_judged(self.problem))]

    def _recompute(self, bounds: dict[Space, float]) -> float:
        """The plan that recomputes alone, and what joint plans come of it; no longer than its bound says that it may help."""
        useless = min(self.problem.useless_seconds, self.best.step_seconds if self.best is not None else float("inf"))
        alone = optimal.bound_seconds(self.problem) if useless < float("inf") else self.floor
        if alone >= useless:
            return alone
        choice = Optimal().choose(replace(self.problem, useless_seconds=useless))
        found = judge_choice(self.index, choice, self.executor)
        if choice.drops_nothing or found.peak_bytes > self.budget:
            return choice.bound_seconds or self.floor
        start = joined(found)
        near = self.best is None or start.step_seconds <= self.best.step_seconds * _NEAR
        self._offer(start)
        for space, bound in bounds.items() if near else ():
            search = self._from(space, bound, lambda: self.problem.remaining_seconds)
            search.polish(start)
            search.exchange()
            if search.best is not None:
                self._offer(search.best)
        return choice.bound_seconds or self.floor

    def _from(self, space: Space, bound: float, remaining: Callable[[], float]) -> Search:
        decisions = len(space.movable | space.dropping)
        enough = bound + (_ROUNDING if decisions <= _FEW else _CONTENT) * self.index.base_seconds
        return Search(space, self.executor, self.budget, enough, remaining)

    def _offer(self, found: JointJudged) -> None:
        if self.best is None or (found.step_seconds, found.peak_bytes) < (self.best.step_seconds, self.best.peak_bytes):
            self.best = found


def joint_of(strategy: Strategy, routes: Routes | None) -> Strategy:
    """The strategy that decides offloads too, in place of ``optimal``; the strategy itself where nothing may leave.

    Raises:
        UsageError: the strategy knows nothing of offloads.
    """
    if routes is None or isinstance(strategy, Joint):
        return strategy
    if not isinstance(strategy, Optimal):
        raise UsageError(f"the strategy {strategy.name!r} offloads nothing; leave it out, or leave out offload")
    return Joint(routes)
