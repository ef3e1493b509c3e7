"""Modules in tiles: gradients as plain up to the order of sums, whatever surrounds the call; refused with a name where that cannot be."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recoup.errors import PlanMismatch, ReplayMismatch, UsageError
from recoup.torch import apply, measure_peak
from recoup.torch.meter import CpuMeter
from tile.hand import ALL, Mlp, Tower, close, gradients, outcome, same_outcome, tiles

GEARS = ("live", "static")


def tower_step(model: Tower, rows: tuple[int, int] = (4, 9)) -> Callable[[], Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(50, rows, generator=generator)

    def step() -> Tensor:
        loss = model(ids, ids)
        loss.backward()
        return loss

    return step


@pytest.mark.parametrize("gear", GEARS)
def test_whole_model(gear: str) -> None:
    model = Tower()
    step = tower_step(model)
    same_outcome(model, step, tiles()(ALL), calls=3 * 5, gear=gear, steps=5)


@given(batch=st.integers(1, 4), tokens=st.integers(2, 9), pieces=st.integers(1, 40), bias=st.booleans(), lead=st.booleans())
def test_any_number_of_pieces(batch: int, tokens: int, pieces: int, bias: bool, lead: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Mlp(8, 24, bias), nn.LayerNorm(8))
    x = torch.randn((batch, tokens, 8) if lead else (batch * tokens, 8), requires_grad=True)

    def step() -> Tensor:
        x.grad = None
        result = model(x)
        (result * torch.linspace(-1, 2, result.numel()).view_as(result)).sum().backward()
        assert x.grad is not None
        return torch.cat([result.flatten(), x.grad.flatten()])

    same_outcome(model, step, tiles()({"0": pieces}), calls=1)


@pytest.mark.parametrize("gear", GEARS)
def test_the_input_may_be_dropped_and_rebuilt(gear: str) -> None:
    model = Tower()
    plan = tiles(recompute=("blocks.[0-1].norm/native_layer_norm",))(ALL)
    same_outcome(model, tower_step(model), plan, calls=15, gear=gear, steps=5)
    with apply(model, plan) as applied:
        tower_step(model)()
    report = applied.report()
    assert report.dropped_bytes > 0
    assert report.sites_met == report.sites_expected == 2


def test_transients_shrink() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 2048), nn.GELU(), nn.Linear(2048, 64)))
    x = torch.randn(2048, 64)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()

    step()
    model.zero_grad(set_to_none=True)
    plain = measure_peak(step, model)
    with apply(model, tiles()({"1": 16})):
        tiled = measure_peak(step, model)
    assert plain > 5 * tiled


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    model = Tower().to(dtype)
    # In bfloat16 the plain sums are rounded too; the exact ones are compared elsewhere.
    same_outcome(model, tower_step(model), tiles()(ALL), calls=3, slack=64 if dtype is torch.float64 else 4)


def test_narrow_gradients_add_up_in_float32() -> None:
    model = nn.Sequential(nn.Linear(32, 32)).bfloat16()
    x = torch.randn(512, 32).bfloat16()
    exact = nn.Sequential(nn.Linear(32, 32)).double()
    exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    exact(x.double()).sum().backward()

    def step() -> Tensor:
        model(x).sum().backward()
        return x.sum()

    errors = []
    for plan in (None, tiles()({"0": 64})):
        found = outcome(model, step, plan)[1]["0.weight"]
        assert found is not None
        errors.append(float((found.double() - exact[0].weight.grad).abs().max()))
    assert errors[1] <= errors[0] * 2


def test_autocast_with_the_backward_outside_of_it() -> None:
    model = Tower()
    ids = torch.randint(50, (4, 9))

    def step() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, ids)
        loss.backward()
        return loss

    same_outcome(model, step, tiles()(ALL), calls=3, slack=2e5)


def test_frozen_weights_and_adapters() -> None:
    model = Tower()
    model.requires_grad_(False)
    model.blocks[0].mlp.up.weight.requires_grad_(True)
    model.head.weight.requires_grad_(True)
    plain, grads, _ = outcome(model, tower_step(model))
    tiled, tiled_grads, _ = outcome(model, tower_step(model), tiles()(ALL))
    assert {name for name, grad in tiled_grads.items() if grad is not None} == {"blocks.0.mlp.up.weight", "head.weight"}
    assert torch.equal(plain, tiled)
    assert all(close(tiled_grads[name], grad) for name, grad in grads.items())


def test_tied_weights() -> None:
    model = Tower()
    model.head.weight = model.embed.weight
    same_outcome(model, tower_step(model), tiles()(ALL), calls=3)


def test_an_activation_shared_by_all_blocks_keeps_its_numbers() -> None:
    shared = nn.GELU()
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 32), shared, nn.Linear(32, 8)) for _ in range(3)])
    x = torch.randn(40, 8)

    def step() -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss

    plan = tiles(recompute=("0.1@2/gelu",))({"1": 4})
    same_outcome(model, step, plan, calls=1)
    with apply(model, plan) as applied:
        step()
    assert applied.report().dropped_bytes == 40 * 32 * 4


def test_gradients_add_up_and_hooks_on_parameters_run_once() -> None:
    model = Tower()
    calls: list[int] = []
    model.blocks[0].mlp.up.weight.register_hook(lambda grad: calls.append(1))
    step = tower_step(model)

    def twice() -> Tensor:
        step()
        return step()

    same_outcome(model, twice, tiles()(ALL), calls=6)
    assert len(calls) == 4


def test_retain_graph_and_partial_backwards() -> None:
    model = Tower()
    ids = torch.randint(50, (4, 9))

    def step() -> Tensor:
        loss = model(ids, ids)
        loss.backward(retain_graph=True)
        (some,) = torch.autograd.grad(loss, [model.blocks[0].mlp.gate.weight], retain_graph=True)
        loss.backward()
        return some

    same_outcome(model, step, tiles()(ALL), calls=3)


def test_double_backward_is_plain_and_right() -> None:
    model = Tower().double()
    ids = torch.randint(50, (4, 9))

    def step() -> Tensor:
        loss = model(ids, ids)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        penalty = sum(grad.square().sum() for grad in grads)
        assert isinstance(penalty, Tensor)
        penalty.backward()
        return penalty

    same_outcome(model, step, tiles()(ALL), calls=3, slack=4096)


def test_flags_and_tensors_are_those_of_the_forward() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.scale = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * (self.scale if self.training else 1.0)

    model = nn.Sequential(Scaled(), nn.Tanh())
    x = torch.randn(12, 8)

    def step() -> Tensor:
        model.train()
        model[0].scale = 2.0
        loss = model(x).sum()
        model.eval()
        model[0].scale = 7.0
        loss.backward()
        assert not model[0].training
        assert model[0].scale == 7.0
        return loss

    same_outcome(model, step, tiles()({"0": 4}), calls=1)
    other = {name: value.detach() + 1 for name, value in model.named_parameters()}
    for value in other.values():
        value.requires_grad_()

    def called() -> Tensor:
        loss = torch.func.functional_call(model, other, (x,)).sum()
        return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(other.values()))])

    plain = called()
    with apply(model, tiles()({"0": 4})) as applied:
        assert close(called(), plain)
    assert applied.report().tiled_calls == 1


def test_other_threads_may_call_the_model_during_a_backward() -> None:
    """The module is not touched while pieces run again: a forward in another thread gets all of its gradients."""
    model = Tower()
    ids = torch.randint(50, (4, 9))
    reference = outcome(model, tower_step(model))[1]
    wrong: list[str] = []

    def work() -> None:
        generator = torch.Generator().manual_seed(1)
        mine = torch.randint(50, (4, 9), generator=generator)
        for _ in range(6):
            names, parameters = zip(*model.named_parameters(), strict=True)
            grads = torch.autograd.grad(model(mine, mine), parameters)
            wrong.extend(name for name, grad in zip(names, grads, strict=True) if not close(grad, reference[name]))

    with apply(model, tiles()(ALL)):
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        model(ids, ids)
    assert wrong == []


def test_compiled_models_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].compile(backend="eager")
    with pytest.raises(PlanMismatch, match="runs 1 in tiles, which compiled models do not"):
        apply(model, tiles()({"1": 2}))


def test_a_weight_written_before_the_backward_is_an_error() -> None:
    model = Tower()
    ids = torch.randint(50, (4, 9))
    with apply(model, tiles()({"blocks.0.mlp": 3})):
        loss = model(ids, ids)
        with torch.no_grad():
            model.blocks[0].mlp.down.weight.mul_(2)
        with pytest.raises((ReplayMismatch, RuntimeError), match="modified by an inplace operation"):
            loss.backward()


def test_a_number_that_no_one_sees_change_is_an_error() -> None:
    numbers = [1.0]

    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * numbers[0]

    model = nn.Sequential(Outside(), nn.Tanh())
    with apply(model, tiles()({"0": 4})):
        loss = model(torch.randn(12, 8)).sum()
        numbers[0] = 3.0
        with pytest.raises(ReplayMismatch, match=r"0, run in tiles: rows from 0 on"):
            loss.backward()
    assert model[0].linear.weight.grad is None


def test_a_tensor_from_elsewhere_that_takes_gradients_is_an_error() -> None:
    outside = torch.ones(8, requires_grad=True)

    class Outside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * outside

    model = nn.Sequential(nn.Linear(8, 8), Outside())
    with apply(model, tiles()({"1": 4})):
        loss = model(torch.randn(12, 8)).sum()
        if loss.requires_grad:
            with pytest.raises(ReplayMismatch, match="neither its input nor one of its parameters"):
                loss.backward()


@pytest.mark.parametrize("kind", ["forward", "pre", "backward", "random", "shape", "two", "one row"])
def test_what_cannot_run_in_pieces_runs_plain_and_says_so(kind: str) -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return x.tanh() * scale

    inner: nn.Module = nn.Linear(8, 8)
    if kind == "random":
        inner = nn.Dropout(0.5)
    elif kind == "shape":
        inner = nn.Flatten(0)
    elif kind == "two":
        inner = Two()
    model = nn.ModuleDict({"first": nn.Linear(8, 8), "part": inner})
    calls: list[int] = []
    if kind == "forward":
        inner.register_forward_hook(lambda *_: calls.append(1))
    elif kind == "pre":
        inner.register_forward_pre_hook(lambda *_: calls.append(1))
    elif kind == "backward":
        inner.register_full_backward_hook(lambda *_: calls.append(1))

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor) -> Tensor:
            x = model["first"](x)
            return model["part"](x, scale=2.0) if kind == "two" else model["part"](x)

    root = Root()
    x = torch.randn(1 if kind == "one row" else 6, 8)

    def step() -> Tensor:
        torch.manual_seed(3)
        loss = root(x).square().sum()
        loss.backward()
        return loss

    step()
    plain = gradients(root)
    root.zero_grad()
    with apply(root, tiles()({"parts.part": 2})) as applied:
        step()
    tiled = gradients(root)
    assert all(torch.equal(tiled[name], grad) for name, grad in plain.items() if grad is not None)
    report = applied.report()
    assert report.tiled_calls == 0
    assert "not run in tiles" in report.kept["parts.part"]
    assert kind not in ("forward", "pre", "backward") or len(calls) == 2


def test_writing_its_own_input_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)))
    with apply(model, tiles()({"1": 2})), pytest.raises(UsageError, match="1 writes its input in place"):
        model(torch.randn(6, 8))


def test_inside_of_checkpoint_it_runs_plain() -> None:
    model = Tower()

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = model

        def forward(self, ids: Tensor) -> Tensor:
            x = self.tower.embed(ids)
            for block in self.tower.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x.square().sum()

    root, ids = Root(), torch.randint(50, (4, 9))

    def step() -> Tensor:
        loss = root(ids)
        loss.backward()
        return loss

    plain = outcome(root, step)[1]
    root.zero_grad()
    with apply(root, tiles()({"tower.blocks.0.mlp": 3})) as applied:
        step()
    assert all(close(gradients(root)[name], grad) for name, grad in plain.items())
    assert "torch.utils.checkpoint" in applied.report().kept["tower.blocks.0.mlp"]


def test_an_exception_in_the_middle_leaves_nothing_behind() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.left = [1 << 30]

        def forward(self, x: Tensor) -> Tensor:
            self.left[0] -= 1
            if self.left[0] < 0:
                raise KeyError("enough")
            return self.linear(x)

    model = nn.Sequential(nn.Linear(8, 8), Fails())
    x = torch.randn(8, 8)
    with apply(model, tiles()({"1": 4})):
        model[1].left[0] = 2
        with pytest.raises(KeyError, match="enough"):
            model(x)
        model[1].left[0] = 1 << 30
        loss = model(x).sum()
        model[1].__class__.forward, kept = (lambda self, x: 1 / 0), model[1].__class__.forward
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        model[1].__class__.forward = kept
        model(x).sum().backward()


def test_nothing_outlives_the_step() -> None:
    model = Tower()
    ids = torch.randint(50, (64, 9))

    def forward_alone() -> None:
        model(ids, ids)
        model(ids).argmax(-1)

    def step() -> None:
        model(ids, ids).backward()
        model.zero_grad(set_to_none=True)
        forward_alone()

    gc.collect()
    gc.disable()
    try:
        with apply(model, tiles()(ALL)):
            step()
            assert CpuMeter().net_and_peak(step, before=step)[0] == 0
    finally:
        gc.enable()


def test_without_gradients_nothing_is_tiled() -> None:
    model = Tower()
    ids = torch.randint(50, (4, 9))
    with apply(model, tiles()(ALL)) as applied, torch.no_grad():
        loss = model(ids, ids)
    assert torch.equal(loss, model(ids, ids))
    assert applied.report().tiled_calls == 0


def test_unknown_modules_are_refused() -> None:
    with pytest.raises(PlanMismatch, match=r"no module 'blocks\.7\.mlp'"):
        apply(Tower(), tiles()({"blocks.7.mlp": 2}))
