"""The program of ``recoup.solve.program`` with a third choice, and the link as a fluid.

For a storage v that can move, ``O_v`` is 1 if it is offloaded; ``R_v + O_v <= 1``, and it is kept where both are 0. What it holds
in memory is what a recomputed storage holds: nothing between its last use in the forward and its first in the backward. In place of
replays it costs time on the link. With ``w_v`` and ``r_v`` the seconds that its way out and back occupy the link,

    backlog_k >= backlog_{k-1} - (seconds since put k-1) - stall_k + sum(w_v O_v put at k),    0 <= backlog_k <= write window
    lead_k <= min(read window, lead_{k-1} + (seconds since ask k-1)) + stall_k - sum(r_v O_v asked for at k),    0 <= lead_k

where ``backlog`` is what the link has yet to write and ``lead`` what it has read before it is asked for, both in seconds of the
link; replays give it time too. The objective adds ``sum(stall)``. While anything is on its way (``out_k >= O_v`` for all v put up to
k, ``back_k >= O_v`` for all v asked for from k on) the window and the transfers' buffers stand in memory. All of this is an
estimate, made to find plans: it orders transfers as they are put and asked for, and knows no replays that ask for offloaded
storages early.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

import highspy
import numpy as np
from numpy.typing import NDArray

from recoup.cost import OffloadLink
from recoup.plan import Capabilities
from recoup.simulate.index import Replays
from recoup.simulate.judge import alive_bytes
from recoup.solve.linear import model_of, run_relaxed
from recoup.solve.offload.moving import Moving
from recoup.solve.program import Program, Row
from recoup.solve.windows import Windows, rebuilt_spans, windows

__all__ = ["JointProgram", "Movables", "Point", "joint_windows"]

_UNBOUNDED = highspy.kHighsInf
# Moments of the link that are told apart; puts and asks between two of them count as one.
_MOMENTS = 300
_HALF = 0.5


@dataclass(frozen=True, slots=True)
class Point:
    """An optimal point of the relaxed program: by storage how much of it is recomputed and offloaded; what is held for replays."""

    recompute: dict[int, float]
    offload: dict[int, float]
    held: frozenset[int]
    seconds: float


def joint_windows(index: Replays, executor: Capabilities, movable: Iterable[int], recomputing: bool = True) -> Windows:
    """The windows of a step in which these storages are decided too, whether or not they can be recomputed."""
    frame = windows(index, executor)
    dropping = frame.dropping if recomputing else frozenset()
    needed = frozenset(movable) | (frame.needed if recomputing else frozenset())
    optional = frame.optional if recomputing else frozenset()
    held = {v: span for v, span in frame.held.items() if v in optional}
    held.update({v: (int(index.unheld[v]), int(index.dies[v])) for v in needed})
    ends = index.dies.copy()
    for v in needed | (optional & dropping):
        ends[v] = index.unheld[v]
    during, across = alive_bytes(index, ends)
    return Windows(dropping, needed, optional, held, rebuilt_spans(index, needed), during + index.scratch, across)


class Movables(Program):
    """The program with the choice ``O_v``, its memory and its overheads, and nothing yet of the time on the link.

    Args:
        index: the step.
        executor: what runs it.
        frame: of :func:`joint_windows`.
        storages: what can move.
        link: over which it moves.
        cap: bytes that may wait on the target, None if there is no limit.
    """

    def __init__(
        self, index: Replays, executor: Capabilities, frame: Windows, storages: Iterable[int], link: OffloadLink, cap: int | None
    ) -> None:
        super().__init__(index, executor, frame)
        self.link = link
        self.offload: dict[int, int] = {}
        for v in storages:
            self._movable(v)
        if cap is not None and self.offload:
            # In units of the cap, so that tolerances mean the same in every row.
            columns = list(self.offload.values())
            self.entries.append((columns, [-link.waiting_bytes(index.bytes[v]) / max(cap, 1) for v in self.offload], -1.0 if cap else 0.0))

    def _movable(self, v: int) -> None:
        seconds = self.executor.replay_seconds + self._drag(v)
        column = self.offload[v] = self._column(seconds * self.scale, False)
        if v in self.recompute:
            self.entries.append(([column, self.recompute[v]], [-1.0, -1.0], -1.0))
        producer = self.index.graph.storages[v].producer
        assert producer is not None
        self._capture(producer, column)

    def _drag(self, v: int) -> float:
        """Seconds that the way out, which nothing avoids, slows the step's own work."""
        return self.link.drag_seconds(self.link.write_seconds(self.index.bytes[v]))

    def _chained(self, storages: Iterable[int]) -> list[int]:
        """For each storage the column that is 1 if it or one before it is offloaded."""
        columns: list[int] = []
        for v in storages:
            column = self._column(0.0, False)
            self.entries.append(([column, self.offload[v]], [1.0, -1.0], 0.0))
            if columns:
                self.entries.append(([column, columns[-1]], [1.0, -1.0], 0.0))
            columns.append(column)
        return columns

    def _gone(self, v: int) -> tuple[int, ...]:
        return tuple(decided[v] for decided in (self.recompute, self.offload) if v in decided)


class JointProgram(Movables):
    """The columns and structural rows of one step with one link and its windows.

    Args:
        index: the step.
        executor: what runs it.
        frame: of :func:`joint_windows`.
        moving: what can move.
        link: over which it moves.
        window: bytes of the write and of the read window.
        cap: bytes that may wait on the target, None if there is no limit.
    """

    def __init__(
        self, index: Replays, executor: Capabilities, frame: Windows, moving: Moving, link: OffloadLink, window: int, cap: int | None
    ) -> None:
        super().__init__(index, executor, frame, moving.storages, link, cap)
        self.moving, self.window = moving, window
        last = self._writes()
        self._reads(last)
        self._allow()

    def _drag(self, v: int) -> float:
        return super()._drag(v) + self.link.drag_seconds(self.link.read_seconds(self.index.bytes[v]))

    def allowance(self, away: frozenset[int]) -> NDArray[np.int64]:
        """Bytes at each operation that the windows and the transfers' own buffers stand for, if these storages move."""
        if not away:
            return np.zeros(self.index.count, dtype=np.int64)
        moments = np.arange(self.index.count)
        out = moments >= min(self.moving.put[v] for v in away)
        back = moments < max(self.moving.ask[v] for v in away)
        return ((self._window_at + self.link.staging_bytes) * np.where(moments < self.index.turn, out, back)).astype(np.int64)

    def _seconds_column(self, most: float = _UNBOUNDED, cost: float = 0.0) -> int:
        column = self._column(cost * self.scale, False)
        self.upper[column] = most * self.scale if most < _UNBOUNDED else _UNBOUNDED
        return column

    # Columns of seconds are scaled as the objective is.

    def _writes(self) -> tuple[int, float] | None:
        """The way out; returns the backlog after the last put, and when that is."""
        before: tuple[int, float] | None = None
        for gap, storages in _grouped(self.moving.storages, self.moving.put):
            now = float(self.moving.clock[gap])
            most = self.link.write_seconds(max(self.window, max(self.index.bytes[v] for v in storages)))
            backlog, stall = self._seconds_column(most), self._seconds_column(cost=1.0)
            columns, values = [backlog, stall], [1.0, 1.0]
            for v in storages:
                columns.append(self.offload[v])
                values.append(-self.link.write_seconds(self.index.bytes[v]) * self.scale)
            passed = 0.0
            if before is not None:
                columns.append(before[0])
                values.append(-1.0)
                passed = (now - before[1]) * self.scale
            self.entries.append((columns, values, -passed))
            before = backlog, now
        return before

    def _reads(self, written: tuple[int, float] | None) -> None:
        """The way back, from the first unpacking on."""
        if written is None:
            return
        start = float(self.moving.clock[min(self.index.turn, self.index.count)])
        before, since = self._seconds_column(0.0), start
        if self.link.shared:
            # Reads queue behind what has yet to be written: the lead begins below nothing by that much.
            behind = self._seconds_column()
            self.entries.append(([behind, written[0]], [1.0, -1.0], -(start - written[1]) * self.scale))
            before = -1 - behind
        replays = self._replays_by_ask()
        order = sorted(self.moving.storages, key=lambda v: self.moving.ask[v])
        for gap, storages in _grouped(order, self.moving.ask):
            now = float(self.moving.clock[min(gap, self.index.count)])
            lead, stall = self._seconds_column(), self._seconds_column(cost=1.0)
            columns, values = [lead, stall], [-1.0, 1.0]
            for v in storages:
                columns.append(self.offload[v])
                values.append(-self.link.read_seconds(self.index.bytes[v]) * self.scale)
            window = self.link.read_seconds(max(self.window, max(self.index.bytes[v] for v in storages))) * self.scale
            self.entries.append((list(columns), list(values), -window))
            columns.append(before if before >= 0 else -1 - before)
            values.append(1.0 if before >= 0 else -1.0)
            for v in replays:
                if since < replays[v][0] <= now:
                    columns.append(self.recompute[v])
                    values.append(replays[v][1] * self.scale)
            self.entries.append((columns, values, -(now - since) * self.scale))
            before, since = lead, now

    def _replays_by_ask(self) -> dict[int, tuple[float, float]]:
        """For each storage that may be recomputed, when it is asked for and the seconds of its own replay."""
        found: dict[int, tuple[float, float]] = {}
        for v, spans in self.windows.rebuilt.items():
            if v in self.recompute:
                ops = self.index.ops_of[v]
                found[v] = float(self.moving.clock[min(spans[0][0], self.index.count)]), sum(self.index.graph.ops[op].seconds for op in ops)
        return found

    def _allow(self) -> None:
        """What stands of the windows at each operation at most, and the columns that say whether it does."""
        count, moving = self.index.count, self.moving
        out, back = np.zeros(count + 1), np.zeros(count + 2)
        for v in moving.storages:
            out[min(max(moving.put[v], int(self.index.unheld[v])), count)] += self.index.bytes[v]
            back[min(moving.ask[v], count)] += self.index.bytes[v]
        left = np.cumsum(back[::-1])[::-1][1 : count + 1]
        reached = np.where(np.arange(count) < self.index.turn, np.cumsum(out)[:count], left)
        self._window_at: NDArray[np.float64] = np.minimum(self.window, reached)
        by_ask = sorted(moving.storages, key=lambda v: -moving.ask[v])
        self._gaps = [*(moving.put[v] for v in moving.storages)], [-moving.ask[v] for v in by_ask]
        self._flags = self._chained(moving.storages), self._chained(by_ask)

    def _flag(self, at: int) -> int | None:
        """The column that says whether anything is on its way at an operation; None if nothing can be."""
        side = 0 if at < self.index.turn else 1
        place = bisect_right(self._gaps[0], at) if side == 0 else bisect_left(self._gaps[1], -at)
        return self._flags[side][place - 1] if place else None

    def _memory(self, row: Row) -> tuple[dict[int, float], int]:
        found, fixed = super()._memory(row)
        flag = self._flag(row.at)
        if flag is not None:
            found[flag] = float(self._window_at[row.at]) + self.link.staging_bytes
        return found, fixed

    def point(self, rows: list[Row], budget: int, seconds: float) -> Point | None:
        """An optimal point of the relaxed program within the budget; None if there is none."""
        entries, _ = self._limited(rows, budget)
        _, values, _, objective = run_relaxed(model_of(self.cost, self.upper, [False] * len(self.cost), entries), seconds)
        if values is None:
            return None
        return Point(
            recompute={v: float(values[column]) for v, column in self.recompute.items()},
            offload={v: float(values[column]) for v, column in self.offload.items()},
            held=frozenset(u for u, column in self.hold.items() if values[column] > _HALF),
            seconds=objective / self.scale,
        )


def _grouped(storages: Iterable[int], gap_of: dict[int, int]) -> list[tuple[int, list[int]]]:
    """The storages by gap, in order; neighbours put together where there are too many."""
    groups: dict[int, list[int]] = {}
    for v in storages:
        groups.setdefault(gap_of[v], []).append(v)
    ordered = sorted(groups.items())
    size = -(-len(ordered) // _MOMENTS)
    if size <= 1:
        return ordered
    return [
        (chunk[0][0], [v for _, members in chunk for v in members])
        for chunk in (ordered[start : start + size] for start in range(0, len(ordered), size))
    ]
