"""T5 from ``transformers``: encoder and decoder, cross attention that every decoder block reads, relative positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import T5Config, T5ForConditionalGeneration

__all__ = ["TINY", "workload"]

TINY = {"layers": 2, "width": 32, "heads": 2, "source": 16, "target": 8, "batch": 2, "vocabulary": 64}


def workload(
    *,
    layers: int = 4,
    width: int = 256,
    heads: int = 4,
    source: int = 256,
    target: int = 128,
    batch: int = 4,
    vocabulary: int = 2048,
    dropout: float = 0.1,
    attention: str = "eager",
    seed: int = 0,
) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """A T5 and its training step from random source to random target sequences.

    Args:
        layers: blocks of the encoder, and as many of the decoder.
        width: features of a token.
        heads: attention heads; must divide ``width``.
        source: tokens of one input sequence.
        target: tokens of one output sequence.
        batch: samples of one step.
        vocabulary: distinct tokens.
        dropout: of attention, MLP and residuals.
        attention: ``eager`` or, where ``transformers`` has it for T5, ``sdpa``.
        seed: of the weights and of the tokens.
    """
    # Options that all configurations have, and that their signatures do not name.
    common: dict[str, Any] = {"attn_implementation": attention, "decoder_start_token_id": 0}
    config = T5Config(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=width // heads,
        d_ff=4 * width,
        num_layers=layers,
        num_decoder_layers=layers,
        num_heads=heads,
        dropout_rate=dropout,
        use_cache=False,
        **common,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = T5ForConditionalGeneration(config).train()
    generator = torch.Generator().manual_seed(seed + 1)
    inputs = torch.randint(1, vocabulary, (batch, source), generator=generator)
    labels = torch.randint(1, vocabulary, (batch, target), generator=generator)

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=inputs, labels=labels, use_cache=False).loss
        loss.backward()
        return loss.detach()

    return model, step
