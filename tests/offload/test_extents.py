from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from recoup.torch.offload.extents import BLOCK, Extents, Space

_STEPS = st.lists(st.one_of(st.tuples(st.just("take"), st.integers(1, 9)), st.tuples(st.just("give"), st.integers(0, 99))), max_size=60)


@given(steps=_STEPS, limit=st.one_of(st.none(), st.integers(0, 40)), size=st.integers(0, 12))
@settings(max_examples=300, deadline=None)
def test_no_block_is_lent_twice_and_all_come_back(steps: list[tuple[str, int]], limit: int | None, size: int) -> None:
    size = min(size, limit) if limit is not None else size
    extents = Extents(limit=limit, size=size)
    lent: list[tuple[int, int]] = []
    for kind, number in steps:
        if kind == "take":
            free_runs = _free_runs(lent, extents.size)
            start = extents.take(number)
            if start is None:
                assert limit is not None
                assert all(run < number for run in free_runs)  # refused only where nothing fits
                tail = free_runs[-1] if free_runs else 0
                assert extents.size - tail + number > limit
            else:
                assert all(start + number <= other or other + count <= start for other, count in lent)
                assert limit is None or start + number <= limit
                lent.append((start, number))
        elif lent:
            extents.give(*lent.pop(number % len(lent)))
        assert extents.free == extents.size - sum(count for _, count in lent)
    for start, count in lent:
        extents.give(start, count)
    assert extents.free == extents.size
    if extents.size:
        assert extents.take(extents.size) == 0  # in one piece


def _free_runs(lent: list[tuple[int, int]], size: int) -> list[int]:
    """Lengths of the free runs; the last one is that at the end, 0 if there is none."""
    runs, at = [], 0
    for start, count in sorted(lent):
        runs.append(start - at)
        at = start + count
    return [*runs, size - at]


def test_leases_come_back_when_their_last_holder_lets_go() -> None:
    space = Space(limit=4)
    first = space.lease(3 * BLOCK)
    transfer = first
    assert first is not None
    assert space.used_bytes == 3 * BLOCK
    assert space.lease(2 * BLOCK) is None
    del first
    assert space.lease(2 * BLOCK) is None  # a transfer still runs on it
    del transfer
    assert space.used_bytes == 0
    assert space.lease(4 * BLOCK) is not None


def test_even_nothing_takes_a_block() -> None:
    space = Space()
    none, one = space.lease(0), space.lease(1)
    assert none is not None
    assert one is not None
    assert (none.offset, one.offset) == (0, BLOCK)
