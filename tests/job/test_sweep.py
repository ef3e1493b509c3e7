"""Sweeps, advice and curves: every layout splits the model, the order is by speed, and what is promised is what a plan gives."""

from __future__ import annotations

import pytest

from recoup.errors import UsageError
from recoup.job.advice import advise, way_out
from recoup.job.curve import curve
from recoup.job.export import FORMATS, export
from recoup.job.job import Job
from recoup.job.layout import Kernels, Layout, Numbers, check_layout
from recoup.job.plan import plan_job, quick_plan, shortfall
from recoup.job.presets import preset
from recoup.job.sweep import layouts, sweep
from tests.job.jobs import A100, GIB, small_job


def splits(layout: Layout) -> bool:
    try:
        check_layout(preset("gpt-22b"), layout)
    except UsageError:
        return False
    return True


def test_layouts_use_all_devices_and_none_comes_twice() -> None:
    found = list(layouts(preset("gpt-22b"), Layout(sequence=2048, global_batch=64), 32, A100))
    assert {layout.devices for layout in found} == {32}
    assert len(set(found)) == len(found)
    valid = [layout for layout in found if splits(layout)]
    assert {layout.tensor for layout in valid} == {1, 2, 4, 8}
    assert {layout.pipeline for layout in valid} == {1, 2, 4, 8, 16}
    assert {layout.zero for layout in valid} == {0, 1, 2, 3}


def test_a_sweep_orders_by_speed_and_agrees_with_single_plans() -> None:
    model, numbers = preset("gpt-22b"), Numbers()
    candidates = list(layouts(model, Layout(sequence=2048, global_batch=64), 16, A100, most_micro_batch=2))
    told: list[tuple[int, int]] = []
    found, refused = sweep(model, candidates, A100, Kernels(), numbers, progress=lambda done, total, text: told.append((done, total)))
    assert len(found) + refused == len(candidates)
    assert told[-1] == (len(candidates), len(candidates))
    fitting = [item for item in found if item.fits]
    assert found[: len(fitting)] == fitting
    speeds = [item.tokens_per_second for item in fitting]
    assert speeds == sorted(speeds, reverse=True)
    for item in (fitting[0], fitting[len(fitting) // 2], fitting[-1]):
        plan = plan_job(Job(model, item.layout, A100, Kernels(), numbers))
        assert plan.estimate.step_seconds == pytest.approx(item.step_seconds)
        assert plan.estimate.peak_bytes == item.peak_bytes <= plan.limit_bytes
    for item in found[len(fitting) : len(fitting) + 5]:
        assert (
            shortfall(Job(model, item.layout, A100, Kernels(), numbers)).least_bytes
            == item.peak_bytes
            > A100.memory_bytes - A100.reserved_bytes
        )


def test_advice_is_ranked_and_true() -> None:
    job = small_job()
    limit = shortfall(job).least_bytes + 2 * GIB
    before, _ = quick_plan(job, limit)
    assert before is not None
    changes = advise(job, limit)
    fitting = [change for change in changes if change.fits]
    assert list(changes[: len(fitting)]) == fitting
    assert fitting[0].speedup == max(change.speedup or 0 for change in changes)
    assert any(change.what == "fused attention" for change in fitting)
    for change in changes:
        after, peak = quick_plan(change.job, limit)
        assert peak == change.peak_bytes
        assert change.fits == (after is not None)
        if after is not None:
            assert change.speedup == pytest.approx(after.tokens_per_second / before.tokens_per_second)
        assert change.job.layout.devices == job.layout.devices
        assert change.job.layout.global_batch == job.layout.global_batch


def test_the_way_out_names_changes_then_layouts_then_devices() -> None:
    job = small_job(data=2, global_batch=32)
    assert "it fits with" in way_out(job, shortfall(job).least_bytes - GIB)
    tiny = small_job(pipeline=1, data=1, tensor=1, sequence_parallel=False)
    assert "devices fit it with" in way_out(tiny, 40 * GIB)
    assert "no change makes it fit" in way_out(tiny, GIB // 4)


def test_a_curve_falls_from_the_least_memory_to_the_unplanned_step() -> None:
    job = small_job()
    points = curve(job)
    assert points[0].peak_bytes <= points[0].limit_bytes == shortfall(job).least_bytes
    assert points[-1].relative_time == pytest.approx(1)
    assert [point.step_seconds for point in points] == sorted((point.step_seconds for point in points), reverse=True)


@pytest.mark.parametrize("name", FORMATS)
def test_exports_fit_and_are_never_faster_than_the_plan(name: str) -> None:
    job = small_job()
    plan = plan_job(job, shortfall(job).least_bytes + 6 * GIB)
    found = export(plan, name)
    assert found.peak_bytes <= plan.limit_bytes
    assert found.step_seconds >= plan.estimate.step_seconds * (1 - 1e-9) / (1 + plan.gap)
    assert found.text.endswith("\n")


def test_an_export_that_cannot_say_the_plan_is_an_error() -> None:
    from dataclasses import replace

    import msgspec

    job = small_job()
    offloading = replace(job, kernels=msgspec.structs.replace(job.kernels, offload=True))
    plan = plan_job(offloading, shortfall(offloading).least_bytes + GIB)
    assert any(group.way.offload for groups in plan.estimate.groups for group in groups)
    with pytest.raises(UsageError, match="offloads"):
        export(plan, "recoup")
    with pytest.raises(UsageError, match="megatron, torchtitan, maxtext, recoup"):
        export(plan, "deepspeed")


def test_offload_and_hidden_recomputation_never_cost_time() -> None:
    from dataclasses import replace

    import msgspec

    job = small_job()
    limit = shortfall(job).least_bytes + 2 * GIB
    plain, _ = quick_plan(job, limit)
    assert plain is not None
    for changes in ({"offload": True}, {"hide_recompute": True}):
        changed, _ = quick_plan(replace(job, kernels=msgspec.structs.replace(job.kernels, **changes)), limit)
        assert changed is not None
        assert changed.step_seconds <= plain.step_seconds + 1e-12
