"""Deferred logits: cross-entropy in pieces wherever it is, and plain values for whoever wants them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from recoup.errors import ReplayMismatch, UsageError
from recoup.torch import apply, measure_peak
from tile.hand import Tower, close, gradients, outcome, same_outcome, tiles

LOSS = {"head/cross_entropy": 4}


@given(
    ignored=st.sampled_from([-100, 0, 7]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    weighted=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1]),
    pieces=st.integers(1, 30),
    cast=st.booleans(),
    shift=st.booleans(),
    turned=st.booleans(),
)
def test_every_kind_of_cross_entropy(
    ignored: int, reduction: str, weighted: bool, smoothing: float, pieces: int, cast: bool, shift: bool, turned: bool
) -> None:
    torch.manual_seed(0)
    model = Tower(blocks=1)
    ids = torch.randint(50, (3, 7))
    targets = torch.where(torch.rand(3, 7) < 0.3, ignored, ids)
    weight = torch.rand(50) if weighted else None

    def step() -> Tensor:
        logits = model(ids)
        wanted = targets
        if cast:
            logits = logits.float()
        if shift:
            logits, wanted = logits[..., :-1, :].contiguous(), targets[:, 1:]
        if turned:
            logits = logits.transpose(1, 2)
        else:
            logits, wanted = logits.reshape(-1, 50), wanted.reshape(-1)
        loss = F.cross_entropy(logits, wanted, weight, ignore_index=ignored, reduction=reduction, label_smoothing=smoothing)
        (loss * torch.linspace(0.5, 3, loss.numel()).view_as(loss)).sum().backward()
        return loss

    plain, tiled = outcome(model, step), outcome(model, step, tiles()({"head/cross_entropy": pieces}))
    assert tiled[2] == 1
    assert close(plain[0], tiled[0])
    # Neither single rows nor classes in another place have the same kernels; weighted losses are added up in another order.
    assert torch.equal(plain[0], tiled[0]) or pieces > 6 or weighted or smoothing or turned
    assert all(close(tiled[1][name], grad) for name, grad in plain[1].items())


def test_all_ignored_is_nan_as_ever() -> None:
    model = Tower()
    ids = torch.randint(50, (3, 7))
    with apply(model, tiles()(LOSS)):
        assert torch.isnan(F.cross_entropy(model(ids).view(-1, 50), torch.full((21,), -100)))


def test_a_target_out_of_range_is_the_same_error() -> None:
    model = Tower()
    ids = torch.randint(50, (3, 7))
    with apply(model, tiles()(LOSS)), pytest.raises(IndexError, match="Target 50 is out of bounds"):
        F.cross_entropy(model(ids).view(-1, 50), torch.full((21,), 50))


def test_module_loss_masks_and_microbatches() -> None:
    model = Tower()
    ids = torch.randint(50, (4, 7))
    mask = torch.rand(4, 7) < 0.6
    criterion = nn.CrossEntropyLoss(reduction="sum")

    def step() -> Tensor:
        losses = [criterion(model(part)[keep], part[keep]) for part, keep in zip(ids.chunk(2), mask.chunk(2), strict=True)]
        loss = (losses[0] + losses[1]) / mask.sum()
        loss.backward()
        return loss

    same_outcome(model, step, tiles(root_calls=2)(LOSS), calls=2)


@pytest.mark.parametrize("gear", ["live", "static"])
def test_beside_recomputation(gear: str) -> None:
    model = Tower()
    ids = torch.randint(50, (4, 9))

    def step() -> Tensor:
        loss = model(ids, ids)
        loss.backward()
        return loss

    plan = tiles(recompute=("blocks.[0-1].mlp/silu", "blocks.[0-1].mlp/mul.Tensor", "blocks.1/add.Tensor#1"))(LOSS)
    same_outcome(model, step, plan, calls=5, gear=gear, steps=5)


def test_the_peak_is_that_of_a_piece() -> None:
    model = Tower(words=4000, blocks=1)
    ids = torch.randint(4000, (8, 64))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        F.cross_entropy(model(ids).view(-1, 4000), ids.view(-1)).backward()

    step()
    model.zero_grad(set_to_none=True)
    plain = measure_peak(step, model)
    with apply(model, tiles()({"head/cross_entropy": 32})):
        tiled = measure_peak(step, model)
    assert plain > 12 * tiled


def test_autocast_and_scaled_losses() -> None:
    model = Tower()
    ids = torch.randint(50, (4, 9))

    def step() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids)
            assert logits.dtype is torch.bfloat16
        loss = F.cross_entropy(logits.float().view(-1, 50), ids.view(-1)) * 1024
        loss.backward()
        return loss

    plain, tiled = outcome(model, step), outcome(model, step, tiles()(LOSS))
    assert torch.equal(plain[0], tiled[0])
    assert all(close(tiled[1][name], grad, 2e5) for name, grad in plain[1].items())


# -- whoever wants the values


USES: dict[str, Callable[[Tensor], object]] = {
    "argmax": lambda logits: logits.argmax(-1),
    "softmax": lambda logits: torch.softmax(logits, -1),
    "all of it": lambda logits: logits[()] + 0,
    "one row": lambda logits: logits[0, 0],
    "last of the vocabulary": lambda logits: logits[..., -1],
    "first half of the vocabulary": lambda logits: logits[..., :25],
    "by a method": lambda logits: logits.detach().numpy().tolist(),
    "printed": lambda logits: str(logits.detach()),
    "formatted": lambda logits: f"{logits.sum():.6f}",
    "list": lambda logits: logits.tolist(),
    "compared": lambda logits: torch.equal(logits, logits.clone()),
    "stacked": lambda logits: torch.stack([logits, logits]),
    "by an operator": lambda logits: (2 * logits - logits / 3) @ logits.mT,
    "iterated": lambda logits: [part.sum() for part in logits],
    "cut and used": lambda logits: logits[:, 1:].float().reshape(-1, 50).exp(),
    "turned and used": lambda logits: logits.transpose(1, 2).sum(1),
    "out": lambda logits: torch.exp(logits.detach(), out=torch.empty(3, 7, 50)),
    "saved": lambda logits: _saved(logits),
    "pickled": lambda logits: pickle.loads(pickle.dumps(logits.detach())),
    "copied": lambda logits: copy.deepcopy(logits.detach()),
    "log softmax": lambda logits: F.nll_loss(F.log_softmax(logits.view(-1, 50), -1), torch.zeros(21, dtype=torch.int64)),
    "probabilities as targets": lambda logits: F.cross_entropy(logits.view(-1, 50), torch.full((21, 50), 0.02)),
    "below python": lambda logits: torch.ops.aten.exp.default(logits),
}


def _saved(logits: Tensor) -> Tensor:
    buffer = io.BytesIO()
    torch.save(logits, buffer)
    buffer.seek(0)
    return torch.load(buffer)


@pytest.mark.parametrize("use", USES)
def test_any_other_use_has_the_plain_values(use: str) -> None:
    model = Tower()
    ids = torch.randint(50, (3, 7))
    plain = USES[use](model(ids))
    with apply(model, tiles()(LOSS)) as applied:
        logits = model(ids)
        assert applied.report().kept == {}
        found = USES[use](logits)
    for left, right in zip(_leaves(found), _leaves(plain), strict=True):
        assert type(left) is type(right)
        assert torch.equal(left, right) if isinstance(left, Tensor) else left == right
    assert "asks for its values" in applied.report().kept["head/cross_entropy"] or use == "below python"
    assert applied.report().tiled_calls == 0


def _leaves(value: object) -> list[object]:
    return list(value) if isinstance(value, list) else [value]


DIFFERENTIABLE = ("softmax", "last of the vocabulary", "by an operator", "cut and used", "turned and used", "log softmax", "below python")


@pytest.mark.parametrize("use", DIFFERENTIABLE)
def test_gradients_of_any_other_use(use: str) -> None:
    model = Tower()
    ids = torch.randint(50, (3, 7))

    def step() -> Tensor:
        found = USES[use](model(ids))
        assert isinstance(found, Tensor)
        loss = (found * torch.linspace(-1, 2, found.numel()).view_as(found)).sum()
        loss.backward()
        return loss

    plain = outcome(model, step)
    model.zero_grad()
    with apply(model, tiles()(LOSS)):
        step()
    assert all(close(gradients(model)[name], grad, 256) for name, grad in plain[1].items())


def test_a_function_of_the_users_own_gets_gradients_through() -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, logits: Tensor) -> Tensor:
            return logits.square().sum()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return torch.ones(3, 7, 50) * grad

    model = Tower()
    ids = torch.randint(50, (3, 7))

    def step() -> Tensor:
        loss = Own.apply(model(ids))
        loss.backward()
        return loss

    plain = outcome(model, step)
    model.zero_grad()
    with apply(model, tiles()(LOSS)):
        step()
    assert all(close(gradients(model)[name], grad) for name, grad in plain[1].items())


def test_loss_and_a_metric_beside_it() -> None:
    model = Tower()
    ids = torch.randint(50, (3, 7))

    def step() -> Tensor:
        logits = model(ids)
        loss = F.cross_entropy(logits.view(-1, 50), ids.view(-1))
        with torch.no_grad():
            accuracy = (logits.argmax(-1) == ids).float().mean()
        (loss + logits.logsumexp(-1).square().mean()).backward()
        return torch.stack([loss.detach(), accuracy])

    plain = outcome(model, step)
    model.zero_grad()
    with apply(model, tiles()(LOSS)) as applied:
        found = step()
    assert torch.equal(found, plain[0])
    assert all(close(gradients(model)[name], grad) for name, grad in plain[1].items())
    assert applied.report().tiled_calls == 1


def test_metadata_asks_for_nothing() -> None:
    model = Tower()
    ids = torch.randint(50, (3, 7))
    with apply(model, tiles()(LOSS)) as applied:
        logits = model(ids)
        assert isinstance(logits, Tensor)
        assert torch.is_tensor(logits)
        assert (logits.shape, logits.dtype, logits.device.type, len(logits)) == ((3, 7, 50), torch.float32, "cpu", 3)
        assert logits.requires_grad
        assert not logits.is_leaf
        assert logits.size(-1) == 50
        assert logits.dim() == 3
        del logits
        model(ids).view(-1, 50)
    assert applied.report().kept == {}


def test_written_in_place() -> None:
    """``mul_`` and ``/=`` on the logits themselves are as plain; through a view they are refused once somebody would miss them."""
    model = Tower()
    ids = torch.randint(50, (3, 7))

    def step() -> Tensor:
        logits = model(ids)
        logits /= 2.0
        logits[..., 3] = -5.0
        loss = F.cross_entropy(logits.view(-1, 50), ids.view(-1))
        loss.backward()
        return loss

    plain = outcome(model, step)
    model.zero_grad()
    with apply(model, tiles()(LOSS)):
        assert torch.equal(step(), plain[0])
        assert all(close(gradients(model)[name], grad) for name, grad in plain[1].items())
        logits = model(ids)
        flat = logits.view(-1, 50)
        flat.mul_(2)
        with pytest.raises(UsageError, match="written in place through a view"):
            F.cross_entropy(logits.view(-1, 50), ids.view(-1))


def test_values_after_the_optimizer_are_an_error() -> None:
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(50, (3, 7))
    with apply(model, tiles()(LOSS)):
        logits = model(ids)
        F.cross_entropy(logits.view(-1, 50), ids.view(-1)).backward()
        optimizer.step()
        with pytest.raises(ReplayMismatch, match="after its weights or its input were written"):
            logits.argmax(-1)
