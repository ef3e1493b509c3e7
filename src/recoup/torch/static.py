"""The static gear: saved-tensor hooks alone run a program that several live calls have shown to be constant.

It assumes that the sequence of operations and their constants are those of the program. Guards (``promotion``) look
before the call; every saved tensor's shape and dtype is compared with the program's during it; versions of all that
replays read, and a probe of every dropped tensor, are compared in the backward.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from recoup.errors import ReplayMismatch
from recoup.torch.holding import Held
from recoup.torch.offload.inbox import Inbox, Noted
from recoup.torch.offload.outbox import Moved, fetch
from recoup.torch.private import call_at_end_of_backward, current_backward
from recoup.torch.probe import read_probe, same_probe
from recoup.torch.program import LeafRead, Program, SavedTensor, StaticOp, VersionRead
from recoup.torch.rebuild import is_quiet, replaying
from recoup.torch.views import anchor, fitted, lay, tensors_in

__all__ = ["StaticCall", "Token"]


class Token:
    """What autograd holds in place of a dropped tensor; when it lets go, so do the leaves that only this one was rebuilt from."""

    __slots__ = ("call", "probe", "saved")

    def __init__(self, call: StaticCall, saved: SavedTensor, probe: object) -> None:
        self.call = call
        self.saved = saved
        self.probe = probe

    def __del__(self) -> None:
        self.call.released(self.saved)


class StaticCall(AbstractContextManager["StaticCall"]):
    """One forward call under a program; enter it around the forward.

    Attributes:
        diverged: why the call left the program, '' if it did not (known when the forward is over).
    """

    def __init__(self, program: Program, leaves: list[Held | None], inbox: Inbox | None = None) -> None:
        self.program = program
        self.inbox = inbox
        # By version, what is offloaded of this call, and how many saved tensors may still ask for it.
        self.moved: dict[int, Moved] = {}
        self.moves_left = dict(program.move_reads)
        self.cells = leaves
        self.leaf_left = list(program.leaf_reads)
        self.diverged = ""
        self.count = 0
        self.lock = threading.RLock()
        self.task = -1
        # Of the backward pass under way: rebuilt values; what may still ask for each version, and whether it has been held;
        # for how many versions each operation is still to run; milestones reached; readers to come within one rebuild.
        self.values: list[Tensor | None] = [None] * len(program.maker)
        self.asks: list[int] = list(program.asks)
        self.held: list[bool] = [False] * len(program.maker)
        self.pending: list[int] = list(program.pending)
        self.reached: set[int] = set()
        self.reads: dict[int, int] = {}
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
            return self._held(tensor, count)
        saved = self.program.saved[count]
        if tensor.shape != saved.size or tensor.dtype is not saved.dtype:
            found, wanted = f"{tensor.dtype} {list(tensor.shape)}", f"{saved.dtype} {list(saved.size)}"
            self.diverged = f"saved tensor {count} is {found} where the program has {wanted}"
            return self._held(tensor, count)
        if saved.version < 0:
            held = self._held(tensor, count)
            if saved.leaf >= 0 and self.leaf_left[saved.leaf] > 0:
                self.cells[saved.leaf] = held
            return held
        if tensor.stride() != saved.layout.stride:
            self.diverged = f"saved tensor {count} ({saved.site}) has other strides than in the program"
            return self._held(tensor, count)
        if saved.version in saved.moves:
            self._offload(saved, tensor)
        return Token(self, saved, read_probe(tensor, saved.probe))

    def _offload(self, saved: SavedTensor, tensor: Tensor) -> None:
        moved = self.moved.get(saved.version)
        if moved is None:
            assert self.inbox is not None
            moved = self.moved[saved.version] = Moved(self.inbox, saved.site, tensor)
        moved.put(tensor)

    def _held(self, tensor: Tensor, count: int) -> Held:
        if self.inbox is None:
            return Held(tensor, _number(count))
        noted = Noted(tensor, _number(count))
        noted.inbox = self.inbox
        return noted

    # -- backward

    def rebuilt(self, token: Token) -> Tensor:
        """The tensor that a token stands for.

        Raises:
            ReplayMismatch: the rebuilt tensor is not what the forward had, or what it is rebuilt from has changed.
        """
        if is_quiet():
            tensor = self._tensor(token)
        else:
            with replaying():
                tensor = self._tensor(token)
        if self.inbox is not None:
            self.inbox.fetch_ahead()
        return tensor

    def _tensor(self, token: Token) -> Tensor:
        saved = token.saved
        with self.lock:
            task = current_backward()
            # A node of the user's own may ask twice for what it saved once; then the counting starts anew.
            if task != self.task or task == -1 or self.asks[saved.version] <= 0:
                self._begin(task)
            self.reached.add(self.program.milestones[saved.version])
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
            self._no_longer_ask(saved.version)
            return tensor

    def released(self, saved: SavedTensor) -> None:
        """Autograd has let go of a dropped tensor."""
        with self.lock:
            for leaf in saved.leaves:
                self.leaf_left[leaf] -= 1
                if self.leaf_left[leaf] == 0:
                    self.cells[leaf] = None
            for version in saved.moves:
                self.moves_left[version] -= 1
                if self.moves_left[version] == 0:
                    self.moved.pop(version, None)

    def _begin(self, task: int) -> None:
        self._forget()
        self.task = task
        self.asks = list(self.program.asks)
        self.held = [False] * len(self.held)
        self.pending = list(self.program.pending)
        self.reached = {-1}
        self.reads = {}
        if task != -1:
            call_at_end_of_backward(self._forget)

    def _forget(self) -> None:
        with self.lock:
            self.values = [None] * len(self.values)
            self.task = -1

    def _no_longer_ask(self, version: int) -> None:
        """One reason less to have a version, and where it was the last one, to have what it is made from."""
        asks, stack = self.asks, [version]
        while stack:
            version = stack.pop()
            asks[version] -= 1
            if asks[version] > 0:
                continue
            if self.held[version]:
                self.values[version] = None
            else:
                stack.extend(self._made(self.program.maker[version]))

    def _made(self, place: int, count: int = 1) -> Sequence[int]:
        """An operation has run for so many versions that are held; what it asks for no longer."""
        self.pending[place] -= count
        return () if self.pending[place] else _reads_of(self.program.ops[place])

    def _holds(self, version: int) -> bool:
        return self.program.held_from[version] in self.reached

    def _run(self, root: int) -> None:
        """Replay what a version needs and is not there, in the order of the forward."""
        ops, maker, values = self.program.ops, self.program.maker, self.values
        missing, todo, stack = {root}, {maker[root]}, [maker[root]]
        while stack:
            for read in _reads_of(ops[stack.pop()]):
                if values[read] is None:
                    missing.add(read)
                    if maker[read] not in todo:
                        todo.add(maker[read])
                        stack.append(maker[read])
        order = sorted(todo)
        for version in missing:
            self.held[version] = version == root or self._holds(version)
        # What is not held goes with its last reader in this rebuild.
        self.reads = reads = {version: 0 for version in missing if not self.held[version]}
        if reads:
            for place in order:
                for read in _reads_of(ops[place]):
                    if read in reads:
                        reads[read] += 1
        for place in order:
            self._replay(place)

    def _replay(self, place: int) -> None:
        op, values = self.program.ops[place], self.values
        fresh = [(number, version) for number, version in op.outputs if self._stored(version)]
        afters = [(before, after) for before, after in op.overwrites if self._stored(after)]
        holding = sum(self.held[version] for _, version in (*fresh, *afters))
        moved = self._take_overwritten(op, holding == self.pending[place])
        arguments = [self._resolve(argument, moved) for argument in op.arguments]
        keywords = {name: self._resolve(argument, moved) for name, argument in op.keywords}
        results = [self._fetched(op.outputs[0][1])] if op.func is fetch else tensors_in(op.func(*arguments, **keywords))
        for number, version in fresh:
            made = results[number].untyped_storage().nbytes()
            if made != self.program.nbytes[version]:
                raise ReplayMismatch(f"a replay in the static gear made {made} bytes where the program has {self.program.nbytes[version]}")
            values[version] = results[number]
        for before, after in afters:
            values[after] = moved[before]
        if holding:
            for version in self._made(place, holding):
                self._no_longer_ask(version)
        if self.reads:
            self._read_once(op)

    def _fetched(self, version: int) -> Tensor:
        moved = self.moved.get(version)
        if moved is None:
            raise ReplayMismatch(
                f"the step left the static program ({self.diverged or 'a tensor that is offloaded was never saved'}), and what was dropped "
                "cannot be rebuilt. No weight has moved; run the step again, or apply the plan with gear='live'."
            )
        return fetch(moved)

    def _stored(self, version: int) -> bool:
        """Whether a version that is about to be made is stored: to be held, or for readers in the same rebuild."""
        if self.values[version] is not None or self.asks[version] <= 0:
            return False
        if not self.held[version] and version not in self.reads:
            # Made beside what was wanted.
            self.held[version] = self._holds(version)
        return self.held[version] or self.reads.get(version, 0) > 0

    def _take_overwritten(self, op: StaticOp, last: bool) -> dict[int, Tensor]:
        """The values that the operation is about to write: copies where the old version may still be asked for."""
        moved: dict[int, Tensor] = {}
        for before, _ in op.overwrites:
            value = self.values[before]
            assert value is not None
            if self.reads.get(before, 0) > 1 or (self.held[before] and self.asks[before] > last):
                value = anchor(value.untyped_storage().clone(), value.device)
            else:
                self.values[before] = None
            moved[before] = value
        return moved

    def _read_once(self, op: StaticOp) -> None:
        for version in _reads_of(op):
            if version in self.reads:
                self.reads[version] -= 1
                if not self.reads[version]:
                    self.values[version] = None

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


def _reads_of(op: StaticOp) -> Sequence[int]:
    return (*op.inputs, *(before for before, _ in op.overwrites)) if op.overwrites else op.inputs


@functools.lru_cache(maxsize=4096)
def _number(count: int) -> str:
    return f"saved tensor {count}"


def _unpack(packed: Held | Token) -> Tensor:
    if type(packed) is Token:
        return packed.call.rebuilt(packed)
    return packed.get()  # type: ignore[union-attr]
