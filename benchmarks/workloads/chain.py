"""An uneven chain: convolutions and linear layers whose widths, and so whose bytes and seconds, differ by an order of magnitude.

No two stages are alike, so a rule per block is far from the best choice here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["TINY", "Chain", "workload"]

TINY = {"layers": 3, "width": 4, "image": 8, "batch": 2}

# Channels of the convolution stages, as multiples of the base width, and features of the linear stages likewise.
_CONVOLUTIONS = (1, 12, 2, 6, 1, 16, 3, 8)
_LINEARS = (64, 4, 256, 16, 128, 8)


class Chain(nn.Module):
    """Convolution stages, pooling to 8 by 8, linear stages, cross entropy."""

    def __init__(self, layers: int, width: int, dropout: float) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        inputs = 3
        for index in range(layers):
            outputs = width * _CONVOLUTIONS[index % len(_CONVOLUTIONS)]
            stages.append(nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GELU()))
            inputs = outputs
        stages.append(nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten()))
        inputs *= 64
        for index in range(layers):
            outputs = width * _LINEARS[index % len(_LINEARS)]
            stages.append(nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh(), nn.Dropout(dropout)))
            inputs = outputs
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Images ``[batch, 3, side, side]`` and labels ``[batch]`` to the mean loss."""
        return F.cross_entropy(self.head(self.stages(images)), labels)


def workload(
    *,
    layers: int = 8,
    width: int = 8,
    image: int = 64,
    batch: int = 24,
    dropout: float = 0.1,
    seed: int = 0,
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """An uneven chain and its training step on noise, ten classes.

    Args:
        layers: convolution stages, and as many linear stages after them.
        width: channels of the narrowest stage.
        image: pixels of an image's side.
        batch: images of one step.
        dropout: after every linear stage.
        seed: of the weights and of the noise.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Chain(layers, width, dropout).train()
    generator = torch.Generator().manual_seed(seed + 1)
    images = torch.randn(batch, 3, image, image, generator=generator)
    labels = torch.randint(10, (batch,), generator=generator)

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(images, labels)
        loss.backward()
        return loss.detach()

    return model, step
