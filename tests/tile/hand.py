"""Plans written by hand, and steps to compare: planned with tiles beside plain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from recoup.plan import Decision, Plan
from recoup.torch import apply


def tiles(recompute: tuple[str, ...] = (), **options: object) -> Callable[..., Plan]:
    """A maker of plans: ``tiles(recompute=...)({"mlp": 4})``."""

    def plan(pieces: Mapping[str, int]) -> Plan:
        return Plan(
            fingerprint="by hand", strategy="hand", peak_bytes=0, step_seconds=1.0, unplanned_peak_bytes=1, unplanned_step_seconds=1.0,
            decisions=(
                *(Decision(site=site, action="recompute", bytes=0) for site in recompute),
                *(Decision(site=site, action="tile", bytes=0, tiles=count) for site, count in pieces.items()),
            ),
            **options,
        )  # fmt: skip

    return plan


class Mlp(nn.Module):
    """Gated, as in Llama."""

    def __init__(self, width: int, hidden: int, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=bias), nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A norm and an MLP with a residual, and something that mixes tokens."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = Mlp(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.cumsum(x, 1) / x.shape[1]
        return x + self.mlp(self.norm(x))


class Tower(nn.Module):
    """Two blocks and a vocabulary projection; the loss is inside if there are targets."""

    def __init__(self, width: int = 16, hidden: int = 48, words: int = 50, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(blocks))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if targets is None:
            return logits
        return nn.functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.view(-1))


ALL = {"blocks.[0-1].mlp": 3, "head/cross_entropy": 4}


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if parameter.grad is None else parameter.grad.clone() for name, parameter in model.named_parameters()}


def outcome(
    model: nn.Module, step: Callable[[], Tensor], plan: Plan | None = None, gear: str = "live", steps: int = 1
) -> tuple[Tensor, dict[str, Tensor | None], int]:
    """Result and gradients of the last of ``steps`` steps, and how many calls ran in tiles."""
    setting: AbstractContextManager = nullcontext() if plan is None else apply(model, plan, gear=gear)
    with setting as applied:
        for _ in range(steps):
            model.zero_grad(set_to_none=True)
            result = step()
        report = None if applied is None else applied.report()
        assert report is None or report.kept == {}
        return result.detach().clone(), gradients(model), 0 if report is None else report.tiled_calls


def close(left: Tensor | None, right: Tensor | None, slack: float = 64.0) -> bool:
    """Whether two tensors differ by no more than the order of sums explains."""
    if left is None or right is None:
        return left is right
    scale = float(right.abs().max())
    return left.dtype == right.dtype and float((left - right).abs().max()) <= slack * torch.finfo(right.dtype).eps * max(scale, 1e-30)


def same_outcome(
    model: nn.Module, step: Callable[[], Tensor], plan: Plan, calls: int, gear: str = "live", steps: int = 1, slack: float = 64.0
) -> None:
    """Planned and plain: the result equal bit for bit, gradients up to the order of sums, and so many calls in tiles."""
    plain, plain_grads, _ = outcome(model, step, steps=steps)
    tiled, tiled_grads, ran = outcome(model, step, plan, gear, steps)
    assert ran == calls
    assert close(tiled, plain)
    assert plain_grads.keys() == tiled_grads.keys()
    wrong = [name for name, grad in plain_grads.items() if not close(tiled_grads[name], grad, slack)]
    assert wrong == []
