"""Schedules of chains against all that there are, and the laws of the table."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recoup.errors import UsageError
from recoup.solve.chain import ChainTable, Schedule, Segment, Walk, Way, stages_walk

_EXACT = 10**6


def all_schedules(segments):
    """Every persistent schedule: each boundary from any stage that makes it, each way from any forward of its segment."""
    n = len(segments)
    for boundaries in product([-1], *([-1, *range(j, n)] for j in range(1, n))):
        held_from = [n if since < 0 else since for since in boundaries]
        first = [max(s for s in range(t + 1) if held_from[s] > t) for t in range(n)]
        if all(since < 0 or first[since] < j for j, since in enumerate(boundaries)):
            yield from _with_ways(segments, boundaries, held_from, first)


def _with_ways(segments, boundaries, held_from, first):
    n = len(segments)
    choices = []
    for s, segment in enumerate(segments):
        stages = [-1] * (held_from[s] == n) + [t for t in range(s + 1, n) if first[t] <= s and t <= held_from[s]]
        choices.append([(w, since) for w, way in enumerate(segment.ways) for since in (stages if way.kept_bytes else [s])])
    for chosen in product(*choices):
        ways, ways_since = zip(*chosen, strict=True)
        yield Schedule(0.0, ways, ways_since, boundaries)


def frontier_of(segments):
    """Peak and least seconds of all schedules, peaks growing and seconds falling."""
    walks = [stages_walk(segments, schedule) for schedule in all_schedules(segments)]
    points = []
    for peak, seconds in sorted((walk.peak_bytes, walk.seconds) for walk in walks):
        if not points or seconds < points[-1][1]:
            points.append((peak, seconds))
    return points


@st.composite
def a_segment(draw, ways=2):
    sizes = st.integers(0, 6)
    entering = draw(sizes)
    kept = [0, *(draw(st.integers(0, 6)) for _ in range(draw(st.integers(0, ways - 1))))]
    menu = [Way(size, entering + size + draw(sizes), float(draw(st.integers(0, 4)))) for size in draw(st.permutations(kept))]
    return Segment(entering, float(draw(st.integers(0, 4))), entering + draw(sizes), draw(sizes), tuple(menu))


def chains(most, ways=2):
    return st.lists(a_segment(ways), min_size=1, max_size=most)


def _agrees_with_all(segments):
    points = frontier_of(segments)
    table = ChainTable(segments, points[-1][0], levels=_EXACT)
    assert table.least_bytes == points[0][0]
    assert table.seconds(points[0][0] - 1) == inf
    assert table.schedule(points[0][0] - 1) is None
    for budget in range(points[0][0], points[-1][0] + 3):
        least = min(seconds for peak, seconds in points if peak <= budget)
        schedule = table.schedule(budget)
        walk = stages_walk(segments, schedule)
        assert table.seconds(budget) == schedule.seconds == walk.seconds == least
        assert walk.peak_bytes <= budget
        chosen = [segment.ways[way] for segment, way in zip(segments, schedule.ways, strict=True)]
        assert all(way.kept_bytes or since == s for s, (way, since) in enumerate(zip(chosen, schedule.ways_since, strict=True)))


@settings(max_examples=150)
@given(chains(4))
def test_it_is_the_best_of_all_schedules(segments):
    _agrees_with_all(segments)


@settings(max_examples=15)
@given(st.lists(a_segment(), min_size=5, max_size=5))
def test_it_is_the_best_of_all_schedules_of_five_segments(segments):
    _agrees_with_all(segments)


@settings(max_examples=50)
@given(chains(3, ways=4))
def test_it_is_the_best_over_menus(segments):
    _agrees_with_all(segments)


@settings(max_examples=50)
@given(a_segment(), st.integers(2, 5))
def test_it_is_the_best_for_equal_segments(segment, n):
    _agrees_with_all([segment] * n)


@given(chains(7, ways=3), st.integers(1, 12), st.integers(0, 60))
def test_rounding_brackets_the_optimum(segments, levels, budget):
    exact = ChainTable(segments, 80, levels=_EXACT)
    up, down = (ChainTable(segments, 80, levels=levels, rounding=rounding) for rounding in ("up", "down"))
    assert down.seconds(budget) <= exact.seconds(budget) <= up.seconds(budget)
    assert exact.seconds(budget) >= exact.seconds(budget + 1)
    assert up.seconds(budget) >= up.seconds(budget + 1)
    assert down.seconds(budget) >= down.seconds(budget + 1)


@given(chains(7, ways=3), st.integers(1, 40), st.integers(0, 100))
def test_a_coarse_schedule_fits_and_takes_what_the_table_says(segments, levels, budget):
    table = ChainTable(segments, 80, levels=levels)
    schedule = table.schedule(budget)
    assert (schedule is None) == (table.least_bytes is None or budget < table.least_bytes)
    if schedule is not None:
        walk = stages_walk(segments, schedule)
        assert walk.peak_bytes <= budget
        assert walk.seconds == schedule.seconds <= table.seconds(budget)


@given(chains(6), st.integers(1, 10))
def test_the_least_bytes_are_bracketed(segments, levels):
    least = {rounding: ChainTable(segments, 120, levels, rounding).least_bytes for rounding in ("up", "down")}
    exact = ChainTable(segments, 120, _EXACT).least_bytes
    assert least["down"] <= exact
    assert least["up"] is None or exact <= least["up"]


@given(a_segment(ways=3), st.integers(2, 9))
def test_equal_segments_share_rows_without_a_difference(segment, n):
    """A way that never fits makes segments differ, but not their schedules."""
    apart = [replace(segment, ways=(*segment.ways, Way(0, _EXACT + s, 0.0))) for s in range(n)]
    shared, separate = ChainTable([segment] * n, 60, 60), ChainTable(apart, 60, 60)
    assert len(shared._seconds) == 2 * n
    assert len(separate._seconds) == n * (n + 1) // 2 + n
    assert all(shared.seconds(budget) == separate.seconds(budget) for budget in range(60))


# Three segments with boundaries of 10; keeping takes 5 and saves 2 seconds; a replay takes 1 second, and 24 bytes with its ends.
KEEP, REBUILD = Way(5, 17, 0.0), Way(0, 19, 2.0)
THREE = [Segment(10, 1.0, 24, base, (KEEP, REBUILD)) for base in (3, 2, 1)]


def test_a_schedule_walked_by_hand():
    kept = Schedule(0.0, (0, 0, 0), (-1, -1, -1), (-1, -1, -1))
    assert stages_walk(THREE, kept) == Walk(1 + 15 + 15 + 17, 0.0, (0, 0, 0))
    middle_later = Schedule(0.0, (1, 0, 1), (0, -1, 2), (-1, -1, -1))
    assert stages_walk(THREE, middle_later) == Walk(1 + 10 + 15 + 19, 4.0, (0, 0, 0))
    # Stage 1 replays segment 0 from boundary 0 (held, and counted once) beside nothing else: 2 + 24, under the 2 + 10 + 19 of its backward.
    once = Schedule(0.0, (1, 1, 1), (0, 1, 2), (-1, 1, -1))
    assert stages_walk(THREE, once) == Walk(2 + 10 + 19, 7.0, (1, 0, 0))
    held_on_replay = Schedule(0.0, (0, 1, 1), (1, 1, 2), (-1, 1, -1))
    assert stages_walk(THREE, held_on_replay) == Walk(2 + 10 + 5 + 19, 5.0, (1, 0, 0))


def test_every_byte_is_charged_once():
    table = ChainTable(THREE, 60, _EXACT)
    assert table.seconds(48) == 0.0
    assert table.seconds(47) == 2.0
    assert table.least_bytes == 31
    assert table.seconds(31) == 5.0
    single = ChainTable([replace(THREE[0], base_bytes=0)], 60, _EXACT)
    assert (single.least_bytes, single.seconds(17), single.seconds(16)) == (17, 0.0, inf)


def test_forwards_in_passing_need_their_bytes():
    """What enters a segment that a replay only passes by is not held, and stands while it passes."""
    wide = [Segment(1, 1.0, forward, 0, (Way(0, 1, 0.0),)) for forward in (1, 50, 1, 1)]
    passed = Schedule(0.0, (0, 0, 0, 0), (0, 1, 2, 3), (-1, 1, 2, -1))
    assert stages_walk(wide, passed) == Walk(1 + 50, 3.0, (2, 1, 0, 0))
    held = Schedule(0.0, (0, 0, 0, 0), (0, 1, 2, 3), (-1, 2, 2, -1))
    assert stages_walk(wide, held) == Walk(1 + 50, 2.0, (1, 1, 0, 0))
    table = ChainTable(wide, 60, _EXACT)
    assert [table.seconds(budget) for budget in (2, 3, 4)] == [inf, 1.0, 0.0]


def test_a_segment_passed_on_the_way_to_a_checkpoint_binds_too():
    """Stage 4 leaves room for one boundary less than are wanted; stage 3 has none to pass segment 1, stage 2 would have."""
    sizes = [(1, 0), (50, 0), (1, 0), (1, 20), (1, 57)]
    table = ChainTable([Segment(1, 1.0, forward, base, (Way(0, 1, 0.0),)) for forward, base in sizes], 70, _EXACT)
    assert table.seconds(59) == inf
    assert table.seconds(60) == 2.0


def test_holding_on_a_replay_needs_the_forward_and_what_it_keeps():
    """Much stands in stage 2, which leaves segment 0 to a replay in stage 1, of 85 bytes without what it keeps."""
    crowded = [Segment(10, 1.0, 85, base, (KEEP, REBUILD)) for base in (0, 0, 60)]
    held = Schedule(0.0, (0, 1, 0), (1, 1, -1), (-1, 1, -1))
    assert stages_walk(crowded, held) == Walk(85 + 5, 3.0, (1, 0, 0))
    table = ChainTable(crowded, 120, _EXACT)
    assert [table.seconds(budget) for budget in (86, 87, 89, 90, 101, 102, 106, 107)] == [inf, 5.0, 5.0, 3.0, 3.0, 2.0, 2.0, 0.0]


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(0.0, (0, 0, 0), (-1, -1, -1), (-1, 2, -1)),
        Schedule(0.0, (1, 1, 1), (0, 1, 2), (-1, 0, -1)),
        Schedule(0.0, (0, 1, 1), (0, 1, 2), (-1, -1, -1)),
        Schedule(0.0, (0, 1, 1), (2, 1, 2), (-1, 1, -1)),
        Schedule(0.0, (1, 0, 1), (0, -1, 2), (-1, 1, -1)),
    ],
)
def test_a_walk_refuses_what_no_forward_makes(schedule):
    with pytest.raises(UsageError, match="not made"):
        stages_walk(THREE, schedule)


def test_malformed_tables_are_refused():
    with pytest.raises(UsageError, match="segments"):
        ChainTable([], 10)
    with pytest.raises(UsageError, match="levels"):
        ChainTable(THREE, 10, levels=0)
    with pytest.raises(UsageError, match="rounding"):
        ChainTable(THREE, 10, rounding="nearest")
    below = ChainTable(THREE, 60, rounding="down")
    assert below.seconds(1000) == 0.0
    with pytest.raises(AssertionError, match="rounded down"):
        below.schedule(60)


def test_too_few_bytes_have_no_schedule():
    table = ChainTable(THREE, 20)
    assert table.least_bytes is None
    assert table.schedule(20) is None
    assert table.seconds(-5) == inf


def _uneven(n, ways):
    """A chain whose sizes and times vary as a real one's do, without chance."""
    segments = []
    for s in range(n):
        entering, full, seconds = 1000 * (5 + s * 7 % 11), 1000 * (50 + s * 31 % 97), 1.0 + s * 13 % 7
        kept = [full * way // (ways - 1) for way in range(ways)]
        menu = tuple(Way(size, entering + full + 1000 * (s % 5), seconds * (1 - size / full)) for size in kept)
        segments.append(Segment(entering, seconds, entering + full // 3, 100 * (n - s), menu))
    return segments


@pytest.mark.parametrize(
    ("segments", "levels", "limit_seconds"),
    [(_uneven(100, 8), 400, 10), ([_uneven(1, 8)[0]] * 1000, 200, 15)],
    ids=["uneven", "equal"],
)
def test_long_chains_are_solved_in_seconds(segments, levels, limit_seconds):
    most = sum(segment.input_bytes + segment.ways[-1].kept_bytes for segment in segments) + 200_000
    start = time.perf_counter()
    table = ChainTable(segments, most, levels)
    assert time.perf_counter() - start < limit_seconds
    least = table.least_bytes
    for budget in range(least, most + 1, (most - least) // 7):
        schedule = table.schedule(budget)
        walk = stages_walk(segments, schedule)
        assert walk.peak_bytes <= budget
        assert walk.seconds == schedule.seconds
        assert schedule.seconds <= table.seconds(budget) * (1 + 1e-9)
