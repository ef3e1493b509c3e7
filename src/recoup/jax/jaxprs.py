"""Reading and running jaxprs: everything that hangs on how JAX lays them out is in this file.

Of JAX only what ``jax.extend.core`` gives out is imported. Beyond it these hang on the layout of a jaxpr: the names of
primitives, the parameters of ``scan`` (whole numbers up to JAX 0.11, trees of flags from 0.12 on), the shardings of a ``jit``
equation, and an equation's ``ctx`` and ``source_info``. :func:`self_test` tries each of them on the installed JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

import jax
from recoup.jax.naming import module_of, scope_of

__all__ = [
    "CALLS",
    "Aval",
    "Scan",
    "bind",
    "bytes_of",
    "elements_of",
    "evaluate",
    "flatten",
    "inner_jaxprs",
    "is_dropped",
    "is_explicit",
    "is_inexact",
    "is_literal",
    "on_explicit_mesh",
    "scan_of",
    "self_test",
    "shape_of",
    "values_of",
]

CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "remat2", "remat", "checkpoint"})
"""Equations that only call: what they hold runs in their place. A user's ``checkpoint`` is one: the plan decides in its stead."""

Aval = Any
Hook = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True, slots=True)
class Scan:
    """A ``scan`` equation, as all versions of JAX mean it: inputs are constants, carries, slices; outputs carries, slices."""

    jaxpr: Any
    consts: tuple[Any, ...]
    length: int
    constants: int
    carries: int
    reverse: bool
    unroll: Any


def is_literal(atom: Any) -> bool:
    """Whether an operand is a number written into the jaxpr."""
    return isinstance(atom, core.Literal)


def is_dropped(var: Any) -> bool:
    """Whether nobody reads this result."""
    return isinstance(var, core.DropVar)


def is_inexact(aval: Aval) -> bool:
    """Whether it can have a gradient: a floating point or complex dtype."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def elements_of(aval: Aval) -> int:
    """How many elements an array has; 1 for what has no shape."""
    return int(np.prod(getattr(aval, "shape", ()), dtype=np.int64))


def bytes_of(aval: Aval) -> int:
    """Bytes of an array, elements of less than a byte counted as one; random keys as their words; 0 for tokens."""
    dtype = getattr(aval, "dtype", None)
    return 0 if dtype is None else elements_of(aval) * max(int(getattr(dtype, "itemsize", 4)), 1)


def shape_of(aval: Aval) -> jax.ShapeDtypeStruct:
    """Shape, dtype and weakness of a type, to trace with; its sharding where that is part of the type."""
    sharding = aval.sharding if is_explicit(aval) else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)), sharding=sharding)


def is_explicit(aval: Aval) -> bool:
    """Whether a type says how its array lies on an explicit mesh."""
    return on_explicit_mesh(aval) and any(part is not None for part in aval.sharding.spec)


def on_explicit_mesh(aval: Aval) -> bool:
    """Whether a type names an explicit mesh, its array cut along it or not."""
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return any("xplicit" in str(kind) for kind in getattr(mesh, "axis_types", None) or ())


def values_of(atoms: Sequence[Any], env: Mapping[Any, Any]) -> list[Any]:
    """The values of operands."""
    return [atom.val if is_literal(atom) else env[atom] for atom in atoms]


def called(eqn: Any) -> tuple[Any, Sequence[Any]]:
    """The jaxpr that a calling equation holds, and its constants."""
    held = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return (held.jaxpr, held.consts) if hasattr(held, "consts") else (held, ())


def inner_jaxprs(eqn: Any) -> list[Any]:
    """The jaxprs among an equation's parameters, constants aside (branches, bodies, calls)."""
    found = []
    for value in eqn.params.values():
        for held in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(held, (core.ClosedJaxpr, core.Jaxpr)):
                found.append(held.jaxpr if isinstance(held, core.ClosedJaxpr) else held)
    return found


def is_call(eqn: Any) -> bool:
    """Whether an equation only calls; a ``jit`` that asks for shardings or layouts of its own is left whole."""
    if eqn.primitive.name not in CALLS or called(eqn)[0] is None:
        return False
    asked = [eqn.params.get(name) or () for name in ("in_shardings", "out_shardings")]
    return all("Unspecified" in type(sharding).__name__ for shardings in asked for sharding in shardings)


def scan_of(eqn: Any) -> Scan:
    """What a ``scan`` equation says."""
    params = eqn.params
    if "ft_in" in params:
        constants, carries = (len(part) for part in params["ft_in"].unpack()[:2])
    else:
        constants, carries = params["num_consts"], params["num_carry"]
    held = params["jaxpr"]
    return Scan(held.jaxpr, tuple(held.consts), params["length"], constants, carries, params["reverse"], params["unroll"])


def bind(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """Run one equation on values or tracers."""
    given = eqn.primitive.get_bind_params(eqn.params)
    functions, params = given if isinstance(given, tuple) else ((), given)
    with eqn.ctx.manager:
        outputs = eqn.primitive.bind(*functions, *inputs, **params)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


def evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], hooks: Mapping[int, Hook] | None = None) -> list[Any]:
    """Run a jaxpr equation by equation, each in its own module's scope; ``hooks`` run in the place of equations, by number."""
    env = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))
    for number, eqn in enumerate(jaxpr.eqns):
        inputs = values_of(eqn.invars, env)
        hook = hooks.get(number) if hooks else None
        if hook:
            outputs = hook(inputs)
        else:
            with scope_of(module_of(eqn)):
                outputs = bind(eqn, inputs)
        env.update(zip(eqn.outvars, outputs, strict=True))
    return values_of(jaxpr.outvars, env)


def flatten(closed: Any, scope: Callable[[Any, str], str], prefix: str = "") -> Any:
    """The same jaxpr with calls written out, each equation in the scope that ``scope(eqn, caller's scope)`` names."""

    def run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], outer: str) -> list[Any]:
        env = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            inputs, place = values_of(eqn.invars, env), scope(eqn, outer)
            if is_call(eqn):
                outputs = run(*called(eqn), inputs, place)
            else:
                with scope_of(place):
                    outputs = bind(eqn, inputs)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return values_of(jaxpr.outvars, env)

    shapes = [shape_of(aval) for aval in closed.in_avals]
    return jax.make_jaxpr(lambda *args: run(closed.jaxpr, closed.consts, args, prefix))(*shapes)


def self_test() -> list[tuple[str, bool, str]]:
    """Each thing this file leans on, tried on the installed JAX: (name, whether it holds, what was seen)."""
    one, many = jax.ShapeDtypeStruct((2,), "float32"), jax.ShapeDtypeStruct((3, 2), "float32")

    def step(carry: Any, x: Any) -> Any:
        return jnp.sin(carry) * x, carry

    def loss(x: Any, xs: Any) -> Any:
        with jax.named_scope("named"):
            return jax.jit(jnp.cos)(jax.lax.scan(step, x, xs)[0]).sum()

    closed = jax.make_jaxpr(loss)(one, many)
    flat = flatten(closed, lambda eqn, outer: outer)
    names = [eqn.primitive.name for eqn in flat.eqns]
    scans = [scan_of(eqn) for eqn in closed.eqns if eqn.primitive.name == "scan"]
    found = [(scan.length, scan.constants, scan.carries) for scan in scans]
    stacks = {str(eqn.source_info.name_stack) for eqn in closed.eqns}
    return [
        ("jaxpr: calls are written out", "cos" in names and not CALLS & set(names), ", ".join(names)),
        ("jaxpr: parameters of scan", found == [(3, 0, 1)], str(found)),
        ("jaxpr: names of scopes", "named" in stacks, str(sorted(stacks))),
    ]
