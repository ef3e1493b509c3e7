"""Where a step of any size is made and run: recorded, measured, and proven within a budget."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

import recoup.torch
from recoup.errors import InfeasibleBudget, UsageError, VerifyFailure
from recoup.graph import StepGraph
from recoup.graph.peak import peak_bytes, with_scratch
from recoup.graph.scale import ScaledStep
from recoup.plan import Plan
from recoup.solve import solve
from recoup.solve.strategy import Strategy
from recoup.torch.free import free_bytes
from recoup.torch.meter import device_of
from recoup.torch.promotion import WARM_UP_CALLS
from recoup.torch.timing import synchronizer
from recoup.units import format_bytes
from recoup.verify import Check, Verification, verify

__all__ = ["CheckMode", "Make", "Progress", "Trial", "Workshop"]

Step = Callable[[], object]
Make = Callable[..., tuple[torch.nn.Module, Step]]
Progress = Callable[[int, int, str], None]
CheckMode = Literal["auto", "compared", "alone"]

_SHARE = 8  # the step is recorded up to where its activations take this part of what the budget leaves for them
_COPIES = 6  # of the model's state: a snapshot, and what two steps left behind, gradients included, with some to spare
_ROUNDS = 4
_SPILL = 0.03  # of the budget: by how much a step that runs out of memory counts as above it


@dataclass(frozen=True, slots=True)
class Trial:
    """A size whose planned step ran within the budget.

    Attributes:
        size: which.
        plan: the plan it ran.
        graph: the step that the plan was made for.
        compared_at: the size at which its decisions ran beside the unplanned step: its own, or a recorded one.
        verification: what was compared and measured.
        recorded_sizes: what the model of the step was made from.
        model_error: modelled over measured peak, less 1: of the unplanned step if that ran, else of the planned one.
    """

    size: int
    plan: Plan
    graph: StepGraph
    compared_at: int
    verification: Verification
    recorded_sizes: tuple[int, ...]
    model_error: float


@dataclass(frozen=True, slots=True)
class Workshop:
    """Makes the step at a size, and runs it; nothing of one size stands while another runs.

    Attributes:
        make: called with ``over`` as a keyword; returns the model and its step.
        over: the name of the size.
        strategy, gear: as for ``solve``.
        means: what else a plan may use, as arguments of ``solve``: what is allowed, links to offload over, budgets of what waits there.
        check: as for ``longest``.
        progress: told what is going on.
    """

    make: Make
    over: str
    strategy: Strategy
    gear: str
    means: Mapping[str, Any]
    check: CheckMode
    progress: Progress

    def made(self, size: int) -> tuple[torch.nn.Module, Step]:
        """The model and the step of a size."""
        gc.collect()
        return self.make(**{self.over: size})

    def telling(self, size: int) -> Progress:
        """The callback for what is done at a size."""
        return lambda done, total, text: self.progress(done, total, f"{self.over}={size}: {text}")

    def free_bytes(self, size: int) -> int | None:
        """What the device can give to the step of a size, what stands already included."""
        return free_bytes(self.made(size)[0])

    def recorded(self, size: int) -> StepGraph:
        """The recorded step."""
        model, step = self.made(size)
        return recoup.torch.record(step, model=model, name=f"{self.over}={size}", progress=self.telling(size))

    def solve(self, graph: StepGraph, budget_bytes: int, size: int) -> Plan:
        """The plan for a graph of a size."""
        self.telling(size)(0, 1, "solving")
        return solve(graph, budget_bytes, strategy=self.strategy, gear=self.gear, **self.means)

    def measured(self, size: int, plan: Plan | None = None) -> tuple[int, float]:
        """Peak bytes and median seconds of the step, unplanned or planned."""
        self.telling(size)(0, 1, f"running the {'un' if plan is None else ''}planned step")
        model, step = self.made(size)
        wait = synchronizer(device_of(model))
        with nullcontext() if plan is None else recoup.torch.apply(model, plan):
            for _ in range(WARM_UP_CALLS if plan is not None and plan.gear == "static" else 0):
                step()
            return recoup.torch.measure_peak(step, model), recoup.torch.time_step(step, repeats=3, warmup=1, synchronize=wait)

    def sizes_to_record(self, budget_bytes: int, multiple: int, most: int) -> tuple[int, int, int]:
        """Three sizes that double, up to where a step says enough, else the first three; not 1, which is often a case of its own.

        Raises:
            UsageError: there are no three below ``most``.
        """
        first = size = max(multiple, 2)
        if 3 * first > most:
            raise UsageError(f"there are no three sizes to record up to {self.over}={most}; give them as sizes")
        stands = self._peak(first)
        while 2 * size <= most and self._peak(2 * size) - stands < (budget_bytes - stands) // _SHARE:
            size *= 2
        return (size // 4, size // 2, size) if size >= 4 * first else (first, 2 * first, 3 * first)

    def _peak(self, size: int) -> int:
        self.telling(size)(0, 1, "measuring the peak")
        model, step = self.made(size)
        return recoup.torch.measure_peak(step, model)

    def tried(self, scaled: ScaledStep, size: int, budget_bytes: int, excess_bytes: int) -> Trial:
        """The size, solved on the model and run for real; what the allocator sees goes into the graph, until it fits.

        Args:
            scaled: the model of the step.
            size: the size to try.
            budget_bytes: the budget.
            excess_bytes: by how much real peaks are known to lie above the modelled ones.

        Raises:
            InfeasibleBudget: what was seen leaves no plan that fits, or the device runs out of memory.
            VerifyFailure: the planned step differs from the unplanned one, or its peak does not settle.
        """
        modelled = scaled.at(size)
        needed_bytes = peak_bytes(modelled) + _COPIES * modelled.resident_bytes
        compared_at = size if self._compares(size, needed_bytes) else max(scaled.recordings)
        for _ in range(_ROUNDS):
            graph = with_scratch(modelled, excess_bytes)
            plan = self.solve(graph, budget_bytes, size)
            verification = self._verified(plan, size, compared_at)
            peak = verification.peak_bytes or 0
            if peak <= budget_bytes:
                verification.raise_if_failed()
                error = self._error(modelled, plan.peak_bytes - excess_bytes, verification)
                return Trial(size, plan, graph, compared_at, verification, tuple(scaled.recordings), error)
            excess_bytes += peak - plan.peak_bytes
        raise VerifyFailure(f"the peak at {self.over}={size} is still above {format_bytes(budget_bytes)} after {_ROUNDS} corrections")

    @staticmethod
    def _error(modelled: StepGraph, planned_bytes: int, verification: Verification) -> float:
        """Modelled over measured peak, less 1: of the unplanned step, or of the planned one if that is all that ran."""
        real = verification.unplanned_peak_bytes or verification.peak_bytes or 1
        return ((peak_bytes(modelled) if verification.unplanned_peak_bytes else planned_bytes) - real) / real

    def _compares(self, size: int, needed_bytes: int) -> bool:
        if self.check != "auto":
            return self.check == "compared"
        free = self.free_bytes(size)
        return free is None or needed_bytes <= free

    def _verified(self, plan: Plan, size: int, compared_at: int) -> Verification:
        """The plan's decisions beside the unplanned step at one size; the planned step measured at its own.

        Raises:
            InfeasibleBudget: the device runs out of memory.
        """
        model, step = self.made(compared_at)
        if compared_at == size:
            return verify(model, step, plan, progress=self.telling(size))
        compared = verify(model, step, plan, measure=False, progress=self.telling(compared_at))
        del model, step
        try:
            peak, seconds = self.measured(size, plan)
        except torch.OutOfMemoryError as error:
            raise InfeasibleBudget(
                f"the device runs out of memory at {self.over}={size}: {error}",
                budget_bytes=plan.budget_bytes,
                least_bytes=int(plan.budget_bytes * (1 + _SPILL)),
                moment="on the device",
            ) from error
        detail = (
            f"measured {format_bytes(peak)}, predicted {format_bytes(plan.peak_bytes)} (ratio {peak / plan.peak_bytes:.4f});"
            f" allowed is the budget, {format_bytes(plan.budget_bytes)}"
        )
        checks = [replace(check, name=f"{check.name} at {self.over}={compared_at}") for check in compared.checks]
        checks.append(Check("peak", peak <= plan.budget_bytes, detail))
        passed = all(check.passed for check in checks)
        return replace(compared, passed=passed, checks=tuple(checks), peak_bytes=peak, step_seconds=seconds)
