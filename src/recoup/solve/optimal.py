"""The strategy ``optimal``: several ways to a plan, one way to a proof, and the simulator as their judge.

The program of the whole step is relaxed to a linear one, with rows that every plan satisfies: that gives a proven bound on
the time and, all that is partly recomputed recomputed, a plan near it. Where the simulator finds that plan over the
budget it is repaired: more is dropped, or copies are held later. The chain of segments gives plans that recompute more than
once, the named strategies the known ones. What is not close to the bound by then goes to the integer program: first
with proven rows, for a better bound, then with rows learned from simulated runs, until the simulator agrees.

With the effort ``quick`` the linear program is solved to its end first, and then one plan near its point is looked for; no
integer program, no exchange. Where that finds none within the budget, or only one far above the bound, the chain follows.

All limits are amounts of work, not of time, so that the same step and budget give the same plan on any machine, unless
the time limit cuts the search short.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from recoup.solve.anneal import annealed
from recoup.solve.checkmate import Checkmate
from recoup.solve.classics import Revolve, Rotor
from recoup.solve.descent import Judged, hold_more, judge, judge_choice, keep_more, tries_for
from recoup.solve.exchange import exchanged
from recoup.solve.holds import can_wait
from recoup.solve.least import least_judged
from recoup.solve.lowering import lower_peak
from recoup.solve.program import Solution
from recoup.solve.rows import Rows
from recoup.solve.strategy import Choice, Price, Problem, needed_budget
from recoup.solve.survey import survey_of
from recoup.solve.walls import walls_seconds

__all__ = ["Optimal", "bound_seconds"]

_RELAXED_ROUNDS = 12
_EXACT_ROUNDS = 6
_LEARN_ROUNDS = 10
# The gap at which the search stops, by how many storages can be dropped: a larger step need not be solved to the last microsecond.
_TOLERANCES = ((60, 0.0), (500, 2e-4), (1000, 1e-3))
_TOLERANCE = 2e-3
_ROUNDING = 1e-9
_IMPROVEMENTS, _MANY = 3, 12_000
# Beyond so many decisions the integer program is left out: its relaxation is nearly integral, and all that scales.
_EXACT = 6000
_WHOLE, _WHOLE_NODES, _WHOLE_ROUNDS = 48, 100, 3
_FEW, _DEEP = 500, 1.1
_TINY = 24
# Local search through worse plans: up to how many storages that can be dropped, from which gap on, and how many operations are simulated
# in plans over the budget and within it.
_EXCHANGED, _OPEN, _ANNEALED, _WORK = 600, 5e-3, 4_000_000, 2_000_000
# Which part of that a sweep over budgets does for each: what was found for smaller budgets goes on to the next.
_SWEEP_SHARE = 8
# The gap at which a quick search stops, and which part of the local search it does.
_QUICK_TOLERANCE, _QUICK_SHARE = 5e-3, 2
# What is further above the best plan than that is not worth improving.
_NEAR = 1.01


@dataclass(frozen=True, slots=True)
class Optimal:
    """Least time within the budget, with a proven bound."""

    name: str = "optimal"
    takes_budgets: bool = True

    def choose(self, problem: Problem) -> Choice:
        """The best simulated plan found within the limits; over the budget only if none that fits was found."""
        return _Search(problem).choose()


def bound_seconds(problem: Problem) -> float:
    """A proven lower bound on the seconds of any plan within the budget, from the linear program alone; infinite if none fits."""
    search = _Search(problem)
    if judge(search.index, frozenset(), problem.executor).peak_bytes <= search.budget:
        return search.index.base_seconds
    search.relax(trying=False)
    return float("inf") if search.impossible else search.bound


class _Search:
    """One search: the rows, the bound, the best plan so far."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.budget, self.executor = problem, needed_budget(problem, "optimal"), problem.executor
        self.survey = survey_of(problem.graph, problem.executor)
        self.index, self.frame = self.survey.index, self.survey.frame
        warm = problem.warm
        self.rows = Rows(self.index, self.frame, None if warm is None else warm.rows.setdefault(problem.executor, {}))
        self.best: Judged | None = None
        # The last plan that local search has been at.
        self.improved: Judged | None = None
        self.bound = self.survey.floor_seconds
        self.price: Price | None = None
        self.impossible = False
        # What the linear program's last solution drops.
        self.point: frozenset[int] | None = None
        size = len(self.frame.dropping)
        self.tolerance = next((tolerance for most, tolerance in _TOLERANCES if size <= most), _TOLERANCE)
        self.quick = problem.effort == "quick"
        if self.quick:
            self.tolerance = max(self.tolerance, _QUICK_TOLERANCE)
        self.nodes = 20000 if self.tolerance == 0.0 else max(200_000 // size, 50)
        self.seen: set[object] = set()

    def choose(self) -> Choice:
        unplanned = judge(self.index, frozenset(), self.executor)
        if unplanned.peak_bytes <= self.budget:
            return Choice(frozenset(), self.index.base_seconds, "the unplanned step fits", price=Price(0.0))
        for known in self._handed_on():
            self._offer(known)
        full = (self._fixed, self.relax, self._chain, self._walls, self._exact, self._learn, self._whole)
        for stage in (self._glance,) if self.quick else full:
            if self.impossible or self._close() or self._late() or self.bound >= self.problem.useless_seconds:
                break
            self._tell(stage.__name__.strip("_"))
            stage()
        if self.best is None and self.bound >= self.problem.useless_seconds:
            return Choice(frozenset(), self.bound, "another executor has a plan that no plan of this one can beat")
        if self.best is None:
            least = least_judged(self.problem)
            if least.peak_bytes > self.budget:
                note = "proven: no plan fits" if self.impossible else "no plan that fits was found"
                return Choice(least.recompute, None, note, least.run.held_from)
            self._offer(least)
        assert self.best is not None
        if not self._close() and not (self.quick and self.best is self.improved):
            self._offer(self._improved(self.best))
        if not self.quick:
            self._exchange()
        if self.problem.warm is not None:
            self.problem.warm.plans[self.executor] = self.best
        bound = min(self.bound, self.best.step_seconds)
        return Choice(self.best.recompute, bound, "", self.best.run.held_from, self.price)

    def _handed_on(self) -> list[Judged]:
        """The plan for the next smaller budget."""
        warm = self.problem.warm
        known = None if warm is None else warm.plans.get(self.executor)
        return [] if known is None or known.peak_bytes > self.budget else [known]

    # -- stages

    def _fixed(self) -> None:
        """The plans of the named strategies."""
        for known in self.survey.named:
            self._offer(known)

    def _glance(self) -> None:
        """One plan near the last point of the linear program; others only if that is over the budget or far above the bound."""
        self.relax(trying=False)
        if self.point is not None:
            self._try(self.point)
        if not self.impossible and not self._close():
            self._fixed()
        if not self.impossible and self.best is None:
            self._squeeze()
        if self.best is not None and self.best.step_seconds > self.bound * _DEEP:
            self._chain()

    def _squeeze(self) -> None:
        """From the chain's least plan down until the budget is kept."""
        if self.survey.links is not None:
            least = self.survey.links.least()
            self._offer(lower_peak(self.index, least, self.executor, self.frame.dropping, tries_for(least), self.budget))

    def relax(self, trying: bool = True) -> None:
        """The linear program with proven rows, until its point violates none: the bound, and the price of a byte."""
        everything = frozenset(self.frame.held)
        self.rows.add_proven(everything & self.frame.needed, frozenset(), self.budget)
        self.rows.add_proven(frozenset(), self.frame.needed, self.budget)
        for _ in range(_RELAXED_ROUNDS):
            rows = list(self.rows.proven.values())
            solution = self.survey.program.relaxed(rows, self.budget, self.problem.remaining_seconds)
            self._bounded(solution)
            if solution.recompute is None:
                return
            self.price, self.point = Price.of([row.at for row in rows], solution.prices), solution.recompute
            fresh = self._add_proven(solution)
            if trying:
                self._try(solution.recompute)
            if not fresh or self._late() or self._close():
                return

    def _chain(self) -> None:
        """Schedules of the chain, and of the classical strategies on it."""
        if self.survey.links is None:
            return
        nested = self.survey.links.within(self.budget)
        if nested is not None:
            self._take(nested)
        if len(self.frame.dropping) <= _FEW:
            for strategy in (Rotor(), Revolve()):
                self._offer(judge_choice(self.index, strategy.choose(self.problem), self.executor))

    def _walls(self) -> None:
        """The bound that counts repeats."""
        if len(self.frame.dropping) <= _EXCHANGED:
            replayed = walls_seconds(self.index, self.executor, self.frame, self.budget)
            self.bound = max(self.bound, self.survey.floor_seconds + replayed)

    def _exact(self) -> None:
        """The integer program with proven rows."""
        if not self._worthwhile():
            return
        for _ in range(_EXACT_ROUNDS):
            solution = self._solve(proven=True)
            self._bounded(solution)
            if solution.recompute is None:
                return
            fresh = self._add_proven(solution)
            self._try(solution.recompute)
            if not fresh or self._late() or self._close():
                return

    def _learn(self) -> None:
        """Solve, simulate, add the rows that the simulation found, again."""
        if not self._worthwhile():
            return
        for _ in range(_LEARN_ROUNDS):
            solution = self._solve(proven=False)
            if solution.recompute is None or self._late():
                return
            self._add_proven(solution)
            if not self._try(solution.recompute) or self._close():
                return

    def _whole(self) -> None:
        """In small steps the program of the whole schedule, which knows of storages that are rebuilt more than once."""
        if len(self.frame.dropping) > _WHOLE:
            return
        choice = Checkmate(nodes=_WHOLE_NODES, rounds=_WHOLE_ROUNDS, lowers=len(self.frame.dropping) <= _TINY).choose(self.problem)
        self._offer(judge_choice(self.index, choice, self.executor))
        if choice.bound_seconds is not None:
            self.bound = max(self.bound, choice.bound_seconds)

    def _exchange(self) -> None:
        """Local search through worse plans, which finds most where plans recompute more than once and no program says how."""
        enough = self.bound + _OPEN * self.index.base_seconds
        if self.best is None or self.best.step_seconds <= enough or self.bound >= self.problem.useless_seconds:
            return
        if not _TINY < len(self.frame.dropping) <= _EXCHANGED:
            return
        start, part = self.best, 1 if self.problem.warm is None else _SWEEP_SHARE
        # Neither search is the better start for the other everywhere.
        self._search(exchanged, start, enough, _WORK // part)
        if can_wait(self.index) and self.executor.rebuilds_again:
            over = self._search(annealed, start, enough, _ANNEALED // part)
            if over is not start:
                self._search(exchanged, over, enough, _WORK // part)

    def _search(self, search: Callable[..., Judged], start: Judged, enough: float, work: int) -> Judged:
        self._tell(search.__name__)
        remaining = self.problem.remaining_seconds
        found = search(self.index, start, self.executor, self.frame.dropping, self.budget, enough, work, remaining)
        self._offer(found)
        return found

    def _worthwhile(self) -> bool:
        """Whether the integer program may come nearer: not in large steps, nor where plans recompute much more than it counts."""
        size = len(self.frame.dropping)
        return size <= _FEW or (size <= _EXACT and self.best is not None and self.best.step_seconds <= self.bound * _DEEP)

    # -- what they share

    def _solve(self, proven: bool) -> Solution:
        rows = list(self.rows.proven.values())
        rows += [] if proven else self.rows.estimated()
        seconds = min(self.problem.remaining_seconds, max(self.problem.time_limit_seconds / 4, 0.1))
        return self.survey.program.solve(rows, self.budget, seconds, self.tolerance, self.nodes)

    def _bounded(self, solution: Solution) -> None:
        self.impossible = self.impossible or solution.infeasible
        self.bound = max(self.bound, self.survey.floor_seconds + solution.bound)

    def _add_proven(self, solution: Solution) -> int:
        assert solution.recompute is not None
        kept = (self.frame.needed - solution.recompute) | solution.held
        return self.rows.add_proven(kept, solution.recompute & self.frame.needed, self.budget)

    def _try(self, recompute: frozenset[int]) -> bool:
        """Offer a choice, repaired and improved, and learn from it; says whether it is new."""
        found = self._judge(recompute)
        self.rows.learn(found.run, self.budget)
        if found.recompute in self.seen:
            return False
        self.seen.add(found.recompute)
        self._take(found if found.peak_bytes <= self.budget else self._repaired(found))
        return True

    def _take(self, found: Judged) -> None:
        """Offer a plan, and if it is near the best one, or is that, what local search makes of it."""
        if self._offer(found) and self.best is not None and found.step_seconds <= self.best.step_seconds * _NEAR:
            self._offer(self._improved(found))

    def _judge(self, recompute: frozenset[int]) -> Judged:
        return judge(self.index, recompute, self.executor)

    def _offer(self, found: Judged) -> bool:
        """Take a plan if it fits and is better; says whether it fits."""
        if found.peak_bytes > self.budget:
            return False
        if self.best is None or (found.step_seconds, found.peak_bytes) < (self.best.step_seconds, self.best.peak_bytes):
            self.best = found
        return True

    def _improved(self, found: Judged) -> Judged:
        """More kept, and more held, until neither helps."""
        tries = self._tries(found)
        # A plan with very many replays takes long to simulate.
        many = self.quick or self.index.count + len(found.run.replayed.ops) > _MANY
        for _ in range(1 if many else _IMPROVEMENTS):
            if self._late():
                break
            more = hold_more(self.index, found, self.executor, self.budget, self.problem.remaining_seconds, tries)
            more = keep_more(self.index, more, self.executor, self.budget, self.problem.remaining_seconds, tries)
            if more.step_seconds >= found.step_seconds:
                break
            found = more
        self.improved = found
        return found

    def _repaired(self, found: Judged) -> Judged:
        """A choice that is over the budget, lowered until it fits or cannot be lowered further."""
        return lower_peak(self.index, found, self.executor, self.frame.dropping, self._tries(found), self.budget)

    def _tries(self, found: Judged) -> int:
        return tries_for(found) // (_QUICK_SHARE if self.quick else 1)

    def _close(self) -> bool:
        return self.best is not None and self.best.step_seconds <= self.bound + max(self.tolerance, _ROUNDING) * self.index.base_seconds

    def _late(self) -> bool:
        return self.problem.remaining_seconds <= 0

    def _tell(self, text: str) -> None:
        if self.problem.progress is not None:
            self.problem.progress(0, 1, f"solving: {text}")
