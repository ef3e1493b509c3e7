"""What runs, as columns and rows: the decisions of a schedule, and the replays that follow from them stage by stage."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recoup.plan import Capabilities
from recoup.simulate.index import Replays
from recoup.solve.checkmate.columns import CONSTANT, ONE, Columns, Terms, added, both, less
from recoup.solve.choice import droppable, prune

__all__ = ["Asked", "Stage", "Stages"]

State = tuple[dict[int, Terms], dict[int, Terms]]
"""H of storages before and after a stage; a storage that is not in it is not held."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A first unpacking.

    Attributes:
        storage: what is unpacked.
        gap: where.
        turn: in which backward pass.
        number: its place among all unpack events.
        held: the copies that are held.
        whole: those of them all of whose writes have run.
    """

    storage: int
    gap: int
    turn: int
    number: int
    held: State
    whole: State


@dataclass(slots=True)
class Asked:
    """What one pass asks of a storage: first in which stage, last by which unpack event, and until which gap saves hold its copy."""

    stage: int
    last: int = 0
    end: int = 0


class Stages(Columns):
    """The columns and rows of one step that are not about memory.

    Attributes:
        drop: D by storage.
        makes: the droppable storages that each operation allocates or writes.
        readers: the operations in ``makes`` that read each droppable storage and do not make it.
        stages: in the order of the step.
        asked: by pass and storage.
        ran: O by stage and operation.
    """

    def __init__(self, index: Replays, executor: Capabilities) -> None:
        super().__init__()
        self.index, self.executor = index, executor
        self.drop = {v: self.column(integer=True) for v in sorted(droppable(index, executor))}
        # Where the model is called several times, a storage is held from its first rebuild on or waits for its own unpacking.
        self._one_call = index.graph.root_calls == 1
        self._wait = {v: {} if self._one_call or not executor.rebuilds_again else self.column(integer=True) for v in self.drop}
        self.makes: dict[int, list[int]] = {}
        for v in self.drop:
            for op in index.ops_of[v]:
                self.makes.setdefault(op, []).append(v)
        self.readers = {v: [op for op in sorted(self.makes) if v in index.foreign[op]] for v in self.drop}
        self.stages: list[Stage] = []
        self.asked: dict[tuple[int, int], Asked] = {}
        self.ran: dict[tuple[int, int], Terms] = {}
        self._find_stages()
        self._sets()
        for t in range(len(self.stages)):
            self._stage(t)

    def _find_stages(self) -> None:
        for number, event in enumerate(self.index.events):
            v, turn = event.storage, event.backward
            if v not in self.drop:
                continue
            if (turn, v) not in self.asked:
                same = bool(self.stages) and self.stages[-1].turn == turn
                held, whole = (self.stages[-1].held[1], self.stages[-1].whole[1]) if same else ({}, {})
                self.asked[turn, v] = Asked(len(self.stages))
                self.stages.append(Stage(v, event.gap, turn, number, (held, {}), (whole, {})))
            asked = self.asked[turn, v]
            asked.last, asked.end = number, max(asked.end, event.released_at)

    def _sets(self) -> None:
        """What can be dropped together, and is of use."""
        index = self.index
        for v, drop in self.drop.items():
            for u in index.inputs_of[v]:
                if index.is_activation[u] and not index.saves_of[u] and not self.executor.keeps_unsaved:
                    self.at_least(self.drop.get(u, {}), drop)
            if not index.saves_of[v]:
                self.at_least(added(self.drop[w] for w in self.drop if v in index.inputs_of[w]), drop)

    def _stage(self, t: int) -> None:
        stage, index = self.stages[t], self.index
        top, held, whole = stage.storage, stage.held[1], stage.whole[1]
        held.update(stage.held[0])
        whole.update(stage.whole[0])
        reach = sorted(index.needed({top}, frozenset(self.drop)))
        wanted = {v: self.column() for v in reach if v != top} | {top: less(self.drop[top], whole.get(top, {}))}
        ops = sorted({op for v in reach for op in index.ops_of[v]})
        for op in ops:
            self.ran[t, op] = self._operation(stage, op, {v: wanted[v] for v in self.makes[op] if v in wanted})
        for v in reach:
            if v != top:
                self._wanting(stage, v, wanted[v], [self.ran[t, op] for op in ops if v in index.reads[op] and self.makes[op] != [v]])
        for v in (v for op in ops for v in index.produced[op] if v in self.drop):
            if (stage.turn, v) not in self.asked or self.asked[stage.turn, v].stage > t:
                self._holding(stage, v, wanted.get(v, {}), self.ran[t, index.ops_of[v][0]])
        held[top] = whole[top] = self.drop[top]

    def _operation(self, stage: Stage, op: int, wanted: dict[int, Terms]) -> Terms:
        if len(self.makes[op]) == 1:
            return wanted[self.makes[op][0]]
        ran = self.column()
        for v, terms in wanted.items():
            # Of one that was made beside another, only its own writes are left.
            self.at_least(ran, less(terms, stage.held[0].get(v, {})) if self._in_parts(v) else terms)
        self.at_least(added(wanted.values()), ran)
        return ran

    def _in_parts(self, v: int) -> bool:
        """Whether it can be made beside another storage, before its own writes run."""
        ops = self.index.ops_of[v]
        return len(ops) > 1 and any(len(self.makes[op]) > 1 for op in ops)

    def _wanting(self, stage: Stage, v: int, wanted: Terms, asking: list[Terms]) -> None:
        absent = less(self.drop[v], stage.whole[0].get(v, {}))
        self.at_least(absent, wanted)
        self.at_least(added(asking), wanted)
        for ran in asking:
            self.at_least(wanted, both(ran, absent))

    def _holding(self, stage: Stage, v: int, wanted: Terms, ran: Terms) -> None:
        hold = self.column(integer=True)
        held = stage.held[1][v] = added([stage.held[0].get(v, {}), hold])
        self.at_least(ran, hold)
        self.at_least(self.drop[v], held)
        if not (self._one_call and self.executor.rebuilds_again):
            self.at_least(added([held, self._wait[v]]), both(ran, self.drop[v]))
            self.at_least(less(ONE, self._wait[v]), hold)
        if not self._in_parts(v):
            stage.whole[1][v] = held
        elif wanted:
            finished = self.column()
            whole = stage.whole[1][v] = added([stage.whole[0].get(v, {}), finished])
            self.at_least(wanted, finished)
            self.at_least(held, whole)
            self.at_least(whole, both(wanted, held))

    def schedule(self, values: NDArray[np.float64]) -> tuple[frozenset[int], dict[int, int]]:
        """What an answer drops, and from when it holds copies."""

        def true(terms: Terms) -> bool:
            return sum(value * (1.0 if column == CONSTANT else values[column]) for column, value in terms.items()) > 0.5

        recompute = prune(self.index, frozenset(v for v, drop in self.drop.items() if true(drop)))
        ran = {place for place, terms in self.ran.items() if true(terms)}
        others = [stage.storage for stage in self.stages if stage.storage in recompute and self._one_call]
        held_from: dict[int, int] = {}
        for v in sorted(recompute) if self.executor.rebuilds_again else ():
            states = [[true(state.get(v, {})) for state in stage.held] for stage in self.stages]
            since = [t for t, state in enumerate(states) if state == [False, True]]
            trigger = next((u for u in (None, v, *others) if self._since(v, u, ran) == since), v)
            if trigger is not None:
                held_from[v] = trigger
        return recompute, held_from

    def _since(self, v: int, trigger: int | None, ran: set[tuple[int, int]]) -> list[int]:
        """The stages, one in each pass that makes v, since which copies are held if they wait for ``trigger``."""
        found: dict[int, int] = {}
        for t, stage in enumerate(self.stages):
            asked = None if trigger is None else self.asked.get((stage.turn, trigger))
            reached = trigger is None or (asked is not None and asked.stage <= t)
            if (t, self.index.ops_of[v][0]) in ran and (reached or stage.storage == v):
                found.setdefault(stage.turn, t)
        return list(found.values())
