"""``fit``: record, solve, apply and verify in one call, with the loop closed: what XLA says goes back into the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
_CLOSE = 0.01
_LOOSER = 2
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
    is held against the budget; where it is more than was predicted, the excess is added to every moment of the recorded step, and the
    step is planned again.

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


class _Loop:
    """Solve, compile, correct, again."""

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

    def run(self) -> tuple[Plan, Trial]:
        """The plan whose compiled step is within the budget.

        Raises:
            VerifyFailure: XLA does not bring any plan that was tried within it.
            InfeasibleBudget: no plan is within it by the corrected graph.
        """
        seen, added, fits = 0, 0, 0
        for number in range(_ROUNDS):
            self.tell(number, _ROUNDS, "solving")
            try:
                plan = self._solved(added, seen)
            except InfeasibleBudget:
                if added - fits <= _CLOSE * self.limit:
                    raise
                added = (fits + added) // 2
                continue
            self.tell(number, _ROUNDS, "compiling")
            trial = Trial.of(self.prepared, planned_step(self.prepared, plan))
            peak = trial.compiled.peak_bytes * self.devices
            if peak <= self.limit:
                return self._loosened(plan, trial)
            seen, fits = min(seen or peak, peak), added
            # What XLA lays out does not follow the graph to the byte, so a correction that did not do is made larger.
            added += max(peak - self.limit + (self.limit - plan.peak_bytes), 1) * (4 + number) // 4
        if not seen:
            self._solved(added, seen)
        raise VerifyFailure(
            f"XLA's compiled step takes {format_bytes(seen)} at least, over the budget of {format_bytes(self.limit)}, in {_ROUNDS} plans"
            f" of which each promised to fit (unplanned it takes {format_bytes(self.unplanned.peak_bytes * self.devices)});"
            " give a larger budget, or a version of jaxlib that honours optimization barriers on this platform"
        )

    def _loosened(self, plan: Plan, trial: Trial) -> tuple[Plan, Trial]:
        """A faster plan, where XLA takes so much less than was predicted that one may fit; else the plan itself.

        XLA reuses buffers that the graph counts twice. So the same graph is solved for as much more as was left over, and what
        comes of it is compiled: only what fits then is taken, its prediction lowered by that much.
        """
        for _ in range(_LOOSER):
            peak = trial.compiled.peak_bytes * self.devices
            spare = plan.peak_bytes - peak
            if plan.drops_nothing or min(spare, self.limit - peak) <= _CLOSE * self.limit:
                break
            self.tell(_ROUNDS - 1, _ROUNDS, "solving for what was left over")
            try:
                wider = self._solved(0, peak, self.limit + spare)
            except InfeasibleBudget:
                break
            if wider.drops_nothing or wider.step_seconds >= plan.step_seconds:
                break
            other = Trial.of(self.prepared, planned_step(self.prepared, wider))
            if other.compiled.peak_bytes * self.devices > self.limit:
                break
            promised = max(wider.peak_bytes - spare, other.compiled.peak_bytes * self.devices)
            plan = msgspec.structs.replace(
                wider, budget_bytes=self.limit, peak_bytes=min(promised, self.limit), bound_seconds=0.0, gap=None
            )
            trial = other
        return plan, trial

    def _solved(self, added: int, seen: int, limit: int = 0) -> Plan:
        try:
            return solve(
                with_scratch(self.recording, added), self.limit, strategy=self.strategy, time_limit_seconds=self.seconds, link=self.link
            )
        except InfeasibleBudget as error:
            if not seen:
                raise
            raise InfeasibleBudget(
                f"{error} (the graph counts {format_bytes(seen)}, which the best plan so far took when compiled)",
                budget_bytes=error.budget_bytes, least_bytes=min(error.least_bytes, seen), moment=error.moment,
            ) from error  # fmt: skip


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
