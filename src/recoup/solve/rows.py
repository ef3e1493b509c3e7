"""Which memory rows a program needs: proven ones from the windows, learned ones from simulated runs."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from recoup.simulate.index import Replays
from recoup.simulate.judge import Run
from recoup.solve.program import Row
from recoup.solve.windows import Windows

__all__ = ["Rows", "spread"]

_SPREAD = 24


class Rows:
    """The rows gathered in one search. Proven rows may be used for a bound, learned rows only to find plans."""

    def __init__(self, index: Replays, frame: Windows, proven: dict[int, Row] | None = None) -> None:
        self.index, self.windows = index, frame
        # Proven rows hold whatever the budget is; searches for other budgets may begin with them.
        self.proven: dict[int, Row] = {} if proven is None else proven
        self.learned: dict[tuple[int, int], tuple[int, int, bool]] = {}
        # From a simulation: the earliest gap at which a storage's copy was made, by storage.
        self.early: dict[int, int] = {}
        ids = sorted(frame.held)
        self._ids = ids
        self._start = np.array([frame.held[v][0] for v in ids], dtype=np.int64)
        self._end = np.array([frame.held[v][1] for v in ids], dtype=np.int64)

    def profile(self, kept: frozenset[int], recomputed: frozenset[int]) -> NDArray[np.int64]:
        """Proven bytes at each operation for a choice: no simulation of it can show less."""
        count = self.index.count
        change = np.zeros(count + 1, dtype=np.int64)
        for v in kept:
            if v in self.windows.held:
                start, end = self.windows.held[v]
                change[start] += self.index.bytes[v]
                change[end] -= self.index.bytes[v]
        for v in recomputed:
            for start, end in self.windows.rebuilt.get(v, ()):
                change[min(start, count)] += self.index.bytes[v]
                change[min(end, count)] -= self.index.bytes[v]
        return self.windows.base + np.cumsum(change)[:count]

    def add_proven(self, kept: frozenset[int], recomputed: frozenset[int], budget: int) -> int:
        """Add proven rows where the choice is over the budget; returns how many are new."""
        profile = self.profile(kept, recomputed)
        fresh = [at for at in spread(profile, budget) if at not in self.proven]
        self.add_rows(fresh)
        return len(fresh)

    def add_rows(self, moments: Iterable[int]) -> None:
        """Add the proven rows of these operations."""
        for at in moments:
            copied = tuple(v for v, spans in self.windows.rebuilt.items() if any(start <= at < end for start, end in spans))
            self.proven[at] = Row(at, int(self.windows.base[at]), self._kept(at), copied, True)

    def _kept(self, at: int) -> tuple[int, ...]:
        return tuple(self._ids[place] for place in np.flatnonzero((self._start <= at) & (self._end > at)))

    def learn(self, run: Run, budget: int) -> None:
        """Take from a simulated run when copies were made, and the moments at which it is over the budget."""
        self.see(run)
        for at in spread(run.bytes_at, budget):
            moment = run.moment(at)
            if moment.replay is None:
                self.learned[(at, 0)] = (at, int(self.windows.base[at]), False)
                continue
            gap = run.replayed.gaps[moment.replay]
            produced = self.index.produced[moment.op]
            # Outputs that go on as copies are counted by their own decision; the rest stands only now.
            kept_on = {copy.storage for copy in run.replayed.copies if copy.first == moment.replay and copy.last > moment.replay + 1}
            extra = sum(self.index.bytes[v] for v in produced if v not in kept_on) + int(self.index.scratch[moment.op])
            fixed = int(self.windows.base_across[gap]) + extra
            place = (gap, 1)
            known = self.learned.get(place)
            self.learned[place] = (gap, max(fixed, known[1]) if known else fixed, True)

    def see(self, run: Run) -> None:
        """Take from a simulated run when copies were made."""
        for copy in run.replayed.copies:
            if copy.storage in run.recompute and copy.until > copy.gap:
                self.early[copy.storage] = min(self.early.get(copy.storage, copy.gap), copy.gap)

    def forget(self) -> None:
        """Drop what simulations taught."""
        self.learned.clear()
        self.early.clear()

    def estimated(self) -> list[Row]:
        """The learned rows, with every copy counted from the earliest gap at which it was seen."""
        return [self._estimate(at, fixed, across) for at, fixed, across in self.learned.values()]

    def _estimate(self, at: int, fixed: int, across: bool) -> Row:
        copied = []
        for v, spans in self.windows.rebuilt.items():
            start, end = min(self.early.get(v, spans[0][0]), spans[0][0]), spans[0][1]
            inside = start <= at < end or any(low <= at < high for low, high in spans[1:])
            if inside and not (across and start == end):
                copied.append(v)
        return Row(at, fixed, self._kept(at), tuple(copied), False)


def spread(profile: NDArray[np.int64], budget: int) -> list[int]:
    """Operations over the budget: the worst one of each stretch of the step, the very worst first."""
    over = np.flatnonzero(profile > budget)
    if not len(over):
        return []
    width = max(len(profile) // _SPREAD, 1)
    worst: dict[int, int] = {}
    for at in over.tolist():
        stretch = at // width
        if stretch not in worst or profile[at] > profile[worst[stretch]]:
            worst[stretch] = at
    return sorted(worst.values(), key=lambda at: -int(profile[at]))
