"""The two checks of every plan: residual bytes, exact when traced, and what XLA says of the compiled step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from recoup.errors import CaptureError
from recoup.jax.jaxprs import bytes_of, is_literal, shape_of

__all__ = ["Compiled", "compiled_memory", "residual_bytes", "residual_bytes_of"]


@dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled step and its memory, in bytes of one device.

    Attributes:
        run: the compiled step.
        argument_bytes: its arguments.
        temp_bytes: what it allocates and frees.
        output_bytes: its results, gradients among them.
        alias_bytes: results that lie in donated arguments.
    """

    run: Callable[..., Any]
    argument_bytes: int
    temp_bytes: int
    output_bytes: int
    alias_bytes: int

    @property
    def working_bytes(self) -> int:
        """Beside the arguments: ``temp + output - alias``."""
        return self.temp_bytes + self.output_bytes - self.alias_bytes

    @property
    def peak_bytes(self) -> int:
        """All that the step needs to stand at once: arguments and what it works with."""
        return self.argument_bytes + self.working_bytes


def compiled_memory(step: Callable[..., Any], arrays: Sequence[Any]) -> Compiled:
    """Compile a step for these arguments and read XLA's memory analysis.

    ``peak_memory_in_bytes`` leaves temporaries out on CPU, so the sum of arguments, temporaries and results is taken, which
    the resident high water confirms there.

    Raises:
        CaptureError: the platform gives none.
    """
    compiled = jax.jit(step, keep_unused=True).lower(*arrays).compile()
    memory = compiled.memory_analysis()
    if memory is None:
        raise CaptureError("XLA gives no memory analysis on this platform; a plan cannot be held against its budget there")
    return Compiled(
        compiled, memory.argument_size_in_bytes, memory.temp_size_in_bytes, memory.output_size_in_bytes, memory.alias_size_in_bytes
    )


def residual_bytes(loss: Callable[..., Any], *args: Any, argnums: int | Sequence[int] = 0, has_aux: bool = False) -> int:
    """Bytes that the forward of a loss keeps for its backward, arguments and constants aside: exact, without running anything.

    Args:
        loss: any function that ``jax.grad`` takes.
        args: its arguments, or shapes of them.
        argnums: arguments that are differentiated.
        has_aux: whether it returns (loss, aux).
    """
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    leaves, tree = jax.tree.flatten(args)
    wanted = [
        leaf for place, arg in enumerate(jax.tree.unflatten(tree, _numbered(tree))) if place in numbers for leaf in jax.tree.leaves(arg)
    ]

    def flat(*arrays: Any) -> list[Any]:
        made = loss(*jax.tree.unflatten(tree, arrays))
        return jax.tree.leaves(made[0] if has_aux else made)

    return residual_bytes_of(flat, [jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf in leaves], wanted)


def _numbered(tree: Any) -> list[int]:
    return list(range(tree.num_leaves))


def residual_bytes_of(flat: Callable[..., Sequence[Any]], avals: Sequence[Any], wanted: Sequence[int]) -> int:
    """The same of a flat function, its first result the loss, differentiated by the inputs ``wanted``."""

    def pull(*arrays: Any) -> Any:
        def of_wanted(*values: Any) -> Any:
            full = list(arrays)
            for place, value in zip(wanted, values, strict=True):
                full[place] = value
            return flat(*full)[0]

        return jax.vjp(of_wanted, *[arrays[place] for place in wanted])[1]

    jaxpr = jax.make_jaxpr(pull)(*map(shape_of, avals)).jaxpr
    given = {*jaxpr.invars, *jaxpr.constvars}
    held = {var for var in jaxpr.outvars if not is_literal(var)} - given
    return sum(bytes_of(var.aval) for var in held if "Host" not in str(getattr(var.aval, "memory_space", "")))
