"""Checkpoints of a chain of equal steps in closed form: binomial (revolve) and sqrt(N).

A *slot* holds one state; the initial state takes the first one. The state in motion, which the forward advances and the backward
reads, is outside the slots. With ``beta(c, r) = C(c + r, c)``, the most steps that c slots reverse when no step is advanced more than
r times, and r the least number with ``n <= beta(c, r)``, n steps take

    t(n, c) = r n - beta(c + 1, r - 1) = r n - C(c + r, r - 1)

forward steps: those of the first sweep, all but its last step, are counted, the forward within each step's own backward is not.

Griewank, "Achieving logarithmic growth of temporal and spatial complexity in reverse automatic differentiation", Optimization
Methods and Software 1, 1992; Griewank and Walther, "Algorithm 799: revolve", ACM TOMS 26, 2000; Chen, Xu, Zhang, Guestrin,
"Training deep nets with sublinear memory cost", 2016 (arXiv:1604.06174).
"""

from __future__ import annotations

from itertools import count
from math import comb, isqrt

from recoup.errors import UsageError

__all__ = ["checkpoints", "forward_steps", "repetitions", "sqrt_segments"]


def repetitions(n: int, slots: int) -> int:
    """How often at most a step is advanced in the best schedule: the least r with ``n <= C(slots + r, slots)``.

    Args:
        n: steps.
        slots: states that can be held, the initial one included.

    Raises:
        UsageError: there is no step or no slot.
    """
    _check(n, slots)
    return next(r for r in count() if n <= comb(slots + r, slots))


def forward_steps(n: int, slots: int) -> int:
    """The least number of forward steps to reverse n steps, t(n, slots); n - 1 of them are the first sweep's, the others replays.

    Raises:
        UsageError: there is no step or no slot.
    """
    r = repetitions(n, slots)
    return r * n - comb(slots + r, r - 1) if r else 0


def checkpoints(n: int, slots: int) -> tuple[int, ...]:
    """A schedule of that many forward steps, as the stage from which the state that enters each step is held.

    The form is that of ``Schedule.boundaries_since``: -1 from the first sweep, t from when the backward reaches step t. A state that
    is held from its own stage on (or, for the last step, from the first sweep) is the one in motion and takes no slot.

    Raises:
        UsageError: there is no step or no slot.
    """
    _check(n, slots)
    since = [-1] * n
    left = [(0, n, slots, -1)]
    while left:
        start, end, free, stage = left.pop()
        if end - start > 1:
            middle = start + _first_part(end - start, free)
            since[middle] = stage
            left += [(start, middle, free, middle - 1), (middle, end, max(free - 1, 1), stage)]
    return tuple(since)


def _first_part(n: int, slots: int) -> int:
    """How far to the next checkpoint: the most steps for which both parts stay within the repetitions of the whole."""
    r = repetitions(n, slots)
    return min(comb(slots + r - 1, slots), n - comb(slots + r - 2, slots - 1))


def sqrt_segments(n: int) -> tuple[int, int]:
    """The least number of blocks alive when every k-th is a checkpoint and one segment of k is rebuilt at a time, and that k.

    The blocks alive are ``ceil(n / k) + k``, least at ``k = ceil(sqrt(n))``, where they are ``ceil(2 sqrt(n))``.

    Args:
        n: equal blocks in the chain.

    Raises:
        UsageError: there is no block.
    """
    if n < 1:
        raise UsageError(f"a chain needs blocks; it got {n}")
    return isqrt(4 * n - 1) + 1, isqrt(n - 1) + 1


def _check(n: int, slots: int) -> None:
    if n < 1 or slots < 1:
        raise UsageError(f"a schedule needs steps and slots; it got {n} and {slots}")
