"""The joint jaxpr of a region, forward and backward in one, and what each of its equations is for.

Planning on the forward alone goes wrong: derivative rules that reuse their own result (tanh, exp, rsqrt, max) hold values that the
forward never names. So the region is differentiated first, and its equations sorted:

- ``early``: they depend on no cotangent and come before the first one that does. They make the activations.
- ``late``: they depend on no cotangent, but stand among the backward. They run there, when first asked for.
- ``backward``: they depend on a cotangent.

What late and backward equations read of early results must be kept, or made again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from recoup.jax.jaxprs import Aval, flatten, is_inexact, is_literal, shape_of
from recoup.jax.naming import module_of

__all__ = ["Joint", "trace"]

Function = Callable[..., Sequence[Any]]


@dataclass(frozen=True, eq=False)
class Joint:
    """One region: ``outputs`` results of the region, then a gradient for each differentiable input.

    Attributes:
        jaxpr: inputs are the region's and one cotangent for each differentiable output.
        consts: arrays that it closes over.
        inputs: how many inputs the region has.
        outputs: how many results the region has.
        sloped: the inputs that can have a gradient.
        sloped_outputs: the results that can.
        wanted: the inputs whose gradient the step asks for; others can be had, and count for nothing in planning.
    """

    jaxpr: Any
    consts: tuple[Any, ...]
    inputs: int
    outputs: int
    sloped: tuple[int, ...]
    sloped_outputs: tuple[int, ...]
    wanted: frozenset[int]

    @property
    def given(self) -> list[Any]:
        """The region's inputs."""
        return self.jaxpr.invars[: self.inputs]

    @property
    def cotangents(self) -> list[Any]:
        """The cotangents, one for each of ``sloped_outputs``."""
        return self.jaxpr.invars[self.inputs :]

    @property
    def results(self) -> list[Any]:
        """The region's results."""
        return self.jaxpr.outvars[: self.outputs]

    @property
    def gradients(self) -> list[Any]:
        """The gradients, one for each of ``sloped``."""
        return self.jaxpr.outvars[self.outputs :]

    @cached_property
    def sources(self) -> dict[Any, int]:
        """For each variable the equation that makes it."""
        return {var: number for number, eqn in enumerate(self.jaxpr.eqns) for var in eqn.outvars}

    @cached_property
    def dependent(self) -> frozenset[Any]:
        """Variables that depend on a cotangent."""
        found = set(self.cotangents)
        for eqn in self.jaxpr.eqns:
            if any(not is_literal(atom) and atom in found for atom in eqn.invars):
                found.update(eqn.outvars)
        return frozenset(found)

    @cached_property
    def backward(self) -> tuple[int, ...]:
        """Equations that depend on a cotangent."""
        return tuple(n for n, eqn in enumerate(self.jaxpr.eqns) if any(var in self.dependent for var in eqn.outvars))

    @cached_property
    def early(self) -> tuple[int, ...]:
        """Equations before the first one that depends on a cotangent."""
        return tuple(range(self.backward[0] if self.backward else len(self.jaxpr.eqns)))

    @cached_property
    def live(self) -> frozenset[int]:
        """Equations that the results or the wanted gradients need, and those with effects."""
        wanted = [var for place, var in zip(self.sloped, self.gradients, strict=True) if place in self.wanted]
        needed = {atom for atom in (*self.results, *wanted) if not is_literal(atom)}
        return frozenset(_slice(self.jaxpr, needed, range(len(self.jaxpr.eqns))))

    @cached_property
    def last_reader(self) -> dict[Any, int]:
        """For each variable the last live equation that reads it; for gradients that are asked for, beyond the last."""
        found = {atom: number for number in sorted(self.live) for atom in self.jaxpr.eqns[number].invars if not is_literal(atom)}
        for place, atom in zip(self.sloped, self.gradients, strict=True):
            if place in self.wanted and not is_literal(atom):
                found[atom] = len(self.jaxpr.eqns)
        return found

    def forward_slice(self, targets: Sequence[Any]) -> list[int]:
        """The early equations that make the targets, and those with effects, in order."""
        return _slice(self.jaxpr, {atom for atom in targets if not is_literal(atom)}, self.early)


def _slice(jaxpr: Any, needed: set[Any], numbers: Sequence[int]) -> list[int]:
    used: list[int] = []
    for number in reversed(numbers):
        eqn = jaxpr.eqns[number]
        if eqn.effects or any(var in needed for var in eqn.outvars):
            used.append(number)
            needed.update(atom for atom in eqn.invars if not is_literal(atom))
    return used[::-1]


def trace(function: Function, avals: Sequence[Aval], wanted: frozenset[int] | None = None, still: frozenset[int] = frozenset()) -> Joint:
    """Differentiate a function of flat arrays into its joint jaxpr.

    Args:
        function: flat arrays to flat arrays.
        avals: types of its inputs.
        wanted: inputs whose gradients the step asks for; None for all that can have one.
        still: results that no gradient flows through.
    """
    sloped = tuple(place for place, aval in enumerate(avals) if is_inexact(aval))
    results = jax.eval_shape(lambda *args: list(function(*args)), *map(shape_of, avals))
    sloped_outputs = tuple(place for place, aval in enumerate(results) if is_inexact(aval) and place not in still)

    def joint(*everything: Any) -> list[Any]:
        args, cotangents = list(everything[: len(avals)]), list(everything[len(avals) :])

        def of_sloped(*values: Any) -> tuple[list[Any], list[Any]]:
            full = list(args)
            for place, value in zip(sloped, values, strict=True):
                full[place] = value
            made = function(*full)
            return [made[place] for place in sloped_outputs], [out for place, out in enumerate(made) if place not in sloped_outputs]

        moving, pull, others = jax.vjp(of_sloped, *[args[place] for place in sloped], has_aux=True)
        flowing, standing = iter(moving), iter(others)
        outs = [next(flowing) if place in sloped_outputs else next(standing) for place in range(len(results))]
        return [*outs, *pull(cotangents)]

    shapes = [*map(shape_of, avals), *(shape_of(results[place]) for place in sloped_outputs)]
    closed = flatten(jax.make_jaxpr(joint)(*shapes), lambda eqn, outer: module_of(eqn) or outer)
    asked = frozenset(sloped) if wanted is None else wanted & frozenset(sloped)
    return Joint(closed.jaxpr, tuple(closed.consts), len(avals), len(results), sloped, sloped_outputs, asked)
