"""Every private interface of PyTorch that Recoup leans on, in one place, with a self-test.

Written against torch 2.13; ``self_test`` says whether the installed torch still behaves as expected, and ``recoup
doctor`` reports it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "TESTED_TORCH",
    "below_backward",
    "below_modes",
    "call_at_end_of_backward",
    "current_backward",
    "current_node",
    "in_functional_transform",
    "is_faking",
    "next_node",
    "outer_saved_tensor_hooks",
    "self_test",
    "shared_alias",
]

TESTED_TORCH = ("2.13",)
_UNNUMBERED = 1 << 62
_COUNTING = torch._C.DispatchKey.ADInplaceOrView

Hooks = tuple[Callable[[Tensor], object], Callable[[object], Tensor]]


def current_backward() -> int:
    """The id of the backward pass that this thread works on, -1 outside of one."""
    return torch._C._current_graph_task_id()


def next_node() -> int:
    """The number that the next node of autograd's graph will have, counted in this thread."""
    return torch.autograd._get_sequence_nr()


def current_node() -> int:
    """The number of the node whose backward runs now; -1 outside of one, and for nodes that add to a leaf's gradient."""
    node = torch._C._current_autograd_node()
    if node is None:
        return -1
    number = node._sequence_nr()
    return -1 if number >= _UNNUMBERED else number


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have the autograd engine call back when the backward pass under way is over."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # pyrefly: ignore


def below_backward() -> bool:
    """Whether this thread is inside of a backward pass."""
    return torch._C._current_graph_task_id() != -1


def is_faking() -> bool:
    """Whether operations do not really run: under a fake-tensor mode, a proxy mode or a functional transform."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return torch._C._len_torch_dispatch_stack() > 0 and (
        torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None
    )


def in_functional_transform() -> bool:
    """Whether a ``torch.func`` transform is active in this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outer_saved_tensor_hooks() -> Hooks | None:
    """The innermost saved-tensor hooks active in this thread, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def below_modes() -> int:
    """How many dispatch modes are active in this thread."""
    return torch._C._len_torch_dispatch_stack()


def shared_alias(tensor: Tensor) -> Tensor:
    """An alias without a gradient that shares the tensor's version counter, inside of a dispatch mode too.

    Below a dispatch mode the key that shares counters is excluded, and ``detach`` gives a fresh counter, blind to later writes.
    """
    if not torch._C._dispatch_tls_is_dispatch_key_excluded(_COUNTING):
        return tensor.detach()
    with torch._C._SetExcludeDispatchKeyGuard(_COUNTING, False):
        return tensor.detach()


def self_test() -> list[tuple[str, bool, str]]:
    """Try each interface; a list of (what, works, detail)."""
    results: list[tuple[str, bool, str]] = []

    def attempt(what: str, test: Callable[[], bool]) -> None:
        try:
            works, detail = test(), ""
        except (AttributeError, RuntimeError, TypeError) as error:
            works, detail = False, f"{type(error).__name__}: {error}"
        results.append((what, works, detail))

    attempt("backward pass id", _test_backward_id)
    attempt("aliases share version counters", _test_shared_alias)
    attempt("saved-tensor hooks can be looked up", _test_outer_hooks)
    attempt("storages can be watched", _test_storage_watch)
    attempt("functional transforms can be seen", lambda: not in_functional_transform())
    attempt("dispatch modes can leave the compiler's guard out", lambda: hasattr(TorchDispatchMode, "_should_skip_dynamo"))
    attempt("operations of the backward know their node", _test_node_numbers)
    attempt("module calls can be wrapped", lambda: "_compiled_call_impl" in torch.nn.Module._wrapped_call_impl.__code__.co_names)
    return results


def _test_backward_id() -> bool:
    seen: list[int] = []
    finished: list[int] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2

    def hook(grad: Tensor) -> None:
        seen.append(current_backward())
        call_at_end_of_backward(lambda: finished.append(1))

    y.register_hook(hook)
    y.sum().backward()
    return len(seen) == 1 and seen[0] != -1 and finished == [1] and current_backward() == -1


def _test_node_numbers() -> bool:
    x = torch.ones(2, requires_grad=True)
    begin = next_node()
    y = x * 2
    end, seen = next_node(), []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
        ) -> object:
            seen.append(current_node())
            return func(*args, **(kwargs or {}))

    with Mode():
        y.sum().backward()
    return begin < end and begin in seen and end in seen and current_node() == -1


def _test_shared_alias() -> bool:
    aliases: list[Tensor] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Callable[..., object], types: object, args: tuple[Tensor, ...] = (), kwargs: dict[str, object] | None = None
        ) -> object:
            aliases.append(shared_alias(args[0]))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    y = x * 1
    with Mode():
        torch.tanh(y)
    with torch.no_grad():
        y.mul_(2)
    return aliases[0]._version == y._version and not aliases[0].requires_grad


def _test_outer_hooks() -> bool:
    if outer_saved_tensor_hooks() is not None:
        return True
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda packed: packed):
        return outer_saved_tensor_hooks() is not None


def _test_storage_watch() -> bool:
    import weakref

    dead: list[int] = []
    x = torch.ones(4)
    y = x.view(2, 2)
    watch = weakref.ref(x.untyped_storage(), lambda _: dead.append(1))
    del x
    alive = watch() is not None and not dead
    del y
    return alive and dead == [1]
