"""What is alive, as one expression in bytes for each moment of the step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from recoup.simulate.judge import GENERATOR_STATE_BYTES, alive_bytes
from recoup.solve.checkmate.columns import CONSTANT, ONE, Terms, added, both, less, weighed
from recoup.solve.checkmate.stages import Stages

__all__ = ["moments"]

_END = 1 << 60


def moments(stages: Stages) -> list[Terms]:
    """Bytes during each recorded operation, and during each operation that a stage may replay; never more than the simulator counts."""
    memory = _Memory(stages)
    return [*memory.recorded(), *memory.replayed()]


class _Memory:
    """The lives of storages, leaves and copies; their columns join those of the stages."""

    def __init__(self, stages: Stages) -> None:
        self.all, self.index, self.drop = stages, stages.index, stages.drop
        self.pending: dict[tuple[int, int, int], Terms] = {}
        ends = self.index.dies.copy()
        ends[list(self.drop)] = self.index.unheld[list(self.drop)]
        self.during, self.across = alive_bytes(self.index, ends)

    def recorded(self) -> Iterator[Terms]:
        """During each recorded operation."""
        stages, events = [stage.gap for stage in self.all.stages], [event.gap for event in self.index.events]
        for op in range(self.index.count):
            t = bisect_right(stages, op) - 1
            copies = self._copies(t, _END, op, bisect_right(events, op)) if t >= 0 else {}
            yield added([{CONSTANT: float(self.during[op] + self.index.scratch[op])}, self._standing(op, op), copies])

    def replayed(self) -> Iterator[Terms]:
        """During each operation that a stage may replay."""
        index = self.index
        for (t, op), ran in self.all.ran.items():
            gap, number = self.all.stages[t].gap, self.all.stages[t].number
            fresh = weighed([(float(index.produced_bytes[op] + index.scratch[op]), ran)])
            standing = self._standing(gap, min(gap, index.count - 1))
            yield added([{CONSTANT: float(self.across[gap])}, standing, self._copies(t, op, gap, number), fresh])

    def _standing(self, at: int, place: int) -> Terms:
        """What decisions on the forward put there: kept storages, leaves, generator states drawn up to ``place``."""
        index = self.index
        kept = [(index.bytes[v], less(ONE, drop)) for v, drop in self.drop.items() if index.unheld[v] <= at < index.dies[v]]
        leaves = [(count, self._leaf(u, at)) for u, count in enumerate(index.bytes) if index.is_activation[u] and index.dies[u] <= at]
        random = [made for op, made in self.all.makes.items() if op <= place and "random" in index.graph.ops[op].flags]
        states = [(GENERATOR_STATE_BYTES, self.all.largest([self.drop[v] for v in made])) for made in random]
        return weighed([*kept, *leaves, *states])

    def _leaf(self, u: int, at: int) -> Terms:
        dropped = self.drop.get(u, {})
        return self.all.cover(("leaf", u, self._released(at)), lambda: [less(needed, dropped) for needed in self._recipes(u, at)])

    def _recipes(self, u: int, at: int) -> Iterator[Terms]:
        """Reasons to have u at that gap: what is rebuilt from it."""
        for w in (w for w in self.drop if u in self.index.inputs_of[w]):
            if self.index.released[w] > at:
                yield self.drop[w]
            else:
                yield both(self.drop[w], self.all.cover(("recipe", w, self._released(at)), lambda w=w: self._recipes(w, at)))

    def _released(self, at: int) -> int:
        return sum(self.index.released[v] <= at for v in self.drop)

    def _copies(self, t: int, op: int, gap: int, passed: int) -> Terms:
        """Copies at a gap, when stage t replays ``op`` (or is over: ``_END``) and so many unpack events are over."""
        count, turn = self.index.bytes, self.all.stages[t].turn
        present = [(count[v], self.all.largest(self._copy(t, op, v, gap, passed))) for v in self.drop]
        earlier = [(count[v], self.drop[v]) for (one, v), asked in self.all.asked.items() if one < turn and asked.end > gap]
        return weighed([*present, *earlier])

    def _copy(self, t: int, op: int, v: int, gap: int, passed: int) -> list[Terms]:
        """Reasons for a copy of v to be there."""
        stage, readers, made = self.all.stages[t], self.all.readers[v], self.index.ops_of[v][0] < op
        asked, held = self.all.asked.get((stage.turn, v)), stage.held[made].get(v)
        found: list[Terms] = []
        if held and asked and (asked.last >= passed or asked.end > gap):
            found.append(held)
        elif held:
            found += [both(held, pending) for reader in readers if (pending := self._pending(t, op, reader))]
        if made:
            found += [both(self.all.ran[t, reader], self.drop[v]) for reader in readers if reader >= op and (t, reader) in self.all.ran]
        return found

    def _pending(self, t: int, op: int, reader: int) -> Terms:
        """Whether an operation has yet to be replayed for something to hold, when stage t replays ``op``."""
        if (t, op, reader) not in self.pending:
            self.pending[t, op, reader] = self.all.largest(list(self._missing(t, op, reader)))
        return self.pending[t, op, reader]

    def _missing(self, t: int, op: int, reader: int) -> Iterator[Terms]:
        stage = self.all.stages[t]
        for w in self.all.makes[reader]:
            state = stage.held if reader == self.index.ops_of[w][0] else stage.whole
            missing = less(self.drop[w], state[reader < op].get(w, {}))
            if missing and (stage.turn, w) in self.all.asked:
                yield missing
            elif missing:
                above = [self._pending(t, op, other) for other in self.all.readers[w]]
                yield from (both(missing, pending) for pending in above if pending)
