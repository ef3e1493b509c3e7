"""Every schedule of a small step, simulated: what solvers are checked against; and small steps with much to choose in.

A schedule is a set of dropped storages and, for each of them, the rebuild since which copies of it are held. Choosing at
each rebuild which of the storages it makes are held from then on, and which wait, walks through the schedules one by one.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, combinations, islice, product

from hypothesis import strategies as st

import graphs
from recoup.graph import StepGraph
from recoup.plan import Capabilities
from recoup.simulate.index import Replays, replays
from recoup.simulate.judge import run
from recoup.solve.choice import droppable, runnable

__all__ = ["Schedule", "TooMany", "by_triggers", "fastest", "front", "pareto", "runnables", "schedules", "tangled_graph", "tangled_graphs"]

Schedule = tuple[frozenset[int], Mapping[int, int], int, float]
"""Dropped storages, ``held_from``, peak in bytes, time of the step in seconds."""

LIMIT = 2000


class TooMany(Exception):
    """The step has more schedules than the limit."""


def schedules(graph: StepGraph, executor: Capabilities, limit: int = LIMIT) -> Iterator[Schedule]:
    """All schedules that the executor can run, each once.

    Left out are those in which a storage waits although nothing asks for it any more after the rebuild that makes it: held, it
    goes no later, and what it is made from may go at once.

    Raises:
        TooMany: there are more than ``limit``.
    """
    assert len(graph.backwards) <= 1, "a trigger of one pass would be one of the others too"
    # To list them is cheaper than to simulate them: that there are too many is known before the first is simulated.
    listed = list(islice(_listed(graph, executor), limit + 1))
    if len(listed) > limit:
        raise TooMany(f"more than {limit} schedules")
    for recompute, held_from in listed:
        lived = run(graph, recompute, held_from)
        yield recompute, held_from, int(lived.bytes_at.max(initial=0)), lived.seconds(executor)


def _listed(graph: StepGraph, executor: Capabilities) -> Iterator[tuple[frozenset[int], dict[int, int]]]:
    index = replays(graph)
    for recompute in runnables(index, executor):
        for held_from in _Walk(index, recompute).waits(executor.rebuilds_again, graph.root_calls > 1):
            yield recompute, held_from


def runnables(index: Replays, executor: Capabilities) -> Iterator[frozenset[int]]:
    """All sets of storages that the executor can drop, without those that nobody needs."""
    candidates = sorted(droppable(index, executor))
    subsets = chain.from_iterable(combinations(candidates, size) for size in range(len(candidates) + 1))
    return (chosen for chosen in map(frozenset, subsets) if runnable(index, chosen, executor) == chosen)


def pareto(graph: StepGraph, executor: Capabilities, limit: int = LIMIT) -> list[tuple[int, float]]:
    """Peak and time of the schedules that no other one dominates, the least peak first.

    Raises:
        TooMany: there are more than ``limit`` schedules.
    """
    return front((peak, seconds) for _, _, peak, seconds in schedules(graph, executor, limit))


def front(points: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Those of these peaks and times that no other one dominates, the least peak first."""
    found: list[tuple[int, float]] = []
    for peak, seconds in sorted(points):
        if not found or seconds < found[-1][1]:
            found.append((peak, seconds))
    return found


def by_triggers(graph: StepGraph, executor: Capabilities) -> list[tuple[int, float]]:
    """The same front by trying each storage to wait for, for each storage: slow, and right for steps of several passes and calls too."""
    index, found = replays(graph), set()
    for recompute in runnables(index, executor):
        chosen = sorted(recompute)
        asked = [v for v in chosen if v in index.unpacked and graph.root_calls == 1]
        waits = [(None, v, *(u for u in asked if u != v)) if executor.rebuilds_again else (None,) for v in chosen]
        for triggers in product(*waits):
            lived = run(graph, recompute, {v: u for v, u in zip(chosen, triggers, strict=True) if u is not None})
            found.add((int(lived.bytes_at.max(initial=0)), lived.seconds(executor)))
    return front(found)


def fastest(front: list[tuple[int, float]], budget_bytes: int) -> float | None:
    """The least time within a budget, None if nothing fits."""
    return min((seconds for peak, seconds in front if peak <= budget_bytes), default=None)


class _Walk:
    """The rebuilds of one set of dropped storages, as far as who is made and held goes."""

    def __init__(self, index: Replays, recompute: frozenset[int]) -> None:
        self.index, self.recompute = index, recompute
        asked = [event.storage for event in index.events if event.storage in recompute]
        self.stages = list(dict.fromkeys(asked))
        # The stage up to which the unpack events of a storage may ask for it.
        self.last = {v: len(set(asked[: len(asked) - asked[::-1].index(v)])) - 1 for v in self.stages}
        self.readers: dict[int, list[int]] = {v: [] for v in recompute}
        self.makes: dict[int, list[int]] = {}
        for v in sorted(recompute):
            for op in index.ops_of[v]:
                self.makes.setdefault(op, []).append(v)
        for op in self.makes:
            for u in index.foreign[op]:
                if u in recompute:
                    self.readers[u].append(op)

    def waits(self, again: bool, only_own: bool) -> Iterator[dict[int, int]]:
        """The distinct ``held_from`` of this set; ``only_own`` where a storage can only wait for its own unpacking."""
        left: list[tuple[int, dict[int, tuple[int, ...]], dict[int, int], frozenset[int]]] = [(0, {}, {}, frozenset())]
        while left:
            place, held, since, waited = left.pop()
            if place == len(self.stages):
                yield {v: since.get(v, v) for v in sorted(waited)}
                continue
            v = self.stages[place]
            if v in held and not held[v]:
                left.append((place + 1, held, since, waited))
                continue
            wanted, ran, free = self._rebuild(v, held, place)
            for chosen in _subsets(free):
                waiting = set(free) - set(chosen)
                if (waiting and not again) or (only_own and waited & set(chosen)):
                    continue
                after = {**held, **dict.fromkeys(wanted & held.keys(), ())}
                for u in (v, *chosen):
                    after[u] = () if u in wanted else tuple(op for op in self.index.ops_of[u] if op not in ran)
                if only_own or all(self._asked(u, after, place) for u in waiting):
                    left.append((place + 1, after, {**since, **dict.fromkeys(chosen, v)}, waited | waiting))

    def _rebuild(self, v: int, held: dict[int, tuple[int, ...]], place: int) -> tuple[set[int], set[int], list[int]]:
        """What is wanted for v, the operations that run, and the storages that may be held from now on or wait."""
        index, wanted, stack, ran = self.index, {v}, [v], set()
        while stack:
            w = stack.pop()
            for op in held.get(w, index.ops_of[w]):
                ran.add(op)
                for u in index.reads[op]:
                    if u in self.recompute and u not in wanted and held.get(u, (op,)):
                        wanted.add(u)
                        stack.append(u)
        made = {u for op in ran for u in index.produced[op] if u in self.recompute}
        beside = {u for u in made - wanted - held.keys() if self._asked(u, held, place)}
        return wanted, ran, sorted((wanted | beside) - held.keys() - {v})

    def _asked(self, v: int, held: dict[int, tuple[int, ...]], place: int) -> bool:
        """Whether an unpack event or an operation that is still to be replayed may ask for it."""
        return self.last.get(v, -1) >= place or any(
            op in held.get(w, (op,)) and self._asked(w, held, place) for op in self.readers[v] for w in self.makes[op]
        )


def _subsets(items: list[int]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(items, size) for size in range(len(items) + 1))


def tangled_graphs() -> st.SearchStrategy[StepGraph]:
    """Random steps of four to nine operations, few of whose results are saved, most read more than once, in uneven sizes."""
    return st.builds(tangled_graph, st.integers(0, 1 << 32))


def tangled_graph(seed: int) -> StepGraph:
    """One of them."""
    pick, build = random.Random(seed), graphs.Builder("tangled")
    x = build.standing(5, "input")
    activations, saved = [x], {x}
    for place in range(pick.randint(3, 8)):
        module = f"layers.{place // 3}"
        reads = tuple(dict.fromkeys(pick.choice(activations[-4:]) for _ in range(pick.randint(1, 3))))
        target = reads[0]
        fresh = target not in saved and build.drafts[target].last_use == build.drafts[target].born
        if fresh and pick.random() < 0.15:
            build.op("add_", (target, x), mutates=(target,), seconds=pick.randint(1, 9), module=module, backward=False)
            continue
        sizes = tuple(pick.choice((10, 20, 35, 60, 100)) for _ in range(pick.choice((1, 1, 1, 2))))
        saves = (*(u for u in reads if pick.random() < 0.35), *((-1,) if pick.random() < 0.35 else ()))
        made = build.op("op", reads, sizes, saves=saves, seconds=pick.randint(1, 9), scratch=pick.choice((0, 0, 25)), module=module)
        saved.update(u for u in saves if u >= 0)
        saved.update(made[:1] if -1 in saves else ())
        activations.extend(made)
    build.op("wide", (activations[-1],), (pick.choice((30, 100, 200)),), module="head")
    return build.backward(gradients=pick.random() < 0.5)
