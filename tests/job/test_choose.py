"""Choosing ways for a stage: against every assignment, and the laws that any choice obeys."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recoup.errors import InfeasibleBudget
from recoup.job.choose import Slot, choose, least_bytes
from recoup.job.dishes import NAMED, Dish
from recoup.job.plan import plan_job, quick_plan, shortfall
from tests.job.jobs import GIB, small_job


def way(kept: int, working: int, seconds: float, name: str = "priced") -> Dish:
    return Dish(name, frozenset(), frozenset(), kept, working, 0, seconds, 0)


ways = st.builds(way, st.integers(0, 40), st.integers(0, 30), st.floats(0, 10, allow_nan=False))
menus = st.lists(ways, min_size=1, max_size=4).map(tuple)


def every_choice(slots: list[Slot], menu: dict[str, tuple[Dish, ...]], room: int, head: int) -> float | None:
    """The least seconds over all assignments of ways to layers."""
    layers = [slot for slot in slots for _ in range(slot.count)]
    best: float | None = None
    for chosen in product(*(menu[slot.kind] for slot in layers)):
        kept = sum(slot.held * item.kept_bytes for slot, item in zip(layers, chosen, strict=True))
        if kept + max(head, max(item.working_bytes for item in chosen)) <= room:
            seconds = sum(item.added_seconds for item in chosen)
            best = seconds if best is None else min(best, seconds)
    return best


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.sampled_from("ab"), menus, min_size=2, max_size=2),
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(0, 300),
    st.integers(0, 40),
)
def test_near_the_best_of_all_assignments(menu: dict[str, tuple[Dish, ...]], first: int, second: int, room: int, head: int) -> None:
    slots = [Slot("a", 0, first, 3), Slot("b", 1, second, 2)]
    best = every_choice(slots, menu, room, head)
    found = choose(slots, menu, room, head)
    if found is None:
        # Only where rounding to whole layers leaves the hull: never where everything at its least fits.
        assert least_bytes(slots, menu, head) > room
        assert best is None
        return
    assert best is not None
    kept = sum(group.held * group.count * group.way.kept_bytes for group in found.groups)
    assert kept + max(head, max(group.way.working_bytes for group in found.groups)) <= room
    assert found.bound_seconds <= best + 1e-9
    assert best <= found.seconds + 1e-9
    assert sum(group.count for group in found.groups) == first + second
    # No further from the bound than one layer's step along its menu.
    widest = max(max(item.added_seconds for item in items) - min(item.added_seconds for item in items) for items in menu.values())
    assert found.seconds <= found.bound_seconds + widest + 1e-9


def test_more_memory_is_never_slower_and_below_the_least_nothing_fits() -> None:
    job = small_job()
    least = shortfall(job).least_bytes
    seconds = []
    for limit in (least, least + GIB // 2, least + 2 * GIB, least + 4 * GIB, 200 * GIB):
        estimate, peak = quick_plan(job, limit)
        assert estimate is not None
        assert peak <= limit
        seconds.append(estimate.step_seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == pytest.approx(job.estimate("none").step_seconds)
    with pytest.raises(InfeasibleBudget) as caught:
        plan_job(job, least - 1)
    assert caught.value.least_bytes == least
    assert "stage 0" in str(caught.value)


@pytest.mark.parametrize("changes", [{}, {"pipeline": 1, "tensor": 8}, {"schedule": "interleaved", "chunks": 3}, {"schedule": "gpipe"}])
def test_never_worse_than_a_named_recipe_that_fits(changes: dict[str, object]) -> None:
    job = small_job(**changes)
    for name in NAMED:
        named = job.estimate(name)
        plan = plan_job(job, named.peak_bytes)
        assert plan.estimate.step_seconds <= named.step_seconds + 1e-12
        assert plan.estimate.peak_bytes <= named.peak_bytes
        assert plan.gap < 0.01
        for other in plan.fitting.values():
            assert plan.estimate.step_seconds <= other.step_seconds + 1e-12
