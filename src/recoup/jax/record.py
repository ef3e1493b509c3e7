"""``record``: trace a loss, differentiate it, write down what the step does and what it costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

import jax
from recoup.errors import CaptureError, UsageError
from recoup.jax.building import Given
from recoup.jax.calls import Call, Convention
from recoup.jax.costs import Rates, rates_for
from recoup.jax.jaxprs import shape_of
from recoup.jax.recording import Body, Recording
from recoup.jax.regions import LoopNode, Node, Traced, carry_bytes, keep_carries, traced, tree_of
from recoup.jax.residuals import Compiled, compiled_memory, residual_bytes_of

__all__ = ["Prepared", "prepare", "record"]

Loss = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Prepared:
    """A loss traced for one kind of call: its regions, and how its flat results make its results again.

    Attributes:
        loss: the function as the user wrote it.
        convention: how it may be called.
        call: the call it was traced for.
        node: the regions of the step.
        given: what each array argument is.
        wanted: the arrays whose gradients the step asks for.
        tree: structure of the results.
        still: flat results that no gradient flows through.
    """

    loss: Loss
    convention: Convention
    call: Call
    node: Node
    given: tuple[Given, ...]
    wanted: frozenset[int]
    tree: Any
    still: frozenset[int]


def prepare(
    loss: Loss, args: Sequence[Any], kwargs: Mapping[str, Any], *, argnums: int | Sequence[int] = 0, has_aux: bool = False,
    static_argnames: Sequence[str] = (),
) -> Prepared:  # fmt: skip
    """Trace a loss for one kind of call.

    Raises:
        UsageError: it cannot be called so, or ``argnums`` names nothing that can be differentiated.
        CaptureError: it cannot be traced, or returns no loss.
    """
    convention = Convention(loss, static_argnames, argnums)
    return prepare_call(loss, convention, convention.call(args, kwargs), has_aux)


def prepare_call(loss: Loss, convention: Convention, call: Call, has_aux: bool) -> Prepared:
    """Trace a loss for a call that has been taken apart."""
    wanted = convention.differentiated(call)
    tree: list[Any] = []

    def flat(*arrays: Any) -> list[Any]:
        positional, named = call.filled(arrays)
        leaves, structure = jax.tree.flatten(loss(*positional, **named))
        tree[:] = [structure]
        return leaves

    try:
        closed = jax.make_jaxpr(flat)(*map(shape_of, call.avals))
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerIntegerConversionError, jax.errors.NonConcreteBooleanIndexError) as error:
        raise CaptureError(
            f"{convention.name} makes a Python decision on a traced value; pass the argument that decides as a flag (bool or text), "
            f"or name it in static_argnames: {str(error).splitlines()[0]}"
        ) from error
    still = _aux_places(tree[0], len(closed.out_avals), convention.name) if has_aux else frozenset[int]()
    if not has_aux and (len(closed.out_avals) != 1 or closed.out_avals[0].shape != ()):
        shapes = ", ".join(str(aval) for aval in closed.out_avals) or "nothing"
        raise CaptureError(f"{convention.name} must return one scalar loss, or (loss, aux) with has_aux=True; it returns {shapes}")
    given: tuple[Given, ...] = tuple("parameter" if place in wanted else "input" for place in range(len(call.traced)))
    return Prepared(loss, convention, call, tree_of(closed), given, wanted, tree[0], still)


def _aux_places(tree: Any, count: int, name: str) -> frozenset[int]:
    parts = jax.tree.unflatten(tree, list(range(count)))
    if not isinstance(parts, tuple) or len(parts) != 2 or len(jax.tree.leaves(parts[0])) != 1:
        raise CaptureError(f"{name} with has_aux=True must return (loss, aux)")
    return frozenset(jax.tree.leaves(parts[1]))


def record(
    loss: Loss, *example_args: Any, argnums: int | Sequence[int] = 0, has_aux: bool = False, static_argnames: Sequence[str] = (),
    kwargs: Mapping[str, Any] | None = None, runs: int = 3, rates: Rates | None = None, name: str | None = None,
) -> Recording:  # fmt: skip
    """Record the training step ``jax.value_and_grad(loss, argnums)``: what it computes, keeps and costs.

    Args:
        loss: a function to a scalar, or with ``has_aux`` to (scalar, anything).
        example_args: arguments like those of training; ``jax.ShapeDtypeStruct`` will do where ``runs`` is 0.
        argnums: positional arguments that are differentiated, as for ``jax.grad``.
        has_aux: whether the loss returns something beside the scalar.
        static_argnames: arguments that are no arrays although they are numbers.
        kwargs: keyword arguments of the loss.
        runs: how often the compiled step is run for its time, after one run to warm up; with 0 times are modelled alone.
        rates: of the device, for the roofline; assumed by platform if not given.
        name: of the step in reports; by default the function's.

    Raises:
        UsageError: the loss cannot be called so, or ``runs`` is negative.
        CaptureError: the loss cannot be traced or differentiated.
    """
    if runs < 0:
        raise UsageError(f"runs must not be negative, got {runs}")
    prepared = prepare(loss, example_args, kwargs or {}, argnums=argnums, has_aux=has_aux, static_argnames=static_argnames)
    return record_prepared(prepared, runs=runs, rates=rates, name=name)[0]


def record_prepared(prepared: Prepared, *, runs: int, rates: Rates | None = None, name: str | None = None) -> tuple[Recording, Compiled]:
    """The recording of a traced loss, and what XLA makes of the unplanned step."""
    call = prepared.call
    platform = platform_of(call.arrays)
    title = name or prepared.convention.name
    step = traced(
        prepared.node, keep_carries, prepared.given, rates or rates_for(platform), wanted=prepared.wanted, still=prepared.still, name=title
    )
    compiled = compiled_memory(plain_step(prepared), call.arrays)
    seconds = time_compiled(compiled, call.arrays, runs) if runs else 0.0
    devices = devices_of(call.arrays)
    graph = msgspec.structs.replace(
        step.built.graph, device=platform, environment={"jax": jax.__version__, "python": _python()}, signature=call.signature,
        step_seconds=0.0, measured_peak_bytes=compiled.peak_bytes * devices,
    )  # fmt: skip
    recording = Recording(
        graph=graph, loops=tuple(_body(loop, inner) for loop, inner in step.loops), names=_names(step),
        unplanned_residual_bytes=residual_bytes_of(flat_loss(prepared), call.avals, sorted(prepared.wanted)), devices=devices,
    )  # fmt: skip
    return (scaled(recording, seconds) if seconds else recording), compiled


def flat_loss(prepared: Prepared) -> Callable[..., Any]:
    """The loss of flat arrays, to its flat results."""

    def flat(*arrays: Any) -> list[Any]:
        positional, named = prepared.call.filled(arrays)
        return jax.tree.leaves(prepared.loss(*positional, **named))

    return flat


def plain_step(prepared: Prepared) -> Callable[..., Any]:
    """The unplanned step of flat arrays: results and gradients."""
    return step_of(flat_loss(prepared), sorted(prepared.wanted))


def step_of(flat: Callable[..., Sequence[Any]], wanted: Sequence[int]) -> Callable[..., Any]:
    """Value, auxiliary results and gradients of a flat function whose first result is the loss."""

    def split(*arrays: Any) -> tuple[Any, list[Any]]:
        first, *others = flat(*arrays)
        return first, others

    return jax.value_and_grad(split, argnums=tuple(wanted), has_aux=True)


def time_compiled(compiled: Compiled, arrays: Sequence[Any], runs: int) -> float:
    """Median seconds of a compiled step."""
    if any(isinstance(array, jax.ShapeDtypeStruct) for array in arrays):
        raise UsageError("a step of shapes alone cannot be run for its time; give arrays, or runs=0")
    jax.block_until_ready(compiled.run(*arrays))
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(compiled.run(*arrays))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def scaled(recording: Recording, seconds: float) -> Recording:
    """The recording with all seconds in proportion, so that the unplanned step takes what was measured."""
    modelled = _modelled_seconds(recording.graph.ops) + sum(_loop_seconds(body) for body in recording.loops)
    factor = seconds / modelled if modelled > 0 else 1.0
    return msgspec.structs.replace(
        recording,
        graph=_with_factor(recording.graph, factor),
        loops=tuple(_body_with_factor(body, factor) for body in recording.loops),
    )


def _modelled_seconds(ops: Sequence[Any]) -> float:
    return sum(op.seconds for op in ops)


def _loop_seconds(body: Body) -> float:
    return body.turns * (_modelled_seconds(body.graph.ops) + sum(_loop_seconds(inner) for inner in body.loops))


def _with_factor(graph: Any, factor: float) -> Any:
    return msgspec.structs.replace(graph, ops=tuple(msgspec.structs.replace(op, seconds=op.seconds * factor) for op in graph.ops))


def _body_with_factor(body: Body, factor: float) -> Body:
    loops = tuple(_body_with_factor(inner, factor) for inner in body.loops)
    return msgspec.structs.replace(body, graph=_with_factor(body.graph, factor), loops=loops)


def _body(loop: LoopNode, step: Traced) -> Body:
    graph = step.built.graph
    outside = sum(storage.bytes for storage in graph.storages if storage.born < 0 and storage.kind == "outside")
    return Body(
        name=loop.body.name, turns=loop.scan.length, carry_bytes=carry_bytes(loop), outside_bytes=outside, graph=graph,
        loops=tuple(_body(inner, traced_inner) for inner, traced_inner in step.loops),
    )  # fmt: skip


def _names(step: Traced) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    stack = [step]
    while stack:
        one = stack.pop()
        for site, tags in one.built.names.items():
            for tag in tags:
                found.setdefault(tag, []).append(site)
        stack.extend(inner for _, inner in one.loops)
    return {tag: tuple(dict.fromkeys(sites)) for tag, sites in found.items()}


def platform_of(arrays: Sequence[Any]) -> str:
    """The platform that the arguments lie on; the default one for shapes alone."""
    for array in arrays:
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
            return next(iter(array.devices())).platform
    return jax.default_backend()


def devices_of(arrays: Sequence[Any]) -> int:
    """Over how many devices the arguments are laid."""
    return max((len(array.sharding.device_set) for array in arrays if isinstance(array, jax.Array)), default=1)


def _python() -> str:
    import platform

    return platform.python_version()
