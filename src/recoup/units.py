"""Bytes, seconds and budgets, read from and written for people.

``parse_bytes("6GiB")`` is 6442450944; ``format_bytes`` is its inverse up to rounding. A budget is text such
as ``6GiB``, ``60%`` (of the unplanned peak), ``auto`` (what the device has free) or a plain count of bytes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from recoup.errors import UsageError

__all__ = ["Budget", "format_bytes", "format_seconds", "parse_budget", "parse_bytes"]

_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_NUMBER = r"(?P<number>[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)"
_BYTES = re.compile(rf"^\s*{_NUMBER}\s*(?P<prefix>[kmgtKMGT]?)(?P<binary>i?)(?P<unit>[bB]?)\s*$")
_PERCENT = re.compile(rf"^\s*{_NUMBER}\s*%\s*$")


@dataclass(frozen=True, slots=True)
class Budget:
    """What the user allows the step's peak to be.

    Attributes:
        kind: ``absolute`` (bytes), ``relative`` (a fraction of the unplanned peak) or ``auto``.
        amount: bytes for ``absolute``, a fraction such as 0.6 for ``relative``, 0 for ``auto``.
        text: what the user wrote.
    """

    kind: Literal["absolute", "relative", "auto"]
    amount: float
    text: str

    def resolve(self, unplanned_peak_bytes: int, free_bytes: int | None = None) -> int:
        """The budget in bytes, given the unplanned peak and, for ``auto``, what the device can give in all.

        Raises:
            UsageError: the budget is ``auto`` and ``free_bytes`` is not known.
        """
        if self.kind == "absolute":
            return int(self.amount)
        if self.kind == "relative":
            return int(unplanned_peak_bytes * self.amount)
        if free_bytes is None:
            raise UsageError("budget 'auto' needs a device whose free memory is known; give bytes, such as 6GiB, or a share, such as 60%")
        return free_bytes


def parse_bytes(text: str) -> int:
    """Bytes from text such as ``"6GiB"``, ``"512 MB"``, ``"1.5g"`` or ``"4096"``.

    ``GiB`` and ``G`` are powers of 1024, ``GB`` powers of 1000, as in IEC 80000-13.

    Raises:
        UsageError: the text is no amount of bytes.
    """
    match = _BYTES.match(text)
    if match is None or (match["binary"] and not match["prefix"]):
        raise UsageError(f"cannot read {text!r} as bytes; write for example 6GiB, 512MiB, 4GB or 4096")
    decimal = match["unit"] and not match["binary"]
    factor = (_DECIMAL if decimal else _BINARY)[match["prefix"].lower()]
    amount = float(match["number"]) * factor
    if not math.isfinite(amount):
        raise UsageError(f"cannot read {text!r} as bytes: not a finite number")
    return round(amount)


def parse_budget(budget: str | int | Budget) -> Budget:
    """A budget from text (``6GiB``, ``60%``, ``auto``), from bytes, or as it is.

    Raises:
        UsageError: the text does not parse, or the budget is not positive.
    """
    if isinstance(budget, Budget):
        return budget
    if isinstance(budget, bool) or not isinstance(budget, (str, int)):
        raise UsageError(f"a budget is text or a whole number of bytes, not {type(budget).__name__}")
    if isinstance(budget, int):
        if budget <= 0:
            raise UsageError(f"a budget must be positive, got {budget}")
        return Budget("absolute", budget, str(budget))
    text = budget.strip()
    if text.lower() == "auto":
        return Budget("auto", 0, text)
    if text.startswith("-"):
        raise UsageError(f"a budget must be positive, got {text!r}")
    percent = _PERCENT.match(text)
    if percent is not None:
        parsed = Budget("relative", float(percent["number"]) / 100, text)
    else:
        parsed = Budget("absolute", parse_bytes(text), text)
    if parsed.amount <= 0:
        raise UsageError(f"a budget must be positive, got {text!r}")
    return parsed


def format_bytes(count: int | float) -> str:
    """``1536`` as ``"1.50 KiB"``; bytes below 1024 are whole: ``"12 B"``."""
    value = float(count)
    if abs(value) < 1024:
        return f"{int(value)} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if abs(value) < 1024 or unit == "TiB":
            break
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f} {unit}"


def format_seconds(seconds: float) -> str:
    """``0.0123`` as ``"12.3 ms"``; three significant digits, from microseconds to seconds."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        value = seconds * factor
        if abs(value) >= 1 or unit == "us":
            digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
            return f"{value:.{digits}f} {unit}"
    raise AssertionError("unreachable")
