"""The search: solve the program, simulate its answer, cut it off, again."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from math import inf

import highspy
import numpy as np
from numpy.typing import NDArray

from recoup.errors import UsageError
from recoup.plan import Capabilities
from recoup.simulate.index import Replays, replays
from recoup.simulate.judge import run
from recoup.solve.checkmate.columns import CONSTANT, Columns, Terms, weighed
from recoup.solve.checkmate.memory import moments
from recoup.solve.checkmate.stages import Stages
from recoup.solve.choice import droppable
from recoup.solve.linear import COST_SCALE, MEMORY_SCALE, model_of, run_integer
from recoup.solve.strategy import Choice, Problem, needed_budget

__all__ = ["Checkmate"]

_LIMIT = 60
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Checkmate:
    """Least time within the budget, proven, for steps of up to 60 storages that can be dropped.

    Attributes:
        name: what plans call it.
        nodes: how far the search for one integer program may branch; beyond that its best answer and bound count.
        rounds: how many answers are simulated and, where the simulator is not content or the search was cut short, cut off.
        lowers: whether to look for the least peak where nothing within the budget is found.
    """

    name: str = "checkmate"
    nodes: int = 1_000_000
    rounds: int = 50
    lowers: bool = True
    takes_budgets: bool = True

    def choose(self, problem: Problem) -> Choice:
        """The fastest schedule within the budget; the one with the least peak where nothing fits.

        Raises:
            UsageError: there is no budget, or the step is too large.
        """
        budget_bytes = needed_budget(problem, self.name)
        index = replays(problem.graph)
        if int(run(problem.graph, frozenset()).bytes_at.max(initial=0)) <= budget_bytes:
            return Choice(frozenset(), index.base_seconds, "the unplanned step fits")
        size = len(droppable(index, problem.executor))
        if size > _LIMIT:
            raise UsageError(f"the strategy 'checkmate' is for steps with up to {_LIMIT} storages to drop, not {size}; use 'optimal'")
        return _Search(problem, budget_bytes, self).choose()


@dataclass(frozen=True, slots=True)
class _Found:
    """A schedule, simulated."""

    peak_bytes: int
    step_seconds: float
    recompute: frozenset[int]
    held_from: dict[int, int]


class _Search:
    """One search: the program, and what the simulator says of its answers."""

    def __init__(self, problem: Problem, budget_bytes: int, limits: Checkmate) -> None:
        self.problem, self.budget_bytes, self.limits = problem, budget_bytes, limits
        self.program = _Program(replays(problem.graph), problem.executor, limits.nodes)
        self.fastest: _Found | None = None
        self.least: _Found | None = None

    def choose(self) -> Choice:
        """What fits, until the program has nothing faster; else the least peak."""
        bound, proven = 0.0, False
        for turn in range(self.limits.rounds):
            if self.problem.progress is not None:
                self.problem.progress(turn, self.limits.rounds, "solving")
            answer = self.program.solve(self.budget_bytes, self.problem.remaining_seconds)
            proven = answer.infeasible
            bound = inf if proven else max(bound, answer.bound)
            self._take(answer)
            found = self.fastest is not None and self.fastest.step_seconds <= bound * (1 + _ROUNDING)
            if answer.values is None or found or not self.problem.remaining_seconds:
                break
        if self.fastest is None and self.limits.lowers:
            self._lower()
        if self.fastest is not None:
            return Choice(self.fastest.recompute, min(bound, self.fastest.step_seconds), "", self.fastest.held_from)
        note = "proven: no plan fits" if proven else "no plan that fits was found"
        return Choice(frozenset(), None, note) if self.least is None else Choice(self.least.recompute, None, note, self.least.held_from)

    def _lower(self) -> None:
        clock = replace(self.problem, started=time.perf_counter())
        for _ in range(self.limits.rounds):
            answer = self.program.solve(None, clock.remaining_seconds)
            self._take(answer)
            proven = self.least is not None and self.least.peak_bytes < answer.bound * (1 + _ROUNDING) + 1
            if answer.values is None or proven or not clock.remaining_seconds:
                break

    def _take(self, answer: _Answer) -> None:
        """Simulate an answer and cut it off."""
        if answer.values is None:
            return
        recompute, held_from = self.program.stages.schedule(answer.values)
        lived = run(self.problem.graph, recompute, held_from)
        found = _Found(int(lived.bytes_at.max()), lived.seconds(self.problem.executor), recompute, held_from)
        if self.least is None or found.peak_bytes < self.least.peak_bytes:
            self.least = found
        if found.peak_bytes <= self.budget_bytes and (self.fastest is None or found.step_seconds < self.fastest.step_seconds):
            self.fastest = found
        self.program.exclude(answer.values)


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """The best values found, or None; the proven bound in seconds or bytes; whether it is proven that there are no values."""

    values: NDArray[np.float64] | None
    bound: float
    infeasible: bool


class _Program:
    """The program of one step: what runs, its seconds, and the bytes of all moments."""

    def __init__(self, index: Replays, executor: Capabilities, nodes: int) -> None:
        self.nodes = nodes
        self.stages = Stages(index, executor)
        self.moments = moments(self.stages)
        self.fixed_seconds = index.base_seconds + executor.pack_seconds * len(index.graph.saves)
        self.scale = COST_SCALE / max(index.base_seconds, 1e-12)
        for (_, op), ran in self.stages.ran.items():
            self.stages.charge(ran, (index.graph.ops[op].seconds + executor.replay_seconds) * self.scale)
        frames: dict[tuple[str, int], set[int]] = {}
        for op, made in self.stages.makes.items():
            frames.setdefault(index.frame_of[op], set()).update(made)
        for frame, made in frames.items():
            captured = self.stages.largest([self.stages.drop[v] for v in sorted(made)])
            self.stages.charge(captured, executor.capture_seconds * index.frame_ops.get(frame, 0) * self.scale)

    def solve(self, budget_bytes: int | None, seconds: float) -> _Answer:
        """The least seconds within the budget, or without one the least peak in bytes."""
        size = budget_bytes or max((moment.get(CONSTANT, 0.0) for moment in self.moments), default=0.0)
        unit, count = MEMORY_SCALE / max(size, 1.0), len(self.stages.cost)
        # Half a byte of room is for rounding.
        room: Terms = {count: 1.0} if budget_bytes is None else {CONSTANT: (budget_bytes + 0.5) * unit}
        cost = [*self.stages.cost, 0.0] if budget_bytes is not None else [*([0.0] * count), 1.0]
        rows = Columns()
        for moment in self.moments:
            rows.at_least(room, weighed([(unit, moment)]))
        model = model_of(cost, [*([1.0] * count), inf], [*self.stages.integer, False], [*self.stages.entries, *rows.entries])
        status, values, dual = run_integer(model, seconds, 0.0, self.nodes)
        bound = dual / unit if budget_bytes is None else self.fixed_seconds + dual / self.scale
        return _Answer(values, bound, status == highspy.HighsModelStatus.kInfeasible)

    def exclude(self, values: NDArray[np.float64]) -> None:
        """No longer give an answer with these decisions."""
        signs = {column: -1.0 if values[column] > 0.5 else 1.0 for column, whole in enumerate(self.stages.integer) if whole}
        self.stages.entries.append((list(signs), list(signs.values()), 1.0 - sum(sign < 0 for sign in signs.values())))
