"""Finding the repeated blocks of a model: what "every block" means to the named strategies."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["blocks_of"]


def blocks_of(model: torch.nn.Module, running: Iterable[str]) -> tuple[str, ...]:
    """Paths of the outermost repeated blocks, in the order in which they ran.

    A block is a numbered child of a ``ModuleList`` or ``Sequential`` that has parameters and at least one sibling like
    that; a list inside of a block makes no blocks of its own.

    Args:
        model: whose modules are looked at.
        running: module paths of the operations of the forward, in order.
    """
    blocks: set[str] = set()
    for path, module in model.named_modules():
        if not isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) or _inside(path, blocks):
            continue
        children = [f"{path}.{name}" if path else name for name, child in module.named_children() if any(True for _ in child.parameters())]
        if len(children) > 1:
            blocks.update(children)
    order: dict[str, None] = {}
    for path in running:
        block = _inside(path, blocks)
        if block:
            order[block] = None
    return tuple(order)


def _inside(path: str, blocks: set[str]) -> str:
    """The block that a path lies in, or ''."""
    parts = path.split(".")
    return next((prefix for end in range(1, len(parts) + 1) if (prefix := ".".join(parts[:end])) in blocks), "")
