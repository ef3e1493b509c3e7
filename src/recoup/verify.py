"""Planned against unplanned: the same steps from the same state, everything compared bit by bit, then peak and time.

A plan may change when memory is held and how long a step takes, and nothing else. So the comparison asks for equal
bits, not for closeness; only where the unplanned step itself differs from run to run is that difference allowed for,
and said. A plan with tiles changes the order of sums: what then differs is held against the same step in float64.
The unplanned step of a compiled model is the one compiled with everything kept.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

import recoup.torch
from recoup.errors import UsageError, VerifyFailure
from recoup.plan.plan import Plan
from recoup.torch.apply import refuse_planned
from recoup.torch.compiled.detect import is_compiled
from recoup.torch.meter import device_of, measure_peak, meter_for
from recoup.torch.offload.store import Store
from recoup.torch.promotion import WARM_UP_CALLS
from recoup.torch.state import Snapshot, find_state, generator_states, own_attributes, same_bits
from recoup.torch.tile.precision import compared_with_exact, in_float64
from recoup.torch.timing import alternate, synchronizer
from recoup.units import format_bytes, format_seconds

__all__ = ["Check", "Verification", "verify"]

Step = Callable[[], object]
Progress = Callable[[int, int, str], object]
Outcome = dict[str, dict[str, object]]

_LONG_STEP_SECONDS = 2.0
_UNSTEADY_FACTOR = 4  # how far beyond the unplanned step's own unsteadiness a planned step may differ
_PREDICTION_SLACK = 1.05  # how far a plan without a budget may exceed its predicted peak


@dataclass(frozen=True, slots=True)
class Check:
    """One thing compared: what, whether it held, and the numbers."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Verification:
    """What came of running planned and unplanned steps side by side.

    Attributes:
        passed: whether every check held.
        checks: what was compared.
        peak_bytes: measured peak of the planned step; None if not measured, as for the three that follow.
        predicted_peak_bytes: what the plan promised.
        unplanned_peak_bytes: measured peak of the unplanned step.
        step_seconds: median time of the planned step.
        unplanned_step_seconds: median time of the unplanned step.
    """

    passed: bool
    checks: tuple[Check, ...]
    predicted_peak_bytes: int
    peak_bytes: int | None = None
    unplanned_peak_bytes: int | None = None
    step_seconds: float | None = None
    unplanned_step_seconds: float | None = None

    @property
    def relative_time(self) -> float | None:
        """Planned over unplanned seconds; None if not measured."""
        if self.step_seconds is None or not self.unplanned_step_seconds:
            return None
        return self.step_seconds / self.unplanned_step_seconds

    def raise_if_failed(self) -> None:
        """Does nothing if every check held.

        Raises:
            VerifyFailure: names the first check that failed, where, and by how much.
        """
        for check in self.checks:
            if not check.passed:
                raise VerifyFailure(f"{check.name}: {check.detail}")


def verify(
    model: torch.nn.Module,
    step: Step,
    plan: Plan,
    *,
    steps: int = 1,
    measure: bool = True,
    gear: str | None = None,
    offload_to: str | Path | Store | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Runs ``steps`` unplanned and planned steps from the same state and compares all that they leave behind.

    Compared bit by bit, after the first step and after the last: what the step returns, gradients, parameters,
    buffers, plain attributes of modules, optimizer state, generator states. Where a plan has tiles and bits differ, the
    check gives the largest relative error against the step in float64 beside the unplanned step's own, and passes up to
    twice that. With ``measure``, also the peak against the budget, the bytes left allocated from step to step, and the
    time. The state is put back at the end, whatever happens. Beside the snapshot it holds a copy of parameters,
    gradients, buffers and optimizer state for each step compared. ``offload_to`` is that of ``apply``.

    Raises:
        UsageError: ``steps`` is less than one, or a plan is applied to the model already.
        PlanMismatch: the plan does not belong to the model.
    """
    if steps < 1:
        raise UsageError(f"at least one step is compared, got steps={steps}")
    refuse_planned(model)
    tell = progress if progress is not None else lambda done, total, text: None
    total = 4 if measure else 2
    with ExitStack() as stack:
        # The stock partitioner recomputes too; what a compiled step is compared with is the one that keeps all.
        turn = stack.enter_context(_side_by_side(model, plan, offload_to)) if is_compiled(model) else None
        bench = _Bench(model, step, plan, gear, offload_to, stack.enter_context(Snapshot.take(model, step)), turn)
        tell(0, total, "running unplanned steps")
        reference = bench.outcomes(steps, planned=False)
        tell(1, total, "running planned steps")
        planned = bench.outcomes(steps, planned=True)
        exact = (lambda: bench.exact(steps)) if plan.tiles_by_module else None
        checks = _compare(reference, planned, lambda: bench.outcomes(steps, planned=False), exact)
        del planned
        if not measure:
            tell(total, total, "compared")
            return Verification(all(check.passed for check in checks), tuple(checks), plan.peak_bytes)
        del reference
        tell(2, total, "measuring peaks")
        unplanned_peak, peak = bench.peak(planned=False), bench.peak(planned=True)
        checks += [_peak_check(plan, peak, unplanned_peak), _residue_check(bench.residue(planned=False), bench.residue(planned=True))]
        tell(3, total, "timing")
        unplanned_seconds, seconds = bench.times()
        tell(4, total, f"planned {format_seconds(seconds)}, unplanned {format_seconds(unplanned_seconds)}")
    return Verification(
        passed=all(check.passed for check in checks),
        checks=tuple(checks),
        predicted_peak_bytes=plan.peak_bytes,
        peak_bytes=peak,
        unplanned_peak_bytes=unplanned_peak,
        step_seconds=seconds,
        unplanned_step_seconds=unplanned_seconds,
    )


def _side_by_side(
    model: torch.nn.Module, plan: Plan, offload_to: str | Path | Store | None
) -> AbstractContextManager[Callable[[bool], AbstractContextManager[object]]]:
    from recoup.torch.compiled.apply import side_by_side  # loads the compiler's private parts, which eager models do without

    return side_by_side(model, plan, offload_to)


@dataclass(frozen=True, slots=True)
class _Bench:
    """Runs the step planned or unplanned, each time from the same state; ``turn`` switches a compiled model between the two."""

    model: torch.nn.Module
    step: Step
    plan: Plan
    gear: str | None
    offload_to: str | Path | Store | None
    snapshot: Snapshot
    turn: Callable[[bool], AbstractContextManager[object]] | None = None

    def _setting(self, planned: bool) -> AbstractContextManager[object]:
        """The model with or without the plan, from the first state; the static gear past the live calls it learns from."""
        self.snapshot.restore()
        if self.turn is not None:
            return self.turn(planned)
        if not planned:
            return nullcontext()
        applied = recoup.torch.apply(self.model, self.plan, gear=self.gear, offload_to=self.offload_to)
        try:
            if (self.gear or self.plan.gear) == "static" and not self.plan.drops_nothing:
                for _ in range(WARM_UP_CALLS):
                    self.step()
                self.snapshot.restore()
        except BaseException:
            applied.remove()
            raise
        return applied

    def outcomes(self, steps: int, *, planned: bool) -> dict[int, Outcome]:
        """What stands after the first and after the last of ``steps`` steps."""
        with self._setting(planned):
            return self._run(steps)

    def exact(self, steps: int) -> dict[int, Outcome]:
        """The same of the unplanned step computed in float64."""
        self.snapshot.restore()
        with in_float64(self.model, self.step):
            return self._run(steps)

    def _run(self, steps: int) -> dict[int, Outcome]:
        found: dict[int, Outcome] = {}
        for number in range(1, steps + 1):
            result = self.step()
            if number in (1, steps):
                found[number] = _outcome(self.model, self.step, result)
        return found

    def peak(self, *, planned: bool) -> int:
        """Measured peak bytes."""
        with self._setting(planned):
            return measure_peak(self.step, self.model)

    def residue(self, *, planned: bool) -> int:
        """Bytes that two further steps leave allocated, once one has run."""

        def further() -> None:
            for _ in range(2):
                self.step()
            gc.collect()

        def first() -> None:
            self.step()
            gc.collect()

        with self._setting(planned):
            return meter_for(device_of(self.model)).net_and_peak(further, before=first)[0]

    def times(self) -> tuple[float, float]:
        """Median seconds unplanned and planned, in alternating rounds: nine runs each, four for a long step."""
        seconds: dict[bool, list[float]] = {False: [], True: []}
        wait = synchronizer(device_of(self.model))
        rounds, repeats, warmup = 3, 3, 1
        done = 0
        while done < rounds:
            for planned, taken in seconds.items():
                with self._setting(planned):
                    taken.extend(alternate({"step": self.step}, repeats=repeats, warmup=warmup, synchronize=wait)["step"].all)
                if statistics.median(taken) > _LONG_STEP_SECONDS:
                    rounds, repeats, warmup = 2, 2, 0
            done += 1
        return statistics.median(seconds[False]), statistics.median(seconds[True])


def _outcome(model: torch.nn.Module, step: Step, result: object) -> Outcome:
    """Copies of all that a step leaves behind, by kind and name."""
    found: tuple[Any, ...] = find_state(step, model)
    outcome: Outcome = {kind: {} for kind in ("result", "gradients", "parameters", "buffers", "attributes", "state", "generators")}
    outcome["result"] = {str(place): leaf for place, leaf in enumerate(tree_leaves(result))}
    for place, root in enumerate(item for item in found if isinstance(item, torch.nn.Module)):
        prefix = "" if root is model else f"{type(root).__name__} {place}."
        for name, parameter in root.named_parameters(prefix):
            outcome["parameters"][name] = parameter
            outcome["gradients"][name] = parameter.grad
        outcome["buffers"].update(root.named_buffers(prefix))
        for path, module in root.named_modules(prefix=prefix.removesuffix(".")):
            outcome["attributes"].update((f"{path}.{name}".lstrip("."), value) for name, value in own_attributes(module).items())
    stateful = [item for item in found if not isinstance(item, torch.nn.Module) and hasattr(item, "state_dict")]
    for place, item in enumerate(stateful):
        leaves = tree_flatten_with_path(item.state_dict())[0]
        outcome["state"].update((f"{type(item).__name__} {place}{''.join(map(str, path))}", leaf) for path, leaf in leaves)
    others = [item for item in found if not isinstance(item, torch.nn.Module) and not hasattr(item, "state_dict")]
    outcome["generators"] = generator_states(others)
    return {kind: {name: _copied(value) for name, value in values.items()} for kind, values in outcome.items()}


def _copied(value: object) -> object:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _compare(
    reference: dict[int, Outcome],
    planned: dict[int, Outcome],
    repeat: Callable[[], dict[int, Outcome]],
    exact: Callable[[], dict[int, Outcome]] | None = None,
) -> list[Check]:
    """One check for each kind of thing.

    ``repeat`` runs the unplanned steps again, ``exact`` in float64, for plans with tiles; called only if something differs.
    """
    checks: list[Check] = []
    again: dict[int, Outcome] | None = None
    true: dict[int, Outcome] | None = None
    for number, outcome in reference.items():
        for kind, values in outcome.items():
            name = kind if len(reference) == 1 else f"{kind} after step {number}"
            off = _differences(values, planned[number][kind])
            if not off:
                checks.append(Check(name, True, f"{len(values)} equal bit for bit"))
                continue
            if exact is not None:
                true = exact() if true is None else true
                checks.append(Check(name, *compared_with_exact(values, planned[number][kind], true[number][kind], off)))
                continue
            again = repeat() if again is None else again
            checks.append(_unequal(name, len(values), off, _differences(values, again[number][kind])))
    return checks


def _unequal(name: str, count: int, off: Mapping[str, float], unsteady: Mapping[str, float]) -> Check:
    worst = max(off, key=lambda key: off[key])
    first = next(iter(off))
    detail = f"{len(off)} of {count} differ, first {first!r} by up to {off[first]:.3g}, most {worst!r} by up to {off[worst]:.3g}"
    if not unsteady:
        return Check(name, False, detail)
    allowed = _UNSTEADY_FACTOR * max(unsteady.values())
    detail += f"; two unplanned runs differ too, by up to {max(unsteady.values()):.3g}, so up to {allowed:.3g} is allowed"
    return Check(name, off[worst] <= allowed, detail)


def _differences(left: Mapping[str, object], right: Mapping[str, object]) -> dict[str, float]:
    """The largest difference of each entry that is not the same bit for bit; infinite where it is no number."""
    names = list(dict.fromkeys([*left, *right]))
    pairs = ((name, left.get(name, _Missing), right.get(name, _Missing)) for name in names)
    return {name: difference for name, one, other in pairs for difference in _difference(one, other)}


class _Missing:
    """Stands for an entry that one side does not have."""


def _difference(left: object, right: object) -> Iterator[float]:
    """Nothing if both are the same, else how far apart they are."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if same_bits(left, right):
            return
        if left.shape != right.shape or left.dtype != right.dtype or left.device != right.device:
            yield math.inf
            return
        wide = torch.complex128 if left.is_complex() else torch.float64
        apart = float((left.to_dense().to(wide) - right.to_dense().to(wide)).abs().max())
        yield math.inf if math.isnan(apart) else apart
    elif isinstance(left, float) and isinstance(right, float):
        if left != right and not (math.isnan(left) and math.isnan(right)):
            yield math.inf if math.isnan(left - right) else abs(left - right)
    elif not _same_plain(left, right):
        yield math.inf


def _same_plain(left: object, right: object) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, (tuple, list)) and isinstance(right, (tuple, list)):
        return len(left) == len(right) and all(_same_plain(one, other) for one, other in zip(left, right, strict=True))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same_plain(value, right[key]) for key, value in left.items())
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.tobytes() == right.tobytes()
    return bool(left == right)


def _peak_check(plan: Plan, peak: int, unplanned: int) -> Check:
    allowed = plan.budget_bytes or int(plan.peak_bytes * _PREDICTION_SLACK)
    limit = "the budget" if plan.budget_bytes else f"the predicted peak and {_PREDICTION_SLACK - 1:.0%}"
    detail = (
        f"measured {format_bytes(peak)}, predicted {format_bytes(plan.peak_bytes)} (ratio {peak / plan.peak_bytes:.4f}), "
        f"unplanned {format_bytes(unplanned)}; allowed is {limit}, {format_bytes(allowed)}"
    )
    return Check("peak", peak <= allowed, detail)


def _residue_check(unplanned: int, planned: int) -> Check:
    detail = f"two further planned steps leave {format_bytes(planned)} allocated, two unplanned ones {format_bytes(unplanned)}"
    return Check("residue", planned <= unplanned, detail)
