"""How a loss is called: arguments by name, arrays apart from what is fixed.

Arrays and numbers are traced. Everything else (flags, texts, functions, ``None``) is *fixed*: the plan holds for that value, however
it is passed, by position or by keyword. ``static_argnames`` fixes numbers too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import jax
from recoup.errors import PlanMismatch, UsageError
from recoup.jax.jaxprs import is_inexact

__all__ = ["Call", "Convention"]


@dataclass(frozen=True, eq=False)
class Call:
    """One call, taken apart.

    Attributes:
        tree: structure of ``(args, kwargs)``, defaults filled in.
        leaves: all leaves.
        traced: places of the leaves that are arrays.
        paths: what each leaf is called, for messages.
    """

    tree: Any
    leaves: tuple[Any, ...]
    traced: tuple[int, ...]
    paths: tuple[str, ...]

    @property
    def arrays(self) -> list[Any]:
        """The leaves that are traced."""
        return [self.leaves[place] for place in self.traced]

    @property
    def avals(self) -> list[Any]:
        """Their types."""
        return [leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf) for leaf in self.arrays]

    @property
    def signature(self) -> str:
        """Shapes and dtypes, as text."""
        return ", ".join(f"{aval.dtype}[{','.join(map(str, aval.shape))}]" for aval in self.avals)

    def key(self) -> tuple[Any, ...]:
        """What two calls have in common that can share one trace: structure, types, and which leaves are fixed."""
        types = tuple((aval.shape, str(aval.dtype), bool(getattr(aval, "weak_type", False))) for aval in self.avals)
        return (self.tree, self.traced, types)

    def filled(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments with other arrays in the place of its own."""
        leaves = list(self.leaves)
        for place, value in zip(self.traced, arrays, strict=True):
            leaves[place] = value
        return jax.tree.unflatten(self.tree, leaves)


class Convention:
    """How one function may be called.

    Raises:
        UsageError: ``static_argnames`` or ``argnums`` names what the function does not have.
    """

    def __init__(self, function: Callable[..., Any], static_argnames: Sequence[str] = (), argnums: int | Sequence[int] = 0) -> None:
        self.signature = inspect.signature(function)
        self.name = getattr(function, "__name__", type(function).__name__)
        names = list(self.signature.parameters)
        takes_any = any(one.kind is one.VAR_KEYWORD for one in self.signature.parameters.values())
        for name in static_argnames:
            if name not in names and not takes_any:
                raise UsageError(f"static_argnames names {name!r}, but {self.name} takes {', '.join(names) or 'nothing'}")
        self.static = frozenset(static_argnames)
        self.argnums = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Take a call apart.

        Raises:
            UsageError: the function cannot be called so.
        """
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise UsageError(f"{self.name} cannot be called so: {error}") from error
        bound.apply_defaults()
        found, tree = jax.tree.flatten_with_path((bound.args, bound.kwargs), is_leaf=lambda leaf: leaf is None)
        positional = [
            name for name, one in self.signature.parameters.items() if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        ]
        names = [_top(path, positional) for path, _ in found]
        paths = tuple(name + jax.tree_util.keystr(path[2:]) for name, (path, _) in zip(names, found, strict=True))
        leaves = tuple(leaf for _, leaf in found)
        traced = tuple(place for place, leaf in enumerate(leaves) if names[place] not in self.static and _is_array(leaf))
        return Call(tree, leaves, traced, paths)

    def differentiated(self, call: Call) -> frozenset[int]:
        """Which of the traced arrays the step asks gradients of: places among ``call.arrays``.

        Raises:
            UsageError: an argument of ``argnums`` is not there, or holds no floating point array.
        """
        args, _ = jax.tree.unflatten(call.tree, list(range(len(call.leaves))))
        places: set[int] = set()
        order = {leaf: place for place, leaf in enumerate(call.traced)}
        for number in self.argnums:
            if not -len(args) <= number < len(args):
                raise UsageError(f"argnums names argument {number}, but {self.name} is called with {len(args)}")
            inside = jax.tree.leaves(args[number], is_leaf=lambda leaf: leaf is None)
            mine = {order[leaf] for leaf in inside if leaf in order and is_inexact(call.avals[order[leaf]])}
            if not mine:
                raise UsageError(f"argument {number} of {self.name} holds no floating point array to differentiate")
            places |= mine
        return frozenset(places)


def same_fixed(wanted: Call, got: Call, name: str) -> None:
    """Passes if two calls agree in all that is fixed.

    Raises:
        PlanMismatch: they do not; the message names the argument and both values.
    """
    for place, leaf in enumerate(wanted.leaves):
        if place in wanted.traced:
            continue
        other = got.leaves[place]
        if leaf is not other and not (type(leaf) is type(other) and bool(np.all(leaf == other))):
            raise PlanMismatch(
                f"{name} was planned for {wanted.paths[place]}={leaf!r}, but is called with {other!r}; "
                "plan that call by itself, or pass the argument as an array if its value does not change the program"
            )


def _top(path: Sequence[Any], positional: Sequence[str]) -> str:
    """The name of the argument that a leaf belongs to."""
    where, which = path[0].idx, path[1]
    if where == 1:
        return str(which.key)
    return positional[which.idx] if which.idx < len(positional) else f"argument {which.idx}"


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
        return True
    return isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool)
