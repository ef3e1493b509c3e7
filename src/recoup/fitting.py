"""``fit``: record, solve, apply and verify in one call, with the loop closed: what the allocator says goes back into the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

import recoup.torch
from recoup.errors import UsageError, VerifyFailure
from recoup.graph import StepGraph
from recoup.graph.peak import with_scratch
from recoup.plan import Plan
from recoup.simulate import simulate
from recoup.solve import solve
from recoup.solve.entry import executors_of, strategy_of
from recoup.solve.strategy import Strategy
from recoup.solve.tiling import check_allowed
from recoup.torch import Applied, Report
from recoup.torch.free import free_bytes
from recoup.torch.meter import device_of
from recoup.torch.offload.links import Wanted, links_of
from recoup.units import Budget, format_bytes, parse_budget
from recoup.verify import Verification, verify

if TYPE_CHECKING:
    from recoup.torch.compiled.apply import AppliedCompiled

__all__ = ["Fitted", "fit"]

Progress = Callable[[int, int, str], None]
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Fitted:
    """A plan that has been found, applied and proven.

    Attributes:
        plan: what is applied.
        graph: the recorded step.
        verification: what was compared and measured.
        applied: the plan at work on the model.
    """

    plan: Plan
    graph: StepGraph
    verification: Verification
    applied: Applied | AppliedCompiled

    def report(self) -> Report:
        """What the applied plan has done so far."""
        return self.applied.report()

    def remove(self) -> None:
        """Give the model back as it was."""
        self.applied.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


def fit(
    model: torch.nn.Module,
    step: Callable[[], object],
    budget: str | int | Budget,
    *,
    strategy: str | Strategy = "optimal",
    gear: str = "auto",
    offload: Wanted | Sequence[Wanted] | None = None,
    host_budget: str | int | None = None,
    disk_budget: str | int | None = None,
    allow: Sequence[str] = (),
    steps: int = 2,
    name: str = "step",
    progress: Progress | None = None,
) -> Fitted:
    """Find the fastest way to run this step within the budget, apply it to the model, and prove it.

    Args:
        model: the model, which is not modified; the plan works on its calls until ``remove()``.
        step: one training step without arguments; its state is put back.
        budget: of the whole step's peak: ``"6GiB"``, ``"60%"`` of the unplanned peak, ``"auto"``, or bytes.
        strategy: ``optimal``, or a named strategy.
        gear: ``live``, ``static``, or ``auto`` for the one that is faster by the simulation.
        offload: where activations may wait out of memory: ``"host"``, ``"disk:/scratch"``, a directory as a ``Path``, a measured
            ``OffloadLink``, or several of these. Links that are not given as such are measured first.
        host_budget: most bytes that may wait in the host's memory.
        disk_budget: most bytes that may wait on disk.
        allow: ``("tile",)`` lets the plan run token-wise regions in tiles, which changes the order of sums in weight gradients.
        steps: how many steps are compared, planned with unplanned.
        progress: called with what is done, of how much, and a text.

    Raises:
        InfeasibleBudget: nothing found fits; the error carries the least peak that does.
        VerifyFailure: the planned step differs from the unplanned one, or stays above the budget after corrections.
        CaptureError: the step cannot be recorded.
        OffloadError: the place to offload to cannot be used.
        UsageError: the budget or an option cannot be understood.
    """
    wanted = parse_budget(budget)
    executors_of(gear)
    check_allowed(allow)
    strategy = strategy_of(strategy)
    if steps < 1:
        raise UsageError(f"at least one step is compared, got steps={steps}")
    tell = progress or (lambda done, total, text: None)
    links = links_of(offload, device_of(model))
    away: dict[str, Any] = {"offload": links or None, "host_budget": host_budget, "disk_budget": disk_budget}
    graph = recoup.torch.record(step, model=model, name=name, progress=progress)
    # Resolved once: a corrected graph has a higher unplanned peak, which must not raise a budget given as a share of it.
    budget_bytes = wanted.resolve(simulate(graph).peak_bytes, free_bytes(model) if wanted.kind == "auto" else None)
    for round_number in range(_ROUNDS + 1):
        tell(0, 1, "solving")
        plan = solve(graph, budget_bytes, strategy=strategy, gear=gear, allow=allow, **away)
        verification = verify(model, step, plan, steps=steps, progress=progress)
        peak_bytes = verification.peak_bytes or 0
        if peak_bytes <= plan.budget_bytes or peak_bytes <= plan.peak_bytes:
            verification.raise_if_failed()
            return Fitted(plan, graph, verification, recoup.torch.apply(model, plan))
        # The allocator saw more than the graph knows of: from now on every moment counts as that much higher.
        excess = peak_bytes - plan.peak_bytes
        tell(
            round_number, _ROUNDS, f"the measured peak is {format_bytes(excess)} above the prediction; correcting the graph, solving again"
        )
        graph = with_scratch(graph, excess)
    raise VerifyFailure(
        f"after {_ROUNDS} corrections of the graph the measured peak still lies above the budget of {format_bytes(budget_bytes)}: "
        "the step's memory differs from run to run; give a larger budget"
    )
