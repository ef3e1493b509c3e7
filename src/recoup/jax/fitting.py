"""``fit``: record, solve, apply and verify in one call, with the loop closed: what XLA says goes back to the solver."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

import jax
from recoup.errors import InfeasibleBudget, VerifyFailure
from recoup.jax.offload import Link
from recoup.jax.planned import Planned, planned_step
from recoup.jax.record import Prepared, devices_of, prepare, record_prepared
from recoup.jax.recording import Recording
from recoup.jax.residuals import Compiled
from recoup.jax.solving import solve
from recoup.jax.verifying import Trial, Verification, examine
from recoup.plan import Plan
from recoup.solve.strategy import Strategy
from recoup.units import Budget, format_bytes, parse_budget

__all__ = ["Fitted", "fit", "free_bytes"]

_ROUNDS = 6
_CLOSE = 0.02  # of the budget for each plan compiled so far: what is left over then is not worth another one
_FAR = 0.25  # of the budget: if the graph's least plan takes more than that too much, it is not compiled
_RESERVE = 0.05

Progress = Callable[[int, int, str], object]


class Fitted(Planned):
    """A loss under a plan that has been found and proven.

    Attributes:
        recording: the recorded step.
        verification: what was compared and measured.
    """

    def __init__(self, planned: Prepared, plan: Plan, has_aux: bool, recording: Recording, verification: Verification) -> None:
        super().__init__(planned.loss, plan, planned, has_aux)
        self.recording, self.verification = recording, verification


def fit(
    loss: Callable[..., Any], *example_args: Any, budget: str | int | Budget, argnums: int | Sequence[int] = 0, has_aux: bool = False,
    static_argnames: Sequence[str] = (), kwargs: Mapping[str, Any] | None = None, strategy: str | Strategy = "optimal",
    time_limit_seconds: float = 20.0, link: Link | None = None, runs: int = 3, measure: bool = True, name: str | None = None,
    progress: Progress | None = None,
) -> Fitted:  # fmt: skip
    """A function with the values and gradients of a loss whose training step stays within the budget, at the least time.

    The step is ``jax.value_and_grad(loss, argnums)`` on arguments like the examples. What XLA allocates for the compiled planned step
    is held against the budget: where it is more, the excess is added to every moment of the recorded step, where it is less, the
    rest is given to the solver, and the step is planned again. The fastest plan whose compiled step is within the budget is taken.

    Args:
        loss: a function to a scalar, or with ``has_aux`` to (scalar, anything).
        example_args: arguments like those of training.
        budget: of the whole step's peak, arguments and gradients included: ``"6GiB"``, ``"60%"`` of the unplanned peak, ``"auto"``, bytes.
            Of arguments laid over several devices it is for all devices together.
        argnums: positional arguments that are differentiated, as for ``jax.grad``.
        has_aux: whether the loss returns something beside the scalar.
        static_argnames: arguments that are no arrays although they are numbers.
        kwargs: keyword arguments of the loss.
        strategy: ``optimal``, or a named strategy.
        time_limit_seconds: of the solver.
        link: to the host's memory, to offload over; not measured on an accelerator yet.
        runs: how often the unplanned step is run for its time; with 0 times are modelled.
        measure: whether planned and unplanned steps are timed side by side in the end.
        name: of the step in reports.
        progress: called with (done, total, text).

    Raises:
        InfeasibleBudget: nothing found fits; the error carries the least peak that does.
        VerifyFailure: the planned step differs from the unplanned one, or XLA does not bring it within the budget.
        CaptureError: the loss cannot be traced or differentiated.
        UsageError: the budget or an option cannot be understood.
    """
    wanted = parse_budget(budget)
    tell = progress or (lambda done, total, text: None)
    prepared = prepare(loss, example_args, kwargs or {}, argnums=argnums, has_aux=has_aux, static_argnames=static_argnames)
    tell(0, 4, "recording")
    recording, unplanned = record_prepared(prepared, runs=runs, name=name)
    devices = devices_of(prepared.call.arrays)
    free = free_bytes(prepared.call.arrays) if wanted.kind == "auto" else None
    limit = wanted.resolve(unplanned.peak_bytes * devices, free)
    search = _Loop(prepared, recording, unplanned, limit, strategy, time_limit_seconds, link, tell)
    plan, trial = search.run()
    tell(3, 4, "verifying")
    verification = examine(prepared, plan, trial, unplanned, measure=measure)
    verification.raise_if_failed()
    return Fitted(prepared, plan, has_aux, recording, verification)


@dataclass(frozen=True, eq=False)
class _Tried:
    """A plan that was compiled, and what it needs: by XLA, and at the least for what its forward hands over; over all devices."""

    plan: Plan
    trial: Trial
    peak_bytes: int


class _Loop:
    """Solve, compile, correct, again.

    The graph does not know to the byte what XLA lays out. So plans are solved for some bytes less than the budget, or more: the
    excess or the rest of the plan that was compiled last, kept between a number that was too small and one that was enough.
    """

    def __init__(
        self,
        prepared: Prepared,
        recording: Recording,
        unplanned: Compiled,
        limit: int,
        strategy: str | Strategy,
        seconds: float,
        link: Link | None,
        tell: Progress,
    ) -> None:
        self.prepared, self.recording, self.unplanned, self.limit = prepared, recording, unplanned, limit
        self.strategy, self.seconds, self.link, self.tell = strategy, seconds, link, tell
        self.devices = devices_of(prepared.call.arrays)
        self.unplanned_bytes = unplanned.peak_bytes * self.devices
        # Bytes taken off the budget that were too few, and such as were enough, or too many for the graph.
        self.few: int | None = None
        self.enough: int | None = None
        self.tried: dict[object, _Tried] = {}
        self.best: _Tried | None = None
        # How far XLA was from the graph in the plan compiled before.
        self.offset = 0

    def run(self) -> tuple[Plan, Trial]:
        """The fastest plan found whose compiled step is within the budget.

        Raises:
            VerifyFailure: XLA does not bring any plan that was tried within it.
            InfeasibleBudget: no plan is within it by the corrected graph.
        """
        added, refused = 0, None
        for number in range(_ROUNDS):
            self.tell(number, _ROUNDS, "solving")
            try:
                plan = self._solved(added)
            except InfeasibleBudget as error:
                refused = error
                following = self._after_refusal(added, error)
            else:
                self.tell(number, _ROUNDS, "compiling")
                following = self._after(plan, added, number)
            if following is None:
                break
            added = following
        if self.best is not None:
            return self.best.plan, self.best.trial
        if refused is not None:
            raise refused
        least = min([self.unplanned_bytes, *(one.peak_bytes for one in self.tried.values())])
        raise VerifyFailure(
            f"XLA's compiled step takes {format_bytes(least)} at least, over the budget of {format_bytes(self.limit)}, in"
            f" {len(self.tried)} plans of which each promised to fit (unplanned it takes {format_bytes(self.unplanned_bytes)});"
            " give a larger budget, or a version of jaxlib that honours optimization barriers on this platform"
        )

    @property
    def close(self) -> int:
        """Bytes that another plan is not compiled for."""
        return int(_CLOSE * max(len(self.tried), 1) * self.limit)

    def _after_refusal(self, added: int, error: InfeasibleBudget) -> int | None:
        """What to take off next where the graph has no plan: less, down to what its least plan lacks."""
        if self.few is None and self.best is None:
            short = error.least_bytes - self.limit
            return added - short if added == 0 and short <= _FAR * self.limit else None
        self.enough = added if self.enough is None else min(self.enough, added)
        return self._between()

    def _after(self, plan: Plan, added: int, number: int) -> int | None:
        """Compile a plan; what to take off next, None if nothing better is to be had."""
        counted = plan.peak_bytes - max(added, 0)
        if plan.drops_nothing and self.unplanned_bytes > self.limit:
            peak = self.unplanned_bytes
        elif self.best is not None and plan.step_seconds >= self.best.plan.step_seconds:
            # Nothing gained: as good as the best, which fits.
            peak = self.best.peak_bytes
        else:
            peak = self._compiled(plan, counted).peak_bytes
        rest = self.limit - peak
        if rest < 0:
            self.few = added
            # What XLA lays out does not follow the graph to the byte, so a correction that did not do is made larger.
            following = self.limit - counted - max(rest * (4 + number) // 4, rest - self.limit)
            return self._between() if self.enough is not None and following >= self.enough - self.close else following
        self.enough = added
        if plan.drops_nothing or rest <= self.close:
            return None
        following = min(self.limit - counted, added) - rest
        return self._between() if self.few is not None and following <= self.few + self.close else following

    def _between(self) -> int | None:
        if self.few is None or self.enough is None or self.enough - self.few <= self.close:
            return None
        return (self.few + self.enough) // 2

    def _compiled(self, plan: Plan, counted: int) -> _Tried:
        """A plan compiled, and taken as the best where it fits; its prediction is the graph's, with what XLA was off by before."""
        key = (plan.decisions, tuple(plan.stretches.items()))
        if key not in self.tried:
            trial = Trial.of(self.prepared, planned_step(self.prepared, plan))
            # What XLA fuses away must fit as well: another version may not. The unplanned step is what it is.
            residual_bytes = 0 if plan.drops_nothing else trial.residual_bytes
            peak = max(trial.compiled.peak_bytes * self.devices, residual_bytes)
            promised = min(max(counted + self.offset, peak), self.limit)
            plan = msgspec.structs.replace(plan, budget_bytes=self.limit, peak_bytes=promised if peak <= self.limit else counted)
            self.tried[key] = _Tried(plan, trial, peak)
            self.offset = peak - counted
        found = self.tried[key]
        if found.peak_bytes <= self.limit and (self.best is None or found.plan.step_seconds < self.best.plan.step_seconds):
            self.best = found
        return found

    def _solved(self, added: int) -> Plan:
        """A plan for so many bytes less than the budget; more, if negative."""
        recording, limit = (with_scratch(self.recording, added), self.limit) if added > 0 else (self.recording, self.limit - added)
        try:
            plan = solve(recording, limit, strategy=self.strategy, time_limit_seconds=self.seconds, link=self.link)
        except InfeasibleBudget as error:
            if not self.tried:
                raise
            seen = min(one.peak_bytes for one in self.tried.values())
            raise InfeasibleBudget(
                f"{error} (the graph counts {format_bytes(seen)}, which the best plan so far took when compiled)",
                budget_bytes=self.limit, least_bytes=min(error.least_bytes, seen), moment=error.moment,
            ) from error  # fmt: skip
        # The bound is one for the budget that was solved for.
        return plan if added >= 0 else msgspec.structs.replace(plan, bound_seconds=0.0, gap=None)


def with_scratch(recording: Recording, count: int) -> Recording:
    """The recording with that many bytes more at every moment of the step."""
    ops = tuple(msgspec.structs.replace(op, scratch_bytes=op.scratch_bytes + count) for op in recording.graph.ops)
    # The unplanned step was measured; it stays what it was.
    return msgspec.structs.replace(recording, graph=msgspec.structs.replace(recording.graph, ops=ops))


def free_bytes(arrays: Sequence[Any]) -> int | None:
    """What the devices of the arguments can give a step in all, arguments included, less a twentieth; None if they do not say."""
    devices = {device for array in arrays if isinstance(array, jax.Array) for device in array.devices()} or set(jax.devices()[:1])
    given = 0
    for device in devices:
        stats = device.memory_stats()
        if not stats or "bytes_limit" not in stats:
            return None
        own = sum(
            shard.data.nbytes
            for array in arrays
            if isinstance(array, jax.Array)
            for shard in array.addressable_shards
            if shard.device == device
        )
        given += int(stats["bytes_limit"] * (1 - _RESERVE)) - stats.get("bytes_in_use", 0) + own
    return given
