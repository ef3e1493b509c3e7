"""A residual convolutional net: batch norm, rectifiers and additions in place, dropout between convolutions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["TINY", "ResidualBlock", "ResidualNet", "workload"]

TINY = {"layers": 2, "width": 8, "image": 8, "batch": 2}


class ResidualBlock(nn.Module):
    """``relu(x + norm(conv(drop(relu(norm(conv(x)))))))``, rectifiers and the addition in place."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Features ``[batch, width, side, side]`` to features of the same shape."""
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(self.dropout(y)))
        y += x
        return self.relu(y)


class ResidualNet(nn.Module):
    """Stem, blocks, pooled linear head and cross entropy."""

    def __init__(self, layers: int, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(*(ResidualBlock(width, dropout) for _ in range(layers)))
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Images ``[batch, 3, side, side]`` and labels ``[batch]`` to the mean loss."""
        features = self.blocks(self.stem(images))
        return F.cross_entropy(self.head(features.mean((2, 3))), labels)


def workload(
    *,
    layers: int = 8,
    width: int = 48,
    image: int = 32,
    batch: int = 32,
    dropout: float = 0.1,
    seed: int = 0,
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A residual net and its training step on noise, ten classes.

    Args:
        layers: residual blocks.
        width: channels.
        image: pixels of an image's side.
        batch: images of one step.
        dropout: inside every block.
        seed: of the weights and of the noise.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ResidualNet(layers, width, 10, dropout).train()
    generator = torch.Generator().manual_seed(seed + 1)
    images = torch.randn(batch, 3, image, image, generator=generator)
    labels = torch.randint(10, (batch,), generator=generator)

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(images, labels)
        loss.backward()
        return loss.detach()

    return model, step
