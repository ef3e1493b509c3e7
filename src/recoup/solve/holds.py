"""From when on the copies of a storage are held: moments of the backward in a solver, storages in a plan.

Replays run when a dropped storage is asked for the first time. A solver says "held from the moment ``since[v]``", counted
in unpack events; a plan says it by the storage that is asked for then.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from recoup.simulate.index import Replays
from recoup.simulate.judge import Run
from recoup.simulate.result import Moment

__all__ = ["can_wait", "first_asks", "held_from", "last_ask"]

_CACHE_KEY = "_recoup_first_asks"


def first_asks(index: Replays) -> dict[int, int]:
    """For each storage that the backward unpacks, the number of the event that does so first; in order."""
    found: dict[int, int] | None = index.graph.__dict__.get(_CACHE_KEY)
    if found is None:
        found = {}
        for number, event in enumerate(index.events):
            found.setdefault(event.storage, number)
        index.graph.__dict__[_CACHE_KEY] = found
    return found


def can_wait(index: Replays) -> bool:
    """Whether storages may be held from a moment that others mark: in steps of one call of the model and one backward pass."""
    return index.graph.root_calls == 1 and len(index.graph.backwards) <= 1


def last_ask(index: Replays, run: Run, moment: Moment) -> int:
    """The last event, by a moment of a simulated run, that asked for something dropped for the first time; -1 before them all."""
    if moment.replay is not None:
        return run.replayed.events[moment.replay]
    asks = first_asks(index)
    return max((asks[v] for v in run.recompute if v in asks and index.events[asks[v]].gap <= moment.at), default=-1)


def held_from(index: Replays, recompute: frozenset[int], since: Mapping[int, int]) -> dict[int, int]:
    """Moments as storages: the first dropped one that is asked for at that moment or later.

    What is held from the first replay on is left out. What would never be held is held from the last replay on, which is the same.
    In steps that are no chain a storage that waits does so for itself.
    """
    if not since:
        return {}
    asks = first_asks(index)
    order = sorted((asks[v], v) for v in recompute if v in asks)
    numbers, chain = [number for number, _ in order], can_wait(index)
    found: dict[int, int] = {}
    for v, moment in since.items():
        place = min(bisect_left(numbers, moment), len(order) - 1)
        if v in recompute and place > 0:
            found[v] = order[place][1] if chain else v
    return found
