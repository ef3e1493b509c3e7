"""A loss under a plan: the same values and gradients, kept and recomputed as the plan says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from recoup.errors import PlanMismatch
from recoup.jax.building import Built
from recoup.jax.calls import Call, Convention, same_fixed
from recoup.jax.costs import rates_for
from recoup.jax.figures import kept_storages, residual_bytes
from recoup.jax.jaxprs import bytes_of
from recoup.jax.record import Prepared, flat_loss, prepare, prepare_call
from recoup.jax.regions import Decided, traced
from recoup.jax.running import Region
from recoup.plan import Plan

__all__ = ["Planned", "PlannedStep", "apply", "planned_step"]

Loss = Callable[..., Any]
Flat = Callable[..., Sequence[Any]]


@dataclass(frozen=True, eq=False)
class _Compiled:
    """The plan at work on one kind of call."""

    prepared: Prepared
    flat: Flat


class Planned:
    """A loss that runs a plan; call, differentiate and compile it like the loss itself.

    Gradients are right for every argument, not only for those that the plan was made for. Calls of other shapes run the same
    decisions, at other costs in memory.

    Attributes:
        plan: what it runs.
        loss: the function that it stands for.
    """

    def __init__(self, loss: Loss, plan: Plan, first: Prepared, has_aux: bool) -> None:
        functools.update_wrapper(self, loss)
        self.loss, self.plan, self.has_aux = loss, plan, has_aux
        self._first = first
        self._made: dict[Any, _Compiled] = {first.call.key(): _Compiled(first, planned_step(first, plan).flat)}

    @property
    def convention(self) -> Convention:
        """How the loss may be called."""
        return self._first.convention

    @property
    def signatures(self) -> tuple[str, ...]:
        """The shapes it has been called with so far, those it was planned for first."""
        return tuple(made.prepared.call.signature for made in self._made.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The loss's results.

        Raises:
            UsageError: the loss cannot be called so.
            PlanMismatch: a fixed argument has another value, or the plan names what this call does not compute.
        """
        call = self.convention.call(args, kwargs)
        made = self._for(call)
        return jax.tree.unflatten(made.prepared.tree, list(made.flat(*call.arrays)))

    def _for(self, call: Call) -> _Compiled:
        known = self._made.get(call.key())
        if known is None:
            prepared = prepare_call(self.loss, self.convention, call, self.has_aux)
            if call.tree == self._first.call.tree and call.traced == self._first.call.traced:
                same_fixed(self._first.call, call, self.convention.name)
            known = _Compiled(prepared, planned_step(prepared, self.plan).flat)
            self._made[call.key()] = known
        same_fixed(known.prepared.call, call, self.convention.name)
        return known


def apply(
    loss: Loss, plan: Plan, *example_args: Any, argnums: int | Sequence[int] = 0, has_aux: bool = False,
    static_argnames: Sequence[str] = (), kwargs: Mapping[str, Any] | None = None,
) -> Planned:  # fmt: skip
    """The loss under a plan.

    Args:
        loss: a function to a scalar, or with ``has_aux`` to (scalar, anything).
        plan: as ``solve`` or ``recoup.load_plan`` give it.
        example_args: arguments like those of training, or their shapes; as for ``record``, with what follows.
        argnums: positional arguments that are differentiated.
        has_aux: whether the loss returns something beside the scalar.
        static_argnames: arguments that are no arrays although they are numbers.
        kwargs: keyword arguments of the loss.

    Raises:
        PlanMismatch: the plan is of another front-end, or names a site that the loss does not have.
        UsageError, CaptureError: as for ``record``.
    """
    prepared = prepare(loss, example_args, kwargs or {}, argnums=argnums, has_aux=has_aux, static_argnames=static_argnames)
    return Planned(loss, plan, prepared, has_aux)


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A flat loss under a plan.

    Attributes:
        flat: flat arrays to flat results.
        residual_bytes: what its forward hands to its backward, by the graph; None where the plan leaves the step as it is.
    """

    flat: Flat
    residual_bytes: int | None = None


def planned_step(prepared: Prepared, plan: Plan) -> PlannedStep:
    """The flat loss under a plan; the loss itself where the plan drops nothing.

    Raises:
        PlanMismatch: the plan is of another front-end, or names a site that the loss does not have.
    """
    if plan.frontend != "jax":
        raise PlanMismatch(f"the plan was made for {plan.frontend}, not for a JAX step")
    if plan.drops_nothing:
        return PlannedStep(flat_loss(prepared))
    reader = _Reader(plan)
    step = traced(prepared.node, reader.decide, prepared.given, rates_for("cpu"), wanted=prepared.wanted, still=prepared.still)
    decided = reader.decide(step.built)
    reader.all_met(prepared)
    run = Region(step.joint, decided.kept, host=decided.host, holds=reader.holds(step.built), roots=step.built.roots).function()

    def flat(*arrays: Any) -> list[Any]:
        made = list(run(*arrays))
        return [jax.lax.stop_gradient(out) if place in prepared.still else out for place, out in enumerate(made)]

    on_host = sum(bytes_of(var.aval) for var in decided.host)
    return PlannedStep(flat, residual_bytes(step.built.graph, reader.dropped(step.built)) - on_host)


class _Reader:
    """A plan, read region by region; it remembers which of its sites were met."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.met: set[str] = set()
        self.loops: set[str] = set()

    def decide(self, built: Built) -> Decided:
        """What a region's forward hands over: what is saved and not dropped, and what replays start from."""
        graph, sites = built.graph, built.by_site
        here = sites.keys() & (self.plan.recompute_sites | self.plan.offload_sites)
        self.met |= here
        self.loops.add(graph.name)
        kept = sorted(kept_storages(graph, self.dropped(built)))
        host = frozenset(var for site in here & self.plan.offload_sites for var in built.variables[sites[site]])
        given = set(built.joint.given)
        handed = tuple(var for v in kept for var in built.variables[v] if var not in given)
        return Decided(handed, host, self.plan.stretches.get(graph.name, ()))

    def dropped(self, built: Built) -> frozenset[int]:
        """The storages of a region that the plan makes again."""
        return frozenset(v for site, v in built.by_site.items() if site in self.plan.recompute_sites)

    def holds(self, built: Built) -> dict[Any, Any]:
        """Variables that are made again more than once, each with the one from which on it is held."""
        sites, found = built.by_site, {}
        for site, trigger in self.plan.held_from_sites.items():
            if site in sites and trigger in sites:
                first = built.variables[sites[trigger]][0]
                found.update((var, first) for var in built.variables[sites[site]])
        return found

    def all_met(self, prepared: Prepared) -> None:
        """Passes if every site and loop that the plan names was there.

        Raises:
            PlanMismatch: one was not; the message names the first.
        """
        missing = sorted((self.plan.recompute_sites | self.plan.offload_sites) - self.met)
        missing += sorted(self.plan.stretches.keys() - self.loops)
        if missing:
            raise PlanMismatch(
                f"the plan names {missing[0]}, which {prepared.convention.name} does not have for {prepared.call.signature}"
                f" ({len(missing)} names are missing); record the loss and solve again"
            )
