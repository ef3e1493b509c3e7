"""Descent on the peak of a simulated plan: drop what stands there, rebuild it later, or keep what is rebuilt there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from recoup.plan import Capabilities
from recoup.simulate.index import Replays
from recoup.simulate.result import Moment
from recoup.solve.descent import Judged, judge
from recoup.solve.holds import can_wait, first_asks, last_ask

__all__ = ["delays", "lower_peak", "stretch"]

# From how many of the largest storages at the peak each kind of change starts, and how many operations before them a stretch begins.
_LARGEST, _CONES, _STRETCHES, _REACHES = 24, 8, 8, (4, 12, 30)

Decisions = tuple[frozenset[int], Mapping[int, int]]


def lower_peak(
    index: Replays,
    start: Judged,
    executor: Capabilities,
    dropping: frozenset[int],
    tries: int,
    enough: int = 0,
    judging: Callable[[frozenset[int], Mapping[int, int]], Judged] | None = None,
) -> Judged:
    """Drop what stands at the peak, keep what is rebuilt there, or rebuild it later, as long as the peak falls and is above ``enough``.

    ``judging`` simulates a choice in place of :func:`judge`, for who counts what is simulated.
    """
    judged = judging or (lambda recompute, since: judge(index, recompute, executor, since))
    best = start
    while tries > 0 and best.peak_bytes > enough:
        better = None
        for choice, since in _moves(index, best, dropping):
            tries -= 1
            found = judged(choice, since)
            if (found.peak_bytes, found.step_seconds) < (best.peak_bytes, best.step_seconds) and found.key != best.key:
                better = found
                break
            if tries <= 0:
                break
        if better is None:
            break
        best = better
    return best


def _moves(index: Replays, best: Judged, dropping: frozenset[int]) -> Iterator[Decisions]:
    at = int(np.argmax(best.run.bytes_at))
    moment = best.run.moment(at)
    recorded, copies = best.run.live(moment)
    yield from delays(index, best, moment, copies)
    biggest = _biggest(index, (v for v in recorded if v in dropping and v not in best.recompute))
    for v in biggest[:_LARGEST]:
        yield best.recompute | {v}, best.since
    # Dropping one storage may only pay together with what it is made from.
    for v in biggest[:_CONES]:
        yield best.recompute | _cone(index, v, dropping), best.since
    for v in _biggest(index, (v for v in copies if v in best.recompute))[:_LARGEST]:
        yield best.recompute - {v}, best.since
    yield from _stretches(index, best, (*recorded, *copies), dropping)


def _stretches(index: Replays, best: Judged, standing: Iterable[int], dropping: frozenset[int]) -> Iterator[Decisions]:
    """Drop all that leads up to a storage that stands at the peak, and hold none of it before that storage is asked for.

    One decision of these alone helps nothing: what is kept among them would stand, what is held earlier would stand too.
    """
    if not can_wait(index):
        return
    for v in _biggest(index, (v for v in standing if v in dropping))[:_STRETCHES]:
        for reach in _REACHES:
            recompute, since = stretch(index, v, reach, dropping)
            yield best.recompute | recompute, {**best.since, **since}


def stretch(index: Replays, v: int, reach: int, dropping: frozenset[int]) -> Decisions:
    """What is made in the last ``reach`` operations up to the one that makes ``v``, all held from when ``v`` is asked for."""
    end = index.ops_of[v][0]
    found = frozenset(u for u in dropping if end - reach <= index.ops_of[u][0] <= end)
    return found, dict.fromkeys(found, first_asks(index).get(v, len(index.events)))


def _biggest(index: Replays, storages: Iterable[int]) -> list[int]:
    return sorted(set(storages), key=lambda v: (-index.bytes[v], v))


def delays(index: Replays, best: Judged, moment: Moment, copies: list[int]) -> Iterator[Decisions]:
    """Hold the copies that stand at the peak, and that nobody has asked for yet, only from the next moment on: all, then each."""
    if not can_wait(index):
        return
    asks, now = first_asks(index), last_ask(index, best.run, moment)
    early = _biggest(index, (v for v in copies if v in best.recompute and asks.get(v, len(index.events)) > now))
    if len(early) > 1:
        yield best.recompute, {**best.since, **dict.fromkeys(early, now + 1)}
    for v in early[:_LARGEST]:
        yield best.recompute, {**best.since, v: now + 1}


def _cone(index: Replays, v: int, dropping: frozenset[int]) -> frozenset[int]:
    return frozenset({v, *(u for u in index.inputs_of[v] if u in dropping and not index.saves_of[u])})
