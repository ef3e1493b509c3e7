"""Closed forms of equal chains against dynamic programs, walked schedules and the chain table."""

from __future__ import annotations

from functools import cache
from math import comb, inf

import pytest

from recoup.errors import UsageError
from recoup.solve.binomial import checkpoints, forward_steps, repetitions, sqrt_segments
from recoup.solve.chain import ChainTable, Schedule, Segment, Way, stages_walk

# A state of one byte: advanced in place, and read by the backward in place. One byte beside the slots is the state in motion.
UNIT = Segment(input_bytes=1, forward_seconds=1.0, forward_bytes=1, base_bytes=0, ways=(Way(0, 1, 0.0),))


@cache
def fewest(n, slots):
    """The recursion that the closed form solves: advance k steps, hold that state, reverse the rest, then the first k."""
    if n == 1:
        return 0
    if slots == 1:
        return n - 1 + fewest(n - 1, 1)
    return min(k + fewest(n - k, slots - 1) + fewest(k, slots) for k in range(1, n))


def walked(n, slots):
    stages = tuple(range(n))
    return stages_walk([UNIT] * n, Schedule(0.0, (0,) * n, stages, checkpoints(n, slots)))


@pytest.mark.parametrize("slots", range(1, 6))
@pytest.mark.parametrize("n", range(1, 13))
def test_the_closed_form_is_the_recursion(n, slots):
    assert forward_steps(n, slots) == fewest(n, slots)


def test_known_values():
    assert forward_steps(10, 3) == 15
    assert repetitions(10, 3) == 2
    assert (forward_steps(56, 5), repetitions(56, 5)) == (140, 3)
    assert (repetitions(1, 4), forward_steps(1, 4)) == (0, 0)
    assert [forward_steps(n, 1) for n in range(1, 6)] == [0, 1, 3, 6, 10]
    assert [forward_steps(n, 50) for n in range(1, 6)] == [0, 1, 2, 3, 4]
    assert all(repetitions(comb(c + r, c), c) == r and repetitions(comb(c + r, c) + 1, c) == r + 1 for c in range(1, 6) for r in range(5))


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 10, 12, 37, 100])
def test_a_walked_schedule_takes_the_closed_form(n, slots):
    walk = walked(n, slots)
    assert sum(walk.replays) + n - 1 == forward_steps(n, slots)
    assert max(walk.replays) + 1 <= max(repetitions(n, slots), 1)
    assert walk.peak_bytes == min(slots + 1, n)


def test_a_thousand_steps_in_ten_slots():
    assert sum(walked(1000, 10).replays) + 999 == forward_steps(1000, 10) == 3636


@pytest.mark.parametrize("n", [1, 2, 7, 12, 40])
def test_the_chain_table_is_binomial_on_a_unit_chain(n):
    table = ChainTable([UNIT] * n, n + 3, levels=n + 3)
    for slots in range(1, n + 3):
        assert table.seconds(slots + 1) == forward_steps(n, slots) - (n - 1)
        schedule = table.schedule(slots + 1)
        assert sum(stages_walk([UNIT] * n, schedule).replays) + n - 1 == forward_steps(n, slots)
    assert table.seconds(1) == (0.0 if n == 1 else inf)


def test_the_chain_table_is_binomial_on_a_thousand_steps():
    table = ChainTable([UNIT] * 1000, 60, levels=60)
    assert [table.seconds(slots + 1) + 999 for slots in range(1, 60)] == [forward_steps(1000, slots) for slots in range(1, 60)]


def test_sqrt_segments_are_the_best_of_all_lengths():
    for n in range(1, 2000):
        alive, length = sqrt_segments(n)
        assert alive == -(-n // length) + length == min(-(-n // k) + k for k in range(1, n + 1))
    assert sqrt_segments(100) == (20, 10)


@pytest.mark.parametrize(
    "ask", [lambda: repetitions(0, 1), lambda: forward_steps(3, 0), lambda: checkpoints(0, 2), lambda: sqrt_segments(0)]
)
def test_nothing_to_reverse_is_refused(ask):
    with pytest.raises(UsageError, match="needs"):
        ask()
