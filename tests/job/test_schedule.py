"""Schedules: micro-batches in flight and idle time, against the schedules run event by event."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recoup.job.layout import Layout
from recoup.job.schedule import held_chunks, held_of_chunk, pipeline_seconds


def one_forward_one_backward(stages: int, stage: int, batches: int) -> list[str]:
    """The order of one stage: warm up, alternate, drain."""
    warm = min(stages - stage - 1, batches)
    return ["F"] * warm + ["F", "B"] * (batches - warm) + ["B"] * warm


def interleaved(stages: int, stage: int, batches: int, chunks: int, group: int) -> list[str]:
    """Megatron-LM's order of one device over all its chunks."""
    total = batches * chunks
    warm = min(2 * (stages - stage - 1) + (chunks - 1) * group, total)
    return ["F"] * warm + ["F", "B"] * (total - warm) + ["B"] * warm


def most_held(order: list[str]) -> int:
    held = most = 0
    for step in order:
        held += 1 if step == "F" else -1
        most = max(most, held)
    return most


@given(st.integers(1, 12), st.integers(1, 24), st.data())
def test_held_by_1f1b(stages: int, batches: int, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, stages - 1))
    layout = Layout(pipeline=stages, global_batch=batches)
    assert held_chunks(layout, stage) == most_held(one_forward_one_backward(stages, stage, batches))


@given(st.integers(2, 8), st.integers(0, 3), st.integers(1, 4), st.integers(2, 4), st.data())
def test_held_by_interleaving(stages: int, more: int, rounds: int, chunks: int, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, stages - 1))
    group = stages + more
    layout = Layout(pipeline=stages, global_batch=group * rounds, chunks=chunks, schedule="interleaved", group=group if more else 0)
    held = held_chunks(layout, stage)
    assert held == most_held(interleaved(stages, stage, group * rounds, chunks, group))
    assert held <= layout.micro_batches * chunks
    parts = held_of_chunk(layout, stage)
    assert sum(parts) == held
    assert all(one >= other for one, other in itertools.pairwise(parts))


def test_the_first_stage_of_an_interleaved_pipeline_holds_the_papers_layers() -> None:
    # Korthikanti et al. 2022, section 4.2.3: L (1 + (p - 1) / (p m)) layers.
    layout = Layout(pipeline=8, global_batch=64, chunks=3, schedule="interleaved")
    assert held_chunks(layout, 0) * (96 // 24) == 96 * (1 + 7 / 24)


def run_1f1b(stages: int, batches: int, forward: float, backward: float) -> float:
    """1f1b event by event: each stage does its order as soon as what it waits for is there."""
    orders = [one_forward_one_backward(stages, stage, batches) for stage in range(stages)]
    done: dict[tuple[int, str, int], float] = {}
    clocks, places = [0.0] * stages, [0] * stages
    counts = [{"F": 0, "B": 0} for _ in range(stages)]
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        for stage in range(stages):
            if places[stage] == len(orders[stage]):
                continue
            kind = orders[stage][places[stage]]
            batch = counts[stage][kind]
            before = (stage - 1, "F", batch) if kind == "F" else (stage + 1, "B", batch)
            if 0 <= before[0] < stages and before not in done:
                continue
            start = max(clocks[stage], done.get(before, 0.0))
            clocks[stage] = done[stage, kind, batch] = start + (forward if kind == "F" else backward)
            counts[stage][kind] += 1
            places[stage] += 1
    return max(clocks)


@given(st.integers(1, 8), st.integers(1, 20), st.floats(0.1, 3), st.floats(0.1, 3))
def test_time_of_equal_stages_is_that_of_the_schedule(stages: int, batches: int, forward: float, backward: float) -> None:
    layout = Layout(pipeline=stages, global_batch=batches)
    total, idle = pipeline_seconds(layout, [forward] * stages, [backward / 2] * stages, [backward / 2] * stages)
    assert total == pytest.approx(run_1f1b(stages, batches, forward, backward))
    assert idle == pytest.approx((stages - 1) * (forward + backward))


@given(st.integers(2, 8), st.integers(8, 20), st.floats(0.5, 2), st.floats(0.5, 2), st.floats(0.1, 0.5))
def test_zero_bubble_and_interleaving_idle_less(stages: int, batches: int, forward: float, data: float, weight: float) -> None:
    def idle(**changes: object) -> float:
        layout = Layout(pipeline=stages, global_batch=batches * stages, **changes)  # type: ignore[arg-type]
        return pipeline_seconds(layout, [forward] * stages, [data] * stages, [weight] * stages)[1]

    plain = idle()
    assert idle(schedule="interleaved", chunks=2) == pytest.approx(plain / 2)
    assert idle(schedule="zb-h1") == pytest.approx((stages - 1) * (forward + data - weight))
    assert idle(schedule="zb-h2") == pytest.approx((stages - 1) * max(forward + data - 2 * weight, 0))
