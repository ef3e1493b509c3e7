"""What a planned step does beside its recorded operations, in lanes: the link's two directions, replays, waiting; as data and as text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.table import Table

from recoup.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from recoup.graph import StepGraph
    from recoup.plan import Plan
    from recoup.simulate import Course, Timeline

__all__ = ["Lane", "lanes_of", "merged", "timeline_facts", "timeline_summary"]


@dataclass(frozen=True, slots=True)
class Lane:
    """One kind of work.

    Attributes:
        name: of the lane.
        key: ``writes``, ``reads``, ``replays`` or ``waits``.
        spans: (start, end) in seconds of the planned step, in order of their start.
        bytes: what is moved in it, None where nothing moves.
    """

    name: str
    key: str
    spans: tuple[tuple[float, float], ...]
    bytes: int | None = None

    @property
    def seconds(self) -> float:
        """How long it is busy."""
        return sum(end - start for start, end in self.spans)

    @property
    def text(self) -> str:
        """How much there is of it, in words."""
        if not self.spans:
            return "none"
        size = "" if self.bytes is None else f", {format_bytes(self.bytes)}"
        return f"{len(self.spans)}x{size}, {format_seconds(self.seconds)}"


def lanes_of(graph: StepGraph, timeline: Timeline) -> tuple[Lane, ...]:
    """The lanes that have something in them; those of the link, and waiting, where the plan offloads."""
    lanes = []
    for key, direction, name in (("writes", "write", "out over the link"), ("reads", "read", "back over the link")):
        moves = sorted((move for move in timeline.moves if move.direction == direction), key=lambda move: move.start_seconds)
        if timeline.moves:
            size = sum(graph.storages[move.storage].bytes for move in moves)
            lanes.append(Lane(name, key, tuple((move.start_seconds, move.end_seconds) for move in moves), size))
    if timeline.replays:
        lanes.append(Lane("recomputing", "replays", tuple((span.start_seconds, span.end_seconds) for span in timeline.replays)))
    if timeline.moves:
        lanes.append(Lane("waiting for the link", "waits", tuple((span.start_seconds, span.end_seconds) for span in timeline.waits)))
    return tuple(lanes)


def merged(spans: Iterable[tuple[float, float]], gap_seconds: float) -> list[tuple[float, float]]:
    """Spans in order of their start, those less than ``gap_seconds`` apart as one."""
    found: list[tuple[float, float]] = []
    for start, end in spans:
        if found and start - found[-1][1] <= gap_seconds:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def timeline_summary(graph: StepGraph, plan: Plan, timeline: Timeline) -> Group:
    """The two steps side by side, then the lanes."""
    steps = _table("", ">step", ">backward from", ">peak", ">at")
    for name, course, seconds in (
        ("planned", timeline.planned, timeline.step_seconds),
        ("unplanned", timeline.unplanned, timeline.unplanned_step_seconds),
    ):
        times = (format_seconds(seconds), format_seconds(course.backward_seconds))
        steps.add_row(name, *times, format_bytes(course.peak_bytes), format_seconds(course.peak_seconds))
    lanes = _table("lane", ">times", ">bytes", ">busy", ">share of the step", ">from", ">until")
    for lane in lanes_of(graph, timeline):
        ends = (format_seconds(lane.spans[0][0]), format_seconds(max(end for _, end in lane.spans))) if lane.spans else ("-", "-")
        size = "-" if lane.bytes is None else format_bytes(lane.bytes)
        share = f"{lane.seconds / timeline.step_seconds:.1%}" if timeline.step_seconds else "-"
        lanes.add_row(lane.name, str(len(lane.spans)), size, format_seconds(lane.seconds), share, *ends)
    budget = f"budget {format_bytes(plan.budget_bytes)}; " if plan.budget_bytes else ""
    besides = f"{budget}{format_seconds(timeline.unplaced_seconds)} of the step have no place of their own: the executor's hooks, and what "
    besides += "transfers slow its work down by"
    return Group(steps, "", *((lanes, "") if lanes.row_count else ()), besides)


def timeline_facts(graph: StepGraph, plan: Plan, timeline: Timeline) -> dict[str, Any]:
    """A timeline as JSON values; all times are seconds from the beginning of the step."""
    storages, ops = graph.storages, graph.ops
    return {
        "step_seconds": timeline.step_seconds,
        "unplanned_step_seconds": timeline.unplanned_step_seconds,
        "unplaced_seconds": timeline.unplaced_seconds,
        "budget_bytes": plan.budget_bytes,
        "planned": _course_facts(timeline.planned),
        "unplanned": _course_facts(timeline.unplanned),
        "operations": [op.site for op in ops],
        "transfers": [
            {
                "site": storages[move.storage].site,
                "direction": move.direction,
                "bytes": storages[move.storage].bytes,
                "start_seconds": move.start_seconds,
                "end_seconds": move.end_seconds,
            }
            for move in timeline.moves
        ],
        "replays": [
            {"site": ops[span.op].site, "start_seconds": span.start_seconds, "end_seconds": span.end_seconds}
            for span in timeline.replays
            if span.op is not None
        ],
        "waits": [{"start_seconds": span.start_seconds, "end_seconds": span.end_seconds} for span in timeline.waits],
    }


def _course_facts(course: Course) -> dict[str, Any]:
    return {
        "peak_bytes": course.peak_bytes,
        "peak_seconds": course.peak_seconds,
        "backward_seconds": course.backward_seconds,
        "start_seconds": course.start_seconds.tolist(),
        "end_seconds": course.end_seconds.tolist(),
        "bytes_at": course.bytes_at.tolist(),
    }


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in headings:
        table.add_column(heading.removeprefix(">"), justify="right" if heading.startswith(">") else "left")
    return table
