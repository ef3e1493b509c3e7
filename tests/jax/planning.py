"""What several tests need of a loss: its recording, a plan's checks, a fit. Made once for each loss."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

import recoup.jax
from recoup.jax.planned import planned_step
from recoup.jax.record import Prepared, prepare, record_prepared
from recoup.jax.residuals import Compiled
from recoup.jax.verifying import Check, Trial, Verification, examine
from recoup.plan import Plan

MOST: dict[str, Any] = {"budget": "85%", "runs": 0, "measure": False, "time_limit_seconds": 2.0}


@dataclass(frozen=True, eq=False)
class Recorded:
    """A loss recorded, the unplanned step compiled once for all plans.

    ``recording`` is as if nothing were known of what XLA saves by itself, so that loose budgets make plans too.
    """

    prepared: Prepared
    recording: recoup.jax.Recording
    unplanned: Compiled

    def verified(self, plan: Plan) -> tuple[Verification, dict[str, Check]]:
        seen = examine(self.prepared, plan, Trial.of(self.prepared, planned_step(self.prepared, plan)), self.unplanned, measure=False)
        return seen, {check.name: check for check in seen.checks}


def recorded_of(loss: Any, args: tuple[Any, ...]) -> Recorded:
    prepared = prepare(loss, args, {})
    recording, unplanned = record_prepared(prepared, runs=0)
    recording = msgspec.structs.replace(recording, graph=msgspec.structs.replace(recording.graph, measured_peak_bytes=None))
    return Recorded(prepared, recording, unplanned)


@cache
def recorded(make: Any) -> Recorded:
    return recorded_of(*make())


@cache
def fitted(make: Any) -> recoup.jax.Fitted:
    loss, args = make()
    return recoup.jax.fit(loss, *args, **MOST)
