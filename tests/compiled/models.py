"""Small models for the compiled executors, and the step that trains them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Step = Callable[[], Tensor]


class Block(nn.Module):
    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.up, self.act, self.drop, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(drop), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(self.act(self.up(x))))


class Stack(nn.Module):
    """Blocks in a row with their loss; options put in what a partitioner must get right."""

    def __init__(
        self,
        blocks: int = 4,
        width: int = 32,
        drop: float = 0.1,
        norm: bool = False,
        inside: str = "",
        draws: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, drop) for _ in range(blocks))
        self.norm = nn.BatchNorm1d(width) if norm else None
        self.inside = inside
        self.draws = draws

    def forward(self, x: Tensor) -> Tensor:
        x = self.row(x, 0, 2)
        if self.inside == "break":
            torch._dynamo.graph_break()
        x = self.row(x, 2, len(self.blocks))
        if self.draws is not None:
            x = x * torch.rand(x.shape, generator=self.draws)
        return x.square().mean()

    def row(self, x: Tensor, start: int, stop: int) -> Tensor:
        for block in list(self.blocks)[start:stop]:
            x = checkpoint(block, x, use_reentrant=False) if self.inside == "checkpoint" else block(x)
            if self.norm is not None:
                x = self.norm(x)
            if self.inside == "in place":
                x = x * 1.0
                x.add_(1.0)
                x.relu_()
        return x


def rows(count: int = 128, width: int = 32) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(7))


def stepping(model: nn.Module, call: Callable[..., Any], x: Tensor) -> Step:
    """A training step that draws the same numbers whenever it runs."""

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(11)
        loss = call(x)
        loss.backward()
        return loss

    return step


def left_behind(model: nn.Module) -> list[Tensor]:
    """Gradients and buffers, as they stand."""
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*gradients, *(buffer.clone() for buffer in model.buffers())]
