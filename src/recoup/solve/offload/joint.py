"""The strategy ``joint``: what to keep, to recompute and to offload, decided together.

Every search has in its pool what recomputation alone and offloading alone give, so that a joint plan is never slower than either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from recoup.cost import OffloadLink
from recoup.errors import UsageError
from recoup.simulate.index import Replays, replays
from recoup.solve.choice import droppable
from recoup.solve.descent import judge_choice
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

# A step of that much more than the least conceivable time is not worth searching on.
_CONTENT = 2e-4
# A plan of recomputation that is so near the best one is a start for joint ones too.
_NEAR = 1.1


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


class _Joint:
    """One choice: the best plan so far over all links."""

    def __init__(self, problem: Problem, asked: Joint) -> None:
        self.problem, self.asked, self.budget, self.executor = problem, asked, needed_budget(problem, asked.name), problem.executor
        self.index: Replays = replays(problem.graph)
        self.survey = survey_of(problem.graph, problem.executor)
        self.floor = self.survey.floor_seconds
        self.best: JointJudged | None = None

    def choose(self) -> Choice:
        unplanned = judge_joint(self.index, frozenset(), self.executor)
        if unplanned.peak_bytes <= self.budget:
            return Choice(frozenset(), self.index.base_seconds, "the unplanned step fits")
        spaces = [] if self.problem.graph.root_calls > 1 else [self._space(link) for link in self.asked.routes.of(self.executor)]
        spaces = [space for space in spaces if space.moving.storages]
        for place, space in enumerate(spaces):
            self._search(space, self._share(len(spaces) - place + 1))
        if self.asked.recomputing:
            self._recompute(spaces)
        if self.best is None:
            least = joint_least(self.problem, spaces, self.asked.recomputing)
            if least.peak_bytes > self.budget:
                return replace(least.choice, note="no plan that fits was found")
            self._offer(least)
        assert self.best is not None
        return replace(self.best.choice, bound_seconds=min(self.floor, self.best.step_seconds))

    def _space(self, link: OffloadLink) -> Space:
        dropping = droppable(self.index, self.executor) if self.asked.recomputing else frozenset()
        return Space(self.index, dropping, moving_of(self.index, link), link, self.asked.routes.cap(link))

    def _share(self, parts: int) -> Callable[[], float]:
        """What is left of one of so many equal parts of the time that is left."""
        end = self.problem.remaining_seconds * (1 - 1 / parts)
        return lambda: self.problem.remaining_seconds - end

    def _search(self, space: Space, remaining: Callable[[], float]) -> None:
        alone = self._from(replace(space, dropping=frozenset()), remaining)
        alone.start()
        if alone.best is not None:
            self._offer(alone.best)
        if not self.asked.recomputing:
            return
        search = self._from(space, remaining)
        search.start()
        if alone.best is not None:
            search.polish(alone.best)
        search.exchange()
        if search.best is not None:
            self._offer(search.best)

    def _recompute(self, spaces: list[Space]) -> None:
        """The plan that recomputes alone, and what joint plans come of it; no longer than its bound says that it may help."""
        useless = min(self.problem.useless_seconds, self.best.step_seconds if self.best is not None else float("inf"))
        choice = Optimal().choose(replace(self.problem, useless_seconds=useless))
        found = judge_choice(self.index, choice, self.executor)
        if choice.drops_nothing or found.peak_bytes > self.budget:
            return
        start = joined(found)
        near = self.best is None or start.step_seconds <= self.best.step_seconds * _NEAR
        self._offer(start)
        for space in spaces if near else ():
            search = self._from(space, lambda: self.problem.remaining_seconds)
            search.polish(start)
            search.exchange()
            if search.best is not None:
                self._offer(search.best)

    def _from(self, space: Space, remaining: Callable[[], float]) -> Search:
        enough = self.floor + _CONTENT * self.index.base_seconds
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
