"""What one point of a frontier hands on to the next: rows that are proven for every budget, and a plan that fits larger ones too.

A search without it is a pure function of its problem; with it, one of the problem and the points before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from recoup.plan import Capabilities
from recoup.solve.descent import Judged
from recoup.solve.program import Row

__all__ = ["Warm"]


@dataclass(slots=True)
class Warm:
    """The memory of a sweep over growing budgets.

    Attributes:
        rows: proven memory rows by executor and operation.
        plans: by executor the last plan, which fits every larger budget.
    """

    rows: dict[Capabilities, dict[int, Row]] = field(default_factory=dict)
    plans: dict[Capabilities, Judged] = field(default_factory=dict)
