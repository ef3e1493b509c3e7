"""Tables for terminals, as rich renderables; who prints them decides on width and colour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from recoup.graph.peak import peak_bytes
from recoup.graph.site import collapse
from recoup.graph.step import StepGraph
from recoup.plan.plan import Plan
from recoup.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from recoup.longest import Longest
    from recoup.solve import FrontierPoint

__all__ = [
    "checks_table",
    "frontier_table",
    "graph_summary",
    "longest_summary",
    "peak_table",
    "plan_summary",
    "renderable_text",
    "verification_summary",
]


class Checked(Protocol):
    """A check that was made: its name, whether it passed, and what was seen."""

    @property
    def name(self) -> str: ...

    @property
    def passed(self) -> bool: ...

    @property
    def detail(self) -> str: ...


class Verified(Protocol):
    """What ``recoup.verify.verify`` returns, as far as it is shown."""

    @property
    def passed(self) -> bool: ...

    @property
    def checks(self) -> Sequence[Checked]: ...

    @property
    def peak_bytes(self) -> int | None: ...

    @property
    def predicted_peak_bytes(self) -> int: ...

    @property
    def unplanned_peak_bytes(self) -> int | None: ...

    @property
    def step_seconds(self) -> float | None: ...

    @property
    def unplanned_step_seconds(self) -> float | None: ...

    @property
    def relative_time(self) -> float | None: ...


def frontier_table(points: Sequence[FrontierPoint]) -> Table:
    """One row for each point; a measured column appears if anything was measured.

    The price is what one more MiB of budget would save.
    """
    measured = any(point.measured_peak_bytes is not None for point in points)
    priced = any(point.price_seconds_per_byte for point in points)
    optional = ([">measured peak"] if measured else []), ([">price/MiB"] if priced else [])
    table = _table("strategy", "gear", ">budget", ">peak", *optional[0], ">step", ">time", ">gap", *optional[1], "")
    for point in points:
        row = [point.strategy, point.gear, _bytes(point.budget_bytes or None), _bytes(point.predicted_peak_bytes)]
        row += [_bytes(point.measured_peak_bytes)] if measured else []
        row += [format_seconds(point.step_seconds), _ratio(point.relative_time), _gap(point.gap)]
        row += [_price(point.price_seconds_per_byte)] if priced else []
        remark = point.tiles if point.feasible else "over budget"
        table.add_row(*row, escape(remark), style=None if point.feasible else "dim")
    return table


def plan_summary(plan: Plan, *, limit: int | None = 20) -> Group:
    """What a plan promises, then its decisions, the largest ``limit`` of them."""
    facts = _facts(
        ("strategy", f"{plan.strategy}, {plan.gear} gear"),
        ("budget", _bytes(plan.budget_bytes or None)),
        ("peak", f"{_bytes(plan.peak_bytes)} predicted, {_bytes(plan.unplanned_peak_bytes)} unplanned ({_share(plan)})"),
        ("step", f"{format_seconds(plan.step_seconds)} predicted, {format_seconds(plan.unplanned_step_seconds)} unplanned"),
        ("gap", f"at most {_gap(plan.gap)} slower than the fastest plan" if plan.gap is not None else "not known"),
        *((("price", f"one more MiB would save {_price(plan.price_seconds_per_byte)} a step"),) if plan.price_seconds_per_byte else ()),
        *(("binds at", line) for line in plan.binding),
        ("made for", f"{plan.frontend}, graph {plan.fingerprint}"),
    )
    table = _table("action", ">bytes", "site", "why")
    largest = sorted(plan.decisions, key=lambda decision: -decision.bytes)
    for decision in largest[:limit]:
        table.add_row(decision.action, _bytes(decision.bytes), escape(decision.site), escape(decision.why))
    hidden = len(largest) - table.row_count
    return Group(facts, "", table, *([f"... and {hidden} more decisions"] if hidden else []))


def verification_summary(verification: Verified) -> Group:
    """The verdict, each check, and planned beside unplanned."""
    table = _table("", ">planned", ">predicted", ">unplanned", ">ratio")
    peak, unplanned = verification.peak_bytes, verification.unplanned_peak_bytes
    lowered = peak / unplanned if peak and unplanned else None
    table.add_row("peak", _bytes(peak), _bytes(verification.predicted_peak_bytes), _bytes(unplanned), _ratio(lowered))
    table.add_row(
        "step", _seconds(verification.step_seconds), "", _seconds(verification.unplanned_step_seconds), _ratio(verification.relative_time)
    )
    verdict = Text("verified", style="bold green") if verification.passed else Text("verification FAILED", style="bold red")
    return Group(verdict, checks_table(verification.checks), "", table)


def checks_table(checks: Sequence[Checked]) -> Table:
    """One row for each check."""
    table = _table("check", "", "detail")
    for check in checks:
        table.add_row(escape(check.name), "ok" if check.passed else "FAILED", escape(check.detail), style=None if check.passed else "red")
    return table


def graph_summary(graph: StepGraph) -> Table:
    """What was recorded, in a few lines."""
    forward = [item for item in graph.storages if item.kind == "activation" and _phase(graph, item.producer) == "forward"]
    saved = {save.ref.storage for save in graph.saves if save.unpacked_at}
    held = [item for item in forward if item.id in saved]
    replayable = sum(item.bytes for item in held if not item.replayable)
    measured = f", {_bytes(graph.measured_peak_bytes)} measured" if graph.measured_peak_bytes is not None else ""
    return _facts(
        ("step", f"{graph.name}, {graph.frontend} on {graph.device}"),
        ("recorded", f"{len(graph.ops)} operations, {len(graph.storages)} storages, {len(graph.saves)} saved tensors"),
        ("peak", f"{_bytes(peak_bytes(graph))} simulated{measured}"),
        ("resident", f"{_bytes(graph.resident_bytes)} before the step"),
        ("saved", f"{_bytes(sum(item.bytes for item in held))} of activations, {_bytes(replayable)} of them can be recomputed"),
        ("time", f"{format_seconds(graph.step_seconds)} a step" if graph.step_seconds else "not timed"),
        ("blocks", f"{len(graph.blocks)} repeated blocks" if graph.blocks else "no repeated blocks"),
        *((("tiles", f"{', '.join(_tileable(graph))} can run in tiles"),) if any(_tileable(graph)) else ()),
        ("fingerprint", graph.fingerprint),
    )


def _tileable(graph: StepGraph) -> list[str]:
    """The regions that may run in tiles, identical layers together."""
    return [pattern for pattern, _ in collapse(dict.fromkeys(region.site for region in graph.tileable if not region.reason))]


def longest_summary(found: Longest) -> Group:
    """The largest size planned and unplanned, what keeps the next size out, and how it was proven."""
    table = _table("", f">{found.over}", ">peak", ">step", ">a token")
    costs = format_seconds(found.seconds_per_token), _seconds(found.unplanned_seconds_per_token)
    table.add_row("planned", str(found.size), _bytes(found.measured_peak_bytes), format_seconds(found.step_seconds), costs[0])
    table.add_row("unplanned", str(found.unplanned_size or "-"), "", _seconds(found.unplanned_step_seconds), costs[1])
    beyond = "not asked about"
    if found.next_size is not None and found.next_least_bytes is not None:
        over_bytes = found.next_least_bytes - found.budget_bytes
        much = f"{_bytes(over_bytes)} above the budget" if over_bytes > 0 else "and may fit; the search ended before"
        beyond = f"{found.over}={found.next_size} takes at least {_bytes(found.next_least_bytes)}, {much}"
    facts = _facts(
        ("budget", f"{_bytes(found.budget_bytes)}, of which the plan promises to use {_bytes(found.predicted_peak_bytes)}"),
        ("beyond", beyond),
        ("compared", f"with the unplanned step at {found.over}={found.compared_at}: {'equal' if found.verification.passed else 'FAILED'}"),
        ("model", f"recorded at {', '.join(map(str, found.recorded_sizes))}; off by {found.model_error:+.2%} at {found.size}"),
    )
    return Group(table, "", facts)


def peak_table(places: Sequence[tuple[str, int]], total_bytes: int, *, limit: int = 20) -> Table:
    """What stands at the peak by place, largest first; small places are summed up in the last row."""
    table = _table("at the peak", ">bytes", ">share")
    shown, rest = places[:limit], places[limit:]
    for place, count in [*shown, *([(f"{len(rest)} smaller", sum(count for _, count in rest))] if rest else [])]:
        table.add_row(escape(place), _bytes(count), f"{count / total_bytes:.1%}" if total_bytes else "")
    table.add_section()
    table.add_row("all", _bytes(total_bytes), "")
    return table


def _phase(graph: StepGraph, op: int | None) -> str:
    return "" if op is None else graph.ops[op].phase


def _table(*headings: str) -> Table:
    """A plain table; a heading that starts with ``>`` is of numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in headings:
        table.add_column(heading.removeprefix(">"), justify="right" if heading.startswith(">") else "left", overflow="fold")
    return table


def _facts(*rows: tuple[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(name, style="bold"), escape(value))
    return table


def _share(plan: Plan) -> str:
    return f"{plan.peak_bytes / plan.unplanned_peak_bytes:.1%}" if plan.unplanned_peak_bytes else "-"


def _bytes(count: int | None) -> str:
    return "-" if count is None else format_bytes(count)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}x"


def _price(seconds_per_byte: float | None) -> str:
    return "-" if seconds_per_byte is None else format_seconds(seconds_per_byte * (1 << 20))


def _gap(gap: float | None) -> str:
    return "-" if gap is None else f"{gap:.2%}"


def renderable_text(renderable: RenderableType, *, width: int = 120) -> str:
    """A renderable as plain text, for files and for tests."""
    console = Console(width=width, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()
