"""The meter agrees to the byte with peaks computed by hand."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from recoup.errors import CaptureError, UsageError
from recoup.torch import meter as meter_module
from recoup.torch.meter import CpuMeter, CudaMeter, device_of, mark, measure_peak, meter_for, profile_operations, resident_bytes
from recoup.torch.timing import CpuClock, alternate, clock_for, synchronizer, time_step


@pytest.fixture(params=["legacy", "kineto"])
def _events(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "kineto":
        monkeypatch.setattr(meter_module, "_legacy_events", meter_module._kineto_events)


def taken(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


@pytest.mark.usefixtures("_events")
def test_allocate_two_free_one_allocate_another() -> None:
    def run() -> None:
        a = taken(1000)
        b = taken(5000)
        del a
        c = taken(2000)
        assert (b.numel(), c.numel()) == (5000, 2000)

    assert CpuMeter().net_and_peak(run) == (0, 7000)


@pytest.mark.usefixtures("_events")
def test_net_is_what_stays_and_the_result_is_dropped() -> None:
    kept: list[torch.Tensor] = []

    def run() -> torch.Tensor:
        kept.append(taken(300))
        return taken(5000)

    assert CpuMeter().net_and_peak(run) == (300, 5300)


@pytest.mark.usefixtures("_events")
def test_what_before_allocates_and_run_frees_is_counted_as_freed() -> None:
    kept: list[torch.Tensor] = []

    def run() -> None:
        kept.clear()
        kept.append(taken(700))

    assert CpuMeter().net_and_peak(run, before=lambda: kept.append(taken(1000))) == (-300, 0)


def test_random_allocation_patterns_match_a_counter() -> None:
    generator = torch.Generator().manual_seed(3)
    moves = torch.randint(-3, 6, (200,), generator=generator).tolist()
    held: list[torch.Tensor] = []

    def run() -> None:
        for move in moves:
            if move > 0:
                held.append(taken(move * 100))
            elif held:
                held.pop(0)

    sizes: list[int] = []
    totals = [0]
    for move in moves:
        if move > 0:
            sizes.append(move * 100)
        elif sizes:
            sizes.pop(0)
        totals.append(sum(sizes))
    assert CpuMeter().net_and_peak(run) == (totals[-1], max(totals))


def test_matrix_chain_peak_by_hand() -> None:
    torch.set_num_threads(1)
    size = 64 * 64 * 4
    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(4)]
    x = torch.randn(64, 64)

    upstream = torch.randn(64, 64)

    def step() -> None:
        hidden = x
        for weight in weights:
            hidden = hidden @ weight
        hidden.backward(upstream)

    step()
    for weight in weights:
        weight.grad = None
    gc.collect()
    # In units of one matrix. Forward: four products, the first three saved, the last held by its name: 4.
    # Layer 4 makes a weight gradient and the gradient of its input (6) and releases product 3 (5); layer 3 makes two
    # more (7) and releases product 2 and the gradient that came in (5); layer 2 the same (7, 5); layer 1 makes one (6).
    # The last product and the gradient that came in go at the end: four weight gradients stay.
    assert CpuMeter().net_and_peak(step) == (4 * size, 7 * size)


@pytest.mark.usefixtures("_events")
def test_labels_give_the_rise_inside_each_operation() -> None:
    def run() -> None:
        with mark(4):
            a = taken(4000)
            with mark(5):
                b = taken(1200)
                del b
            c = taken(40)
            assert a.numel() + c.numel() == 4040
        with mark(6):
            pass

    assert profile_operations(run) == {4: 5200, 5: 1200, 6: 0}
    assert profile_operations(run, labels=[5, 9]) == {5: 1200, 9: 0}


def test_labels_work_inside_a_dispatch_mode_and_in_the_backward() -> None:
    seen: list[str] = []

    class Labelled(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            with mark(len(seen) - 1):
                return func(*args, **(kwargs or {}))

    linear = nn.Linear(32, 16)
    x = torch.randn(8, 32)
    upstream = torch.randn(8, 16)

    def run() -> None:
        with Labelled():
            linear(x).backward(upstream)

    highs = profile_operations(run)
    assert not any("profiler" in name for name in seen)
    assert set(highs) == set(range(len(seen)))
    assert highs[seen.index("aten.addmm.default")] == 8 * 16 * 4
    assert highs[seen.index("aten.mm.default")] == 16 * 32 * 4
    assert highs[seen.index("aten.t.default")] == 0


def test_scratch_inside_an_operation_is_seen() -> None:
    x = torch.randn(16, 16)
    column = torch.randn(16, 1).expand(16, 16)

    def run() -> None:
        with mark(1):
            torch.mm(x.t(), x)
        with mark(2):
            torch.mm(column, x)

    highs = profile_operations(run)
    assert highs[1] == 16 * 16 * 4
    # A matrix that is expanded from one column is copied before it is multiplied.
    assert highs[2] == 2 * 16 * 16 * 4


def test_threads_are_merged_by_time() -> None:
    event = meter_module._Event
    main = [
        event("memory", "", 900, 1.0),  # before the measured range
        event("push", "recoup:measured", 0, 2.0),
        event("push", "aten::mm", 0, 3.0),
        event("memory", "", 100, 4.0),
        event("pop", "", 0, 5.0),
        event("memory", "", -100, 8.0),
        event("pop", "", 0, 9.0),
        event("memory", "", 900, 10.0),
    ]
    other = [event("memory", "", 900, 1.5), event("memory", "", 50, 6.0), event("memory", "", 30, 8.5)]
    assert meter_module._net_and_high([other, main]) == (80, 150)


def test_a_running_profiler_is_refused() -> None:
    with torch.autograd.profiler.profile(use_kineto=True), pytest.raises(CaptureError, match="already running"):
        CpuMeter().peak_above(lambda: None)


def test_the_session_ends_when_the_run_fails() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            CpuMeter().peak_above(fail)
    assert CpuMeter().peak_above(lambda: taken(10)) == 10


def test_resident_counts_each_storage_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8))
    model[1].weight = model[0].weight
    weights = 8 * 8 * 4
    norm = 4 * 8 * 4 + 8  # weight, bias, two statistics, the counter
    assert resident_bytes(model) == weights + norm
    model(torch.randn(4, 8)).sum().backward()
    assert resident_bytes(model) == 2 * weights + norm + 2 * 8 * 4
    x = torch.randn(100)
    assert resident_bytes(model, x, [x[10:], {"y": x.view(10, 10)}]) == resident_bytes(model) + 400
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    assert resident_bytes(model, optimizer) == resident_bytes(model) + weights + 2 * 8 * 4


def training(kind: str) -> tuple[nn.Module, torch.optim.Optimizer | None, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*itertools.chain.from_iterable((nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters()) if kind == "adam" else None
    return model, optimizer, torch.randn(32, 64)


@pytest.mark.parametrize("kind", ["plain", "adam"])
def test_measure_peak_is_the_same_however_it_is_started(kind: str) -> None:
    torch.set_num_threads(1)
    model, optimizer, x = training(kind)

    def step() -> None:
        model.zero_grad(set_to_none=True)  # releases gradients that stood before the session
        model(x).square().mean().backward()
        if optimizer is not None:
            optimizer.step()

    first = measure_peak(step, model)
    assert measure_peak(step, model) == first
    assert measure_peak(step, model, warm=True) == first
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    state = 2 * weights + 8 * 4 if optimizer is not None else 0  # two moments, one counter for each of 8 parameters
    if optimizer is not None:
        assert resident_bytes(model, optimizer) == 2 * weights + state
    # Releasing the gradients first makes room for activations before the backward allocates them again.
    saved = 32 * 64 * 4 * 2 * 4
    assert weights + state + x.numel() * 4 + weights <= first <= 2 * weights + state + x.numel() * 4 + saved + weights


def test_measure_peak_by_hand() -> None:
    weight = nn.Parameter(torch.ones(1000))
    model = nn.ParameterList([weight])
    data = torch.ones(1000)

    def step() -> None:
        weight.grad = None
        (weight * data).sum().backward()

    # Standing: weight, data, gradient. The step frees the gradient, makes the product (released before the backward
    # multiplies: only `data` is saved), the sum and its gradient; the backward makes the gradient of the weight.
    assert measure_peak(step, model) == 3 * 4000 + 8


def test_devices() -> None:
    assert isinstance(meter_for("cpu"), CpuMeter)
    assert meter_for("cpu").device == torch.device("cpu")
    assert isinstance(meter_for("cuda:0"), CudaMeter)
    with pytest.raises(UsageError, match="xla"):
        meter_for("xla")
    assert device_of(nn.GELU()) == torch.device("cpu")
    assert device_of(nn.Linear(2, 2, device="meta")) == torch.device("meta")


def test_times_alternate_and_drop_the_warm_up() -> None:
    order: list[str] = []
    told: list[tuple[int, int]] = []
    times = alternate(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")},
        repeats=3,
        warmup=1,
        progress=lambda done, total, text: told.append((done, total)),
    )
    assert order == ["a", "b"] * 4
    assert told == [(done, 8) for done in range(1, 9)]
    assert all(len(taken.all) == 3 and min(taken.all) <= taken.median_seconds <= max(taken.all) for taken in times.values())
    assert time_step(lambda: order.append("c"), repeats=2, warmup=1) >= 0
    assert order.count("c") == 3
    with pytest.raises(UsageError):
        time_step(lambda: None, repeats=0)


def test_clock_and_synchronizer_on_cpu() -> None:
    clock = clock_for("cpu")
    assert isinstance(clock, CpuClock)
    start = clock.now()
    assert clock.seconds(start, clock.now()) >= 0
    synchronizer("cpu")()
