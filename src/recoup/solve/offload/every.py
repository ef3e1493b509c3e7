"""All joint plans of a step that is small enough, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from recoup.plan import Capabilities
from recoup.simulate.offload import Offload
from recoup.solve.choice import runnable
from recoup.solve.offload.moves import Change, Space

__all__ = ["every_plan"]

_PLANS = 6000


def every_plan(space: Space, executor: Capabilities) -> Iterator[tuple[Change, ...]]:
    """Each way to keep, recompute and offload, with windows of none, one and two of the largest storage; nothing if there are too many.

    Plans that differ in their windows alone come together, the one with none first: it has the lowest peak of them.
    """
    decided = sorted(space.dropping | space.movable)
    choices = [("keep", *(["recompute"] if v in space.dropping else []), *(["offload"] if v in space.movable else [])) for v in decided]
    windows = tuple(product((0, space.moving.largest, 2 * space.moving.largest), repeat=2))
    count = len(windows)
    for choice in choices:
        count *= len(choice)
        if count > _PLANS:
            return
    for actions in product(*choices):
        recompute = frozenset(v for v, action in zip(decided, actions, strict=True) if action == "recompute")
        away = frozenset(v for v, action in zip(decided, actions, strict=True) if action == "offload")
        if runnable(space.index, recompute, executor) != recompute:
            continue
        if away:
            yield tuple(Change(recompute, {}, Offload(away, space.link, write, read)) for write, read in windows)
        else:
            yield (Change(recompute, {}, None),)
