"""The errors Recoup raises, each naming the place, the number and the way out.

Every error is a :class:`RecoupError`; the exit status of the command line hangs on the class
(2 for wrong usage, 3 for "the answer is no", 1 for a fault).
"""

from __future__ import annotations

__all__ = [
    "CaptureError",
    "InfeasibleBudget",
    "MissingExtra",
    "OffloadError",
    "PlanMismatch",
    "RankDisagreement",
    "RecoupError",
    "ReplayMismatch",
    "UsageError",
    "VerifyFailure",
]


class RecoupError(Exception):
    """Base of all errors of Recoup.

    Attributes:
        exit_status: what the command line exits with when this error ends it.
    """

    exit_status = 1


class UsageError(RecoupError, ValueError):
    """The caller asked for something malformed: a budget that does not parse, an unknown strategy."""

    exit_status = 2


class CaptureError(RecoupError, RuntimeError):
    """A step could not be recorded, or a region not be captured; the message names the place."""


class InfeasibleBudget(RecoupError):
    """No plan of this strategy and executor stays within the budget.

    Attributes:
        budget_bytes: the budget asked for, in bytes.
        least_bytes: the least simulated peak that a plan was found for, in bytes.
        moment: the operation at which that least peak stands, as a person reads it.
    """

    exit_status = 3

    def __init__(self, message: str, *, budget_bytes: int, least_bytes: int, moment: str) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.least_bytes = least_bytes
        self.moment = moment


class PlanMismatch(RecoupError, ValueError):
    """A plan does not belong to what it is applied to; the message gives the first difference."""

    exit_status = 2


class ReplayMismatch(RecoupError, RuntimeError):
    """A dropped activation cannot be rebuilt as it was; raised in the backward, before any weight moves."""


class OffloadError(RecoupError, RuntimeError):
    """An activation could not be moved out or fetched back; raised before any weight moves, the message names file, bytes and cure."""


class VerifyFailure(RecoupError):
    """A planned step did not give what the unplanned one gives, or left its budget."""

    exit_status = 3


class RankDisagreement(RecoupError, RuntimeError):
    """Ranks of one job hold different plans."""


class MissingExtra(RecoupError, ImportError):
    """An optional dependency is not installed; the message gives the extra to install."""

    exit_status = 2
