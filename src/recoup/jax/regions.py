"""The regions of a step: the step itself, and the body of each loop in it, loops in loops included.

A region is planned by itself: a loop's body runs the same way in every turn, so it is planned once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from recoup.jax.building import Built, Given, build
from recoup.jax.costs import Rates
from recoup.jax.jaxprs import Scan, bytes_of, evaluate, flatten, is_inexact, scan_of
from recoup.jax.joint import Joint, trace
from recoup.jax.loops import Loop, planned_loop
from recoup.jax.naming import Namer, module_of
from recoup.jax.running import Region

__all__ = ["Decided", "LoopNode", "Node", "Traced", "keep_carries", "traced", "tree_of"]

LEAST_TURNS = 2


@dataclass(frozen=True, eq=False)
class LoopNode:
    """A planned loop: which equation of its region it is, what it says, and its body."""

    number: int
    scan: Scan
    body: Node


@dataclass(frozen=True, eq=False)
class Node:
    """A region before it is differentiated: its jaxpr with calls written out, and the loops in it."""

    name: str
    jaxpr: Any
    consts: tuple[Any, ...]
    loops: tuple[LoopNode, ...]

    @property
    def avals(self) -> list[Any]:
        """Types of the region's inputs."""
        return [var.aval for var in self.jaxpr.invars]


@dataclass(frozen=True, slots=True)
class Decided:
    """What a plan says of a region: what its forward hands over, which of it waits on the host, how the loop is split."""

    kept: tuple[Any, ...] = ()
    host: frozenset[Any] = frozenset()
    stretches: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Traced:
    """A region differentiated, its loops planned: the joint jaxpr, its graph, and the loops within."""

    node: Node
    joint: Joint
    built: Built
    loops: tuple[tuple[LoopNode, Traced], ...] = field(default=())


def tree_of(closed: Any, name: str = "") -> Node:
    """The regions of a jaxpr; ``name`` is the module path of the loop that it is the body of."""
    flat = flatten(closed, Namer(name), name)
    taken: Counter[str] = Counter()
    loops: list[LoopNode] = []
    for number, eqn in enumerate(flat.eqns):
        if not _can_be_planned(eqn):
            continue
        place = ".".join(filter(None, (module_of(eqn), "scan")))
        taken[place] += 1
        path = place if taken[place] == 1 else f"{place}{taken[place]}"
        loops.append(LoopNode(number, scan_of(eqn), tree_of(eqn.params["jaxpr"], path)))
    return Node(name, flat.jaxpr, tuple(flat.consts), tuple(loops))


def _kind(place: int, scan: Scan) -> Given:
    """What an input of a loop's body is."""
    return "outside" if place < scan.constants else "carry" if place < scan.constants + scan.carries else "input"


def _can_be_planned(eqn: Any) -> bool:
    if eqn.primitive.name != "scan" or eqn.effects:
        return False
    scan = scan_of(eqn)
    return scan.length >= LEAST_TURNS and any(is_inexact(var.aval) for var in scan.jaxpr.invars[scan.constants :])


def keep_carries(built: Built) -> Decided:
    """The least that a loop can hand over: only carries."""
    return Decided()


def traced(
    node: Node, decide: Callable[[Built], Decided], given: Sequence[Given], rates: Rates, *, wanted: frozenset[int] | None = None,
    still: frozenset[int] = frozenset(), name: str = "step",
) -> Traced:  # fmt: skip
    """Differentiate a region whose loops run as ``decide`` says, innermost first.

    Args:
        node: the region.
        decide: what a loop's body hands over, from its graph.
        given: what each input is.
        rates: of the device.
        wanted: inputs whose gradients the step asks for, None for all.
        still: results that no gradient flows through.
        name: of the graph.
    """
    loops: list[tuple[LoopNode, Traced]] = []
    hooks: dict[int, Callable[[list[Any]], list[Any]]] = {}
    for loop in node.loops:
        scan = loop.scan
        kinds = [_kind(place, scan) for place in range(len(loop.body.avals))]
        body = traced(loop.body, decide, kinds, rates, name=loop.body.name)
        decided = decide(body.built)
        carries = body.joint.given[scan.constants : scan.constants + scan.carries]
        region = Region(body.joint, decided.kept, carries, decided.host)
        hooks[loop.number] = planned_loop(Loop(scan, region, loop.body.name, decided.stretches))
        loops.append((loop, body))

    def run(*args: Any) -> list[Any]:
        return evaluate(node.jaxpr, node.consts, args, hooks)

    joint = trace(run, node.avals, wanted, still)
    built = build(joint, tuple(given), rates, frozenset(loop.body.name for loop in node.loops), name=name, root=node.name)
    return Traced(node, joint, built, tuple(loops))


def carry_bytes(loop: LoopNode) -> int:
    """Bytes of all that a loop carries from turn to turn."""
    scan = loop.scan
    return sum(bytes_of(aval) for aval in loop.body.avals[scan.constants : scan.constants + scan.carries])
