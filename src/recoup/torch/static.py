"""The static gear: saved-tensor hooks alone run a program that several live calls have shown to be constant.

It assumes that the sequence of operations and their constants are those of the program. Guards (``promotion``) look
before the call; every saved tensor's shape and dtype is compared with the program's during it; versions of all that
replays read, and a probe of every dropped tensor, are compared in the backward.
"""

from __future__ import annotations

import functools
import threading
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from recoup.errors import ReplayMismatch
from recoup.torch.holding import Held
from recoup.torch.private import call_at_end_of_backward, current_backward, keeps_graph
from recoup.torch.probe import read_probe, same_probe
from recoup.torch.program import LeafRead, Program, SavedTensor, VersionRead
from recoup.torch.rebuild import is_quiet, replaying
from recoup.torch.views import anchor, fitted, lay, tensors_in

__all__ = ["StaticCall", "Token"]


class Token:
    """What autograd holds in place of a dropped tensor."""

    __slots__ = ("call", "probe", "saved")

    def __init__(self, call: StaticCall, saved: SavedTensor, probe: object) -> None:
        self.call = call
        self.saved = saved
        self.probe = probe


class StaticCall(AbstractContextManager["StaticCall"]):
    """One forward call under a program; enter it around the forward.

    Attributes:
        diverged: why the call left the program, '' if it did not (known when the forward is over).
    """

    def __init__(self, program: Program, leaves: list[Held | None]) -> None:
        self.program = program
        self.cells = leaves
        self.leaf_left = list(program.leaf_reads)
        self.diverged = ""
        self.count = 0
        self.lock = threading.RLock()
        self.task = -1
        self.values: list[Tensor | None] = [None] * len(program.maker)
        self.left: list[int] = list(program.reads)
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None

    def __enter__(self) -> StaticCall:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        hooks, self._hooks = self._hooks, None  # held on, they would make a reference cycle around what the call holds
        assert hooks is not None
        hooks.__exit__(*exc)
        if not self.diverged and exc[0] is None and self.count != len(self.program.saved):
            self.diverged = f"{self.count} tensors were saved where the program has {len(self.program.saved)}"

    # -- forward

    def _pack(self, tensor: Tensor) -> Held | Token:
        count = self.count
        self.count = count + 1
        if self.diverged or count >= len(self.program.saved):
            return _held(tensor, count)
        saved = self.program.saved[count]
        if tensor.shape != saved.size or tensor.dtype is not saved.dtype:
            found, wanted = f"{tensor.dtype} {list(tensor.shape)}", f"{saved.dtype} {list(saved.size)}"
            self.diverged = f"saved tensor {count} is {found} where the program has {wanted}"
            return _held(tensor, count)
        if saved.version < 0:
            held = _held(tensor, count)
            if saved.leaf >= 0 and self.leaf_left[saved.leaf] > 0:
                self.cells[saved.leaf] = held
            return held
        if tensor.stride() != saved.layout.stride:
            self.diverged = f"saved tensor {count} ({saved.site}) has other strides than in the program"
            return _held(tensor, count)
        return Token(self, saved, read_probe(tensor, saved.probe))

    # -- backward

    def rebuilt(self, token: Token) -> Tensor:
        """The tensor that a token stands for.

        Raises:
            ReplayMismatch: the rebuilt tensor is not what the forward had, or what it is rebuilt from has changed.
        """
        if is_quiet():
            return self._tensor(token)
        with replaying():
            return self._tensor(token)

    def _tensor(self, token: Token) -> Tensor:
        saved = token.saved
        with self.lock:
            task = current_backward()
            if task != self.task or task == -1:
                self._begin(task)
            value = self.values[saved.version]
            if value is None:
                self._run(saved.version)
                value = self.values[saved.version]
                assert value is not None
            tensor = lay(value, saved.layout)
            if not same_probe(token.probe, read_probe(tensor, saved.probe)):
                raise ReplayMismatch(
                    f"{saved.site}: rebuilt in the static gear, it is not what the forward had: a number or a branch of the step changed "
                    "since it was recorded. No weight has moved; run the step again, or apply the plan with gear='live'."
                )
            self._used(saved.version)
            if task != -1 and not keeps_graph():
                for leaf in saved.leaves:
                    self.leaf_left[leaf] -= 1
                    if self.leaf_left[leaf] == 0:
                        self.cells[leaf] = None
            return tensor

    def _begin(self, task: int) -> None:
        self._forget()
        self.task = task
        self.left = list(self.program.reads)
        if task != -1:
            call_at_end_of_backward(self._forget)

    def _forget(self) -> None:
        with self.lock:
            self.values = [None] * len(self.values)
            self.task = -1

    def _used(self, version: int) -> None:
        self.left[version] -= 1
        if self.left[version] <= 0:
            self.values[version] = None

    def _run(self, version: int) -> None:
        """Replay what the version needs and is not there, in the order of the forward."""
        ops, maker, values = self.program.ops, self.program.maker, self.values
        todo = {maker[version]}
        stack = [maker[version]]
        while stack:
            op = ops[stack.pop()]
            for read in (*op.inputs, *(before for before, _ in op.overwrites)):
                if values[read] is None and maker[read] not in todo:
                    todo.add(maker[read])
                    stack.append(maker[read])
        for place in sorted(todo):
            self._replay(place)

    def _replay(self, place: int) -> None:
        op = self.program.ops[place]
        values, left = self.values, self.left
        moved: dict[int, Tensor] = {}
        for before, _ in op.overwrites:
            value = values[before]
            assert value is not None
            left[before] -= 1
            moved[before] = anchor(value.untyped_storage().clone(), value.device) if left[before] > 0 else value
            if left[before] <= 0:
                values[before] = None
        arguments = [self._resolve(argument, moved) for argument in op.arguments]
        keywords = {name: self._resolve(argument, moved) for name, argument in op.keywords}
        results = tensors_in(op.func(*arguments, **keywords))
        for number, version in op.outputs:
            if left[version] > 0 and values[version] is None:
                made = results[number].untyped_storage().nbytes()
                if made != self.program.nbytes[version]:
                    raise ReplayMismatch(
                        f"a replay in the static gear made {made} bytes where the program has {self.program.nbytes[version]}"
                    )
                values[version] = results[number]
        for before, after in op.overwrites:
            if left[after] > 0:
                values[after] = moved[before]
        for version in op.inputs:
            self._used(version)

    def _resolve(self, argument: object, moved: dict[int, Tensor]) -> object:
        kind = type(argument)
        if kind is VersionRead:
            value = moved.get(argument.version)  # type: ignore[attr-defined]
            if value is None:
                value = self.values[argument.version]  # type: ignore[attr-defined]
            assert value is not None
            return fitted(value, argument.layout)  # type: ignore[attr-defined]
        if kind is LeafRead:
            held = self.cells[argument.leaf]  # type: ignore[attr-defined]
            if held is None:
                raise ReplayMismatch(
                    f"the step left the static program ({self.diverged or 'a tensor it reads was never saved'}), and what was dropped "
                    "cannot be rebuilt. No weight has moved; run the step again, or apply the plan with gear='live'."
                )
            return fitted(held.get(), argument.layout)  # type: ignore[attr-defined]
        if kind is tuple:
            return [self._resolve(item, moved) for item in argument]  # type: ignore[attr-defined]
        return argument


@functools.lru_cache(maxsize=4096)
def _number(count: int) -> str:
    return f"saved tensor {count}"


def _held(tensor: Tensor, count: int) -> Held:
    return Held(tensor, _number(count))


def _unpack(packed: Held | Token) -> Tensor:
    if type(packed) is Token:
        return packed.call.rebuilt(packed)
    return packed.get()  # type: ignore[union-attr]
