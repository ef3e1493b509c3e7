"""Deciding for a budget without being shown the step: graphs are planned as dynamo meets them, and all together once known.

The first graph is planned as if it were the step. Each further one is planned together with all before it; what that
changes for the earlier ones takes effect when they are called next. So from the second step on, one budget is shared by all
graphs of the step, as the solver sees fit; during the first step the plan of an earlier graph may keep more than that. A share
of the unplanned peak means that of the whole step: what it is too little for at first may fit once all graphs are known, so
that is judged at the end of the first step.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from typing import Literal

import recoup
from recoup.errors import InfeasibleBudget, UsageError
from recoup.graph import StepGraph
from recoup.plan import Plan
from recoup.simulate import simulate
from recoup.solve import Effort, solve
from recoup.torch.compiled.joint import Joint
from recoup.torch.compiled.record import calls_of
from recoup.torch.compiled.session import Label, Local, Logged, Piece, Session
from recoup.torch.compiled.sites import decisions_of
from recoup.torch.compiled.step import combined
from recoup.units import Budget, format_bytes, format_seconds

__all__ = ["Budgeted", "Settings"]

_log = logging.getLogger("recoup")


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user asks of Recoup's backend.

    Attributes:
        budget: bytes of the step's peak: parameters, inputs, activations, gradients, and ``standing_bytes``.
        kernels: ``inductor``, or ``aten`` for plain ATen kernels.
        strategy: ``optimal``, or a named strategy.
        standing_bytes: what stands beside the graphs' own parameters and inputs: optimizer states, gradients that are not set to None,
            other models.
        results: ``held``: what the graphs return is counted to the end of the step. ``released``: nobody holds it while the backward runs,
            but for numbers such as the loss; that is checked in every step that compiles nothing.
        effort: how much work the search may do, ``quick`` or ``full``; see ``recoup.solve``.
        time_limit_seconds: how long to search; the best plan so far is taken then.
        step: a name that keeps several compiled steps of one process apart.
    """

    budget: Budget
    kernels: Literal["inductor", "aten"] = "inductor"
    strategy: str = "optimal"
    standing_bytes: int = 0
    results: Literal["held", "released"] = "held"
    effort: Effort = "quick"
    time_limit_seconds: float = 20.0
    step: str = ""


# Plans by graph, budget and settings, those asked for last: compiling the same once more asks no solver.
_solved: dict[tuple[str, int, Settings], Plan] = {}
_SOLVED = 64


_NUMBER_BYTES = 8
_Key = tuple[int, Label]


def _key(call: Logged) -> _Key:
    return call.piece.number, call.label


class Budgeted:
    """Plans the graphs of a step for a budget as they come."""

    looks = True

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.session: Session | None = None
        self.plan: Plan | None = None
        self.solve_seconds = 0.0
        # The calls of the step under way, in order, each graph and label once, those included that a graph was compiled for only.
        self.calls: list[Logged] = []
        # All calls that have been decided about, and the steps, as sets of calls, that were planned as a whole.
        self.planned: set[_Key] = set()
        self.settled: set[frozenset[_Key]] = set()
        # Whether a graph was compiled in the step under way: frames that the compiler's exceptions hold may then hold results too.
        self.compiling = False
        # Why the plan at work does not keep to the budget: a share that the graphs known so far are too few for.
        self.shortfall: InfeasibleBudget | None = None

    def decisions(self, piece: Piece, label: Label) -> Local | None:
        """What the plan says, once it was made for this call too."""
        if self.plan is None or (piece.number, label) not in self.planned:
            return None
        return decisions_of(self.plan, label)

    def choose(self, piece: Piece, label: Label, joint: Joint) -> Local:
        """Plans anew if this call is not yet in the plan."""
        self.compiling = True
        known = self.decisions(piece, label)
        if known is None:
            assert self.session is not None
            self._remember(Logged(piece, label, self.session.arriving, ()))
            self._solve()
            known = self.decisions(piece, label)
        assert known is not None
        return known

    def key(self, piece: Piece, label: Label) -> bytes:
        """The graphs themselves tell decisions apart: AOTAutograd's cache, which knows only the joint graph, is not asked."""
        return hashlib.sha256(f"recoup {recoup.__version__}".encode()).digest()

    def step_begins(self) -> None:
        """All graphs of the step before are known: if it was not planned as a whole yet, it is now.

        Raises:
            InfeasibleBudget: no plan fits the share asked for.
        """
        if frozenset(map(_key, self._planable())) not in self.settled:
            self._solve()
        self.calls = []
        self.compiling = False
        if self.shortfall is not None:
            raise self.shortfall

    def before(self, piece: Piece, label: Label) -> None:
        """Wants to see where inputs and results lie."""
        assert self.session is not None
        self.session.logging = True

    def after(self, call: Logged) -> None:
        """Remembers the call."""
        self._remember(call)

    def backward_ends(self) -> None:
        """Checks the promise that results are let go; results that count as held need no look, since that is no less than the truth.

        Raises:
            UsageError: a result of a graph that takes part in the plan is still there, though the option ``results`` says otherwise.
        """
        if self.settings.results == "held" or self.compiling:
            return
        for call in self._planable():
            for number, (alive, small) in enumerate(zip(call.alive, _are_numbers(call), strict=False)):
                if alive is not None and not small and alive() is not None:
                    raise UsageError(
                        f"results='released' says that nobody holds what a compiled graph returns while the backward runs, but result"
                        f" {number} of graph {call.piece.number} is still there; let go of it (del, or return the loss alone), or leave"
                        " the option out: then it is counted"
                    )

    def _remember(self, call: Logged) -> None:
        place = next((number for number, one in enumerate(self.calls) if _key(one) == _key(call)), len(self.calls))
        self.calls[place : place + 1] = [call]

    def _planable(self) -> list[Logged]:
        return [call for call in self.calls if call.piece.joint is not None]

    def _solve(self) -> None:
        calls = self._planable()
        if not calls:
            return
        held = [_are_numbers(call) for call in calls] if self.settings.results == "released" else None
        # What a backward begins with, the gradient of a number for each graph at most, is held by its caller to the end.
        beside_bytes = self.settings.standing_bytes + _NUMBER_BYTES * len(calls)
        graph = combined(calls_of(calls, held), beside_bytes=beside_bytes, name="compiled step")
        budget_bytes = self.settings.budget.resolve(simulate(graph).peak_bytes)
        self.plan = self._plan_for(graph, budget_bytes)
        before, now = set(self.planned), frozenset(map(_key, calls))
        self.planned |= now
        self.settled.add(now)
        _log.info(
            "%d compiled graphs: predicted peak %s of a budget of %s, %s of %s unplanned; solved in %s",
            len(calls),
            format_bytes(self.plan.peak_bytes),
            format_bytes(budget_bytes),
            format_seconds(self.plan.step_seconds),
            format_seconds(self.plan.unplanned_step_seconds),
            format_seconds(self.plan.solve_seconds),
        )
        for call in calls:
            # What is compiled for other decisions is looked up again at its next call.
            if _key(call) in before:
                call.piece.by_label.pop(call.label, None)

    def _plan_for(self, graph: StepGraph, budget_bytes: int) -> Plan:
        """A plan for the graph, an earlier one if the same was asked before."""
        key = (graph.fingerprint, budget_bytes, self.settings)
        self.shortfall = None
        if key not in _solved:
            try:
                found = self._solved_for(graph, budget_bytes)
            except InfeasibleBudget as error:
                if self.settings.budget.kind != "relative":
                    raise
                # Its traceback would hold the frames of the step under way, and all that they come to hold.
                self.shortfall = error.with_traceback(None)
                return self._solved_for(graph, error.least_bytes)
            _solved[key] = found
        _solved[key] = found = _solved.pop(key)  # to the end: the first is the one not asked for the longest
        while len(_solved) > _SOLVED:
            del _solved[next(iter(_solved))]
        return found

    def _solved_for(self, graph: StepGraph, budget_bytes: int) -> Plan:
        asked = self.settings
        found = solve(graph, budget_bytes, strategy=asked.strategy, time_limit_seconds=asked.time_limit_seconds, effort=asked.effort)
        self.solve_seconds += found.solve_seconds
        return found


def _are_numbers(call: Logged) -> tuple[bool, ...]:
    """For each result of a graph whether it is no larger than a number: what a user keeps of a step."""
    joint = call.piece.joint
    assert joint is not None
    return tuple(v is None or joint.graph.storages[v].bytes <= _NUMBER_BYTES for v in joint.results)
