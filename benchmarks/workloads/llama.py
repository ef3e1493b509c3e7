"""Llama from ``transformers``: RMS norm, rotary positions, grouped queries, gated MLP, no dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["TINY", "workload"]

TINY = {"layers": 2, "width": 32, "heads": 4, "key_heads": 2, "hidden": 64, "sequence": 16, "batch": 2, "vocabulary": 64}


def workload(
    *,
    layers: int = 10,
    width: int = 256,
    heads: int = 8,
    key_heads: int = 4,
    hidden: int = 688,
    sequence: int = 256,
    batch: int = 4,
    vocabulary: int = 2048,
    attention: str = "sdpa",
    seed: int = 0,
) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """A Llama and its training step on random tokens; query, key and value projections share one saved input.

    Args:
        layers: decoder blocks.
        width: features of a token.
        heads: query heads; must divide ``width``.
        key_heads: key and value heads; must divide ``heads``.
        hidden: features inside the MLP.
        sequence: tokens of one sample.
        batch: samples of one step.
        vocabulary: distinct tokens.
        attention: ``sdpa`` or ``eager``.
        seed: of the weights and of the tokens.
    """
    # Options that all configurations have, and that their signatures do not name.
    common: dict[str, Any] = {"attn_implementation": attention}
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=sequence,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        **common,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).train()
    generator = torch.Generator().manual_seed(seed + 1)
    tokens = torch.randint(vocabulary, (batch, sequence), generator=generator)

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss.detach()

    return model, step
