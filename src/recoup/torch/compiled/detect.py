"""Whether a model is compiled, told without loading the compiler."""

from __future__ import annotations

import sys

import torch

__all__ = ["is_compiled", "original"]


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether calls of the model, or of a module in it, go through ``torch.compile``."""
    frames = sys.modules.get("torch._dynamo.eval_frame")  # nothing is compiled before it is loaded
    if frames is None:
        return False
    slots = (module.__dict__.get("_compiled_call_impl") for module in model.modules())
    return isinstance(model, frames.OptimizedModule) or any(hasattr(slot, "_torchdynamo_orig_callable") for slot in slots)


def original(model: torch.nn.Module) -> torch.nn.Module:
    """The module that ``torch.compile`` was given; the model itself where it was none."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, torch.nn.Module) else model
