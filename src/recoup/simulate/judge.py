"""Simulation of a plan on a step graph, exactly as the executor runs it.

Rules:

1. A storage is alive during operation ``i`` if and only if ``born <= i < dies``.
2. A dropped storage's original lives ``[born, unheld_dies)``; copies of it are rebuilt in the backward
   (``recoup.simulate.backward``).
3. A kept activation that a replay may read (a *leaf*) lives until the last save is released whose recipe holds it.
4. The peak is the largest of all recorded operations (alive bytes, copies, scratch) and all replayed operations
   (alive across the gap, copies, fresh outputs, scratch).
5. An offloaded storage is dropped and comes back by a fetch (``recoup.simulate.offload``); its original also lives until it has
   left for certain, and a copy from when it is fetched. The transfers' buffers stand from the first put until all that is offloaded
   has been asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recoup.errors import PlanMismatch
from recoup.graph import StepGraph
from recoup.plan import LIVE, Capabilities
from recoup.simulate.backward import NEVER, Replayed, run_backward
from recoup.simulate.index import Replays, replays
from recoup.simulate.offload import Offload, forced_out, offload_violations, puts_of, waiting_bytes, with_fetches
from recoup.simulate.result import GENERATORS, SCRATCH, STAGING, Moment, Simulation, State
from recoup.simulate.transfers import Transfers, transfers_of

GENERATOR_STATE_BYTES = 5056
"""What PyTorch's CPU generator hands out as its state; those of other devices are smaller."""

ALWAYS: Mapping[int, int] = MappingProxyType({})
"""No storage waits: every copy that a replay makes is held while it may be asked for."""

__all__ = ["ALWAYS", "Run", "alive_bytes", "run", "simulate", "violations"]


def simulate(
    graph: StepGraph,
    recompute: frozenset[int] = frozenset(),
    executor: Capabilities = LIVE,
    held_from: Mapping[int, int] = ALWAYS,
    offload: Offload | None = None,
) -> Simulation:
    """The step with the storages ``recompute`` dropped and rebuilt in the backward; bytes and seconds.

    Args:
        graph: the recorded step.
        recompute: ids of the storages to drop.
        executor: what runs it.
        held_from: for a dropped storage the one that the backward must have asked for before copies of it are held; until
            then they are rebuilt whenever they are needed. Storages not named are held whenever a replay makes them.
        offload: what waits on the host or on disk, and how it moves.

    Raises:
        PlanMismatch: the executor cannot run it; the message is the first of :func:`violations`.
    """
    found = violations(graph, recompute, executor, held_from)
    if offload is not None:
        found = (*found, *offload_violations(replays(graph), offload, recompute, executor))
    if found:
        raise PlanMismatch(found[0])
    return run(graph, recompute, held_from, offload).simulation(executor)


def violations(
    graph: StepGraph, recompute: frozenset[int], executor: Capabilities = LIVE, held_from: Mapping[int, int] = ALWAYS
) -> tuple[str, ...]:
    """What the executor cannot run of this choice, one sentence each; empty if it can run it all."""
    index, found = replays(graph), []
    sound: list[int] = []
    for v in sorted(recompute):
        if not 0 <= v < len(graph.storages):
            found.append(f"storage {v} is not in the step {graph.name!r}")
            continue
        storage = graph.storages[v]
        name = storage.site or f"storage {v}"
        if storage.kind != "activation":
            found.append(f"{name} is a {storage.kind}, not an activation, and cannot be recomputed")
        elif storage.replayable or storage.producer is None:
            found.append(f"{name} cannot be recomputed: {storage.replayable or 'nothing produced it'}")
        else:
            sound.append(v)
    for v in sound:
        found.extend(_refusals(index, v, recompute, executor))
    for v, trigger in held_from.items():
        found.extend(_waits(graph, v, trigger, recompute, executor))
    return tuple(found)


def _waits(graph: StepGraph, v: int, trigger: int, recompute: frozenset[int], executor: Capabilities) -> list[str]:
    if v not in recompute or trigger not in recompute:
        return [f"storage {v} is held from storage {trigger}, but a plan holds only what it recomputes, from what it recomputes"]
    name = graph.storages[v].site
    if not executor.rebuilds_again:
        return [f"{name} cannot be recomputed more than once in the {executor.name} gear"]
    if v != trigger and graph.root_calls > 1:
        return [f"{name} can only be held from when it is asked for itself: the step calls the model {graph.root_calls} times"]
    return []


def _refusals(index: Replays, v: int, recompute: frozenset[int], executor: Capabilities) -> list[str]:
    graph, found = index.graph, []
    if not executor.replays_random:
        found.extend(
            f"{graph.storages[v].site} cannot be recomputed in the {executor.name} gear: {graph.ops[op].site} is random"
            for op in index.ops_of[v]
            if "random" in graph.ops[op].flags
        )
    if not executor.keeps_unsaved:
        found.extend(
            f"{graph.storages[v].site} cannot be recomputed in the {executor.name} gear:"
            f" it reads {graph.storages[u].site or f'storage {u}'}, which autograd does not save"
            for u in index.inputs_of[v]
            if u not in recompute and not index.saves_of[u] and graph.storages[u].kind in ("activation", "outside")
        )
    return found


def run(graph: StepGraph, recompute: frozenset[int], held_from: Mapping[int, int] = ALWAYS, offload: Offload | None = None) -> Run:
    """The simulated lives, without checking that an executor can run them (solvers check beforehand)."""
    return Run(replays(graph), recompute, held_from, offload)


class _Buffers(NamedTuple):
    """The transfers' buffers, ``count`` bytes, stand from operation ``first_gap`` to ``end_gap``, and at replays to ``last_fetch``."""

    count: int
    first_gap: int
    end_gap: int
    last_fetch: int


class Run:
    """The lives of all storages and copies under one choice."""

    def __init__(
        self, index: Replays, recompute: frozenset[int], held_from: Mapping[int, int] = ALWAYS, offload: Offload | None = None
    ) -> None:
        self.recompute = recompute
        self.held_from = held_from
        self.offload = offload
        self.offloaded = offload.storages if offload is not None else frozenset()
        self.dropped = recompute | self.offloaded
        self.index = with_fetches(index, self.offloaded)
        self.ends = _ends(self.index, self.dropped)
        self.replayed: Replayed = run_backward(self.index, self.dropped, held_from)
        self.transfers: Transfers | None = None
        if offload is not None:
            self._stay_until_left(offload)
            self.transfers = transfers_of(index, offload, self.replayed)
        self.bytes_at, self.moments = self._timeline()

    def _stay_until_left(self, offload: Offload) -> None:
        """Originals of offloaded storages live until they have left for certain, or are asked for."""
        forced = forced_out(self.index, offload)
        asked: dict[int, int] = {}
        for op, gap in zip(self.replayed.ops, self.replayed.gaps, strict=True):
            if op < 0:
                asked.setdefault(op + len(self.index.bytes), gap)
        for v in offload.storages:
            self.ends[v] = max(int(self.ends[v]), forced.get(v, asked.get(v, int(self.index.dies[v]))))

    def _timeline(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        index, count, replayed = self.index, self.index.count, self.replayed
        during, across = alive_bytes(index, self.ends)
        states = self._generator_states()
        ahead, ahead_at = self._ahead()
        buffers = self._buffers()
        at = during + self._copied() + index.scratch[:count] + states + ahead
        at[buffers.first_gap : buffers.end_gap] += buffers.count
        moments = np.full(count, -1, dtype=np.int64)
        if replayed.ops:
            # A backward may unpack after the last operation; its replays count with that operation.
            gaps, events = np.array(replayed.gaps), np.array(replayed.events)
            places = np.minimum(gaps, count - 1)
            totals = across[gaps] + np.array(replayed.live) + states[places] + ahead_at[events]
            totals[: buffers.last_fetch + 1] += buffers.count
            most = at.copy()
            np.maximum.at(most, places, totals)
            # Of equal ones the first counts: it is written last.
            peaks = np.flatnonzero((totals == most[places]) & (totals > at[places]))[::-1]
            moments[places[peaks]] = peaks
            at = most
        return at, moments

    def _buffers(self) -> _Buffers:
        """When the transfers' buffers stand. Where something is never asked for they stay to the end."""
        if self.offload is None or not self.offloaded or not self.offload.link.staging_bytes:
            return _Buffers(0, 0, 0, -1)
        taken, ops, count = self.offload.link.staging_bytes, self.replayed.ops, self.index.count
        puts = puts_of(self.index.graph, self.offloaded)
        first = min((gap for gap, _ in puts), default=count)
        fetches = [number for number, op in enumerate(ops) if op < 0]
        if len({ops[number] for number in fetches}) < len(puts):
            return _Buffers(taken, first, count, len(ops))
        last = fetches[-1]
        return _Buffers(taken, first, max(self.replayed.gaps[last], first), last)

    def _copied(self) -> NDArray[np.int64]:
        """Bytes of copies at each recorded operation."""
        size, count = self.index.bytes, self.index.count
        lives = [(copy.gap, min(copy.until, count), size[copy.storage]) for copy in self.replayed.copies if copy.until > copy.gap < count]
        change = np.zeros(count + 1, dtype=np.int64)
        if lives:
            starts, ends, sizes = np.array(lives, dtype=np.int64).T
            np.add.at(change, starts, sizes)
            np.add.at(change, ends, -sizes)
        return np.cumsum(change[:count])

    def _ahead(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Bytes fetched and not asked for yet: at each operation, and while each unpack event is served."""
        index = self.index
        at = np.zeros(index.count + 1, dtype=np.int64)
        during = np.zeros(len(index.events) + 2, dtype=np.int64)
        if self.transfers is None:
            return at[: index.count], during
        for ahead in self.transfers.ahead:
            count = index.bytes[ahead.storage]
            start = index.events[ahead.issued].gap
            end = index.events[ahead.asked].gap if ahead.asked < len(index.events) else index.count
            at[min(start, index.count)] += count
            at[min(end, index.count)] -= count
            during[ahead.issued + 1] += count
            during[ahead.asked] -= count
        return np.cumsum(at)[: index.count], np.cumsum(during)

    def _generator_states(self) -> NDArray[np.int64]:
        """Bytes of captured generator states at each operation: from the draw to the end, which is no less than the truth."""
        states = np.zeros(self.index.count, dtype=np.int64)
        for op in self.index.closure_ops(self.recompute) if self.recompute else ():
            if "random" in self.index.graph.ops[op].flags:
                states[op:] += GENERATOR_STATE_BYTES
        return states

    def moment(self, at: int) -> Moment:
        """The moment at which ``bytes_at[at]`` stands."""
        number = int(self.moments[at])
        return Moment(at, None, at) if number < 0 else Moment(at, number, self.replayed.ops[number])

    def live(self, moment: Moment) -> tuple[list[int], list[int]]:
        """Recorded storages and copies alive at a moment."""
        index = self.index
        if moment.replay is None:
            alive = np.flatnonzero((index.born <= moment.at) & (self.ends > moment.at))
        else:
            gap = self.replayed.gaps[moment.replay]
            alive = np.flatnonzero((index.born < gap) & (self.ends > gap))
        return alive.tolist(), self._copies(moment)

    def _copies(self, moment: Moment) -> list[int]:
        copies = self.replayed.copies
        if moment.replay is None:
            return [copy.storage for copy in copies if copy.gap <= moment.at < copy.until]
        number, gap = moment.replay, self.replayed.gaps[moment.replay]
        return [copy.storage for copy in copies if copy.first <= number < copy.last and (copy.last < NEVER or copy.until > gap)]

    def seconds(self, executor: Capabilities) -> float:
        """Time of the step: its own, the replays' and the executor's overheads."""
        index = self.index
        ops = index.graph.ops
        total = index.base_seconds + executor.replay_seconds * len(self.replayed.ops)
        total += sum(ops[op].seconds for op in self.replayed.ops if op >= 0)
        if self.transfers is not None:
            total += self.transfers.stall_seconds + self.transfers.drag_seconds
        if self.dropped:
            frames = {index.frame_of[op] for op in index.closure_ops(self.recompute)}
            frames |= {index.frame_of[producer] for v in self.offloaded if (producer := index.graph.storages[v].producer) is not None}
            total += executor.capture_seconds * sum(index.frame_ops.get(frame, 0) for frame in frames)
            total += executor.pack_seconds * len(index.graph.saves)
        return total

    def simulation(self, executor: Capabilities) -> Simulation:
        """The result as data."""
        graph = self.index.graph
        peak_at = int(self.bytes_at.argmax()) if len(self.bytes_at) else 0
        moment = self.moment(peak_at) if len(self.bytes_at) else Moment(0, None, -1)
        made = sum(self.index.bytes[v] for op in self.replayed.ops if op >= 0 for v in self.index.produced[op] if v in self.recompute)
        return Simulation(
            peak_bytes=int(self.bytes_at[peak_at]) if len(self.bytes_at) else graph.resident_bytes,
            peak_op=moment.op,
            peak_site=self._site(moment),
            peak_in_replay=moment.replay is not None,
            peak_moment=moment,
            step_seconds=self.seconds(executor),
            replayed_ops=sum(op >= 0 for op in self.replayed.ops),
            recomputed_bytes=made,
            bytes_at=self.bytes_at,
            live_at_peak=self._described(moment),
            moments=self.moments,
            offloaded_bytes=waiting_bytes(self.index, self.offload.link, self.offloaded) if self.offload else 0,
            transfers=self.transfers,
        )

    def _site(self, moment: Moment) -> str:
        graph = self.index.graph
        if moment.op < 0 and moment.replay is not None:
            return graph.storages[moment.op + len(graph.storages)].site
        return graph.ops[moment.op].site if moment.op >= 0 else ""

    def _described(self, moment: Moment) -> tuple[tuple[int, int, State], ...]:
        index, graph = self.index, self.index.graph
        recorded, copies = self.live(moment)
        found: list[tuple[int, int, State]] = [(v, index.bytes[v], self._state(v, moment.at)) for v in recorded]
        found.extend((v, index.bytes[v], "fetched" if v in self.offloaded else "recomputed") for v in copies)
        scratch = graph.ops[moment.op].scratch_bytes if moment.op >= 0 else 0
        if scratch:
            found.append((SCRATCH, scratch, "scratch"))
        states = int(self._generator_states()[moment.at]) if self.index.count else 0
        if states:
            found.append((GENERATORS, states, "kept for replay"))
        if self.offload is not None and self.offloaded:
            found.extend(self._moving(moment))
        return tuple(found)

    def _moving(self, moment: Moment) -> list[tuple[int, int, State]]:
        """What was fetched ahead, and the transfers' own buffers."""
        assert self.offload is not None
        assert self.transfers is not None
        index, found = self.index, []
        for ahead in self.transfers.ahead:
            if moment.replay is not None:
                here = ahead.issued < self.replayed.events[moment.replay] < ahead.asked
            else:
                end = index.events[ahead.asked].gap if ahead.asked < len(index.events) else index.count
                here = index.events[ahead.issued].gap <= moment.at < end
            if here:
                found.append((ahead.storage, index.bytes[ahead.storage], "fetched"))
        buffers = self._buffers()
        if moment.replay is not None:
            stand = moment.replay <= buffers.last_fetch
        else:
            stand = buffers.first_gap <= moment.at < buffers.end_gap
        if buffers.count and stand:
            found.append((STAGING, buffers.count, "scratch"))
        return found

    def _state(self, v: int, at: int) -> State:
        storage = self.index.graph.storages[v]
        if storage.born < 0:
            return "resident"
        producer = storage.producer
        if storage.kind != "activation" or producer is None or self.index.graph.ops[producer].phase != "forward":
            return "gradient or temporary"
        return "activation" if at < storage.dies else "kept for replay"


def _ends(index: Replays, recompute: frozenset[int]) -> NDArray[np.int64]:
    """The gap at which each recorded storage dies under this choice, leaves extended."""
    ends = index.dies.copy()
    for v in recompute:
        ends[v] = index.unheld[v]
    # A storage's recipe is held until the latest save below it; visiting the latest first settles each storage once.
    roots = sorted((v for v in recompute if index.released[v] >= 0), key=lambda v: -index.released[v])
    seen: set[int] = set()
    for root in roots:
        until = min(index.released[root], index.count)
        stack = [] if root in seen else [root]
        seen.add(root)
        while stack:
            for u in index.inputs_of[stack.pop()]:
                if u in seen:
                    continue
                seen.add(u)
                if u in recompute:
                    stack.append(u)
                elif index.is_activation[u] and ends[u] < until:
                    ends[u] = until
    return ends


def alive_bytes(index: Replays, ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Recorded bytes alive during each operation, and across each gap."""
    count = index.count
    during = np.zeros(count + 2, dtype=np.int64)
    across = np.zeros(count + 2, dtype=np.int64)
    start = np.maximum(index.born, 0)
    lived = np.maximum(ends, start)
    np.add.at(during, start, index.size)
    np.add.at(during, lived, -index.size)
    after = np.minimum(index.born + 1, count)
    gone = np.maximum(ends, after)
    np.add.at(across, after, index.size)
    np.add.at(across, gone, -index.size)
    return np.cumsum(during)[:count], np.cumsum(across)[: count + 1]
