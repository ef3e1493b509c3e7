"""Standing around every call of a model's modules without touching what the model is.

``Module.__call__`` looks at one private slot, ``_compiled_call_impl``, before it runs hooks and ``forward``; it is where
``Module.compile`` puts its result, and ``Module`` itself leaves it out of pickles and copies. A function in that slot
sees every call, exceptions and interrupts included, and changes no name, key, class or hook of the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate

import torch

from recoup.errors import UsageError

__all__ = ["Around", "Interception"]

Around = Callable[Concatenate[str, Callable[..., object], ...], object]
_SLOT = "_compiled_call_impl"


class Interception:
    """Routes the calls of a model's modules through ``around(path, inner, *args, **kwargs)`` until ``remove``."""

    def __init__(self, model: torch.nn.Module, around: Around) -> None:
        self._replaced: list[tuple[torch.nn.Module, object, object]] = []
        for path, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            before = module.__dict__.get(_SLOT)
            wrapper = functools.partial(around, path, module._call_impl if before is None else before)
            module.__dict__[_SLOT] = wrapper
            self._replaced.append((module, before, wrapper))

    def remove(self) -> None:
        """Put back what was there; a second call does nothing.

        Raises:
            UsageError: somebody else has wrapped the same calls since and must be removed first.
        """
        if any(module.__dict__.get(_SLOT) is not wrapper for module, _, wrapper in self._replaced):
            raise UsageError("the calls of this model were wrapped again since the plan was applied; remove the later wrapper first")
        for module, before, _ in reversed(self._replaced):
            if before is None:
                del module.__dict__[_SLOT]
            else:
                module.__dict__[_SLOT] = before
        self._replaced = []
