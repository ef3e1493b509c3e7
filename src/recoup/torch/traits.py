"""What an ATen operation does besides computing: writes, randomness, effects, decisions.

Read off the operator's schema and tags where they tell, and from short tables where they do not (batch norm
updates its statistics without saying so; index outputs of a top-k are routing decisions).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch._ops import OpOverload

from recoup.graph.site import op_name

__all__ = ["Traits", "is_random", "traits_of"]

# Ranges, metadata queries and autograd's own detaches come and go between two runs of one step.
_BOOKKEEPING_NAMESPACES = frozenset({"profiler", "prim"})
_BOOKKEEPING = frozenset({"aten.detach.default", "aten.alias.default", "aten.sym_size.int", "aten.sym_stride.int", "aten.sym_numel.default"})
_COLLECTIVE_NAMESPACES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "symm_mem", "fsdp"})
# Running mean and variance of these are written without an annotation: positions of (mean, variance, training).
_BATCH_NORMS = {
    "native_batch_norm": (3, 4, 5),
    "cudnn_batch_norm": (3, 4, 5),
    "miopen_batch_norm": (3, 4, 5),
}
_UNINITIALISED = frozenset({"empty.memory_format", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})
_DECISIONS = frozenset({"topk", "sort", "sort.stable", "argmax", "argmin", "nonzero", "multinomial", "_unique2", "unique_consecutive", "searchsorted.Tensor"})
_PROBABILITY_ARGUMENTS = ("dropout_p", "p")


@dataclass(frozen=True, slots=True)
class Traits:
    """The static part of what is known of one operator overload.

    Attributes:
        name: short name used in sites.
        bookkeeping: comes and goes between runs; never counted, never captured.
        view: returns views of its arguments and nothing else.
        mutable: the schema says that it writes an argument.
        written: positions (int) or names (str) of arguments it writes.
        seeded: draws random numbers, unless its probability is zero.
        generator: name of its generator argument, '' if it has none.
        statistics: positions of (running mean, running variance, training flag), for batch norms.
        uninitialised: returns memory with arbitrary content.
        decision: its integer outputs decide routing or shapes and are kept, never rebuilt.
        sync: hands a value of a tensor to Python.
        refusal: why it must never run again, '' if it may.
    """

    name: str
    bookkeeping: bool = False
    view: bool = False
    mutable: bool = False
    written: tuple[int | str, ...] = ()
    seeded: bool = False
    generator: str = ""
    statistics: tuple[int, int, int] | None = None
    uninitialised: bool = False
    decision: bool = False
    sync: bool = False
    refusal: str = ""


@functools.cache
def traits_of(func: object) -> Traits:
    """The traits of an operator overload, cached."""
    if not isinstance(func, OpOverload):
        return Traits(name=str(func), refusal="a higher-order operator, whose body cannot be seen")
    schema = func._schema
    name = op_name(str(func))
    written = tuple(
        argument.name if argument.kwarg_only else place
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    returns_views = bool(schema.returns) and all(
        value.alias_info is not None and not value.alias_info.is_write for value in schema.returns
    )
    generator = next((argument.name for argument in schema.arguments if "Generator" in str(argument.type)), "")
    return Traits(
        name=name,
        bookkeeping=func.namespace in _BOOKKEEPING_NAMESPACES or str(func) in _BOOKKEEPING,
        view=returns_views and not written,
        mutable=bool(written),
        written=written,
        seeded=torch.Tag.nondeterministic_seeded in func.tags,
        generator=generator,
        statistics=_BATCH_NORMS.get(name),
        uninitialised=name in _UNINITIALISED,
        decision=name in _DECISIONS,
        sync=torch.Tag.data_dependent_output in func.tags,
        refusal=_refusal(func),
    )


def _refusal(func: OpOverload) -> str:
    if func.namespace in _COLLECTIVE_NAMESPACES:
        return "a collective: running it again would wait for the other ranks"
    if torch.Tag.nondeterministic_bitwise in func.tags:
        return "its result differs from run to run"
    if torch.Tag.inplace_view in func.tags:
        return "it changes a tensor's shape in place"
    if not func._schema.returns:
        return "it returns nothing, so it runs for its effect"
    return ""


def is_random(func: OpOverload, traits: Traits, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Whether this call draws random numbers: attention and dropout tagged as random draw none at probability zero."""
    if not traits.seeded:
        return False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in _PROBABILITY_ARGUMENTS and not traits.name.startswith("bernoulli"):
            default = argument.default_value if argument.has_default_value() else None
            value = args[place] if place < len(args) else kwargs.get(argument.name, default)
            if value == 0:
                return False
        if argument.name in ("train", "training") and not traits.name.startswith("bernoulli"):
            value = args[place] if place < len(args) else kwargs.get(argument.name, None)
            if value is False:
                return False
    return True
