"""BERT from ``transformers``: post-norm encoder, explicit attention matrix with dropout on it, padding mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import BertConfig, BertForMaskedLM

__all__ = ["TINY", "workload"]

TINY = {"layers": 2, "width": 32, "heads": 2, "sequence": 16, "batch": 2, "vocabulary": 64}


def workload(
    *,
    layers: int = 8,
    width: int = 256,
    heads: int = 4,
    sequence: int = 256,
    batch: int = 4,
    vocabulary: int = 2048,
    dropout: float = 0.1,
    attention: str = "eager",
    seed: int = 0,
) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """A BERT and its training step: fill in 15 % of the tokens of padded random sentences.

    Args:
        layers: encoder blocks.
        width: features of a token.
        heads: attention heads; must divide ``width``.
        sequence: tokens of one sample; the last sample is padded in its second half.
        batch: samples of one step.
        vocabulary: distinct tokens; the last one is the mask.
        dropout: of attention and hidden features.
        attention: ``eager`` or ``sdpa``.
        seed: of the weights and of the tokens.
    """
    # Options that all configurations have, and that their signatures do not name.
    common: dict[str, Any] = {"attn_implementation": attention}
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=sequence,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        use_cache=False,
        **common,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = BertForMaskedLM(config).train()
    generator = torch.Generator().manual_seed(seed + 1)
    tokens = torch.randint(vocabulary - 1, (batch, sequence), generator=generator)
    masked = torch.rand(batch, sequence, generator=generator) < 0.15
    masked[:, 0] = True
    mask = torch.ones(batch, sequence, dtype=torch.long)
    mask[-1, sequence // 2 :] = 0
    inputs = tokens.masked_fill(masked, vocabulary - 1)
    labels = tokens.masked_fill(~masked | (mask == 0), -100)

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=inputs, attention_mask=mask, labels=labels).loss
        loss.backward()
        return loss.detach()

    return model, step
