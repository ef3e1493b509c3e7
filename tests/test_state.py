"""A snapshot puts back all that a step changes: repeating from it gives the same bits."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from recoup.errors import CaptureError
from recoup.torch.state import Snapshot, as_bytes, find_state, own_attributes, reachable, same_bits

torch.set_num_threads(1)


class Counting(nn.Module):
    """Has a dropout, a batch norm, a counter, a tensor that is no buffer, a buffer it rebinds and its own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.5)
        self.calls = 0
        self.tracker = torch.zeros(3)
        self.generator = torch.Generator().manual_seed(5)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.tracker += 1
        noise = torch.rand(x.shape, generator=self.generator)
        out = self.dropout(self.norm(self.linear(x + noise)))
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
        self.last = out.detach().sum()
        return out


def full_step(model: nn.Module) -> tuple[Callable[[], torch.Tensor], torch.optim.Optimizer, object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    numbers = np.random.default_rng(3)
    count = 0

    def step() -> torch.Tensor:
        nonlocal count
        count += 1
        optimizer.zero_grad(set_to_none=count % 2 == 0)
        x = torch.randn(8, 6) + random.random() + float(np.random.rand()) + float(numbers.random()) + count
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.detach()

    return step, optimizer, schedule


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [value for state in optimizer.state.values() for value in state.values()]
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [tensor.detach().clone() for tensor in [*model.parameters(), *model.buffers(), *grads, *moments]]


@pytest.mark.parametrize("before", [0, 1, 2])
def test_steps_repeat_bit_for_bit(before: int) -> None:
    torch.manual_seed(0)
    model = Counting()
    step, optimizer, _ = full_step(model)
    for _ in range(before):
        step()
    parameters = list(model.parameters())
    grads = [parameter.grad for parameter in parameters]
    snapshot = Snapshot.take(model, step)
    stood = everything(model, optimizer)
    losses = [step() for _ in range(3)]
    after = everything(model, optimizer)
    for _ in range(2):
        snapshot.restore()
        assert all(map(same_bits, everything(model, optimizer), stood))
        assert len(everything(model, optimizer)) == len(stood)
        assert all(parameter.grad is grad for parameter, grad in zip(parameters, grads, strict=True))
        assert (model.calls, model.tracker.tolist()) == (before, [before] * 3)
        assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**before
        assert all(map(same_bits, [step() for _ in range(3)], losses))
        assert all(map(same_bits, everything(model, optimizer), after))
        assert all(map(lambda left, right: left is right, model.parameters(), parameters))


def test_identity_of_buffers_and_gradients_comes_back() -> None:
    model = Counting()
    step, _, _ = full_step(model)
    step()
    mean, tracker = model.mean, model.tracker
    grad = model.linear.weight.grad
    with Snapshot.take(model, step):
        step()
        step()
        assert model.mean is not mean
    assert model.mean is mean
    assert model.tracker is tracker
    assert model.linear.weight.grad is grad


def test_training_flags_and_unchanged_versions() -> None:
    model = Counting()
    step, _, _ = full_step(model)
    model.dropout.eval()
    snapshot = Snapshot.take(model, step)
    version = model.linear.weight._version
    model.eval()
    model.dropout.train()
    snapshot.restore()
    assert model.training
    assert not model.dropout.training
    assert model.linear.weight._version == version


def test_the_context_restores_when_the_step_fails() -> None:
    model = nn.Linear(2, 2)
    weight = model.weight.detach().clone()

    def step() -> None:
        with torch.no_grad():
            model.weight.zero_()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), Snapshot.take(model, step):
        step()
    assert same_bits(model.weight, weight)


def test_tied_and_expanded_tensors() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model.register_buffer("wide", torch.ones(1, 4).expand(3, 4))
    snapshot = Snapshot.take(model, lambda: None)
    with torch.no_grad():
        model[0].weight.zero_()
    snapshot.restore()
    assert model[1].weight is model[0].weight
    assert model[0].weight.abs().sum() > 0


class Trainer:
    """An object whose method is the step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.teacher = nn.Linear(6, 6)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.seen = 0
        self.average = torch.zeros(())

    def step(self) -> torch.Tensor:
        self.seen += 1
        loss = self.model(torch.ones(4, 6)).sum() * self.seen
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.average.add_(loss.detach())
        self.teacher.weight.data.lerp_(self.model.linear.weight.data, 0.1)
        return loss.detach()


@pytest.mark.parametrize(
    "wrap", [lambda trainer: trainer.step, lambda trainer: lambda: trainer.step(), lambda t: functools.partial(t.step)]
)
def test_a_trainer_is_found_through_method_closure_and_partial(wrap: Callable[[Trainer], Callable[[], torch.Tensor]]) -> None:
    trainer = Trainer(Counting())
    step = wrap(trainer)
    found = find_state(step, trainer.model)
    assert found[0] is trainer.model
    assert any(item is trainer.optimizer for item in found)
    assert any(item is trainer.teacher for item in found)
    snapshot = Snapshot.take(trainer.model, step)
    teacher = trainer.teacher.weight.detach().clone()
    losses = [step(), step()]
    snapshot.restore()
    assert (trainer.seen, float(trainer.average)) == (0, 0.0)
    assert same_bits(trainer.teacher.weight, teacher)
    assert all(map(same_bits, [step(), step()], losses))


GLOBAL_TENSOR = torch.zeros(2)


def helper() -> None:
    GLOBAL_TENSOR.add_(1)


def test_globals_are_found_through_functions_of_the_same_package() -> None:
    def step(extra: torch.Tensor = torch.ones(3)) -> None:  # noqa: B008
        helper()
        extra.add_(1)

    assert any(item is GLOBAL_TENSOR for item in reachable(step))
    snapshot = Snapshot.take(nn.Linear(1, 1), step)
    step()
    assert GLOBAL_TENSOR.tolist() == [1, 1]
    snapshot.restore()
    assert GLOBAL_TENSOR.tolist() == [0, 0]
    assert step.__defaults__ is not None
    assert step.__defaults__[0].tolist() == [1, 1, 1]


def test_what_is_not_bound_yet_is_no_error() -> None:
    def outer() -> Callable[[], object]:
        def step() -> object:
            return later

        snapshot = Snapshot.take(nn.Linear(1, 1), step)
        later = 3
        snapshot.restore()
        return step

    assert outer()() == 3


def test_a_state_that_cannot_be_copied_is_named() -> None:
    class Stubborn:
        def state_dict(self) -> dict[str, object]:
            return {"numbers": (number for number in range(3))}

        def load_state_dict(self, state: dict[str, object]) -> None:
            raise AssertionError

    stubborn = Stubborn()
    with pytest.raises(CaptureError, match="Stubborn"):
        Snapshot.take(nn.Linear(1, 1), lambda: stubborn)


def test_own_attributes_are_the_plain_ones() -> None:
    assert set(own_attributes(Counting())) == {"calls", "tracker", "training"}


def test_same_bits() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor(0.0), torch.tensor(-0.0))
    assert not same_bits(torch.ones(2), torch.ones(2, dtype=torch.float64))
    assert not same_bits(torch.ones(2), torch.ones(1, 2))
    assert same_bits(torch.ones(2, 3).t(), torch.ones(3, 2))
    assert same_bits(torch.tensor([], dtype=torch.bool), torch.tensor([], dtype=torch.bool))
    assert same_bits(torch.tensor([True]), torch.tensor([True]))
    sparse = torch.eye(3).to_sparse()
    assert same_bits(sparse, sparse.clone())
    assert not same_bits(sparse, 2 * sparse)
    assert same_bits(torch.tensor(1j).conj(), torch.tensor(complex(0.0, -1.0)))


def test_one_element_of_any_stride_has_bytes():
    single = torch.arange(12.0).as_strided((1, 1), (7, 5), 3)
    assert single.is_contiguous()
    assert as_bytes(single).tolist() == as_bytes(torch.tensor([3.0])).tolist()
    assert same_bits(single, torch.tensor([[3.0]]))
    assert as_bytes(torch.empty(0, 3)).numel() == 0
