"""When everything in a planned step happens, in seconds: the same clock by which the judge prices a plan.

The clock has three kinds of time: the recorded operations, which keep their order and their length; replays, before the operation
whose backward asked for them; and waiting for the link. What the judge charges to the step as a whole (the executor's hooks, and
what transfers slow the step's own work down by) has no place on it: ``unplaced_seconds``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from recoup.cost import OffloadLink
from recoup.graph import StepGraph
from recoup.plan import Plan
from recoup.simulate.index import Replays, replays
from recoup.simulate.judge import run, simulate
from recoup.simulate.offload import Offload
from recoup.simulate.planned import plan_holds, plan_ids, plan_offload, simulate_plan
from recoup.simulate.result import Simulation
from recoup.simulate.transfers import Transfer, Transfers, transfers_of

__all__ = ["Course", "Span", "Timeline", "timeline_of"]

# A step that offloads nothing runs by the same clock.
_NOTHING = Offload(frozenset(), OffloadLink(target="disk", write_bytes_per_second=1.0, read_bytes_per_second=1.0), 0, 0)


@dataclass(frozen=True, slots=True)
class Span:
    """Something that takes time at one place of the step: a replay of operation ``op``, or waiting (``op`` is None)."""

    start_seconds: float
    end_seconds: float
    op: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """Seconds and bytes of one run of the step.

    Attributes:
        reached_seconds: for each recorded operation when the one before it ended.
        start_seconds: for each recorded operation when it starts; between the two are replays and waiting.
        end_seconds: for each recorded operation when it ends.
        bytes_at: for each recorded operation the most bytes alive from ``reached_seconds`` to ``end_seconds``.
        peak_bytes: the most of these.
        peak_seconds: when they stand.
        backward_seconds: when the first backward operation starts; the end where there is none.
        placed_seconds: when the last of all is done.
    """

    reached_seconds: NDArray[np.float64] = field(repr=False)
    start_seconds: NDArray[np.float64] = field(repr=False)
    end_seconds: NDArray[np.float64] = field(repr=False)
    bytes_at: NDArray[np.int64] = field(repr=False)
    peak_bytes: int
    peak_seconds: float
    backward_seconds: float
    placed_seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """A planned step beside the unplanned one.

    Attributes:
        planned, unplanned: seconds and bytes.
        simulation: of the planned step.
        unplanned_step_seconds: of the unplanned step.
        replays: replayed operations, in order.
        waits: when the step stood still for the link.
        moves: every write and read over the link, in order of their issue.
    """

    planned: Course
    unplanned: Course
    simulation: Simulation
    unplanned_step_seconds: float
    replays: tuple[Span, ...]
    waits: tuple[Span, ...]
    moves: tuple[Transfer, ...]

    @property
    def step_seconds(self) -> float:
        """Simulated time of the planned step."""
        return self.simulation.step_seconds

    @property
    def unplaced_seconds(self) -> float:
        """What the step takes besides: the executor's hooks, and what its own work loses to transfers that run beside it."""
        return max(self.step_seconds - self.planned.placed_seconds, 0.0)


def timeline_of(graph: StepGraph, plan: Plan) -> Timeline:
    """The course of a plan on the graph it was made for.

    Raises:
        PlanMismatch: the plan names a site that the graph does not have, or what its executor cannot run.
    """
    index, simulation, unplanned = replays(graph), simulate_plan(graph, plan), simulate(graph)
    offload = plan_offload(graph, plan)
    transfers = simulation.transfers
    if transfers is None:
        replayed = run(graph, plan_ids(graph, plan), plan_holds(graph, plan), offload).replayed
        transfers = transfers_of(index, _NOTHING, replayed)
    course, spans = _course(index, simulation, transfers)
    return Timeline(
        planned=course,
        unplanned=_course(index, unplanned, Transfers())[0],
        simulation=simulation,
        unplanned_step_seconds=unplanned.step_seconds,
        replays=tuple(span for span in spans if span.op is not None and span.op >= 0),
        waits=tuple(span for span in spans if span.op is None),
        moves=tuple(transfers.moves),
    )


def _course(index: Replays, simulation: Simulation, transfers: Transfers) -> tuple[Course, list[Span]]:
    """Where the recorded operations come to lie, and the delays between them, fetches among them."""
    until = index.until_seconds
    late = np.zeros(index.count + 1)
    for delay in transfers.delays:
        late[min(delay.gap, index.count)] += delay.seconds
    after = np.cumsum(late)
    before = list(accumulate((delay.seconds for delay in transfers.delays), initial=0.0))
    spans = []
    for place, delay in enumerate(transfers.delays):
        start = float(until[min(delay.gap, index.count)]) + before[place]
        spans.append(Span(start, start + delay.seconds, delay.op))
    start, end = until[:-1] + after[:-1], until[1:] + after[:-1]
    placed = float(until[-1] + after[-1])
    forward_end = index.graph.forward_end
    return Course(
        reached_seconds=np.concatenate([[0.0], end[:-1]])[: index.count],
        start_seconds=start,
        end_seconds=end,
        bytes_at=simulation.bytes_at,
        peak_bytes=simulation.peak_bytes,
        peak_seconds=_peak_seconds(simulation, start, spans),
        backward_seconds=float(start[forward_end]) if forward_end < index.count else placed,
        placed_seconds=placed,
    ), spans


def _peak_seconds(simulation: Simulation, start: NDArray[np.float64], spans: list[Span]) -> float:
    moment = simulation.peak_moment
    if moment.replay is not None:
        return [span for span in spans if span.op is not None][moment.replay].start_seconds
    return float(start[moment.at]) if len(start) else 0.0
