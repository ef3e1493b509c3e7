"""Plans as files: JSON that a person can read and compare, one decision a line, unknown fields refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from recoup.errors import PlanMismatch
from recoup.graph.site import expand
from recoup.graph.store import decode_versioned, read_file, write_file
from recoup.plan.plan import FORMAT, Decision, Plan

__all__ = ["load_plan", "plan_json", "save_plan"]


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes the plan to a file, whole or not at all.

    Raises:
        UsageError: the file cannot be written.
    """
    write_file(path, plan_json(plan).encode())


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Reads a plan that ``save_plan`` or a person wrote.

    Raises:
        UsageError: the file is not there or cannot be read.
        PlanMismatch: it is cut short, of another format version, or has a field that is wrong or unknown, or a
            range that does not parse; the path of the field is in the message.
    """
    plan = decode_versioned(read_file(path), Plan, FORMAT, "plan", path)
    patterns = [(f"decisions[{place}].site", decision.site) for place, decision in enumerate(plan.decisions)]
    patterns += [(f"watch[{place}]", pattern) for place, pattern in enumerate(plan.watch)]
    for field, pattern in patterns:
        with _named(path, field):
            expand(pattern)
    for place, decision in enumerate(plan.decisions):
        with _named(path, f"decisions[{place}].held_from"):
            _check_holds(decision)
    return plan


@contextmanager
def _named(path: str | os.PathLike[str], field: str) -> Iterator[None]:
    """Says where in the file a pattern is wrong."""
    try:
        yield
    except ValueError as error:
        raise PlanMismatch(f"{os.fspath(path)} is no plan: {error} - at `$.{field}`") from error


def _check_holds(decision: Decision) -> None:
    if decision.held_from and decision.action != "recompute":
        raise ValueError(f"only what is recomputed is held from some moment on, not what is a {decision.action}")
    _ = decision.holds


def plan_json(plan: Plan) -> str:
    """The text of the plan file: two spaces of indent, but one line for each decision, so that plans can be compared by lines."""
    fields = msgspec.to_builtins(plan)
    decisions = fields.pop("decisions")
    lines = [f"  {json.dumps(name)}: {_indented(value)}" for name, value in fields.items()]
    listed = ",\n".join(f"    {json.dumps(decision, ensure_ascii=False)}" for decision in decisions)
    lines.append(f'  "decisions": [\n{listed}\n  ]' if decisions else '  "decisions": []')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _indented(value: object) -> str:
    # NaN and infinity are no JSON; a plan that holds one is a fault of its maker.
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False).replace("\n", "\n  ")
