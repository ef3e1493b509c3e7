"""What a strategy is: given a problem it chooses the storages to recompute. Nothing it says is reported unsimulated."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from recoup.errors import UsageError
from recoup.graph import StepGraph
from recoup.plan import LIVE, Capabilities
from recoup.simulate.offload import Offload

if TYPE_CHECKING:
    from recoup.solve.warm import Warm

__all__ = ["Choice", "Effort", "Price", "Problem", "Progress", "Strategy", "needed_budget", "takes_budgets"]

Effort = Literal["full", "quick"]
"""How much work a search may do: as much as ever helps, or what takes a small part of a compilation."""

Progress = Callable[[int, int, str], None]
"""Called with steps done, steps in all and a text."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What a strategy is asked.

    Attributes:
        graph: the step.
        budget_bytes: the peak allowed; None asks a strategy that has one plan for that plan.
        executor: what can be run, and its overheads.
        time_limit_seconds: how long to search; running out of it is no error.
        progress: called now and then, or None.
        useless_seconds: a plan that takes that long is of no use: another executor has one. A search may stop when its bound says so.
        warm: what searches for smaller budgets of the same step found, or None.
        effort: how much work a search may do; either way the same for the same problem, on any machine.
        started: when the search began, on ``time.perf_counter``.
    """

    graph: StepGraph
    budget_bytes: int | None = None
    executor: Capabilities = LIVE
    time_limit_seconds: float = 20.0
    progress: Progress | None = None
    useless_seconds: float = float("inf")
    warm: Warm | None = None
    effort: Effort = "full"
    started: float = field(default_factory=time.perf_counter)

    @property
    def remaining_seconds(self) -> float:
        """What is left of the time limit, never below zero."""
        return max(self.time_limit_seconds - (time.perf_counter() - self.started), 0.0)


@dataclass(frozen=True, slots=True)
class Price:
    """What memory is worth at a budget.

    Attributes:
        seconds_per_byte: what one more byte of budget would save: the rate of the relaxed program, exact for small changes.
        moments: the operations at which memory binds, each with its share of the rate, the largest first.
    """

    seconds_per_byte: float
    moments: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, ops: Sequence[int], prices: Sequence[float]) -> Price:
        """From the price of each row of a program, and the operation that the row is about."""
        total = sum(prices)
        binding = sorted(
            ((op, price / total) for op, price in zip(ops, prices, strict=True) if price > total * 1e-6), key=lambda one: -one[1]
        )
        return cls(total, tuple(binding))


@dataclass(frozen=True, slots=True)
class Choice:
    """What a strategy answers.

    Attributes:
        recompute: ids of the storages to drop.
        bound_seconds: a proven lower bound on the step time of any plan within the budget, or None.
        note: what a person should know about the search.
        held_from: for storages that are recomputed more than once, the one from whose unpacking on copies are held.
        price: what memory is worth at this budget, or None.
        offload: what waits on the host or on disk, and how it moves; None where nothing does.
    """

    recompute: frozenset[int]
    bound_seconds: float | None = None
    note: str = ""
    held_from: Mapping[int, int] = field(default_factory=dict)
    price: Price | None = None
    offload: Offload | None = None

    @property
    def drops_nothing(self) -> bool:
        """Whether the step is left as it is."""
        return not self.recompute and self.offload is None


class Strategy(Protocol):
    """A way to choose; ``choose`` must be a pure function of the problem (its clock aside).

    One that makes the same plan whatever the budget is says so with an attribute ``takes_budgets = False``.
    """

    @property
    def name(self) -> str:
        """What plans and reports call it."""
        ...

    def choose(self, problem: Problem) -> Choice:
        """The storages to recompute; may exceed the budget where the strategy finds nothing that fits."""
        ...


def takes_budgets(strategy: Strategy) -> bool:
    """Whether a strategy's plan depends on the budget; without one it cannot be asked."""
    return bool(getattr(strategy, "takes_budgets", True))


def needed_budget(problem: Problem, name: str) -> int:
    """The budget of a problem, for a strategy that cannot do without.

    Raises:
        UsageError: there is none.
    """
    if problem.budget_bytes is None:
        raise UsageError(f"the strategy {name!r} needs a budget, such as 6GiB or 60%")
    return problem.budget_bytes
