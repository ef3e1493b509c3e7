"""The signature of a call: what a plan is good for."""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["signature_of"]


def signature_of(args: tuple[object, ...], kwargs: dict[str, object]) -> str:
    """Shapes and dtypes of the tensors in a call's arguments, such as ``4x256:int64,4x256:int64``."""
    return ",".join(
        f"{'x'.join(map(str, leaf.shape))}:{str(leaf.dtype).removeprefix('torch.')}"
        for leaf in tree_leaves((args, kwargs))
        if isinstance(leaf, torch.Tensor)
    )
