"""A planned ``scan``: forward and backward loops over the planned body, split into stretches where the plan says so.

Unsplit, the forward loop stacks what the body hands to its backward, for every turn. Split into stretches of K turns, it stores
only the carry at the start of each stretch; the backward runs one stretch forward again, stacks what that hands over, and goes
back through it: N/K carries and K stacks, so about sqrt(N) of each at the best K (Chen et al. 2016). Stretches can be split
again, for carries of every level.

Slices and stacks are read by the number of the turn, and gradients of slices written by it: a stretch copies none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

import jax
from jax import lax
from recoup.jax.jaxprs import Scan, on_explicit_mesh
from recoup.jax.naming import scope_of
from recoup.jax.running import Region, Stacked

__all__ = ["Loop", "planned_loop"]

Values = list[Any]


@dataclass(frozen=True, eq=False)
class Loop:
    """A scan, its planned body, the module path it has in sites, and the lengths of its stretches, outermost first."""

    scan: Scan
    body: Region
    name: str
    stretches: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Part:
    """Turns that run as one loop of stretches: where they begin in the slices, how many, how long a stretch."""

    start: int
    turns: int
    stretch: int

    @property
    def stretches(self) -> int:
        """How many there are."""
        return self.turns // self.stretch


@dataclass(frozen=True, eq=False)
class _Standing:
    """What stands while the backward runs: constants, and stacks of all turns."""

    constants: Values
    slices: Values
    cotangents: Values


_State = tuple[Values, Values, Values]
"""Cotangents of the carry, sums for the constants, stacked gradients of the slices."""


def planned_loop(loop: Loop) -> Callable[[Values], Values]:
    """The scan as a differentiable function of its flat inputs (constants, carries, slices) to carries and slices."""
    run = _Run(loop)

    @jax.custom_vjp
    def planned(*args: Any) -> tuple[Any, ...]:
        return tuple(run.forward(args)[0])

    def forward(*args: Any) -> tuple[tuple[Any, ...], Any]:
        outputs, handed = run.forward(args)
        return tuple(outputs), (handed, args)

    def backward(residuals: Any, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
        handed, args = residuals
        return run.backward(handed, args, cotangents)

    planned.defvjp(forward, backward)
    return lambda inputs: list(planned(*inputs))


class _Run:
    def __init__(self, loop: Loop) -> None:
        self.loop, self.scan, self.region = loop, loop.scan, loop.body
        self.joint = loop.body.joint
        self.constants, self.carries = self.scan.constants, self.scan.carries
        self.first_slice = self.constants + self.carries
        # Which carries, constants and slices have gradients.
        sloped = set(self.joint.sloped)
        self.sloped_carries = [place for place in range(self.carries) if self.constants + place in sloped]
        self.sloped_constants = [place for place in range(self.constants) if place in sloped]
        self.sloped_slices = [place for place in range(self.joint.inputs - self.first_slice) if self.first_slice + place in sloped]
        self.sloped_outputs = set(self.joint.sloped_outputs)

    # -- forward

    def forward(self, args: Sequence[Any]) -> tuple[Values, Any]:
        with scope_of(self.loop.name):
            constants, carry, slices = self._split(args)
            carry, outs, handed = self._run_forward(constants, carry, slices, 0, self.scan.length, self.loop.stretches)
            return [*carry, *outs], handed

    def _split(self, args: Sequence[Any]) -> tuple[Values, Values, Values]:
        return list(args[: self.constants]), list(args[self.constants : self.first_slice]), list(args[self.first_slice :])

    def _run_forward(
        self, constants: Values, carry: Values, slices: Values, first: Any, turns: int, stretches: tuple[int, ...]
    ) -> tuple[Values, Values, Any]:
        """Carries, stacked outputs, and what the backward needs, of the turns from ``first`` on."""
        if not stretches:
            return self._plain_forward(constants, carry, slices, first, turns, keep=True)
        made, handed = [], []
        for part in self._parts(turns, stretches[0]):
            carry, outs, starts = self._part_forward(constants, carry, slices, first, part)
            made.append(outs)
            handed.append(starts)
        return carry, self._joined(made), handed

    def _plain_forward(
        self, constants: Values, carry: Values, slices: Values, first: Any, turns: int, *, keep: bool
    ) -> tuple[Values, Values, Values]:
        def step(state: Values, turn: Any) -> tuple[Values, tuple[Values, Values]]:
            outputs, handed = self.region.forward([*constants, *state, *(Stacked(x, first).of(turn) for x in slices)])
            return outputs[: self.carries], (outputs[self.carries :], handed if keep else [])

        carry, (outs, handed) = lax.scan(step, carry, jnp.arange(turns), reverse=self.scan.reverse, unroll=self.scan.unroll)
        return carry, outs, handed

    def _part_forward(self, constants: Values, carry: Values, slices: Values, first: Any, part: _Part) -> tuple[Values, Values, Values]:
        def stretch(state: Values, number: Any) -> tuple[Values, tuple[Values, Values]]:
            start = first + part.start + number * part.stretch
            after, outs, _ = self._plain_forward(constants, state, slices, start, part.stretch, keep=False)
            return after, (outs, state)

        carry, (outs, starts) = lax.scan(stretch, carry, jnp.arange(part.stretches), reverse=self.scan.reverse)
        return carry, [out.reshape(part.turns, *out.shape[2:]) for out in outs], starts

    def _parts(self, turns: int, stretch: int) -> list[_Part]:
        """The turns in the order in which they run; what does not fill a stretch runs last, as a shorter one."""
        rest = turns % stretch
        whole, start = turns - rest, rest if self.scan.reverse else 0
        parts = [_Part(start, whole, stretch)] if whole else []
        return [*parts, *([_Part(0 if self.scan.reverse else whole, rest, rest)] if rest else [])]

    def _joined(self, made: list[Values]) -> Values:
        """Parts one after the other, as they lie in the slices."""
        if len(made) == 1:
            return made[0]
        ordered = made[::-1] if self.scan.reverse else made
        return [jnp.concatenate(pieces) for pieces in zip(*ordered, strict=True)]

    # -- backward

    def backward(self, handed: Any, args: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        """Gradients for all inputs; None for those that can have none."""
        with scope_of(self.loop.name):
            constants, _, slices = self._split(args)
            flowing = [cotangents[place] for place in range(self.carries) if place in self.sloped_outputs]
            stacked = [cotangents[place] for place in range(self.carries, self.joint.outputs) if place in self.sloped_outputs]
            sums = [jnp.zeros_like(constants[place]) for place in self.sloped_constants]
            made = dict(zip(self.joint.sloped, self.joint.gradients, strict=True))
            found = [_zeros(self.scan.length, made[self.first_slice + place].aval) for place in self.sloped_slices]
            standing = _Standing(constants, slices, stacked)
            flowing, sums, found = self._run_backward(standing, handed, (flowing, sums, found), 0, self.scan.length, self.loop.stretches)
            gradients: Values = [None] * self.joint.inputs
            for place, value in zip(self.sloped_constants, sums, strict=True):
                gradients[place] = value
            for place, value in zip(self.sloped_carries, flowing, strict=True):
                gradients[self.constants + place] = value
            for place, value in zip(self.sloped_slices, found, strict=True):
                gradients[self.first_slice + place] = value
            return tuple(gradients)

    def _run_backward(self, standing: _Standing, handed: Any, state: _State, first: Any, turns: int, stretches: tuple[int, ...]) -> _State:
        """Back through the turns from ``first`` on."""
        if not stretches:
            return self._plain_backward(standing, handed, state, first, turns)
        for part, starts in zip(self._parts(turns, stretches[0])[::-1], handed[::-1], strict=True):
            state = self._part_backward(standing, starts, state, first, part, stretches[1:])
        return state

    def _plain_backward(self, standing: _Standing, handed: Values, state: _State, first: Any, turns: int) -> _State:
        given = self.joint.given
        stands = dict(zip(given[: self.constants], standing.constants, strict=True))
        stands |= {var: Stacked(x, first) for var, x in zip(given[self.first_slice :], standing.slices, strict=True)}

        def step(state: _State, turn: Any) -> tuple[_State, None]:
            flowing, sums, stacks = state
            cotangents = [Stacked(x, first).of(turn) for x in standing.cotangents]
            found = self.region.backward(stands, [Stacked(x) for x in handed], [*flowing, *cotangents], turn)
            by_place = dict(zip(self.joint.sloped, found, strict=True))
            sums = [total + by_place[place] for place, total in zip(self.sloped_constants, sums, strict=True)]
            flowing = [by_place[self.constants + place] for place in self.sloped_carries]
            made = [by_place[self.first_slice + place] for place in self.sloped_slices]
            stacks = [lax.dynamic_update_index_in_dim(x, one, first + turn, 0) for x, one in zip(stacks, made, strict=True)]
            return (flowing, sums, stacks), None

        return lax.scan(step, state, jnp.arange(turns), reverse=not self.scan.reverse, unroll=self.scan.unroll)[0]

    def _part_backward(
        self, standing: _Standing, starts: Values, state: _State, first: Any, part: _Part, deeper: tuple[int, ...]
    ) -> _State:
        def stretch(state: _State, now: Any) -> tuple[_State, None]:
            (flowing, sums, found), (number, start) = state, now
            start, flowing = lax.optimization_barrier((start, flowing))
            begin = first + part.start + number * part.stretch
            _, _, handed = self._run_forward(standing.constants, start, standing.slices, begin, part.stretch, deeper)
            return self._run_backward(standing, handed, (flowing, sums, found), begin, part.stretch, deeper), None

        return lax.scan(stretch, state, (jnp.arange(part.stretches), starts), reverse=not self.scan.reverse)[0]


def _zeros(turns: int, aval: Any) -> Any:
    """A stack for all turns of one type."""
    stack = jnp.zeros((turns, *aval.shape), aval.dtype)
    if not on_explicit_mesh(aval):
        return stack
    return jax.sharding.reshard(stack, jax.sharding.NamedSharding(aval.sharding.mesh, jax.P(None, *aval.sharding.spec)))
