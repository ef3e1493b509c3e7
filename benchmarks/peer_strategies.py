"""What people do today to save activation memory, applied to a model that nobody prepared for it.

Each peer is a context manager over a model: inside it the model trains under the peer, after it the model is as before.
All of them stand on ``torch.utils.checkpoint`` with ``use_reentrant=False``.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

__all__ = ["PEERS", "Inapplicable", "blocks_of", "chains_of", "every_block", "plain", "replaced"]

_aten = torch.ops.aten
# What selective checkpointing keeps: results of matrix products, convolutions and fused attention.
_PRODUCTS = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]


class Inapplicable(Exception):
    """A peer has nothing to act on in this model; the message says what is missing."""


@contextmanager
def replaced(owner: object, name: str, value: object) -> Generator[None, None, None]:
    """Sets an attribute of one object, and puts back what stood there, or nothing if the class had it."""
    own = vars(owner)
    stood, before = name in own, own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if stood:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def blocks_of(model: nn.Module) -> list[list[nn.Module]]:
    """The outermost blocks of a model, one list for each container that holds them, in order of registration.

    Blocks are the members of a ``ModuleList`` or ``Sequential``, save PyTorch's own single layers; a ``Sequential`` of
    nothing but those is itself one.
    """
    found: list[list[nn.Module]] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList | nn.Sequential):
                members = [member for member in child if not _is_layer(member)]
                if members:
                    found.append(members)
                elif isinstance(child, nn.Sequential):
                    found.append([child])
            else:
                visit(child)

    visit(model)
    return found


def _is_layer(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None


@contextmanager
def plain(model: nn.Module, step: Callable[[], object], notes: list[str]) -> Generator[None, None, None]:
    """The step as it is."""
    yield


@contextmanager
def every_block(model: nn.Module, step: Callable[[], object], notes: list[str], **options: Any) -> Generator[None, None, None]:
    """``torch.utils.checkpoint`` around each block's forward."""
    blocks = [block for group in blocks_of(model) for block in group]
    if not blocks:
        raise Inapplicable("no blocks")
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(replaced(block, "forward", functools.partial(checkpoint, block.forward, use_reentrant=False, **options)))
        yield


def selective(model: nn.Module, step: Callable[[], object], notes: list[str]) -> Any:
    """Selective checkpointing of each block: results of products are kept, all else is recomputed."""
    return every_block(model, step, notes, context_fn=functools.partial(create_selective_checkpoint_contexts, _PRODUCTS))


@dataclass(frozen=True, slots=True)
class _Call:
    block: nn.Module
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Any

    def feeds(self, other: _Call) -> bool:
        """Whether ``other`` takes this call's output first, and otherwise the very same arguments."""
        if not isinstance(self.output, torch.Tensor) or not other.arguments or other.arguments[0] is not self.output:
            return False
        same = len(self.arguments) == len(other.arguments) and self.keywords.keys() == other.keywords.keys()
        return (
            same
            and all(_same(mine, its) for mine, its in zip(self.arguments[1:], other.arguments[1:], strict=True))
            and all(_same(self.keywords[key], other.keywords[key]) for key in self.keywords)
        )


def _same(left: object, right: object) -> bool:
    if left is right:
        return True
    if isinstance(left, tuple) and isinstance(right, tuple) and len(left) == len(right):
        return all(_same(mine, its) for mine, its in zip(left, right, strict=True))
    return isinstance(left, bool | int | float | str) and type(left) is type(right) and left == right


def chains_of(model: nn.Module, step: Callable[[], object]) -> list[list[nn.Module]] | None:
    """Blocks in chains, each fed by the one before it and called once; None if some block is fed otherwise. Runs one step."""
    calls: list[_Call] = []

    def seen(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        calls.append(_Call(module, arguments, keywords, output))

    groups = blocks_of(model)
    hooks = [block.register_forward_hook(seen, with_kwargs=True) for group in groups for block in group]
    try:
        step()
    finally:
        for hook in hooks:
            hook.remove()
    by_block = {id(call.block): call for call in calls}
    if len(by_block) != len(calls) or len(calls) != sum(map(len, groups)):
        return None
    for group in groups:
        if not all(by_block[id(block)].feeds(by_block[id(after)]) for block, after in itertools.pairwise(group)):
            return None
    return groups


def _segment(forwards: list[Callable[..., torch.Tensor]], x: torch.Tensor, *rest: Any, **keywords: Any) -> torch.Tensor:
    for forward in forwards:
        x = forward(x, *rest, **keywords)
    return x


def _passes(x: torch.Tensor, *rest: Any, **keywords: Any) -> torch.Tensor:
    return x


@contextmanager
def square_root(model: nn.Module, step: Callable[[], object], notes: list[str]) -> Generator[None, None, None]:
    """Segments of about sqrt(n) consecutive blocks, each recomputed from its input.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. The first block of a segment runs it whole, the
    others hand on what they get. Where blocks are not plainly fed by each other, all blocks but each sqrt(n)-th are
    checkpointed alone, which keeps about as many boundaries; the note says so.
    """
    groups = blocks_of(model)
    if sum(map(len, groups)) < 2:
        raise Inapplicable("fewer than two blocks")
    chains = chains_of(model, step)
    with ExitStack() as stack:
        if chains is None:
            blocks = [block for group in groups for block in group]
            stride = max(2, round(math.sqrt(len(blocks))))
            notes.append(f"blocks are no chain: each block alone, save one in {stride}")
            for place, block in enumerate(blocks):
                if (place + 1) % stride:
                    stack.enter_context(replaced(block, "forward", functools.partial(checkpoint, block.forward, use_reentrant=False)))
        for group in chains or ():
            length = max(1, round(math.sqrt(len(group))))
            for start in range(0, len(group), length):
                segment = group[start : start + length]
                run = functools.partial(_segment, [block.forward for block in segment])
                for block in segment[1:]:
                    stack.enter_context(replaced(block, "forward", _passes))
                stack.enter_context(replaced(segment[0], "forward", functools.partial(checkpoint, run, use_reentrant=False)))
        yield


class _CheckpointedAttention(TorchFunctionMode):
    """Checkpoints each call of PyTorch's attention function."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.calls += 1
            return checkpoint(func, *args, use_reentrant=False, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def attention(model: nn.Module, step: Callable[[], object], notes: list[str]) -> Generator[None, None, None]:
    """Selective activation recomputation: the core of attention (scores, softmax, dropout, weighted sum) and nothing else.

    Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022. The core is PyTorch's
    attention function, or ``eager_attention_forward`` where ``transformers`` writes it out.
    """
    mode = _CheckpointedAttention()
    written_out = {sys.modules[type(module).__module__] for module in model.modules()}
    written_out = {home for home in written_out if hasattr(home, "eager_attention_forward")}
    forward, eager_calls = model.forward, [0]

    def counted(core: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        eager_calls[0] += 1
        return checkpoint(core, *arguments, use_reentrant=False, **keywords)

    def with_cores(*arguments: Any, **keywords: Any) -> Any:
        # Around the forward alone: the recomputation in the backward runs the core as it is.
        with ExitStack() as stack:
            for home in written_out:
                stack.enter_context(replaced(home, "eager_attention_forward", functools.partial(counted, home.eager_attention_forward)))
            stack.enter_context(mode)
            return forward(*arguments, **keywords)

    with replaced(model, "forward", with_cores):
        step()
        if not mode.calls and not eager_calls[0]:
            raise Inapplicable("no attention")
        yield


PEERS: dict[str, Callable[[nn.Module, Callable[[], object], list[str]], Any]] = {
    "plain": plain,
    "checkpoint every block": every_block,
    "selective: keep products": selective,
    "sqrt(n) segments": square_root,
    "attention core": attention,
}
