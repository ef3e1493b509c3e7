"""When offloaded storages move: the queue of the link, what the step waits for it, what is fetched ahead.

The recorded operations run on a clock; replays and waiting push all that comes later back. A put at a full window waits for the
oldest writes. A fetch waits in the queue of the link, and behind the write of its own storage.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from recoup.simulate.backward import Replayed
from recoup.simulate.index import Event, Replays
from recoup.simulate.offload import Offload, puts_of

__all__ = ["Ahead", "Delay", "Transfer", "Transfers", "transfers_of"]


class Delay(NamedTuple):
    """The step's own work stands still at a gap: for a replay (``op``; below 0 for a fetch), or waiting for the link (``op`` is None)."""

    gap: int
    seconds: float
    op: int | None


@dataclass(frozen=True, slots=True)
class Transfer:
    """One storage on the link: ``write`` or ``read``, from when to when, in seconds from the beginning of the step."""

    storage: int
    direction: str
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class Ahead:
    """A storage that was fetched after one unpack event and asked for at another (by their places among the events)."""

    storage: int
    issued: int
    asked: int


@dataclass(slots=True)
class Transfers:
    """What moved in a step.

    Attributes:
        moves: every write and read, in order of their start.
        ahead: what was fetched before it was asked for.
        delays: what pushed the recorded operations back, in order: each replay and each wait.
        stall_seconds: what the step waited for the link.
        drag_seconds: what its own work was slowed by transfers, and stood still while the thread that trains began and ended them.
        end_seconds: when the step ended.
    """

    moves: list[Transfer] = field(default_factory=list)
    ahead: list[Ahead] = field(default_factory=list)
    delays: list[Delay] = field(default_factory=list)
    stall_seconds: float = 0.0
    drag_seconds: float = 0.0
    end_seconds: float = 0.0


def transfers_of(index: Replays, offload: Offload, replayed: Replayed) -> Transfers:
    """The transfers of a step.

    Args:
        index: of the recorded graph, without fetches.
        offload: what moves.
        replayed: what the backward replays, fetches among them.
    """
    clock = _Clock(index, offload)
    work: dict[int, list[int]] = {}
    for op, event in zip(replayed.ops, replayed.events, strict=True):
        work.setdefault(event, []).append(op)
    puts = deque(puts_of(index.graph, offload.storages))
    for number, event in enumerate(index.events):
        while puts and puts[0][0] <= event.gap:
            clock.put(*puts.popleft())
        clock.unpack(number, event, work.get(number, ()))
    while puts:
        clock.put(*puts.popleft())
    return clock.finished()


class _Clock:
    def __init__(self, index: Replays, offload: Offload) -> None:
        self.index, self.offload, self.link = index, offload, offload.link
        self.until = index.until_seconds
        self.late = 0.0
        self.done = Transfers()
        self.write_free = self.read_free = 0.0
        self.written: dict[int, float] = {}
        self.on_the_way: deque[int] = deque()
        self.forced: set[int] = set()
        self.order = [v for _, v in puts_of(index.graph, offload.storages)]
        # Of the backward pass under way: what is still to be fetched ahead, what was (with its event and end), and its bytes.
        self.backward = -1
        self.queue: deque[int] = deque()
        self.fetched: dict[int, tuple[int, float]] = {}
        self.asked: set[int] = set()
        self.ahead_bytes = 0

    def now(self, gap: int) -> float:
        return float(self.until[min(gap, len(self.until) - 1)]) + self.late

    def _wait(self, gap: int, until: float) -> None:
        waited = until - self.now(gap)
        if waited > 0:
            self._delay(gap, waited, None)
            self.done.stall_seconds += waited

    def _delay(self, gap: int, seconds: float, op: int | None) -> None:
        self.late += seconds
        self.done.delays.append(Delay(gap, seconds, op))

    def put(self, gap: int, v: int) -> None:
        count = self.index.bytes[v]
        total = sum(self.index.bytes[u] for u in self.on_the_way)
        while self.on_the_way and total + count > self.offload.write_window_bytes:
            oldest = self.on_the_way.popleft()
            total -= self.index.bytes[oldest]
            self.forced.add(oldest)
            self._wait(gap, self.written[oldest])
        start = max(self.now(gap), self.write_free)
        self.write_free = self.written[v] = start + self.link.write_seconds(count)
        self.on_the_way.append(v)
        self._moved(v, "write", start, self.write_free)

    def unpack(self, number: int, event: Event, work: list[int] | tuple[int, ...]) -> None:
        if event.backward != self.backward and (work or self._inside(event)):
            self._begin(event.backward, number)
        for op in work:
            if op < 0:
                self._ask(op + len(self.index.bytes), number, event.gap)
            own = 0.0 if op < 0 else self.index.graph.ops[op].seconds
            self._delay(event.gap, own, op)
        if work or self._inside(event):
            self._fetch_ahead(number, event.gap)

    def _inside(self, event: Event) -> bool:
        """Whether the executor sees this unpacking: what was saved outside of the model it does not."""
        return self.index.graph.ops[max(self.index.graph.saves[event.save].packed_at - 1, 0)].module != "~"

    def _begin(self, backward: int, number: int) -> None:
        self._let_go(number)
        self.backward = backward
        self.queue = deque(reversed(self.order))
        self.asked = set()

    def _let_go(self, number: int) -> None:
        """What was fetched ahead and never asked for goes with the pass."""
        for v, (issued, _) in self.fetched.items():
            self._was_ahead(v, issued, number)
        self.fetched = {}
        self.ahead_bytes = 0

    def _ask(self, v: int, number: int, gap: int) -> None:
        self.asked.add(v)
        if v in self.fetched:
            issued, end = self.fetched.pop(v)
            self.ahead_bytes -= self.index.bytes[v]
            self._was_ahead(v, issued, number)
        else:
            end = self._fetch(v, gap)
        self._wait(gap, end)

    def _was_ahead(self, v: int, issued: int, number: int) -> None:
        if v in self.forced:
            self.done.ahead.append(Ahead(v, issued, number))

    def _fetch(self, v: int, gap: int) -> float:
        """Put a fetch into the link's queue; when it ends."""
        now = self.now(gap)
        if v not in self.forced and self.written[v] > now:
            return self.written[v]
        start = max(now, self.read_free, self.written[v], self.write_free if self.link.shared else 0.0)
        self.read_free = start + self.link.read_seconds(self.index.bytes[v])
        self._moved(v, "read", start, self.read_free)
        return self.read_free

    def _fetch_ahead(self, number: int, gap: int) -> None:
        while self.queue:
            v = self.queue[0]
            count = self.index.bytes[v]
            if v not in self.asked:
                if self.ahead_bytes and self.ahead_bytes + count > self.offload.read_window_bytes:
                    return
                self.fetched[v] = (number, self._fetch(v, gap))
                self.ahead_bytes += count
            self.queue.popleft()

    def _moved(self, v: int, direction: str, start: float, end: float) -> None:
        self.done.moves.append(Transfer(v, direction, start, end))
        self.done.drag_seconds += self.link.drag_seconds(end - start)

    def finished(self) -> Transfers:
        self._let_go(len(self.index.events))
        self.done.end_seconds = float(self.until[-1]) + self.late + self.done.drag_seconds
        return self.done
