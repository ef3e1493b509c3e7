"""A planned ``scan``: forward and backward loops over the planned body, split into stretches where the plan says so.

Unsplit, the forward loop stacks what the body hands to its backward, for every turn. Split into stretches of K turns, it stores
only the carry at the start of each stretch; the backward runs one stretch forward again, stacks what that hands over, and goes
back through it: N/K carries and K stacks, so about sqrt(N) of each at the best K (Chen et al. 2016). Stretches can be split
again, for carries of every level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

import jax
from jax import lax
from recoup.jax.jaxprs import Scan
from recoup.jax.naming import scope_of
from recoup.jax.running import Region

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
            carry, outs, handed = self._run_forward(constants, carry, slices, self.scan.length, self.loop.stretches, keep=True)
            return [*carry, *outs], handed

    def _split(self, args: Sequence[Any]) -> tuple[Values, Values, Values]:
        return list(args[: self.constants]), list(args[self.constants : self.first_slice]), list(args[self.first_slice :])

    def _run_forward(
        self, constants: Values, carry: Values, slices: Values, turns: int, stretches: tuple[int, ...], *, keep: bool
    ) -> tuple[Values, Values, Any]:
        """Carries, stacked outputs, and what the backward needs (nothing without ``keep``)."""
        if not keep or not stretches:
            return self._plain_forward(constants, carry, slices, turns, keep)
        made, handed = [], []
        for part in self._parts(turns, stretches[0]):
            carry, outs, starts = self._part_forward(constants, carry, slices, part)
            made.append(outs)
            handed.append(starts)
        return carry, self._joined(made), handed

    def _plain_forward(self, constants: Values, carry: Values, slices: Values, turns: int, keep: bool) -> tuple[Values, Values, Values]:
        def step(state: Values, x: Values) -> tuple[Values, tuple[Values, Values]]:
            outputs, handed = self.region.forward([*constants, *state, *x])
            return outputs[: self.carries], (outputs[self.carries :], handed if keep else [])

        carry, (outs, handed) = lax.scan(step, carry, slices, length=turns, reverse=self.scan.reverse, unroll=self.scan.unroll)
        return carry, outs, handed

    def _part_forward(self, constants: Values, carry: Values, slices: Values, part: _Part) -> tuple[Values, Values, Values]:
        def stretch(state: Values, x: Values) -> tuple[Values, tuple[Values, Values]]:
            after, outs, _ = self._plain_forward(constants, state, x, part.stretch, keep=False)
            return after, (outs, state)

        cut = self._cut(slices, part)
        carry, (outs, starts) = lax.scan(stretch, carry, cut, length=part.turns // part.stretch, reverse=self.scan.reverse)
        return carry, [out.reshape(part.turns, *out.shape[2:]) for out in outs], starts

    def _parts(self, turns: int, stretch: int) -> list[_Part]:
        """The turns in the order in which they run; what does not fill a stretch runs last, as a shorter one."""
        rest = turns % stretch
        whole, start = turns - rest, rest if self.scan.reverse else 0
        parts = [_Part(start, whole, stretch)] if whole else []
        return [*parts, *([_Part(0 if self.scan.reverse else whole, rest, rest)] if rest else [])]

    @staticmethod
    def _cut(slices: Values, part: _Part) -> Values:
        """The slices of a part, in stretches."""
        shape = (part.turns // part.stretch, part.stretch)
        return [x[part.start : part.start + part.turns].reshape(*shape, *x.shape[1:]) for x in slices]

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
            state, found = self._run_backward(constants, slices, handed, (flowing, sums), stacked, self.scan.length, self.loop.stretches)
            flowing, sums = state
            gradients: Values = [None] * self.joint.inputs
            for place, value in zip(self.sloped_constants, sums, strict=True):
                gradients[place] = value
            for place, value in zip(self.sloped_carries, flowing, strict=True):
                gradients[self.constants + place] = value
            for place, value in zip(self.sloped_slices, found, strict=True):
                gradients[self.first_slice + place] = value
            return tuple(gradients)

    def _run_backward(
        self, constants: Values, slices: Values, handed: Any, state: Any, stacked: Values, turns: int, stretches: tuple[int, ...]
    ) -> tuple[Any, Values]:
        """Cotangents of the carry and sums for the constants, and stacked gradients of the slices."""
        if not stretches:
            return self._plain_backward(constants, slices, handed, state, stacked, turns)
        made = []
        parts = self._parts(turns, stretches[0])
        for part, starts in zip(parts[::-1], handed[::-1], strict=True):
            state, found = self._part_backward(constants, slices, starts, state, stacked, part, stretches[1:])
            made.append(found)
        return state, self._joined(made[::-1])

    def _plain_backward(
        self, constants: Values, slices: Values, handed: Values, state: Any, stacked: Values, turns: int
    ) -> tuple[Any, Values]:
        given = self.joint.given

        def step(state: Any, now: Any) -> tuple[Any, Values]:
            flowing, sums = state
            x, kept, cotangents = now
            standing = dict(zip(given[: self.constants], constants, strict=True)) | dict(zip(given[self.first_slice :], x, strict=True))
            found = self.region.backward(standing, kept, [*flowing, *cotangents])
            by_place = dict(zip(self.joint.sloped, found, strict=True))
            sums = [total + by_place[place] for place, total in zip(self.sloped_constants, sums, strict=True)]
            flowing = [by_place[self.constants + place] for place in self.sloped_carries]
            return (flowing, sums), [by_place[self.first_slice + place] for place in self.sloped_slices]

        backwards = not self.scan.reverse
        return lax.scan(step, state, (slices, handed, stacked), length=turns, reverse=backwards, unroll=self.scan.unroll)

    def _part_backward(
        self, constants: Values, slices: Values, starts: Values, state: Any, stacked: Values, part: _Part, deeper: tuple[int, ...]
    ) -> tuple[Any, Values]:
        def stretch(state: Any, now: Any) -> tuple[Any, Values]:
            x, start, cotangents = now
            start, state = lax.optimization_barrier((start, state))
            _, _, handed = self._run_forward(constants, start, x, part.stretch, deeper, keep=True)
            return self._run_backward(constants, x, handed, state, cotangents, part.stretch, deeper)

        cut = (self._cut(slices, part), starts, self._cut(stacked, part))
        state, found = lax.scan(stretch, state, cut, length=part.turns // part.stretch, reverse=not self.scan.reverse)
        return state, [out.reshape(part.turns, *out.shape[2:]) for out in found]
