"""Traced tensors: what the nodes of a compiled graph say of the tensors that they will make."""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from recoup.graph import View
from recoup.torch.compiled.interfaces import concrete

__all__ = ["is_free", "is_item", "storage_key", "tensors_of", "view_of"]


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The traced tensors that a node makes."""
    return [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]


def storage_key(tensor: torch.Tensor) -> int:
    """The same number for all traced tensors on one storage."""
    return tensor.untyped_storage()._cdata


def view_of(tensor: torch.Tensor) -> View:
    """How a traced tensor lies on its storage, sizes as numbers."""
    return View(
        size=tuple(concrete(size) for size in tensor.shape),
        stride=tuple(concrete(stride) for stride in tensor.stride()),
        offset=concrete(tensor.storage_offset()),
        dtype=str(tensor.dtype).removeprefix("torch."),
    )


def is_item(node: fx.Node) -> bool:
    """Whether a node takes one of several results of an operation."""
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node) and node.args[0].op == "call_function"


def is_free(node: fx.Node) -> bool:
    """Whether a node only looks at what others made: a view, an item of several results, a size."""
    read = {storage_key(tensor) for argument in node.all_input_nodes for tensor in tensors_of(argument)}
    return {storage_key(tensor) for tensor in tensors_of(node)} <= read
