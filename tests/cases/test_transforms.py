"""``torch.func`` transforms forbid saved-tensor hooks: the region runs plainly with a warning, or is refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from situations import Regions, everything
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

from recoup.errors import CaptureError
from recoup.torch import apply, checkpoint, record


def region(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    return lambda t: torch.tanh(torch.tanh(linear(t)))


def test_gradients_per_sample() -> None:
    linear, x = nn.Linear(32, 32), torch.randn(8, 32)
    want = vmap(grad(lambda t: region(linear)(t).sum()))(x)
    with pytest.warns(UserWarning, match=r"inside a torch\.func transform recomputes nothing"):
        got = vmap(grad(lambda t: checkpoint(region(linear), t).sum()))(x)
    assert torch.equal(want, got)


def test_forward_mode() -> None:
    linear, x = nn.Linear(32, 32), torch.randn(8, 32)
    want = jvp(region(linear), (x,), (torch.ones_like(x),))
    with pytest.warns(UserWarning, match="recomputes nothing"):
        got = jvp(lambda t: checkpoint(region(linear), t), (x,), (torch.ones_like(x),))
    assert torch.equal(want[0], got[0])
    assert torch.equal(want[1], got[1])


def test_a_transform_that_saves_nothing_runs_inside_a_region() -> None:
    linear = nn.Linear(32, 32)
    x, z = (torch.ones(64, 32, requires_grad=True) for _ in range(2))
    vmap(region(linear))(x).sum().backward()
    Regions()(lambda t: vmap(region(linear))(t), z).sum().backward()
    assert x.grad is not None
    assert z.grad is not None
    assert torch.equal(x.grad, z.grad)


def test_a_transform_that_saves_is_refused_by_name() -> None:
    linear = nn.Linear(32, 32)

    def wanting(t: Tensor) -> Tensor:
        return vmap(grad(lambda s: region(linear)(s).sum()))(t)

    x = torch.randn(8, 32, requires_grad=True)
    with pytest.raises(CaptureError, match=r"wanting.*Call the transform outside of checkpoint"):
        checkpoint(wanting, x)
    checkpoint(region(linear), x).sum().backward()  # nothing is left behind
    assert x.grad is not None


def test_a_planned_model_in_a_transform() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
    x = torch.randn(8, 32)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    plan = everything(record(step, model=model), "live")
    parameters = dict(model.named_parameters())
    per_sample = vmap(grad(lambda p, t: functional_call(model, p, (t,)).sum()), in_dims=(None, 0))
    want = per_sample(parameters, x)
    with apply(model, plan) as applied, warnings.catch_warnings():
        warnings.simplefilter("error")
        got = per_sample(parameters, x)
        assert applied.report().live_calls == 0
        step()
        assert applied.report().dropped_bytes > 0
    assert all(torch.equal(want[name], got[name]) for name in want)
