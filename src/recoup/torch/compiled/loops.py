"""Which operations Inductor runs as one loop.

Pointwise operations and reductions become loops, and a loop takes in its neighbours; products, convolutions and attention
are kernels of their own. Two loops are one if data goes from one to the other with no other kernel between: each operation
has a *level*, the number of other kernels on the longest way to it, and only operations of one level can share a loop.
What a loop makes and only itself reads is never in memory; what it reads and what it leaves is there all at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import fx

from recoup.torch.compiled.traced import is_free

__all__ = ["is_loop", "is_pointwise", "loops"]

_LOOPS = frozenset(
    {
        "aten.cat.default",
        "aten.constant_pad_nd.default",
        "aten.copy.default",
        "aten.embedding.default",
        "aten.full.default",
        "aten.gather.default",
        "aten.index.Tensor",
        "aten.slice_scatter.default",
        "prims.inductor_random.default",
        "prims.iota.default",
    }
)


def is_pointwise(node: fx.Node) -> bool:
    """Whether an operation computes each element of its result from the same elements of its inputs."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or str(node.target) == "prims.inductor_random.default"


def is_loop(node: fx.Node) -> bool:
    """Whether Inductor makes a loop of an operation, one that others can join."""
    return is_pointwise(node) or torch.Tag.reduction in getattr(node.target, "tags", ()) or str(node.target) in _LOOPS


def loops(nodes: Sequence[fx.Node]) -> list[tuple[fx.Node, ...]]:
    """The nodes of a backward grouped into what runs as one, in an order in which everything is made before it is read.

    Groups keep the order of their last nodes where data leaves a choice.
    """
    leader = _leaders(nodes)
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        groups.setdefault(leader[node], []).append(node)
    return [tuple(groups[first]) for first in _ordered(groups, leader)]


def _leaders(nodes: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For each node the first of its group."""
    leader = {node: node for node in nodes}
    level: dict[fx.Node, int] = {}
    # What a value is seen through: loops look through views and items at what made them.
    source: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        arguments = [argument for argument in node.all_input_nodes if argument in leader]
        before = max((level[argument] for argument in arguments), default=0)
        free = is_free(node)
        source[node] = source[arguments[0]] if free and arguments else node
        level[node] = before + (not free and not is_loop(node))
        if free:
            # A view of what a loop makes belongs to the loop: it must not stand between two of its operations.
            if source[node] is not node and is_loop(source[node]):
                _join(leader, source[node], node)
            continue
        if not is_loop(node):
            continue
        for argument in arguments:
            maker = source[argument]
            if is_loop(maker) and level[maker] == level[node]:
                _join(leader, maker, node)
    return {node: _find(leader, node) for node in nodes}


def _find(leader: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    while leader[node] is not node:
        leader[node] = leader[leader[node]]
        node = leader[node]
    return node


def _join(leader: dict[fx.Node, fx.Node], one: fx.Node, other: fx.Node) -> None:
    leader[_find(leader, other)] = _find(leader, one)


def _ordered(groups: dict[fx.Node, list[fx.Node]], leader: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """Group leaders in an order that data allows, by the place of each group's last node."""
    place = {node: number for number, node in enumerate(leader)}
    last = {first: max(place[node] for node in members) for first, members in groups.items()}
    needs: dict[fx.Node, set[fx.Node]] = {first: set() for first in groups}
    feeds: dict[fx.Node, list[fx.Node]] = {first: [] for first in groups}
    for node, first in leader.items():
        for argument in node.all_input_nodes:
            before = leader.get(argument)
            if before is not None and before is not first and before not in needs[first]:
                needs[first].add(before)
                feeds[before].append(first)
    waiting = {first: len(before) for first, before in needs.items()}
    ready = [(last[first], place[first]) for first, count in waiting.items() if not count]
    heapq.heapify(ready)
    at = {place[first]: first for first in groups}
    order: list[fx.Node] = []
    while ready:
        first = at[heapq.heappop(ready)[1]]
        order.append(first)
        for after in feeds[first]:
            waiting[after] -= 1
            if not waiting[after]:
                heapq.heappush(ready, (last[after], place[after]))
    assert len(order) == len(groups), "loops of one level cannot wait for each other"
    return order
