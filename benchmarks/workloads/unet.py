"""A U-Net: activations of the way down are read again on the way up, so blocks are no chain."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["TINY", "DoubleConv", "UNet", "workload"]

TINY = {"layers": 2, "width": 8, "image": 16, "batch": 1}


class DoubleConv(nn.Sequential):
    """Two convolutions, each with group norm and SiLU, dropout at the end."""

    def __init__(self, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(4, outputs),
            nn.SiLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.GroupNorm(4, outputs),
            nn.SiLU(),
            nn.Dropout(dropout),
        )


class UNet(nn.Module):
    """Levels down by pooling, levels up by transposed convolutions, skips between them, mean squared error."""

    def __init__(self, layers: int, width: int, dropout: float) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(layers + 1)]
        pairs = list(pairwise(widths))
        self.stem = DoubleConv(3, width, dropout)
        self.down = nn.ModuleList(DoubleConv(low, high, dropout) for low, high in pairs)
        self.lift = nn.ModuleList(nn.ConvTranspose2d(high, low, 2, stride=2) for low, high in reversed(pairs))
        self.up = nn.ModuleList(DoubleConv(2 * low, low, dropout) for low, _ in reversed(pairs))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        """Images and targets ``[batch, 3, side, side]`` to the mean loss."""
        x = self.stem(images)
        skips = []
        for block in self.down:
            skips.append(x)
            x = block(F.max_pool2d(x, 2))
        for lift, block in zip(self.lift, self.up, strict=True):
            x = block(torch.cat((skips.pop(), lift(x)), dim=1))
        return F.mse_loss(self.head(x), targets)


def workload(
    *,
    layers: int = 3,
    width: int = 24,
    image: int = 96,
    batch: int = 8,
    dropout: float = 0.1,
    seed: int = 0,
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A U-Net and its training step: remove noise from noise.

    Args:
        layers: levels below the top one; ``2 ** layers`` must divide ``image``.
        width: channels of the top level, doubled at each level down; a multiple of 4.
        image: pixels of an image's side.
        batch: images of one step.
        dropout: at the end of every block.
        seed: of the weights and of the noise.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = UNet(layers, width, dropout).train()
    generator = torch.Generator().manual_seed(seed + 1)
    targets = torch.randn(batch, 3, image, image, generator=generator)
    images = targets + torch.randn(batch, 3, image, image, generator=generator)

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(images, targets)
        loss.backward()
        return loss.detach()

    return model, step
