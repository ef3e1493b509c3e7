"""Single changes of a joint choice: what lowers a peak, what saves time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from recoup.cost import OffloadLink
from recoup.simulate.index import Replays
from recoup.simulate.offload import Offload, waiting_bytes
from recoup.solve.lowering import delays
from recoup.solve.offload.judged import JointJudged
from recoup.solve.offload.moving import Moving

__all__ = ["Change", "Space", "lowering", "windows_of"]

_LARGEST = 16
# The windows that plans choose from, in parts of the largest storage that can move.
_WINDOWS = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True, slots=True)
class Change:
    """A choice that differs from another one; it is simulated by who tries it."""

    recompute: frozenset[int]
    since: Mapping[int, int]
    offload: Offload | None


@dataclass(frozen=True, slots=True, eq=False)
class Space:
    """What can be chosen.

    Attributes:
        index: the step.
        dropping: storages that may be recomputed.
        moving: storages that may be offloaded.
        link: over which.
        cap: bytes that may wait on the target, None if there is no limit.
    """

    index: Replays
    dropping: frozenset[int]
    moving: Moving
    link: OffloadLink
    cap: int | None

    @property
    def movable(self) -> frozenset[int]:
        """The storages that may be offloaded."""
        return frozenset(self.moving.put)

    def offloading(self, moving: Offload | None, storages: frozenset[int]) -> Offload | None:
        """The offload of a choice, ``moving``, with other storages; None if they may not all wait on the target."""
        if self.cap is not None and waiting_bytes(self.index, self.link, storages) > self.cap:
            return None
        window = windows_of(self.moving)[4] if moving is None else 0
        return Offload(storages, self.link, window, window) if moving is None else replace(moving, storages=storages)

    def kept(self, found: JointJudged, v: int) -> Change:
        """The choice with a storage kept."""
        return Change(found.recompute - {v}, _without(found.since, v), _less(found, v))

    def recomputed(self, found: JointJudged, v: int) -> Change | None:
        """The choice with a storage recomputed; None if it cannot be."""
        return Change(found.recompute | {v}, found.since, _less(found, v)) if v in self.dropping else None

    def offloaded(self, found: JointJudged, v: int) -> Change | None:
        """The choice with a storage offloaded; None if it cannot be, or has no place there."""
        moving = self.offloading(found.offload, found.offloaded | {v}) if v in self.moving.put else None
        return Change(found.recompute - {v}, _without(found.since, v), moving) if moving is not None else None

    def windowed(self, found: JointJudged, direction: str, step: int) -> Change | None:
        """The choice with the write or read window so many sizes larger or smaller; None if there is no such size."""
        if found.offload is None:
            return None
        sizes = windows_of(self.moving)
        now = found.offload.write_window_bytes if direction == "write" else found.offload.read_window_bytes
        place = min(range(len(sizes)), key=lambda place: abs(sizes[place] - now)) + step
        if not 0 <= place < len(sizes) or sizes[place] == now:
            return None
        size = sizes[place]
        moving = replace(found.offload, write_window_bytes=size) if direction == "write" else replace(found.offload, read_window_bytes=size)
        return Change(found.recompute, found.since, moving)


def windows_of(moving: Moving) -> tuple[int, ...]:
    """The sizes that windows have, the smallest first, in bytes."""
    return tuple(int(part * moving.largest) for part in _WINDOWS)


def _less(found: JointJudged, v: int) -> Offload | None:
    return replace(found.offload, storages=found.offload.storages - {v}) if found.offload is not None else None


def _without(since: Mapping[int, int], v: int) -> Mapping[int, int]:
    return {u: moment for u, moment in since.items() if u != v} if v in since else since


def lowering(space: Space, found: JointJudged) -> Iterator[Change]:
    """Changes that may lower the peak of a choice, the likeliest first."""
    index = space.index
    at = int(np.argmax(found.run.bytes_at))
    moment = found.run.moment(at)
    recorded, copies = found.run.live(moment)
    for recompute, since in delays(index, found, moment, copies):
        yield Change(recompute, since, found.offload)
    dropped = found.recompute | found.offloaded
    for v in _biggest(index, (v for v in recorded if v not in dropped and (v in space.movable or v in space.dropping))):
        yield from filter(None, (space.offloaded(found, v), space.recomputed(found, v)))
    if found.offload is not None:
        for direction in ("write", "read") if at < index.turn else ("read", "write"):
            yield from filter(None, (space.windowed(found, direction, -1),))
    for v in _biggest(index, (v for v in recorded if v in found.offloaded)):
        # What was put on its way and is still here may as well be rebuilt.
        yield from filter(None, (space.recomputed(found, v),))
    for v in _biggest(index, (v for v in copies if v in dropped)):
        yield space.kept(found, v)
        other = space.offloaded(found, v) if v in found.recompute else space.recomputed(found, v)
        yield from filter(None, (other,))
    for v in _biggest(index, _ahead(found, at)):
        yield from filter(None, (space.recomputed(found, v), space.kept(found, v)))


def _biggest(index: Replays, storages: Iterator[int]) -> list[int]:
    return sorted(set(storages), key=lambda v: (-index.bytes[v], v))[:_LARGEST]


def _ahead(found: JointJudged, at: int) -> Iterator[int]:
    """What has been fetched ahead of its use at an operation."""
    events = found.run.index.events
    for ahead in found.run.transfers.ahead if found.run.transfers is not None else ():
        end = events[ahead.asked].gap if ahead.asked < len(events) else found.run.index.count
        if events[ahead.issued].gap <= at <= end:
            yield ahead.storage
