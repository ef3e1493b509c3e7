"""Choosing for one stage how each of its layers is run: the least added seconds within the bytes that are left.

Layers of one kind have one menu. With w the most that any layer needs at work, a stage that holds h_g micro-batches of group g
asks for

    minimize sum(seconds(d_l))   subject to   sum(h_g * kept(d_l)) <= room - max(head, w),   working(d_l) <= w

which for each w is a knapsack of convex menus: beginning with the fastest ways, layers move along the lower hull of (bytes,
seconds), those first that pay least for a byte, until the rest fits. That is the optimum of the linear relaxation except for
the last layer moved, so that the bound that comes with it is closer than one layer's step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from recoup.job.dishes import Dish
from recoup.job.memory import Group

__all__ = ["Choice", "Slot", "choose", "least_bytes"]


@dataclass(frozen=True, slots=True)
class Slot:
    """Layers of one kind in one virtual stage, still without a way: how many, and how many micro-batches they hold."""

    kind: str
    chunk: int
    count: int
    held: int


@dataclass(frozen=True, slots=True)
class Choice:
    """What a stage does.

    Attributes:
        groups: its layers by way.
        seconds: added to one micro-batch by recomputation and copies.
        bound_seconds: proven: no choice from these menus adds less.
    """

    groups: tuple[Group, ...]
    seconds: float
    bound_seconds: float


@dataclass(frozen=True, slots=True)
class _Step:
    """Moving layers of one slot from one way on the hull to the next."""

    rate: float
    slot: int
    to: int
    bytes: int
    seconds: float


def choose(slots: Sequence[Slot], menus: Mapping[str, tuple[Dish, ...]], room: int, head: int) -> Choice | None:
    """The fastest choice whose activations, with the head or a layer at work, fit into ``room``; None if none does.

    Args:
        slots: the stage's layers.
        menus: ways by kind.
        room: bytes left for activations and what is at work.
        head: bytes that the head takes while all activations stand, 0 if the stage has none.
    """
    kinds = {slot.kind for slot in slots}
    fastest = {kind: min(menus[kind], key=lambda item: (item.added_seconds, item.kept_bytes)) for kind in kinds}
    plain = _uniform(slots, fastest)
    if _needs(plain, head) <= room:
        return Choice(plain, _seconds(plain), _seconds(plain))
    found: list[tuple[Group, ...]] = []
    bounds: list[float] = []
    for cap in sorted({_working(item) for kind in kinds for item in menus[kind]}):
        allowed = {kind: hull(menus[kind], cap) for kind in kinds}
        if not all(allowed.values()):
            continue
        groups, bound = _filled(slots, allowed, room - max(head, cap))
        if groups is not None and _needs(groups, head) <= room:
            found.append(groups)
        bounds.append(bound)
    found += _named(slots, menus, room, head)
    if not found:
        return None
    best = min(found, key=_seconds)
    return Choice(best, _seconds(best), min(min(bounds), _seconds(best)))


def least_bytes(slots: Sequence[Slot], menus: Mapping[str, tuple[Dish, ...]], head: int) -> int:
    """The least room that any choice takes."""
    kinds = {slot.kind for slot in slots}
    least: list[int] = []
    for cap in {_working(item) for kind in kinds for item in menus[kind]}:
        allowed = {kind: [item for item in menus[kind] if _working(item) <= cap] for kind in kinds}
        if all(allowed.values()):
            smallest = {kind: min(allowed[kind], key=lambda item: item.kept_bytes) for kind in kinds}
            least.append(_needs(_uniform(slots, smallest), head))
    return min(least, default=head)


def _working(item: Dish) -> int:
    return max(item.working_bytes, item.forward_bytes)


@lru_cache(maxsize=1 << 16)
def hull(menu: tuple[Dish, ...], cap: int) -> tuple[Dish, ...]:
    """The ways of a menu that need no more than ``cap`` at work, on the lower hull of (bytes kept, added seconds), fastest first."""
    ways = sorted((item for item in menu if _working(item) <= cap), key=lambda item: (item.added_seconds, item.kept_bytes))
    line: list[Dish] = []
    for item in ways:
        if line and item.kept_bytes >= line[-1].kept_bytes:
            continue
        while len(line) > 1 and _rate(line[-2], line[-1]) >= _rate(line[-2], item):
            line.pop()
        line.append(item)
    return tuple(line)


def _rate(one: Dish, other: Dish) -> float:
    """Seconds paid for each byte saved by moving from one way to another."""
    return (other.added_seconds - one.added_seconds) / (one.kept_bytes - other.kept_bytes)


def _filled(slots: Sequence[Slot], hulls: Mapping[str, tuple[Dish, ...]], room: int) -> tuple[tuple[Group, ...] | None, float]:
    """The greedy choice within ``room`` for activations, and the linear relaxation's seconds (infinite if nothing fits)."""
    counts = [[slot.count] + [0] * (len(hulls[slot.kind]) - 1) for slot in slots]
    over = sum(slot.held * slot.count * hulls[slot.kind][0].kept_bytes for slot in slots) - room
    seconds = sum(slot.count * hulls[slot.kind][0].added_seconds for slot in slots)
    for step in sorted(_steps(slots, hulls), key=lambda step: (step.rate, step.slot, step.to)):
        if over <= 0:
            break
        whole = slots[step.slot].count
        moved = min(whole, -(-over // step.bytes)) if step.bytes else whole
        counts[step.slot][step.to - 1] -= moved
        counts[step.slot][step.to] += moved
        seconds += min(float(whole), over / step.bytes if step.bytes else whole) * step.seconds
        over -= moved * step.bytes
    if over > 0:
        return None, float("inf")
    groups = tuple(
        Group(slot.kind, slot.chunk, count, slot.held, hulls[slot.kind][place])
        for slot, line in zip(slots, counts, strict=True)
        for place, count in enumerate(line)
        if count
    )
    return groups, seconds


def _steps(slots: Sequence[Slot], hulls: Mapping[str, tuple[Dish, ...]]) -> list[_Step]:
    steps: list[_Step] = []
    for place, slot in enumerate(slots):
        line = hulls[slot.kind]
        for to in range(1, len(line)):
            freed = slot.held * (line[to - 1].kept_bytes - line[to].kept_bytes)
            paid = line[to].added_seconds - line[to - 1].added_seconds
            steps.append(_Step(paid / freed if freed else float("inf"), place, to, freed, paid))
    return steps


def _named(slots: Sequence[Slot], menus: Mapping[str, tuple[Dish, ...]], room: int, head: int) -> list[tuple[Group, ...]]:
    """Every layer run the same way: what the relaxation rounds up may be beaten by one of these."""
    names = {item.name for menu in menus.values() for item in menu if item.name != "priced"}
    found = []
    for name in sorted(names):
        ways = {kind: next((item for item in menus[kind] if item.name == name), None) for kind in {slot.kind for slot in slots}}
        known = {kind: item for kind, item in ways.items() if item is not None}
        if len(known) == len(ways) and _needs(groups := _uniform(slots, known), head) <= room:
            found.append(groups)
    return found


def _uniform(slots: Sequence[Slot], ways: Mapping[str, Dish]) -> tuple[Group, ...]:
    return tuple(Group(slot.kind, slot.chunk, slot.count, slot.held, ways[slot.kind]) for slot in slots)


def _needs(groups: Sequence[Group], head: int) -> int:
    kept = sum(group.held * group.count * group.way.kept_bytes for group in groups)
    return kept + max(head, max((_working(group.way) for group in groups), default=0))


def _seconds(groups: Sequence[Group]) -> float:
    return sum(group.count * group.way.added_seconds for group in groups)
