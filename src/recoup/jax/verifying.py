"""``verify``: the planned and the unplanned step side by side: residual bytes, compiled memory, values and gradients, time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax
from recoup.errors import VerifyFailure
from recoup.jax.planned import PlannedStep, planned_step
from recoup.jax.record import Prepared, devices_of, flat_loss, plain_step, prepare, step_of
from recoup.jax.residuals import Compiled, compiled_memory, residual_bytes_of
from recoup.plan import Plan
from recoup.units import format_bytes

__all__ = ["Check", "Verification", "verify"]

_ROUNDS = 7
_UNSTEADY_FACTOR = 4  # how far beyond the difference that compiling makes by itself a planned step may differ
_LEAST_EPS = 16
_EFFECT = 0.98

Progress = Callable[[int, int, str], object]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing compared: what, whether it held, and the numbers."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Verification:
    """What came of holding a planned step against the unplanned one.

    Attributes:
        passed: whether every check held.
        checks: what was compared.
        predicted_peak_bytes: what the plan promised.
        residual_bytes: what the planned forward hands to its backward, exact, arguments aside.
        unplanned_residual_bytes: what JAX by itself hands over.
        peak_bytes: of the compiled planned step, arguments included, over all devices.
        unplanned_peak_bytes: of the compiled unplanned step.
        working_bytes: ``temp + output - alias`` of the compiled planned step on one device.
        unplanned_working_bytes: of the compiled unplanned step.
        step_seconds: median time of the planned step; None if not run, as for the next.
        unplanned_step_seconds: median time of the unplanned step.
    """

    passed: bool
    checks: tuple[Check, ...]
    predicted_peak_bytes: int
    residual_bytes: int
    unplanned_residual_bytes: int
    peak_bytes: int
    unplanned_peak_bytes: int
    working_bytes: int
    unplanned_working_bytes: int
    step_seconds: float | None = None
    unplanned_step_seconds: float | None = None

    @property
    def relative_time(self) -> float | None:
        """Planned over unplanned seconds; None if not run."""
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
    loss: Callable[..., Any], plan: Plan, *example_args: Any, argnums: int | Sequence[int] = 0, has_aux: bool = False,
    static_argnames: Sequence[str] = (), kwargs: Mapping[str, Any] | None = None, measure: bool = True, progress: Progress | None = None,
) -> Verification:  # fmt: skip
    """Holds the planned step against the unplanned one.

    Compared are residual bytes as traced with what the plan says, to the byte; the compiled step's memory with the budget and with
    the unplanned step's; loss, auxiliary results and all gradients, bit by bit, or else within what compiling the unplanned step
    changes by itself. With ``measure`` also the time, in alternating runs.

    Args:
        loss: as for ``record``, with what follows.
        plan: the plan to verify.
        example_args: arguments to run with.
        argnums: positional arguments that are differentiated.
        has_aux: whether the loss returns something beside the scalar.
        static_argnames: arguments that are no arrays although they are numbers.
        kwargs: keyword arguments of the loss.
        measure: whether both steps are timed.
        progress: called with (done, total, text).

    Raises:
        PlanMismatch: the plan does not belong to the loss.
    """
    prepared = prepare(loss, example_args, kwargs or {}, argnums=argnums, has_aux=has_aux, static_argnames=static_argnames)
    tell = progress or (lambda done, total, text: None)
    tell(0, 3, "compiling the unplanned step")
    unplanned = compiled_memory(plain_step(prepared), prepared.call.arrays)
    tell(1, 3, "compiling the planned step")
    trial = Trial.of(prepared, planned_step(prepared, plan))
    tell(2, 3, "running both")
    return examine(prepared, plan, trial, unplanned, measure=measure)


@dataclass(frozen=True, eq=False)
class Trial:
    """A planned step, traced and compiled."""

    planned: PlannedStep
    compiled: Compiled
    residual_bytes: int

    @classmethod
    def of(cls, prepared: Prepared, planned: PlannedStep) -> Trial:
        """Traces and compiles."""
        wanted = sorted(prepared.wanted)
        residual = residual_bytes_of(planned.flat, prepared.call.avals, wanted)
        return cls(planned, compiled_memory(step_of(planned.flat, wanted), prepared.call.arrays), residual)


def examine(prepared: Prepared, plan: Plan, trial: Trial, unplanned: Compiled, *, measure: bool = True) -> Verification:
    """The checks of a trial; times and values only where the arguments are arrays."""
    arrays, devices = prepared.call.arrays, devices_of(prepared.call.arrays)
    plain_residual = residual_bytes_of(flat_loss(prepared), prepared.call.avals, sorted(prepared.wanted))
    peak, before = trial.compiled.peak_bytes * devices, unplanned.peak_bytes * devices
    checks = [_residual_check(plan, trial, plain_residual), _peak_check(plan, peak), _effect_check(plan, peak, before)]
    seconds: tuple[float | None, float | None] = (None, None)
    if not any(isinstance(array, jax.ShapeDtypeStruct) for array in arrays):
        checks.append(_value_check(prepared, trial, unplanned))
        seconds = side_by_side(trial.compiled, unplanned, arrays) if measure else seconds
    return Verification(
        all(check.passed for check in checks), tuple(checks), plan.peak_bytes, trial.residual_bytes, plain_residual, peak, before,
        trial.compiled.working_bytes, unplanned.working_bytes, *seconds,
    )  # fmt: skip


def _residual_check(plan: Plan, trial: Trial, unplanned: int) -> Check:
    seen, said = trial.residual_bytes, trial.planned.residual_bytes
    detail = f"{format_bytes(seen)} ({seen} bytes) as traced, unplanned {format_bytes(unplanned)}"
    if said is not None and seen != said:
        return Check("residual bytes", False, f"{detail}; the plan says {said} bytes")
    # What XLA fuses away is not held to the budget where the plan left the step alone.
    fits = plan.drops_nothing or not plan.budget_bytes or seen <= plan.budget_bytes
    return Check("residual bytes", fits, detail if fits else f"{detail}; the budget is {format_bytes(plan.budget_bytes)}")


def _peak_check(plan: Plan, peak: int) -> Check:
    limit = plan.budget_bytes or int(plan.peak_bytes * 1.1)
    name = "compiled peak"
    detail = f"{format_bytes(peak)} of {format_bytes(limit)} allowed; predicted {format_bytes(plan.peak_bytes)}"
    return Check(name, peak <= limit, detail)


def _effect_check(plan: Plan, peak: int, before: int) -> Check:
    detail = f"{format_bytes(peak)} compiled, unplanned {format_bytes(before)}"
    if plan.drops_nothing:
        return Check("effect", True, "the plan leaves the step as it is")
    needed = not plan.budget_bytes or before > plan.budget_bytes
    worked = peak <= before * _EFFECT or not needed
    return Check("effect", worked, detail if worked else f"{detail}: the plan has no effect; XLA undid it")


def _value_check(prepared: Prepared, trial: Trial, unplanned: Compiled) -> Check:
    """Each array bit by bit, or within what compiling the unplanned step changes in that very array."""
    arrays = prepared.call.arrays
    wanted, got = (jax.tree.leaves(compiled.run(*arrays)) for compiled in (unplanned, trial.compiled))
    found = [_apart(_plain(one), _plain(other)) for one, other in zip(got, wanted, strict=True)]
    if not any(found):
        return Check("values and gradients", True, f"equal bit by bit in {len(wanted)} arrays")
    alone = [_apart(_plain(one), _plain(other)) for one, other in zip(jax.tree.leaves(plain_step(prepared)(*arrays)), wanted, strict=True)]
    allowed = [max(_UNSTEADY_FACTOR * one, _LEAST_EPS * _eps(other)) for one, other in zip(alone, wanted, strict=True)]
    worst = max(range(len(found)), key=lambda place: found[place] / allowed[place] if allowed[place] else found[place])
    detail = (
        f"equal bit by bit in {found.count(0.0)} of {len(wanted)} arrays; {_names(prepared)[worst]} differs by {found[worst]:.1e} of its"
        f" largest element, compiling alone by {alone[worst]:.1e}; {allowed[worst]:.1e} allowed"
    )
    return Check("values and gradients", all(one <= limit for one, limit in zip(found, allowed, strict=True)), detail)


def _names(prepared: Prepared) -> list[str]:
    paths = [prepared.call.paths[prepared.call.traced[place]] for place in sorted(prepared.wanted)]
    others = prepared.tree.num_leaves - 1
    return ["the loss", *(f"auxiliary result {number}" for number in range(others)), *(f"the gradient of {path}" for path in paths)]


def _plain(array: Any) -> np.ndarray[Any, Any]:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    exact = np.asarray(array)
    return exact if exact.dtype.kind in "biufc" else exact.astype(np.float64)


def _apart(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if one.tobytes() == other.tobytes() or one.size == 0:
        return 0.0
    wide = np.complex128 if one.dtype.kind == "c" else np.float64
    first, second = one.astype(wide), other.astype(wide)
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    if same.all():
        return 0.0
    with np.errstate(invalid="ignore"):
        gaps = np.abs(first - second)[~same]
    largest = float(np.abs(second[np.isfinite(second)]).max(initial=0.0))
    return float(gaps.max()) / largest if np.isfinite(gaps).all() and largest else float("inf")


def _eps(array: Any) -> float:
    """The machine epsilon of an array's dtype, 0 for whole numbers."""
    return float(jnp.finfo(array.dtype).eps) if jnp.issubdtype(array.dtype, jnp.inexact) else 0.0


def side_by_side(planned: Compiled, unplanned: Compiled, arrays: Sequence[Any], rounds: int = _ROUNDS) -> tuple[float, float]:
    """Median seconds of both steps, in alternating runs."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for taken, compiled in zip(times, (planned, unplanned), strict=True):
            start = time.perf_counter()
            jax.block_until_ready(compiled.run(*arrays))
            taken.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])
