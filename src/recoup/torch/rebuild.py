"""Rebuilding dropped activations in the backward pass by replaying captured operations.

The rules, in one place:

1. A dropped storage is rebuilt when the backward first unpacks a tensor on it: the operations it needs, back to what
   is kept or already rebuilt, run in the order of the forward.
2. What an operation makes stays only if it is read again in this backward pass, and only until its last read.
3. A write in place runs on the rebuilt value itself if nobody else reads that version, else on a copy.
4. Each backward pass (autograd's graph task) starts anew, so ``retain_graph``, partial and double backward work.
5. Replays run below autograd, autocast and every dispatch mode: they are the very kernels of the forward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from recoup.errors import ReplayMismatch
from recoup.torch.capture import Argument, Captured, GeneratorState, Handle, Version, default_generator, generator_lock
from recoup.torch.private import below_modes, call_at_end_of_backward, current_backward
from recoup.torch.views import anchor, fitted, lay, tensors_in

__all__ = ["Rebuilder", "draw", "is_quiet", "replay"]


class Rebuilder:
    """Rebuilds what one forward call dropped."""

    __slots__ = ("__weakref__", "handles", "lock", "observer", "replayed", "stamp", "task", "touched")

    def __init__(self, observer: Callable[[Captured], None] | None = None) -> None:
        self.handles: list[weakref.ref[Handle]] = []
        self.lock = threading.RLock()
        self.task = -1
        self.stamp = 0
        self.replayed = 0
        self.touched: list[weakref.ref[Version]] = []
        self.observer = observer

    def drop(self, version: Version, layout: object) -> Handle:
        """A handle for autograd to hold in place of a tensor on that version."""
        handle = Handle(self, version, layout)  # type: ignore[arg-type]
        self.handles.append(weakref.ref(handle))
        return handle

    def tensor(self, handle: Handle) -> Tensor:
        """The tensor that a handle stands for, rebuilt if need be.

        Raises:
            ReplayMismatch: what the rebuild reads has changed since the forward.
        """
        if is_quiet():
            return self._tensor(handle)
        with replaying():
            return self._tensor(handle)

    def _tensor(self, handle: Handle) -> Tensor:
        with self.lock:
            task = current_backward()
            if task != self.task or task == -1:
                self._begin(task, handle)
            version = handle.version
            if version.value is None:
                self._rebuild(version)
            assert version.value is not None
            tensor = lay(version.value, handle.layout)
            version.left -= 1
            if version.left <= 0:
                version.value = None
            return tensor

    def _begin(self, task: int, handle: Handle) -> None:
        """Count, for the backward pass that starts, how often each version will be read."""
        self.forget()
        self.task = task
        self.stamp += 1
        alive = [handle] if task == -1 else [found for ref in self.handles if (found := ref()) is not None]
        count_reads((found.version for found in alive), self.stamp, self.touched)
        self.handles = [ref for ref in self.handles if ref() is not None]
        if task != -1:
            # A partial backward leaves values behind; they must not outlive the pass.
            call_at_end_of_backward(self.forget)

    def forget(self) -> None:
        """Let go of every value rebuilt so far."""
        with self.lock:
            for ref in self.touched:
                version = ref()
                if version is not None:
                    version.value = None
            self.touched = []
            self.task = -1

    def _rebuild(self, version: Version) -> None:
        for op in needed(version):
            if self.observer is not None:
                self.observer(op)
            replay(op)
            self.replayed += 1


def needed(version: Version) -> list[Captured]:
    """The operations that must run to have a version, in order, given what is rebuilt already."""
    ops: dict[int, Captured] = {}
    stack = [version]
    while stack:
        op = stack.pop().op
        if op.sequence in ops:
            continue
        ops[op.sequence] = op
        stack.extend(read for read in op.inputs if read.value is None)
        stack.extend(before for before, _ in op.overwrites if before.value is None)
    return [ops[sequence] for sequence in sorted(ops)]


def count_reads(roots: Iterable[Version], stamp: int, touched: list[weakref.ref[Version]]) -> None:
    """Set ``left`` of every version that rebuilding the roots reads: unpacks of a root, and reads by operations."""
    seen: set[int] = set()
    stack: list[Version] = []

    def read(version: Version) -> None:
        if version.stamp != stamp:
            version.stamp, version.left, version.value = stamp, 0, None
            touched.append(weakref.ref(version))
            stack.append(version)
        version.left += 1

    for root in roots:
        read(root)
    while stack:
        op = stack.pop().op
        if id(op) in seen:
            continue
        seen.add(id(op))
        for version in op.inputs:
            read(version)
        for before, _ in op.overwrites:
            read(before)


def replay(op: Captured) -> None:
    """Run a captured operation again and store what is still to be read."""
    moved = _take_overwritten(op)
    arguments = tuple(_resolve(argument, moved) for argument in op.arguments)
    keywords = {name: _resolve(argument, moved) for name, argument in op.keywords.items()}
    results = tensors_in(run(op, arguments, keywords))
    for place, ref in op.outputs:
        version = ref()
        if version is None or version.left <= 0 or version.value is not None:
            continue
        if results[place].untyped_storage().nbytes() != version.nbytes:
            raise ReplayMismatch(
                f"{version.site}: rebuilt {results[place].untyped_storage().nbytes()} bytes where the forward had {version.nbytes}"
            )
        version.value = results[place]
    for before, ref in op.overwrites:
        version = ref()
        if version is not None and version.left > 0:
            version.value = moved[id(before)]
    for version in op.inputs:
        version.left -= 1
        if version.left <= 0:
            version.value = None


def _take_overwritten(op: Captured) -> dict[int, Tensor]:
    """The values that the operation is about to write, each its own: a copy where the old version is still read."""
    moved: dict[int, Tensor] = {}
    for before, _ in op.overwrites:
        value = before.value
        assert value is not None
        before.left -= 1
        if before.left > 0:
            value = anchor(value.untyped_storage().clone(), value.device)
        else:
            before.value = None
        moved[id(before)] = value
    return moved


def _resolve(argument: object, moved: dict[int, Tensor]) -> object:
    if type(argument) is Argument:
        source = argument.source
        if type(source) is Version:
            value = moved.get(id(source))
            if value is None:
                value = source.value
            assert value is not None
            return fitted(value, argument.layout)
        return fitted(source.get(), argument.layout)  # type: ignore[union-attr]
    if type(argument) is list:
        return [_resolve(item, moved) for item in argument]
    return argument


def run(op: Captured, arguments: tuple[object, ...], keywords: dict[str, object]) -> object:
    """Call the operator, drawing the random numbers of the forward if it drew any."""
    state = op.generator
    if state is None:
        return op.func(*arguments, **keywords)
    if state.argument:
        private = torch.Generator(state.device)
        private.set_state(state.state)
        return op.func(*_with_generator(arguments, state, private), **_keyword_generator(keywords, arguments, state, private))
    with generator_lock:
        generator = default_generator(state.device)
        before = generator.get_state()
        generator.set_state(state.state)
        try:
            return op.func(*arguments, **keywords)
        finally:
            generator.set_state(before)


def draw(op: Captured, arguments: tuple[object, ...], keywords: dict[str, object]) -> object:
    """Run a random operation of the forward, its generator's state just captured, on the numbers that a replay will draw.

    Another thread may draw from the default generator between the capture and the draw, and no lock of ours stops it.
    So where the operation takes a generator it gets one of its own, and the default one is moved on behind it.
    """
    state = op.generator
    assert state is not None
    given = keywords.get(state.argument) if state.place >= len(arguments) else arguments[state.place]
    if not state.argument or state.device.type != "cpu" or given is not None:
        return op.func(*arguments, **keywords)
    private = torch.Generator(state.device)
    private.set_state(state.state)
    result = op.func(*_with_generator(arguments, state, private), **_keyword_generator(keywords, arguments, state, private))
    default_generator(state.device).set_state(private.get_state())
    return result


def _with_generator(arguments: tuple[object, ...], state: GeneratorState, generator: torch.Generator) -> tuple[object, ...]:
    if state.place < len(arguments):
        return (*arguments[: state.place], generator, *arguments[state.place + 1 :])
    return arguments


def _keyword_generator(
    keywords: dict[str, object], arguments: tuple[object, ...], state: GeneratorState, generator: torch.Generator
) -> dict[str, object]:
    return keywords if state.place < len(arguments) else {**keywords, state.argument: generator}


def is_quiet() -> bool:
    """Whether there is nothing that ``replaying`` would have to switch off: so it is in nearly every backward pass."""
    return not (
        torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
        or below_modes()
        or torch._C._len_torch_function_stack()
    )


class replaying(AbstractContextManager[None]):
    """Below autograd, autocast, torch-function and dispatch modes; only what is on is switched off: it runs for every saved tensor."""

    __slots__ = ("_stack",)

    def __enter__(self) -> None:
        self._stack = stack = ExitStack()
        stack.enter_context(torch.no_grad() if torch.is_grad_enabled() else nullcontext())
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            stack.enter_context(torch._C._DisableAutocast())
        if below_modes() > 0:
            stack.enter_context(_disable_current_modes())
        if torch._C._len_torch_function_stack() > 0:
            stack.enter_context(torch._C.DisableTorchFunction())

    def __exit__(self, *exc: object) -> None:
        self._stack.__exit__(*exc)  # type: ignore[arg-type]
