"""Rebuilding dropped activations in the backward pass by replaying captured operations.

The rules, in one place:

1. A dropped storage is rebuilt when the backward first unpacks a tensor on it: the operations it needs, back to what
   is kept or already rebuilt, run in the order of the forward.
2. What an operation makes is held while the pass may ask for it again: for its own saves, and for operations whose
   results are still to be made and held. What a plan holds only from a milestone on goes, until that is reached, with
   its last reader in the same rebuild, and is made again when it is needed again.
3. A write in place runs on the rebuilt value itself if nobody else reads that version, else on a copy.
4. Each backward pass (autograd's graph task) starts anew, so ``retain_graph``, partial and double backward work.
5. Replays run below autograd, autocast and every dispatch mode: they are the very kernels of the forward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from recoup.errors import ReplayMismatch
from recoup.torch.capture import Argument, Captured, GeneratorState, Handle, Version, default_generator, generator_lock
from recoup.torch.private import below_modes, call_at_end_of_backward, current_backward
from recoup.torch.views import anchor, fitted, lay, tensors_in

__all__ = ["Rebuilder", "draw", "is_quiet"]


class Rebuilder:
    """Rebuilds what one forward call dropped."""

    __slots__ = ("__weakref__", "handles", "lock", "observer", "replayed", "stamp", "task", "touched", "unpacked")

    def __init__(self, observer: Callable[[Captured], None] | None = None, unpacked: Callable[[], None] | None = None) -> None:
        # Called after every tensor handed out: a moment to fetch ahead what is offloaded.
        self.unpacked = unpacked
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
            tensor = self._tensor(handle)
        else:
            with replaying():
                tensor = self._tensor(handle)
        if self.unpacked is not None:
            self.unpacked()
        return tensor

    def _tensor(self, handle: Handle) -> Tensor:
        with self.lock:
            task = current_backward()
            # A node of the user's own may ask twice for what it saved once; then the counting starts anew.
            if task != self.task or task == -1 or handle.version.asks <= 0:
                self._begin(task, handle)
            version = handle.version
            if version.milestone is not None:
                version.milestone.stamp = self.stamp
            if version.value is None:
                self._rebuild(version)
            assert version.value is not None
            tensor = lay(version.value, handle.layout)
            no_longer_ask(version)
            return tensor

    def _begin(self, task: int, handle: Handle) -> None:
        """Count, for the backward pass that starts, how often each version may be asked for."""
        self.forget()
        self.task = task
        self.stamp += 1
        alive = [handle] if task == -1 else [found for ref in self.handles if (found := ref()) is not None]
        count_asks((found.version for found in alive), self.stamp, self.touched)
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

    def _rebuild(self, root: Version) -> None:
        ops, wanted = needed(root)
        stamp = self.stamp
        for version in wanted:
            version.held = version is root or version.holds(stamp)
        if not all(version.held for version in wanted):
            for op in ops:
                for version in reads_of(op):
                    version.reads += not version.held and version.value is None
        for op in ops:
            if self.observer is not None:
                self.observer(op)
            replay(op, stamp)
            self.replayed += 1


def reads_of(op: Captured) -> Iterator[Version]:
    """The versions that an operation reads, those that it writes in place included."""
    yield from op.inputs
    for before, _ in op.overwrites:
        yield before


def needed(root: Version) -> tuple[list[Captured], list[Version]]:
    """The operations that must run to have a version, in order, given what is held already, and the versions that are missing."""
    ops: dict[int, Captured] = {}
    missing: dict[int, Version] = {id(root): root}
    stack = [root]
    while stack:
        op = stack.pop().op
        if op.sequence in ops:
            continue
        ops[op.sequence] = op
        for version in reads_of(op):
            if version.value is None and id(version) not in missing:
                missing[id(version)] = version
                stack.append(version)
    return [ops[sequence] for sequence in sorted(ops)], list(missing.values())


def count_asks(roots: Iterable[Version], stamp: int, touched: list[weakref.ref[Version]]) -> None:
    """Count how often the pass may ask for each version: saves of a root, and operations that read it; and start anew."""
    stack: list[Captured] = []

    def ask(version: Version) -> None:
        if version.stamp != stamp:
            version.stamp, version.asks, version.held, version.reads, version.value = stamp, 0, False, 0, None
            touched.append(weakref.ref(version))
            op = version.op
            if op.stamp != stamp:
                op.stamp, op.pending = stamp, 0
                stack.append(op)
            op.pending += 1
        version.asks += 1

    for root in roots:
        ask(root)
    while stack:
        for version in reads_of(stack.pop()):
            ask(version)


def no_longer_ask(version: Version) -> None:
    """One reason less to have a version, and where it was the last one, to have what it is made from."""
    stack = [version]
    while stack:
        version = stack.pop()
        version.asks -= 1
        if version.asks > 0:
            continue
        if version.held:
            version.value = None
        else:
            stack.extend(made(version.op))


def made(op: Captured, count: int = 1) -> Iterable[Version]:
    """An operation has run for so many versions that are held; what it asks for no longer."""
    op.pending -= count
    return () if op.pending else reads_of(op)


def replay(op: Captured, stamp: int) -> None:
    """Run a captured operation again and store what is held, or read in the same rebuild."""
    afters = [after for _, ref in op.overwrites if (after := ref()) is not None and _stored(after, stamp)]
    fresh = [(place, version) for place, ref in op.outputs if (version := ref()) is not None and _stored(version, stamp)]
    holding = sum(version.held for version in (*afters, *(version for _, version in fresh)))
    moved = _take_overwritten(op, last=holding == op.pending)
    arguments = tuple(_resolve(argument, moved) for argument in op.arguments)
    keywords = {name: _resolve(argument, moved) for name, argument in op.keywords.items()}
    results = tensors_in(run(op, arguments, keywords))
    for place, version in fresh:
        if results[place].untyped_storage().nbytes() != version.nbytes:
            raise ReplayMismatch(
                f"{version.site}: rebuilt {results[place].untyped_storage().nbytes()} bytes where the forward had {version.nbytes}"
            )
        version.value = results[place]
    for before, ref in op.overwrites:
        version = ref()
        if version is not None and version in afters:
            version.value = moved[id(before)]
    if holding:
        for version in made(op, holding):
            no_longer_ask(version)
    for version in reads_of(op):
        if version.reads:
            version.reads -= 1
            if not version.reads:
                version.value = None


def _stored(version: Version, stamp: int) -> bool:
    """Whether a version that is about to be made is stored: to be held, or for readers in the same rebuild."""
    if version.value is not None or version.stamp != stamp or version.asks <= 0:
        return False
    if not version.held and not version.reads:
        # Made beside what was wanted.
        version.held = version.holds(stamp)
    return version.held or version.reads > 0


def _take_overwritten(op: Captured, last: bool) -> dict[int, Tensor]:
    """The values that the operation is about to write, each its own: a copy where the old version may still be asked for.

    ``last`` says that the operation itself will not ask again.
    """
    moved: dict[int, Tensor] = {}
    for before, _ in op.overwrites:
        value = before.value
        assert value is not None
        if before.reads > 1 or (before.held and before.asks > last):
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
