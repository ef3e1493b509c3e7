"""What searches for all budgets of one step share: windows, program, the chain, the fixed plans; kept on the graph."""

from __future__ import annotations

from functools import cached_property

from recoup.graph import StepGraph
from recoup.plan import Capabilities
from recoup.simulate.index import Replays, replays
from recoup.solve.descent import Judged, judge
from recoup.solve.hierarchy import Links, links_of
from recoup.solve.holds import can_wait
from recoup.solve.named import NAMED
from recoup.solve.program import Program
from recoup.solve.strategy import Problem
from recoup.solve.windows import Windows, windows

__all__ = ["Survey", "survey_of"]

_CACHE_KEY = "_recoup_surveys"


class Survey:
    """One step under one executor."""

    def __init__(self, index: Replays, executor: Capabilities) -> None:
        self.index, self.executor = index, executor
        self.frame: Windows = windows(index, executor)

    @cached_property
    def program(self) -> Program:
        """The program of the whole step."""
        return Program(self.index, self.executor, self.frame)

    @cached_property
    def links(self) -> Links | None:
        """The step as a chain; None where copies cannot wait for moments that others mark."""
        return links_of(self.index, self.executor) if can_wait(self.index) and len(self.frame.needed) > 0 else None

    @cached_property
    def named(self) -> tuple[Judged, ...]:
        """The plans of the strategies that have one whatever the budget is, simulated."""
        problem = Problem(self.index.graph, None, self.executor)
        return tuple(judge(self.index, strategy.choose(problem).recompute, self.executor) for strategy in NAMED)

    @property
    def floor_seconds(self) -> float:
        """What a step takes that drops anything, before the first replay."""
        return self.index.base_seconds + self.executor.pack_seconds * len(self.index.graph.saves)


def survey_of(graph: StepGraph, executor: Capabilities) -> Survey:
    """The survey of a step for an executor, made on first use."""
    cache: dict[Capabilities, Survey] = graph.__dict__.setdefault(_CACHE_KEY, {})
    if executor not in cache:
        cache[executor] = Survey(replays(graph), executor)
    return cache[executor]
