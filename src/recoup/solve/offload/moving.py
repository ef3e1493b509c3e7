"""What can move over a link, and when: the facts of one step that every search for offloads shares."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recoup.cost import OffloadLink
from recoup.simulate.index import Replays
from recoup.simulate.offload import offloadable, puts_of
from recoup.solve.holds import first_asks

__all__ = ["Moving", "moving_of", "within_cap"]

# Where there is much to choose from, a storage that occupies the link so many times longer than its bytes alone is left out.
_CRUMB, _MANY = 25.0, 60


@dataclass(frozen=True, slots=True, eq=False)
class Moving:
    """The storages that are worth a place on a link.

    Attributes:
        storages: their ids, in the order in which they are put on their way.
        put: for each the gap at which it is put.
        ask: for each the gap at which the backward first asks for it.
        largest: bytes of the largest of them, 0 if there are none.
        clock: seconds of the unplanned step until each gap.
    """

    storages: tuple[int, ...]
    put: dict[int, int]
    ask: dict[int, int]
    largest: int
    clock: NDArray[np.float64]


def moving_of(index: Replays, link: OffloadLink) -> Moving:
    """What of a step can move over a link to any use: it leaves memory before it is asked for, and among many it is no crumb."""
    asks = first_asks(index)
    found = frozenset(v for v in offloadable(index) if index.unheld[v] < index.events[asks[v]].gap)
    if len(found) > _MANY:
        found = frozenset(v for v in found if not _crumb(index.bytes[v], link))
    puts = puts_of(index.graph, found)
    return Moving(
        storages=tuple(v for _, v in puts),
        put={v: gap for gap, v in puts},
        ask={v: index.events[asks[v]].gap for v in found},
        largest=max((index.bytes[v] for v in found), default=0),
        clock=index.until_seconds,
    )


def within_cap(index: Replays, link: OffloadLink, cap: int | None, storages: Iterable[int]) -> frozenset[int]:
    """Of these storages those that find place on the target, the first ones first."""
    chosen, total = set[int](), 0
    for v in storages:
        count = link.waiting_bytes(index.bytes[v])
        if cap is None or total + count <= cap:
            chosen.add(v)
            total += count
    return frozenset(chosen)


def _crumb(count: int, link: OffloadLink) -> bool:
    bare = count / link.write_bytes_per_second + count / link.read_bytes_per_second
    return 2 * link.latency_seconds > _CRUMB * bare
