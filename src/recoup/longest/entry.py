"""``longest``: the longest sequence or the largest batch within a budget, and what it costs.

A few small recordings give the step at every size (``recoup.graph.scale``). On that model the largest size is looked for
at which a plan fits (``recoup.longest.search``). What comes out is run (``recoup.longest.workshop``): only a size whose
planned step was measured within the budget is ever an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from recoup.errors import UsageError
from recoup.graph import StepGraph
from recoup.graph.scale import ScaledStep
from recoup.longest.search import Search
from recoup.longest.workshop import CheckMode, Make, Progress, Workshop
from recoup.plan import Plan
from recoup.solve.entry import executors_of, strategy_of
from recoup.solve.strategy import Strategy
from recoup.solve.tiling import check_allowed
from recoup.torch.meter import device_of
from recoup.torch.offload.links import Wanted, links_of
from recoup.units import Budget, parse_budget
from recoup.verify import Verification

__all__ = ["Longest", "longest"]

_FAR = 1 << 24  # multiples; a size beyond that is no answer


@dataclass(frozen=True, slots=True)
class Longest:
    """The largest size of a step within a budget, with what it takes.

    Attributes:
        over: the name of the size.
        size: the largest found whose planned step ran within the budget.
        budget_bytes: the budget.
        plan: the plan for that size.
        graph: the modelled step that the plan was made for, with what was seen of the real one.
        compared_at: the size at which the plan's decisions ran beside the unplanned step, and gave the same bits: this one,
            or the largest recorded one.
        verification: what was compared, and what was measured at this size.
        tokens: of one step of this size.
        next_size: the size after it, None if it is the largest that was asked about.
        next_least_bytes: the least peak found for the next size: for real if it was tried, else by the model.
        unplanned_size: the largest whose unplanned step ran within the budget, 0 if there is none.
        unplanned_tokens: of one step of that size.
        unplanned_step_seconds: median time of the unplanned step of that size, None if there is none.
        recorded_sizes: what the model of the step was made from.
        model_error: modelled over measured peak at this size, less 1: of the unplanned step if that ran, else of the planned one.
    """

    over: str
    size: int
    budget_bytes: int
    plan: Plan
    graph: StepGraph
    compared_at: int
    verification: Verification
    tokens: int
    next_size: int | None
    next_least_bytes: int | None
    unplanned_size: int
    unplanned_tokens: int
    unplanned_step_seconds: float | None
    recorded_sizes: tuple[int, ...]
    model_error: float

    @property
    def predicted_peak_bytes(self) -> int:
        """What the plan promises."""
        return self.plan.peak_bytes

    @property
    def measured_peak_bytes(self) -> int:
        """Measured peak of the planned step; never above the budget."""
        return self.verification.peak_bytes or 0

    @property
    def step_seconds(self) -> float:
        """Median time of the planned step."""
        return self.verification.step_seconds or 0.0

    @property
    def seconds_per_token(self) -> float:
        """Of the planned step."""
        return self.step_seconds / max(self.tokens, 1)

    @property
    def unplanned_seconds_per_token(self) -> float | None:
        """Of the unplanned step at its own largest size, None if there is none."""
        return None if self.unplanned_step_seconds is None else self.unplanned_step_seconds / max(self.unplanned_tokens, 1)


def longest(
    make: Make,
    budget: str | int | Budget,
    *,
    over: str,
    sizes: Sequence[int] | None = None,
    least: int = 1,
    most: int | None = None,
    multiple: int = 1,
    strategy: str | Strategy = "optimal",
    gear: str = "auto",
    allow: Sequence[str] = (),
    check: CheckMode = "auto",
    tokens: int | Callable[[int], int] | None = None,
    offload: Wanted | Sequence[Wanted] | None = None,
    host_budget: str | int | None = None,
    disk_budget: str | int | None = None,
    progress: Progress | None = None,
) -> Longest:
    """Find the longest sequence, the largest batch, or the largest of any size of a step within a memory budget.

    Args:
        make: called with ``over`` as a keyword; returns the model and the step of that size, newly made.
        budget: of the whole step's peak: ``"6GiB"``, ``"auto"``, or bytes.
        over: the name of the size.
        sizes: three or more sizes to record; by default three that double, up to where the unplanned step's activations
            take an eighth of the budget.
        least, most: bounds of the answer; nothing is recorded above ``most``.
        multiple: the answer, and what is recorded by default, are multiples of it.
        strategy: ``optimal``, or a named strategy.
        gear: ``live``, ``static``, or ``auto`` for the one that is faster by the simulation.
        allow: as for ``solve``.
        check: ``compared`` verifies the plan at the answer, which runs the unplanned step there too; ``alone`` runs only the
            planned step there, and compares at the largest recorded size; ``auto`` compares at the answer if the device
            has room for the unplanned step and copies of its state.
        tokens: of one step: a factor on the size, or a function of it; by default the size itself.
        offload, host_budget, disk_budget: where activations may wait, as for ``fit``.
        progress: called with what is done, of how much, and a text.

    Raises:
        InfeasibleBudget: no plan fits even at the least size; the error has the least peak there.
        VerifyFailure: every size that was tried differs from the unplanned step, or does not settle within the budget.
        CaptureError: the step cannot be recorded.
        UsageError: an option cannot be understood, the step is not the same at all sizes, or nothing bounds its size.
    """
    wanted = parse_budget(budget)
    if wanted.kind == "relative":
        raise UsageError(f"{wanted.text} of the unplanned peak is no budget here, where that peak grows with {over}; give bytes, or auto")
    if check not in ("auto", "compared", "alone"):
        raise UsageError(f"check is 'auto', 'compared' or 'alone', not {check!r}")
    executors_of(gear)
    check_allowed(allow)
    grid = _grid(least, most, multiple)
    if sizes is not None and (len(set(sizes)) < 3 or min(sizes) < 1):
        raise UsageError(f"three or more different sizes are recorded, each at least 1; got {sizes}")
    means: dict[str, Any] = {"allow": tuple(allow), "host_budget": host_budget, "disk_budget": disk_budget}
    workshop = Workshop(make, over, strategy_of(strategy), gear, means, check, progress or (lambda done, total, text: None))
    if offload is not None:
        means["offload"] = links_of(offload, device_of(workshop.made(grid[0])[0]))
    budget_bytes = wanted.resolve(0, workshop.free_bytes(grid[0]) if wanted.kind == "auto" else None)
    recorded = workshop.sizes_to_record(budget_bytes, multiple, grid[-1]) if sizes is None else dict.fromkeys(sizes)
    scaled = ScaledStep.through({size: workshop.recorded(size) for size in recorded}, over)
    search = Search(workshop, scaled, budget_bytes, grid)
    unplanned_size, unplanned_seconds = search.unplanned(bounded=most is not None)
    trial = search.planned(unplanned_size)
    count = tokens if callable(tokens) else lambda size: size * (1 if tokens is None else tokens)
    following = trial.size + multiple if trial.size + multiple in grid else None
    return Longest(
        over=over,
        size=trial.size,
        budget_bytes=budget_bytes,
        plan=trial.plan,
        graph=trial.graph,
        compared_at=trial.compared_at,
        verification=trial.verification,
        tokens=count(trial.size),
        next_size=following,
        next_least_bytes=None if following is None else search.least_bytes(following),
        unplanned_size=unplanned_size,
        unplanned_tokens=count(unplanned_size) if unplanned_size else 0,
        unplanned_step_seconds=unplanned_seconds,
        recorded_sizes=trial.recorded_sizes,
        model_error=trial.model_error,
    )


def _grid(least: int, most: int | None, multiple: int) -> range:
    """The sizes that may be the answer."""
    if multiple < 1 or least < 1:
        raise UsageError(f"the least size and the multiple are at least 1, got {least} and {multiple}")
    first = -(-least // multiple) * multiple
    grid = range(first, (first + _FAR * multiple if most is None else most) + 1, multiple)
    if not grid:
        raise UsageError(f"no multiple of {multiple} lies between {least} and {most}")
    return grid
