"""Low-rank adapters on a frozen transformer: most weights take no gradient, so far less is saved than computed.

The adapters follow Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["TINY", "Adapted", "AdaptedTransformer", "Block", "workload"]

TINY = {"layers": 2, "width": 32, "heads": 2, "rank": 2, "sequence": 16, "batch": 2, "vocabulary": 64}


class Adapted(nn.Module):
    """``base(x) + (alpha / rank) * up(down(drop(x)))`` over a frozen linear layer."""

    def __init__(self, base: nn.Linear, rank: int, dropout: float, alpha: float = 16.0) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        """Features ``[..., in_features]`` to ``[..., out_features]``."""
        return self.base(x) + self.scale * self.up(self.down(self.dropout(x)))


class Block(nn.Module):
    """A pre-norm decoder block with adapters on queries and values."""

    def __init__(self, width: int, heads: int, rank: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query = Adapted(nn.Linear(width, width), rank, dropout)
        self.key = nn.Linear(width, width)
        self.value = Adapted(nn.Linear(width, width), rank, dropout)
        self.output = nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Features ``[batch, sequence, width]`` to features of the same shape."""
        y = self.norm1(x)
        y = F.scaled_dot_product_attention(self._split(self.query(y)), self._split(self.key(y)), self._split(self.value(y)), is_causal=True)
        x = x + self.output(y.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class AdaptedTransformer(nn.Module):
    """A decoder whose weights are frozen, save the adapters; next-token cross entropy."""

    def __init__(self, layers: int, width: int, heads: int, rank: int, sequence: int, vocabulary: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads, rank, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(".up." in name or ".down." in name)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``[batch, sequence]`` to the mean loss."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def workload(
    *,
    layers: int = 12,
    width: int = 256,
    heads: int = 4,
    rank: int = 8,
    sequence: int = 256,
    batch: int = 6,
    vocabulary: int = 1024,
    dropout: float = 0.1,
    seed: int = 0,
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A frozen decoder with adapters, and its training step on random tokens.

    Args:
        layers: decoder blocks.
        width: features of a token.
        heads: attention heads; must divide ``width``.
        rank: features inside an adapter.
        sequence: tokens of one sample.
        batch: samples of one step.
        vocabulary: distinct tokens.
        dropout: at the entry of every adapter.
        seed: of the weights and of the tokens.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AdaptedTransformer(layers, width, heads, rank, sequence, vocabulary, dropout).train()
    generator = torch.Generator().manual_seed(seed + 1)
    tokens = torch.randint(vocabulary, (batch, sequence), generator=generator)

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(tokens)
        loss.backward()
        return loss.detach()

    return model, step
