"""A byte-level GPT-2 on real text: the source of Python's own standard library, which lies on every disk that runs this."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from recoup.errors import UsageError

__all__ = ["TINY", "library_text", "workload"]

TINY = {"layers": 2, "width": 32, "heads": 2, "sequence": 16, "batch": 2}


def library_text(least_bytes: int = 1 << 20) -> torch.Tensor:
    """At least ``least_bytes`` bytes of the standard library's modules, in order of name, as a ``uint8`` tensor.

    Raises:
        UsageError: this Python has no sources of that length beside it.
    """
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= least_bytes:
            return torch.frombuffer(text, dtype=torch.uint8)
    raise UsageError(f"the standard library beside this Python has {len(text)} bytes of source; {least_bytes} are needed")


def workload(
    *,
    layers: int = 6,
    width: int = 256,
    heads: int = 4,
    sequence: int = 256,
    batch: int = 6,
    dropout: float = 0.1,
    attention: str = "sdpa",
    fresh: bool = False,
    seed: int = 0,
) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """A GPT-2 over bytes and its training step on windows of the standard library.

    Args:
        layers: decoder blocks.
        width: features of a byte.
        heads: attention heads; must divide ``width``.
        sequence: bytes of one window.
        batch: windows of one step.
        dropout: of attention, residuals and embeddings.
        attention: ``sdpa`` or ``eager``.
        fresh: draw new windows in every step, from torch's default generator; otherwise all steps see the same ones.
        seed: of the weights and of the windows.

    Raises:
        UsageError: this Python has no sources beside it.
    """
    # Options that all configurations have, and that their signatures do not name.
    common: dict[str, Any] = {"attn_implementation": attention}
    config = GPT2Config(
        vocab_size=256,
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
    text = library_text()
    within = torch.arange(sequence)

    def windows(generator: torch.Generator | None = None) -> torch.Tensor:
        starts = torch.randint(len(text) - sequence, (batch, 1), generator=generator)
        return text[starts + within].long()

    fixed = windows(torch.Generator().manual_seed(seed + 1))

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        tokens = windows() if fresh else fixed
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss.detach()

    return model, step
