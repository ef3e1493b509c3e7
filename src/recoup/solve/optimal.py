"""The strategy ``optimal``: an integer program over the whole step, and the simulator as its judge.

The program is solved with rows that every plan satisfies: that gives a proven bound on the time. Where the simulator
finds its plan over the budget, rows learned from the simulated run are added and the program is solved again, until the
simulator agrees. What comes out is improved by local search and compared with every named strategy.
"""

from __future__ import annotations

from dataclasses import dataclass

from recoup.simulate.index import replays
from recoup.solve.descent import Judged, hold_more, judge, keep_more, lower_peak
from recoup.solve.hierarchy import links_of
from recoup.solve.holds import can_wait
from recoup.solve.least import least_judged
from recoup.solve.named import NAMED
from recoup.solve.program import Program, Row, Solution
from recoup.solve.rows import Rows
from recoup.solve.strategy import Choice, Problem
from recoup.solve.windows import windows

__all__ = ["Optimal"]

_BOUND_ROUNDS = 12
_LEARN_ROUNDS = 10
# Relative to the time of the step: a larger step need not be solved to the last microsecond.
_TOLERANCE = 2e-4
_SMALL = 60
_REPAIRS = 120


@dataclass(frozen=True, slots=True)
class Optimal:
    """Least time within the budget, with a proven bound."""

    name: str = "optimal"

    def choose(self, problem: Problem) -> Choice:
        """The best simulated plan found within the time limit; over the budget only if none that fits was found."""
        return _Search(problem).choose()


class _Search:
    """One search: the program, its rows, the best plan so far."""

    def __init__(self, problem: Problem) -> None:
        assert problem.budget_bytes is not None, "optimal needs a budget"
        self.problem, self.budget, self.executor = problem, problem.budget_bytes, problem.executor
        self.index = replays(problem.graph)
        frame = windows(self.index, self.executor)
        self.program = Program(self.index, self.executor, frame)
        self.rows = Rows(self.index, frame)
        self.frame = frame
        self.best: Judged | None = None
        self.tolerance = 0.0 if len(frame.dropping) <= _SMALL else _TOLERANCE
        self.seen: set[frozenset[int]] = set()

    def choose(self) -> Choice:
        unplanned = judge(self.index, frozenset(), self.executor)
        if unplanned.peak_bytes <= self.budget:
            return Choice(frozenset(), self.index.base_seconds, "the unplanned step fits")
        for strategy in NAMED:
            self._offer(self._judge(strategy.choose(self.problem).recompute))
        if can_wait(self.index):
            nested = links_of(self.index, self.executor).within(self.budget)
            if nested is not None:
                self._offer(nested)
        bound, impossible = self._bound()
        if not impossible:
            self._learn(bound)
        if self.best is None:
            least = least_judged(self.problem)
            if least.peak_bytes > self.budget:
                note = "proven: no plan fits" if impossible else "no plan that fits was found"
                return Choice(least.recompute, None, note, least.run.held_from)
            self._offer(least)
        assert self.best is not None
        self.best = self._improved(self.best)
        return Choice(self.best.recompute, min(bound, self.best.step_seconds), "", self.best.run.held_from)

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
        while self.problem.remaining_seconds > 0:
            more = hold_more(self.index, found, self.executor, self.budget, self.problem.remaining_seconds)
            more = keep_more(self.index, more, self.executor, self.budget, self.problem.remaining_seconds)
            if more.step_seconds >= found.step_seconds:
                break
            found = more
        return found

    def _repaired(self, found: Judged) -> Judged:
        """A choice that is over the budget, lowered until it fits or cannot be lowered further."""
        return lower_peak(self.index, found, self.executor, self.frame.dropping, _REPAIRS, self.budget)

    def _bound(self) -> tuple[float, bool]:
        """Proven least time of any plan within the budget, and whether it is proven that there is none."""
        floor = self.index.base_seconds + self.executor.pack_seconds * len(self.index.graph.saves)
        everything = frozenset(self.frame.held)
        self.rows.add_proven(everything & self.frame.needed, frozenset(), self.budget)
        self.rows.add_proven(frozenset(), self.frame.needed, self.budget)
        bound = floor
        for _ in range(_BOUND_ROUNDS):
            solution = self._solve(list(self.rows.proven.values()))
            if solution.infeasible:
                return bound, True
            bound = max(bound, floor + solution.bound)
            if solution.recompute is None:
                break
            kept = (self.frame.needed - solution.recompute) | solution.held
            if not self.rows.add_proven(kept, solution.recompute & self.frame.needed, self.budget):
                self._take(solution.recompute)
                break
            if self.problem.remaining_seconds <= 0:
                break
        return bound, False

    def _solve(self, rows: list[Row]) -> Solution:
        seconds = min(self.problem.remaining_seconds, max(self.problem.time_limit_seconds / 4, 0.1))
        return self.program.solve(rows, self.budget, seconds, self.tolerance)

    def _take(self, recompute: frozenset[int]) -> None:
        found = self._judge(recompute)
        self.seen.add(found.recompute)
        self._try(found)
        self.rows.learn(found.run, self.budget)

    def _try(self, found: Judged) -> None:
        """Offer a choice, repaired and improved."""
        fitting = found if found.peak_bytes <= self.budget else self._repaired(found)
        if self._offer(fitting):
            self._offer(self._improved(fitting))

    def _learn(self, bound: float) -> None:
        """Solve, simulate, add the rows that the simulation found, again."""
        for turn in range(_LEARN_ROUNDS):
            if self._close(bound) or self.problem.remaining_seconds <= 0:
                return
            if self.problem.progress is not None:
                self.problem.progress(turn, _LEARN_ROUNDS, "solving")
            solution = self._solve([*self.rows.proven.values(), *self.rows.estimated()])
            if solution.recompute is None:
                return
            kept = (self.frame.needed - solution.recompute) | solution.held
            self.rows.add_proven(kept, solution.recompute & self.frame.needed, self.budget)
            found = self._judge(solution.recompute)
            self._try(found)
            self.rows.learn(found.run, self.budget)
            if found.recompute in self.seen:
                return
            self.seen.add(found.recompute)

    def _close(self, bound: float) -> bool:
        return self.best is not None and self.best.step_seconds <= bound + self.tolerance * self.index.base_seconds
