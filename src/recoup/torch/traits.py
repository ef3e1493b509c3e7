"""What an ATen operation does besides computing: writes, randomness, effects, decisions.

Read off the operator's schema and tags where they tell, and from short tables where they do not (batch norm
updates its statistics without saying so; index outputs of a top-k are routing decisions).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._ops import OpOverload

from recoup.graph.site import op_name
from recoup.torch.views import tensors_in

__all__ = ["Traits", "is_random", "traits_of", "updated_statistics", "written_tensors"]

# Ranges, metadata queries and autograd's own detaches come and go between two runs of one step.
_BOOKKEEPING_NAMESPACES = frozenset({"profiler", "prim"})
_BOOKKEEPING = frozenset(
    {"aten.detach.default", "aten.alias.default", "aten.sym_size.int", "aten.sym_stride.int", "aten.sym_numel.default"}
)
_COLLECTIVE_NAMESPACES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "symm_mem", "fsdp"})
# Running mean and variance of these are written without an annotation: positions of (mean, variance, training).
_BATCH_NORMS = {
    "native_batch_norm": (3, 4, 5),
    "cudnn_batch_norm": (3, 4, 5),
    "miopen_batch_norm": (3, 4, 5),
}
_UNINITIALISED = frozenset({"empty.memory_format", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})
_DECISIONS = frozenset(
    {"topk", "sort", "sort.stable", "argmax", "argmin", "nonzero", "multinomial", "_unique2", "unique_consecutive", "searchsorted.Tensor"}
)
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
        silencers: arguments (place, name, default, value) at whose value it draws none.
        seeded: draws random numbers, unless its probability is zero.
        generator, generator_place: name and position of its generator argument, '' and -1 if it has none.
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
    silencers: tuple[tuple[int, str, object, object], ...] = ()
    generator: str = ""
    generator_place: int = -1
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
    written = _written(func)
    returns_views = bool(schema.returns) and all(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns)
    place, generator = next(((place, one.name) for place, one in enumerate(schema.arguments) if "Generator" in str(one.type)), (-1, ""))
    return Traits(
        name=name,
        bookkeeping=func.namespace in _BOOKKEEPING_NAMESPACES or str(func) in _BOOKKEEPING,
        view=returns_views and not written,
        mutable=bool(written),
        written=written,
        seeded=torch.Tag.nondeterministic_seeded in func.tags,
        silencers=_silencers(func, name),
        generator=generator,
        generator_place=place,
        statistics=_BATCH_NORMS.get(name),
        uninitialised=name in _UNINITIALISED,
        decision=name in _DECISIONS,
        sync=torch.Tag.data_dependent_output in func.tags,
        refusal=_refusal(func),
    )


def _written(func: OpOverload) -> tuple[int | str, ...]:
    # Collectives of torch.distributed write the tensors they are given, and neither schema nor version counter says so.
    silent = func.namespace == "c10d"
    return tuple(
        argument.name if argument.kwarg_only else place
        for place, argument in enumerate(func._schema.arguments)
        if (silent and "Tensor" in str(argument.type)) or (argument.alias_info is not None and argument.alias_info.is_write)
    )


def _silencers(func: OpOverload, name: str) -> tuple[tuple[int, str, object, object], ...]:
    """Arguments (place, name, default, value) at whose value an operation tagged as random draws nothing."""
    if name.startswith("bernoulli"):
        return ()
    return tuple(
        (
            place,
            argument.name,
            argument.default_value if argument.has_default_value() else None,
            0 if argument.name in _PROBABILITY_ARGUMENTS else False,
        )
        for place, argument in enumerate(func._schema.arguments)
        if argument.name in (*_PROBABILITY_ARGUMENTS, "train", "training")
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


def is_random(traits: Traits, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Whether this call draws random numbers: attention and dropout tagged as random draw none at probability zero."""
    if not traits.seeded:
        return False
    for place, name, default, silent in traits.silencers:
        value = args[place] if place < len(args) else kwargs.get(name, default)
        if value is False if silent is False else value == 0:
            return False
    return True


def written_tensors(traits: Traits, args: tuple[object, ...], kwargs: dict[str, object]) -> list[Tensor]:
    """The tensors that this call writes in place, by the schema."""
    return [
        tensor
        for key in traits.written
        for tensor in tensors_in(kwargs.get(key) if isinstance(key, str) else args[key] if key < len(args) else None)
    ]


def updated_statistics(traits: Traits, args: tuple[object, ...]) -> tuple[int, ...]:
    """Places of the running statistics that this call updates: a replay must neither read nor write them."""
    if traits.statistics is None:
        return ()
    mean, variance, training = traits.statistics
    return (mean, variance) if training < len(args) and args[training] else ()
