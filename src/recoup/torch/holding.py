"""Tensors held until the backward: what is kept, with the checks that autograd leaves out under saved-tensor hooks.

With saved-tensor hooks autograd no longer compares versions, so a kept tensor edited in place would go unnoticed.
Everything held here remembers the version it had and refuses to be read at another.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from recoup.errors import ReplayMismatch
from recoup.torch.naming import Namer
from recoup.torch.private import Hooks, shared_alias
from recoup.torch.views import anchor

__all__ = ["Held", "Leaf", "named"]


def named(name: str | Namer, tensor: Tensor) -> str:
    """A name for people."""
    return name if isinstance(name, str) else name.of(tensor)


class Held:
    """One tensor that is kept for the backward pass, as it was when it was saved."""

    __slots__ = ("name", "packed", "tensor", "unpack", "version")

    def __init__(self, tensor: Tensor, name: str | Namer, hooks: Hooks | None = None) -> None:
        self.name = name
        self.version = tensor._version
        self.unpack: Callable[[object], Tensor] | None = None
        self.packed: object = None
        # An output of an autograd node would hold its own node alive through this object: detach it.
        self.tensor: Tensor | None = shared_alias(tensor) if tensor.grad_fn is not None else tensor
        if hooks is not None and not (tensor.is_leaf and tensor.requires_grad):
            self.packed, self.unpack = hooks[0](tensor), hooks[1]
            self.tensor = None

    def get(self) -> Tensor:
        """The tensor.

        Raises:
            ReplayMismatch: it has been written in place since, or its memory was taken away.
        """
        if self.unpack is not None:
            return self.unpack(self.packed)
        tensor = self.tensor
        assert tensor is not None
        if tensor._version != self.version:
            raise ReplayMismatch(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{named(self.name, tensor)}, "
                f"{tensor.dtype} of shape {list(tensor.shape)}, is at version {tensor._version}; expected version {self.version}. "
                "Move the write behind the backward pass, or write out of place."
            )
        return tensor


class Leaf:
    """A storage that replays read but do not rebuild: a weight, an input, a kept activation.

    The storage is held whole. Before somebody writes it in place where Recoup can see that, the content is copied
    (``protect``), so that replays read what the forward read.
    """

    __slots__ = ("__weakref__", "base", "held", "key", "name", "nbytes")

    def __init__(self, tensor: Tensor, key: int, name: str | Namer, hooks: Hooks | None) -> None:
        self.key = key
        self.name = name
        self.nbytes = tensor.untyped_storage().nbytes()
        self.held = Held(tensor, name, hooks)
        self.base: Tensor | None = None

    def get(self) -> Tensor:
        """A tensor on the storage, checked for writes.

        Raises:
            ReplayMismatch: it was written in place, or released, since the forward read it.
        """
        if self.base is not None:
            return self.base
        tensor = self.held.get()
        if tensor.untyped_storage().nbytes() != self.nbytes:
            raise ReplayMismatch(
                f"{named(self.name, tensor)}, {tensor.dtype} of shape {list(tensor.shape)}, was {self.nbytes} bytes in the forward and is "
                f"{tensor.untyped_storage().nbytes()} bytes now: its memory was released too early. "
                "Keep it until the backward is done."
            )
        return tensor

    def protect(self) -> int:
        """Copy the content ahead of a write in place; the number of bytes copied."""
        if self.base is not None:
            return 0
        tensor = self.get()
        self.base = anchor(tensor.untyped_storage().clone(), tensor.device)
        self.held.tensor = None
        return self.nbytes
