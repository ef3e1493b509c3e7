"""GPT-2 from ``transformers``: pre-norm decoder, learned positions, dropout everywhere, tied embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

__all__ = ["TINY", "workload"]

TINY = {"layers": 2, "width": 32, "heads": 2, "sequence": 16, "batch": 2, "vocabulary": 64}


def workload(
    *,
    layers: int = 12,
    width: int = 256,
    heads: int = 4,
    sequence: int = 256,
    batch: int = 4,
    vocabulary: int = 512,
    dropout: float = 0.1,
    attention: str = "sdpa",
    accumulate: bool = False,
    seed: int = 0,
) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """A GPT-2 and its training step on random tokens; the default is the 12-block GPT of the literature on recomputation.

    Args:
        layers: decoder blocks.
        width: features of a token.
        heads: attention heads; must divide ``width``.
        sequence: tokens of one sample.
        batch: samples of one step.
        vocabulary: distinct tokens.
        dropout: of attention, residuals and embeddings. Above 0, attention on CPU keeps its whole matrix.
        attention: ``sdpa`` or ``eager``.
        accumulate: gradients stand before the step and are added to, as in all but the first of the micro-batches of a step.
        seed: of the weights and of the tokens.
    """
    # Options that all configurations have, and that their signatures do not name.
    common: dict[str, Any] = {"attn_implementation": attention}
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=sequence,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        **common,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(config).train()
    generator = torch.Generator().manual_seed(seed + 1)
    tokens = torch.randint(vocabulary, (batch, sequence), generator=generator)

    if accumulate:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def step() -> torch.Tensor:
        if not accumulate:
            model.zero_grad(set_to_none=True)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss.detach()

    return model, step
