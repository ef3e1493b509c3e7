"""``checkpoint(fn)``: gradients as plain, bit for bit, in all that a region can do; less memory; nothing left behind."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recoup.errors import ReplayMismatch
from recoup.torch import RegionReport, checkpoint
from recoup.torch.meter import CpuMeter
from recoup.torch.private import below_modes, outer_saved_tensor_hooks
from recoup.torch.state import same_bits

torch.set_num_threads(1)

Region = Callable[..., Any]


def plain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)


@pytest.fixture(autouse=True)
def no_state_left() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    assert below_modes() == 0
    assert outer_saved_tensor_hooks() is None
    gc.enable()


def assert_same(run: Callable[[Region], list[Any]]) -> RegionReport:
    """Run plainly and in a region from one seed, and compare; the report of the last region."""
    report = RegionReport()
    torch.manual_seed(1)
    base = run(plain)
    torch.manual_seed(1)
    got = run(lambda fn, *args, **kwargs: checkpoint(fn, *args, report=report, **kwargs))
    assert len(base) == len(got)
    for number, (left, right) in enumerate(zip(base, got, strict=True)):
        assert same_bits(left, right) if isinstance(left, Tensor) and isinstance(right, Tensor) else left == right, number
    return report


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32), nn.Tanh())


def grads(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def x_of(*shape: int) -> Tensor:
    return torch.randn(*(shape or (32, 32)), requires_grad=True)


# -- numbers


def test_autocast_and_a_gradient_scaler() -> None:
    def run(region: Region) -> list[Any]:
        model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = region(model, x_of()).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
        return [*losses, *(parameter.detach() for parameter in model.parameters()), scaler.get_scale()]

    assert assert_same(run).dropped_bytes > 0


def test_frozen_and_tied_weights() -> None:
    def run(region: Region) -> list[Any]:
        model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        model[4].weight = model[0].weight
        model[2].requires_grad_(False)
        region(model, torch.randn(32, 32)).sum().backward()
        return grads(model)

    assert assert_same(run).dropped_bytes > 0


def test_one_module_called_several_times() -> None:
    def run(region: Region) -> list[Any]:
        model, x = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Tanh()), x_of()
        a = region(model, region(model, x))
        b = region(lambda t: model(model(t)), x)
        (a * b).sum().backward()
        return [x.grad, *grads(model)]

    assert_same(run)


def test_arguments_and_results_of_every_kind() -> None:
    def fn(x: Tensor, parts: dict[str, list[Tensor]], flag: bool, *, scale: float, name: str | None = None) -> tuple[Any, ...]:
        h = torch.tanh(torch.tanh(x) * parts["w"][0]) * scale
        return h if flag else x, {"name": name, "n": [3, None]}, x, torch.arange(3)

    def run(region: Region) -> list[Any]:
        x, w = x_of(), x_of()
        h, rest, same, numbers = region(fn, x, {"w": [w]}, True, scale=0.5, name="n")
        assert same is x
        h.sum().backward()
        return [x.grad, w.grad, rest, numbers]

    assert assert_same(run).dropped_bytes > 0


class Scale(torch.autograd.Function):
    """Saves an input, an output and something in between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        between = torch.sin(x)
        out = between * w
        ctx.save_for_backward(x, w, between, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w, between, out = ctx.saved_tensors
        return grad * torch.cos(x) * w, (grad * between).sum(0) + out.sum() * 0


def test_custom_functions() -> None:
    def run(region: Region) -> list[Any]:
        x, w = x_of(), torch.randn(32, requires_grad=True)
        region(lambda t, w: torch.tanh(Scale.apply(torch.tanh(t), w)), x, w).sum().backward()
        return [x.grad, w.grad]

    assert assert_same(run).dropped_bytes > 0


class Unseen(torch.autograd.Function):
    """Stands for a kernel launched behind the dispatcher's back: it fills memory from empty()."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out.numpy()[:] = x.detach().numpy() * 2
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2 + ctx.saved_tensors[0] * 0


def test_memory_filled_behind_the_dispatcher_is_kept_and_named() -> None:
    def run(region: Region) -> list[Any]:
        x = x_of()
        region(lambda t: torch.tanh(torch.sin(Unseen.apply(torch.tanh(t)))), x).sum().backward()
        return [x.grad]

    report = assert_same(run)
    assert report.dropped_bytes > 0
    assert any("no operation the dispatcher sees has filled" in reason for reason in report.kept.values())


def inplace(x: Tensor) -> Tensor:
    h = torch.tanh(x)
    h = h * 2
    h.add_(1).mul_(0.5)
    h.relu_()
    return torch.sin(h)


def views(x: Tensor) -> Tensor:
    h = torch.sin(x) * 2
    rows = h.view(16, 64)
    rows[::2] += 1
    h.t()[:, 3:9].mul_(0.25)
    h[:, :16].zero_()
    return torch.tanh(torch.exp(h.narrow(0, 4, 8)).sum(1) + torch.sin(rows).mean())


def kept_across_an_edit(x: Tensor) -> Tensor:
    h = torch.sin(x)
    g = torch.exp(h.clone())  # saved, then its source is edited
    h.mul_(3)
    return torch.tanh(g * h.detach() + torch.cos(h))


def out_arguments(x: Tensor) -> Tensor:
    with torch.no_grad():
        table = torch.empty(32, 32)
        torch.mul(x, 2, out=table)
        table.copy_(table.t().clone())
    return torch.tanh(torch.sin(x * table) * table)


@pytest.mark.parametrize("fn", [inplace, views, kept_across_an_edit, out_arguments])
def test_edits_in_place(fn: Callable[[Tensor], Tensor]) -> None:
    def run(region: Region) -> list[Any]:
        x = x_of()
        y = region(fn, x)
        y.sum().backward()
        return [y.detach(), x.grad]

    assert assert_same(run).dropped_bytes > 0


def test_a_result_edited_after_the_region() -> None:
    def run(region: Region) -> list[Any]:
        x = x_of()
        y = region(lambda t: torch.sin(torch.tanh(t)) * 2, x)  # the product by a number saves nothing
        y.mul_(3)
        y.sum().backward()
        return [x.grad]

    assert_same(run)


def test_a_saved_result_edited_after_the_region() -> None:
    """Plain autograd must refuse, since the saved result is gone; here it was dropped and is rebuilt."""

    def run(region: Region, x: Tensor, factor: Tensor) -> Tensor:
        y = region(lambda t: torch.tanh(torch.sin(t)), x)
        return y.mul_(factor)

    factor = torch.tensor(3.0)
    x, want = x_of(), x_of()
    want.data.copy_(x.data)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(plain, x, factor).sum().backward()
    (torch.tanh(torch.sin(want)) * factor).sum().backward()
    run(checkpoint, x, factor).sum().backward()
    assert x.grad is not None
    assert want.grad is not None
    assert torch.equal(x.grad, want.grad)


def test_a_detached_copy_of_a_weight_written_afterwards() -> None:
    model, x = net(), x_of()
    y = checkpoint(model, x)
    model[0].weight.detach().mul_(0.5)
    with pytest.raises(ReplayMismatch, match=r"0\.weight"):
        y.sum().backward()


# -- backward passes


def test_double_backward() -> None:
    def run(region: Region) -> list[Any]:
        x, model = x_of(), net()
        (first,) = torch.autograd.grad(region(model, x).square().sum(), x, create_graph=True)
        first.square().sum().backward()
        return [first.detach(), x.grad, *grads(model)]

    assert assert_same(run).dropped_bytes > 0


def test_the_graph_is_retained() -> None:
    def run(region: Region) -> list[Any]:
        x, model = x_of(), net()
        y = region(model, x)
        for _ in range(3):
            y.sum().backward(retain_graph=True)
        y.square().sum().backward()
        return [x.grad, *grads(model)]

    assert_same(run)


def test_a_second_backward_is_refused_as_by_autograd() -> None:
    y = checkpoint(net(), x_of()).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


def test_a_partial_backward_and_then_the_whole() -> None:
    def run(region: Region) -> list[Any]:
        model, x = net(), x_of()
        h = []

        def fn(t: Tensor) -> Tensor:
            h.append(model[1](model[0](t)))
            return model[4](model[3](model[2](h[0])))

        y = region(fn, x)
        (part,) = torch.autograd.grad(y.sum(), h[0], retain_graph=True)
        y.sum().backward()
        return [part, x.grad, *grads(model)]

    assert assert_same(run).dropped_bytes > 0


def test_only_some_results_are_used() -> None:
    def run(region: Region) -> list[Any]:
        x, z = x_of(), x_of()
        a, _ = region(lambda s, t: (torch.tanh(torch.sin(s)), torch.tanh(torch.sin(t))), x, z)
        a.sum().backward()
        return [x.grad, z.grad]

    assert_same(run)


def test_a_forward_without_a_backward() -> None:
    model = net()
    gc.collect()
    gc.disable()
    held = weakref.ref(checkpoint(model, x_of()).untyped_storage())
    assert held() is None
    checkpoint(model, x_of()).sum().backward()
    assert all(grad is not None for grad in grads(model))


# -- modes


def test_without_gradients_it_only_calls() -> None:
    model, report = net(), RegionReport()
    x = x_of()
    with torch.no_grad():
        y = checkpoint(model, x, report=report)
    with torch.inference_mode():
        z = checkpoint(model, x, report=report)
    assert not y.requires_grad
    assert torch.equal(y, z)
    assert report.dropped_bytes == 0


def test_eval_mode() -> None:
    def run(region: Region) -> list[Any]:
        model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Tanh(), nn.Sigmoid()).eval()
        x = x_of()
        region(model, x).sum().backward()
        return [x.grad, *grads(model), *model.buffers()]

    assert assert_same(run).dropped_bytes > 0


def test_no_grad_inside_a_region() -> None:
    def run(region: Region) -> list[Any]:
        model, x = net(), x_of()

        def fn(t: Tensor) -> Tensor:
            with torch.no_grad():
                scale = model(t).abs()
            return torch.tanh(torch.sin(model(t)) * scale)

        region(fn, x).sum().backward()
        return [x.grad, *grads(model)]

    assert_same(run)


def test_nested() -> None:
    def run(region: Region) -> list[Any]:
        model, x = net(), x_of()
        region(lambda t: torch.sin(region(model, torch.sin(region(model, t)))), x).sum().backward()
        return [x.grad, *grads(model)]

    assert_same(run)


def test_use_reentrant_is_accepted() -> None:
    x = x_of()
    checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.cos(x.detach()))


def test_sparse_gradients_and_other_layouts() -> None:
    def run(region: Region) -> list[Any]:
        table = nn.Embedding(50, 32, sparse=True)
        ids = torch.randint(0, 50, (40,))
        adjacency = torch.eye(40).to_sparse()
        region(lambda: torch.tanh(torch.sparse.mm(adjacency, torch.sin(table(ids))))).sum().backward()
        assert table.weight.grad is not None
        return [table.weight.grad.to_dense()]

    assert_same(run)


def test_complex_numbers() -> None:
    def run(region: Region) -> list[Any]:
        x = x_of()
        region(lambda t: torch.fft.ifft(torch.fft.fft(torch.tanh(t)).conj() * 2j).real.sin(), x).sum().backward()
        return [x.grad]

    assert_same(run)


# -- what goes wrong


def test_an_exception_in_the_region() -> None:
    model, x = net(), x_of()

    def fails(t: Tensor) -> Tensor:
        model(t)
        raise ZeroDivisionError("in the region")

    for kind in (ZeroDivisionError, KeyboardInterrupt):

        def interrupted(t: Tensor, kind: type[BaseException] = kind) -> Tensor:
            model(t)
            raise kind("in the region")

        with pytest.raises(kind, match="in the region"):
            checkpoint(interrupted, x)
        assert below_modes() == 0
        assert outer_saved_tensor_hooks() is None
    with pytest.raises(ZeroDivisionError):
        checkpoint(lambda t: checkpoint(fails, t), x)
    report = RegionReport()
    checkpoint(model, x, report=report).sum().backward()
    assert report.dropped_bytes > 0


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_in_the_backward(kind: type[BaseException]) -> None:
    model, x = net(), x_of()
    fails = [True]

    def hook(grad: Tensor) -> None:
        if fails[0]:
            raise kind("in the backward")

    def fn(t: Tensor) -> Tensor:
        h = model[1](model[0](t))
        h.register_hook(hook)
        return model[4](model[3](model[2](h)))

    want = x_of()
    want.data.copy_(x.data)
    net()(want).sum().backward()
    y = checkpoint(fn, x)
    with pytest.raises(kind, match="in the backward"):
        y.sum().backward(retain_graph=True)
    assert below_modes() == 0
    assert outer_saved_tensor_hooks() is None
    assert torch._C._current_graph_task_id() == -1
    fails[0] = False
    model.zero_grad()
    y.sum().backward()  # the same graph once more
    assert x.grad is not None
    assert want.grad is not None
    assert torch.equal(x.grad, want.grad)
    gc.collect()
    gc.disable()
    held = weakref.ref(y.untyped_storage())
    del y
    assert held() is None


def test_an_exception_leaves_the_users_modes() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def fails(t: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with Mode():
        with pytest.raises(KeyboardInterrupt):
            checkpoint(fails, x_of())
        assert below_modes() == 1
        checkpoint(torch.sin, x_of()).sum().backward()
        assert below_modes() == 1


def test_threads() -> None:
    wrong: list[int] = []

    def train(seed: int) -> None:
        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(seed)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Tanh())
        for _ in range(15):
            data = torch.randn(32, 32, generator=generator)
            a, b = data.clone().requires_grad_(), data.clone().requires_grad_()
            model(a).sum().backward()
            checkpoint(model, b).sum().backward()
            assert a.grad is not None
            assert b.grad is not None
            wrong.append(int(not torch.equal(a.grad, b.grad)))

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0] * 45


def test_the_backward_in_another_thread() -> None:
    x, want = x_of(), x_of()
    want.data.copy_(x.data)
    net()(want).sum().backward()
    y = checkpoint(net(), x)
    thread = threading.Thread(target=lambda: y.sum().backward())
    thread.start()
    thread.join()
    assert x.grad is not None
    assert want.grad is not None
    assert torch.equal(x.grad, want.grad)


# -- memory


def deep() -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64), nn.Tanh())]
    return nn.Sequential(*layers)


def peak(region: Region) -> tuple[int, int]:
    model, x = deep(), torch.randn(256, 64)

    def step() -> None:
        model.zero_grad()
        h = x
        for block in model:
            h = region(block, h)
        h.sum().backward()

    step()
    net_bytes, high = CpuMeter().net_and_peak(step, before=step)
    return net_bytes, high


def test_the_peak_is_lower_and_nothing_is_left() -> None:
    base_net, base = peak(plain)
    got_net, got = peak(checkpoint)
    assert base_net == got_net == 0
    assert got < 0.6 * base
    theirs = peak(lambda fn, x: torch.utils.checkpoint.checkpoint(fn, x, use_reentrant=False))[1]
    assert got <= theirs * 1.05


def test_no_leak_from_step_to_step() -> None:
    model = deep()

    def steps() -> None:
        for _ in range(5):
            checkpoint(model, torch.randn(16, 64)).sum().backward()
            checkpoint(model, torch.randn(16, 64))  # no backward
            with pytest.raises(ZeroDivisionError):
                checkpoint(lambda t: model(t).sum() / (1 // 0), torch.randn(16, 64))
            model.zero_grad()

    steps()
    gc.collect()
    gc.disable()
    assert CpuMeter().net_and_peak(steps, before=steps)[0] == 0


# -- the report


def test_the_report_says_what_was_dropped_and_kept() -> None:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 64)

        def forward(self, x: Tensor) -> Tensor:
            scores, index = torch.tanh(self.linear(x)).topk(32)
            return torch.sin(scores) * index

    report = RegionReport()
    checkpoint(Picks(), x_of(), report=report).sum().backward()
    # tanh's result, the top scores that sin saves, the sines that the product does not need saved
    assert report.dropped_bytes >= 32 * 64 * 4 + 32 * 32 * 4
    assert report.copied_bytes == 0
    assert report.kept == {"Picks/topk:1": "a decision (indices), which must not flip"}
    assert repr(report).startswith(f"RegionReport(dropped_bytes={report.dropped_bytes}, copied_bytes=0, kept=")


def test_small_tensors_are_not_worth_it() -> None:
    report = RegionReport()
    checkpoint(lambda t: torch.tanh(torch.sin(t)), x_of(8, 8), report=report).sum().backward()
    assert report.dropped_bytes == 0


def test_a_copy_ahead_of_a_write_is_counted() -> None:
    report, position = RegionReport(), torch.ones(32, 32)

    def fn(t: Tensor) -> Tensor:
        y = torch.tanh(torch.sin(t + position))
        position.add_(1)
        return y

    checkpoint(fn, x_of(), report=report).sum().backward()
    assert report.copied_bytes == position.nbytes


def test_the_report_is_filled_when_the_region_fails() -> None:
    report, model = RegionReport(), net()
    with pytest.raises(ZeroDivisionError):
        checkpoint(lambda t: model(t).sum() / (1 // 0), x_of(), report=report)
    assert report.dropped_bytes > 0


def test_unknown_operators_are_kept_and_named() -> None:
    with torch.library._scoped_library("recoup_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        report, x = RegionReport(), x_of()

        def fn(t: Tensor) -> Tensor:
            with torch.no_grad():
                scale = torch.ops.recoup_test.twice(torch.tanh(t))
            return torch.sin(torch.sin(t) * scale)

        checkpoint(fn, x, report=report).sum().backward()
    assert any("'recoup_test'" in reason for reason in report.kept.values())
