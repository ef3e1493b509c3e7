"""What the operations of a joint graph cost: each distinct one is run on real tensors while the step is compiled.

Operations alike in kernel, shapes, strides and constants share one measurement, also from graph to graph: a model of
forty equal layers costs what one layer costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from recoup.simulate.judge import GENERATOR_STATE_BYTES
from recoup.torch.compiled.fusion import Price, by_bytes, in_a_loop
from recoup.torch.compiled.interfaces import concrete, is_random, no_modes
from recoup.torch.compiled.joint import Joint
from recoup.torch.compiled.loops import is_loop
from recoup.torch.meter import CpuMeter, Meter, meter_for
from recoup.torch.timing import least_seconds, synchronizer

__all__ = ["price_of", "priced"]

_REPEATS = 3
_LONG_SECONDS = 0.02


_KNOWN: dict[str, Price] = {}


def priced(joint: Joint) -> Joint:
    """The joint graph with the seconds and scratch bytes of every operation.

    A random operation is given a generator's state of scratch: a replay looks at the state that stands, and puts it back. In a
    loop (``recoup.torch.compiled.loops``) an operation costs what ``in_a_loop`` says, and needs no scratch.
    """
    ops = []
    for op, nodes in zip(joint.graph.ops, joint.nodes, strict=True):
        prices = [in_a_loop(node, price_of(node)) if joint.fuses and is_loop(node) else price_of(node) for node in nodes]
        unknown = next((price.provenance for price in prices if price.provenance != "measured"), "measured")
        op = msgspec.structs.replace(
            op,
            seconds=sum(price.seconds for price in prices),
            scratch_bytes=max((price.scratch_bytes for price in prices), default=0) + GENERATOR_STATE_BYTES * any(map(is_random, nodes)),
            provenance=unknown if prices else "assumed",
        )
        ops.append(op)
    graph = msgspec.structs.replace(joint.graph, ops=tuple(ops), step_seconds=sum(op.seconds for op in ops))
    return replace(joint, graph=graph)


def price_of(node: fx.Node) -> Price:
    """The price of one node, from an earlier measurement of one like it where there is one."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return by_bytes(node)
    key = _key(node)
    if key not in _KNOWN:
        _KNOWN[key] = _measure(node)
    return _KNOWN[key]


def _call_of(node: fx.Node) -> Callable[[], Any]:
    """The node's operation on made-up tensors of the traced shapes; call it under ``no_modes``."""
    args, kwargs = tree_map(_real, (node.args, dict(node.kwargs)))
    return lambda: node.target(*args, **kwargs)  # pyrefly: ignore[not-callable]


def _key(node: fx.Node) -> str:
    return f"{node.target}|{torch.get_num_threads()}|" + "|".join(_described(leaf) for leaf in tree_leaves((node.args, dict(node.kwargs))))


def _described(leaf: object) -> str:
    value = leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf
    if isinstance(value, torch.Tensor):
        shape, stride = [[concrete(one) for one in many] for many in (value.shape, value.stride())]
        return f"{value.dtype}{shape}{stride}{value.device}"
    return str(value)


def _real(leaf: object) -> object:
    value = leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf
    if isinstance(value, torch.SymInt):
        return concrete(value)
    if not isinstance(value, torch.Tensor):
        return value
    shape, stride = [tuple(concrete(one) for one in many) for many in (value.shape, value.stride())]
    made = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    # Indices must be in range; small floating point numbers keep every kernel away from its slow paths.
    return made.fill_(0.5) if value.dtype.is_floating_point or value.dtype.is_complex else made.zero_()


def _measure(node: fx.Node) -> Price:
    device = next((leaf.meta["val"].device for leaf in node.all_input_nodes if isinstance(leaf.meta.get("val"), torch.Tensor)), None)
    with no_modes():
        try:
            call = _call_of(node)
            call()
        except (IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
            # It does not run on made-up numbers (a solver on a singular matrix).
            return by_bytes(node)
        seconds = least_seconds(call, _REPEATS, synchronizer(device or torch.device("cpu")), enough=_LONG_SECONDS)
        return Price(seconds, _scratch_bytes(call, meter_for(device) if device is not None else CpuMeter()))


def _scratch_bytes(call: Callable[[], Any], meter: Meter) -> int:
    """How far memory rises above what the results take: results are held while the peak is read."""
    held: list[Any] = []
    left, peak = meter.net_and_peak(lambda: held.append(call()))
    return max(peak - left, 0)
