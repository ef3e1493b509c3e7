"""Running a region by its plan: the forward keeps what is kept, the backward makes the rest again when it is first asked for.

What a backward equation asks for is made as one group. The values that the group starts from are tied to the cotangent in
flight (``recoup.jax.ties``): so XLA can neither merge the group with the forward that it repeats, nor run it before the backward
has come so far. Without the tie, common-subexpression elimination undoes recomputation.

In a loop what stands is in stacks, a part for each turn. There the number of the turn is tied instead, which costs nothing, and
parts are taken when they are asked for: taken at the start of the turn they would all stand beside their stacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from recoup.jax.costs import ALIASES
from recoup.jax.jaxprs import bind, is_dropped, is_literal, values_of
from recoup.jax.joint import Joint
from recoup.jax.naming import module_of, scope_of
from recoup.jax.ties import tie, ties_are_free

__all__ = ["Region", "Stacked"]

_FREE = ALIASES | {"iota"}


@dataclass(frozen=True, eq=False)
class Stacked:
    """A value of one turn of a loop: its part of a stack.

    Attributes:
        stack: the values of all turns.
        first: where the loop's first turn is in it.
    """

    stack: Any
    first: Any = 0

    def of(self, turn: Any) -> Any:
        """The part of a turn of the loop."""
        return jax.lax.dynamic_index_in_dim(self.stack, turn + self.first, keepdims=False)


class Region:
    """A joint jaxpr and the early variables that its backward finds kept.

    Attributes:
        kept: early results that the forward hands to the backward, in order.
        carried: of the inputs in ``behind``, those that the backward reads, handed over like results.
        behind: inputs that do not stand in the backward by themselves (a loop's carry).
        host: kept results that wait in the host's memory.
        holds: for results that are made again more than once, the one that must have been asked for before they are held.
        roots: of views, the variable that they are a view of.
    """

    def __init__(
        self, joint: Joint, kept: Iterable[Any], behind: Iterable[Any] = (), host: Iterable[Any] = (),
        holds: Mapping[Any, Any] | None = None, roots: Mapping[Any, Any] | None = None,
    ) -> None:  # fmt: skip
        self.joint = joint
        self.kept = tuple(dict.fromkeys(kept))
        self.behind = frozenset(behind)
        self.host = frozenset(host)
        self.holds, self.roots = dict(holds or {}), dict(roots or {})
        self._standing = {*self.kept, *joint.given, *joint.jaxpr.constvars}

    @cached_property
    def carried(self) -> tuple[Any, ...]:
        """Inputs in ``behind`` that the live backward reads, itself or to make something again."""
        asked: set[Any] = set()
        for number in self._backward_live:
            for atom in self.joint.jaxpr.eqns[number].invars:
                if not is_literal(atom) and atom not in self.joint.dependent:
                    asked |= self._leaves(atom)
        for atom in self.joint.gradients:
            if not is_literal(atom) and atom not in self.joint.dependent:
                asked |= self._leaves(atom)
        return tuple(var for var in self.joint.given if var in asked and var in self.behind)

    @property
    def handed(self) -> tuple[Any, ...]:
        """All that the forward hands to the backward."""
        return (*self.kept, *self.carried)

    @cached_property
    def _backward_live(self) -> tuple[int, ...]:
        # Gradients that the step does not ask for must be right all the same, so their equations count here.
        return self.joint.backward

    def _leaves(self, var: Any) -> set[Any]:
        """The standing variables that making ``var`` starts from."""
        found, stack, seen = set(), [var], set()
        while stack:
            one = stack.pop()
            if one in seen:
                continue
            seen.add(one)
            if one in self._standing:
                found.add(one)
            elif one in self.joint.sources:
                stack.extend(atom for atom in self.joint.jaxpr.eqns[self.joint.sources[one]].invars if not is_literal(atom))
        return found

    def forward(self, args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The region's results, and what is handed to the backward."""
        joint = self.joint
        env = dict(zip(joint.jaxpr.constvars, joint.consts, strict=True)) | dict(zip(joint.given, args, strict=True))
        for number in self._forward_slice:
            eqn = joint.jaxpr.eqns[number]
            with scope_of(module_of(eqn)):
                outputs = bind(eqn, values_of(eqn.invars, env))
            env.update(zip(eqn.outvars, outputs, strict=True))
        handed = [to_host(env[var]) if var in self.host else env[var] for var in self.handed]
        return values_of(joint.results, env), handed

    @cached_property
    def _forward_slice(self) -> list[int]:
        return self.joint.forward_slice([*self.joint.results, *self.kept])

    def backward(self, args: dict[Any, Any], handed: Sequence[Any], cotangents: Sequence[Any], turn: Any = None) -> list[Any]:
        """The gradients, one for each sloped input.

        Args:
            args: the inputs that still stand, by variable.
            handed: what the forward handed over; in a loop both may be :class:`Stacked`.
            cotangents: one for each sloped output.
            turn: the number of the loop's turn.
        """
        return _Backward(self, args, handed, cotangents, turn).gradients()

    def function(self) -> Callable[..., tuple[Any, ...]]:
        """The region as a differentiable function of its inputs."""

        @jax.custom_vjp
        def planned(*args: Any) -> tuple[Any, ...]:
            return tuple(self.forward(args)[0])

        def forward(*args: Any) -> tuple[tuple[Any, ...], Any]:
            outputs, handed = self.forward(args)
            return tuple(outputs), (handed, args)

        def backward(residuals: Any, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
            handed, args = residuals
            flowing = [cotangents[place] for place in self.joint.sloped_outputs]
            found = self.backward(dict(zip(self.joint.given, args, strict=True)), handed, flowing)
            by_place = dict(zip(self.joint.sloped, found, strict=True))
            return tuple(by_place.get(place) for place in range(self.joint.inputs))

        planned.defvjp(forward, backward)
        return planned


class _Backward:
    """One run of the backward: what stands, and what has been made again so far."""

    def __init__(self, region: Region, args: dict[Any, Any], handed: Sequence[Any], cotangents: Sequence[Any], turn: Any) -> None:
        joint = region.joint
        self.joint, self.region, self.turn = joint, region, turn
        self.standing = dict(zip(joint.jaxpr.constvars, joint.consts, strict=True))
        self.away: dict[Any, Any] = {}
        self.stacked: dict[Any, Stacked] = {}
        for var, value in (*args.items(), *zip(region.handed, handed, strict=True)):
            place = self.stacked if isinstance(value, Stacked) else self.away if var in region.host else self.standing
            place[var] = value
        self.env = dict(zip(joint.cotangents, cotangents, strict=True))
        self.given = frozenset(joint.given)
        # Live results of the backward since the last tie.
        self.fresh: list[Any] = []
        self.remade: dict[Any, Any] = {}
        self.kept, self.met = frozenset(region.kept), set[Any]()
        # Roots that the backward has asked for so far.
        self.reached: set[Any] = set()

    def gradients(self) -> list[Any]:
        """Runs it all."""
        eqns, live = self.joint.jaxpr.eqns, self.joint.live
        for number in self.joint.backward:
            eqn = eqns[number]
            asked = [atom for atom in eqn.invars if not is_literal(atom) and atom not in self.joint.dependent]
            self._have(asked, number if number in live else None)
            with scope_of(module_of(eqn)):
                outputs = bind(eqn, [atom.val if is_literal(atom) else self._value(atom) for atom in eqn.invars])
            self.env.update(zip(eqn.outvars, outputs, strict=True))
            if number in live:
                self.fresh.extend(var for var in eqn.outvars if not is_dropped(var))
        self._have([atom for atom in self.joint.gradients if not is_literal(atom) and atom not in self.joint.dependent], None)
        return [atom.val if is_literal(atom) else self._value(atom) for atom in self.joint.gradients]

    def _value(self, var: Any) -> Any:
        for place in (self.env, self.standing, self.remade):
            if var in place:
                return place[var]
        raise KeyError(var)

    def _have(self, asked: Sequence[Any], number: int | None) -> None:
        """Make what equation ``number`` asks for and does not stand, one after the other; untied without a number."""
        for var in asked:
            self.reached.add(self._root(var))
            self._make(var, number)

    def _make(self, asked: Any, number: int | None) -> None:
        group, reads = self._group(asked)
        self._fetch([asked, *reads])
        leaves = [var for var in dict.fromkeys(reads) if var in self.stacked or var in self.standing or var in self.remade]
        parts = [var for var in leaves if var in self.stacked]
        if asked in self.stacked and asked not in self.standing:
            parts.append(asked)
        plain = [var for var in leaves if var not in self.stacked]
        first = [var for var in dict.fromkeys([asked, *plain]) if var not in self.stacked and self._is_first(var, asked, number)]
        heavy = any(self.joint.jaxpr.eqns[one].primitive.name not in _FREE for one in group)
        # A group that starts from parts of this turn waits for them; what stands all the time need not be tied as well.
        wanted = [var for var in (plain if heavy else first) if not (parts and var in self.given)]
        tied = self._tied(wanted, parts, number)
        self.standing.update((var, tied[var]) for var in (*first, asked) if var in tied)
        if group:
            self._run_again(group, {var: tied[var] if var in tied else self._value(var) for var in leaves}, asked)

    def _is_first(self, var: Any, asked: Any, number: int | None) -> bool:
        """Whether a kept value is read for the first time: tied, what XLA derives from it now is not what the forward derived.

        Else a transposed copy, made for a product of the forward and for one of the backward, would stand in between.
        """
        if number is None or var not in self.kept or var in self.met:
            return False
        self.met.add(var)
        return var is not asked or ties_are_free()

    def _run_again(self, group: set[int], local: dict[Any, Any], asked: Any) -> None:
        for number in sorted(group):
            eqn = self.joint.jaxpr.eqns[number]
            with scope_of(module_of(eqn)):
                outputs = bind(eqn, values_of(eqn.invars, local))
            local.update(zip(eqn.outvars, outputs, strict=True))
            made = (var for var in eqn.outvars if not is_dropped(var) and var not in self.standing)
            self.remade.update((var, local[var]) for var in made if var is asked or self._is_held(var))

    def _tied(self, wanted: Sequence[Any], parts: Sequence[Any], number: int | None) -> dict[Any, Any]:
        """Values by variable, tied to all that the backward has made since the last tie and that is still of use.

        Cotangents in flight alone would leave weight gradients free to run later, and what they read standing until then.
        """
        if number is None or not (wanted or parts):
            return {var: self.stacked[var].of(self.turn) for var in parts}
        eqn, last = self.joint.jaxpr.eqns[number], self.joint.last_reader
        used = [var for var in self.fresh if last.get(var, -1) >= number]
        flowing = [atom for atom in eqn.invars if not is_literal(atom) and atom in self.joint.dependent]
        ties = list(dict.fromkeys([*flowing, *used]))
        given = [*([self.turn] if parts else []), *map(self._value, wanted)]
        stands = [*([False] if parts else []), *(var in self.given for var in wanted)]
        values, after = tie(given, [self.env[var] for var in ties], stands)
        self.env.update(zip(ties, after, strict=True))
        self.fresh = []
        found = {var: self.stacked[var].of(values[0]) for var in parts}
        return found | dict(zip(wanted, values[bool(parts) :], strict=True))

    def _root(self, var: Any) -> Any:
        return self.region.roots.get(var, var)

    def _is_held(self, var: Any) -> bool:
        """Whether a result made again stays for later; one that waits for another's turn goes, and is made once more."""
        root = self._root(var)
        return root not in self.region.holds or root in self.reached or self.region.holds[root] in self.reached

    def _group(self, asked: Any) -> tuple[set[int], list[Any]]:
        """The equations to run again for a variable, and the variables that they read."""
        group: set[int] = set()
        reads: list[Any] = []
        stack = [asked]
        while stack:
            var = stack.pop()
            if any(var in place for place in (self.standing, self.stacked, self.away, self.remade)):
                continue
            number = self.joint.sources[var]
            if number not in group:
                group.add(number)
                read = [atom for atom in self.joint.jaxpr.eqns[number].invars if not is_literal(atom)]
                reads.extend(read)
                stack.extend(read)
        return group, reads

    def _fetch(self, wanted: Iterable[Any]) -> None:
        """Bring back from the host what is wanted now."""
        for var in wanted:
            if var in self.away:
                self.standing[var] = to_device(self.away.pop(var))


def to_host(value: Any) -> Any:
    """Into the host's pinned memory; where the platform has one memory only, XLA drops the transfer."""
    return jax.device_put(value, jax.memory.Space.Host)


def to_device(value: Any) -> Any:
    """Back into the device's memory."""
    return jax.device_put(value, jax.memory.Space.Device)
