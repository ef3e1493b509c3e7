"""When a call may run in the static gear: after live calls that ran alike, while nothing that they depend on has changed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from recoup.errors import ReplayMismatch
from recoup.torch.holding import Held
from recoup.torch.live import LiveSession, storage_key
from recoup.torch.offload.inbox import Inbox
from recoup.torch.program import LeafSource, NotStatic, Program, compile_program
from recoup.torch.static import StaticCall, Token

__all__ = ["WARM_UP_CALLS", "Promotion"]

WARM_UP_CALLS = 3
_TRIES = 12
_MISSING = object()
_PLAIN = (bool, int, float, str, type(None))

Key = tuple[str, int, str]
Attributes = dict[tuple[int, str], object]


class CallState(NamedTuple):
    """What a call starts from: its settings, and the places of its tensor arguments by storage."""

    settings: tuple[object, ...]
    inputs: dict[int, int]


@dataclass
class _State:
    """What is known of one kind of call (module, place in the step, input shapes)."""

    programs: list[Program] = field(default_factory=list)
    attributes: list[Attributes] = field(default_factory=list)
    settings: tuple[object, ...] = ()
    program: Program | None = None
    guard: tuple[tuple[dict[str, object], str, object], ...] = ()
    calls: int = 0
    tries: int = 0


class Promotion:
    """Learns programs from live calls, checks the guards, and hands out static calls."""

    def __init__(self, model: torch.nn.Module, audit_every: int) -> None:
        self.model = model
        self.audit_every = max(audit_every, 2)
        self._states: dict[Key, _State] = {}
        self._refusals: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._tables = list(_tables(model))
        self._parameters = list(model.parameters())

    def refusals(self) -> dict[str, int]:
        """Why calls ran live although the static gear was asked for, with how often."""
        return dict(self._refusals)

    def start(
        self, key: Key, args: tuple[object, ...], kwargs: dict[str, object], inbox: Callable[[], Inbox | None] = lambda: None
    ) -> StaticCall | None:
        """A static call, or None if this call is to run live: to learn, to audit, or because a guard has tripped."""
        state = self._states.get(key)
        if state is None or state.program is None:
            return None
        state.calls += 1
        if state.calls % self.audit_every == 0:
            return None
        reason = self._tripped(state, args, kwargs)
        if reason:
            self._refuse(state, reason)
            return None
        return _Watched(self, state, state.program, self._leaves(state.program, args, kwargs), inbox())

    def learn(self, key: Key, session: LiveSession, before: CallState) -> None:
        """A live call's forward is over: remember how it ran, and promote its kind once enough calls ran alike."""
        with self._lock:
            state = self._states.setdefault(key, _State())
        if state.tries >= _TRIES:
            return
        try:
            program = compile_program(session, self.model, before.inputs)
        except NotStatic as reason:
            state.tries += 1
            self._refuse(state, str(reason))
            return
        if state.program is not None:
            if program != state.program:
                state.tries += 1
                self._refuse(state, "an audit found that the step no longer runs as it did")
            return
        if state.programs and (program != state.programs[-1] or before.settings != state.settings):
            state.tries += 1
            self._refuse(state, "the last live calls did not run alike")
        state.programs.append(program)
        state.settings = before.settings
        state.attributes.append(self._attributes())
        if len(state.programs) >= WARM_UP_CALLS:
            state.program = program
            state.guard = tuple(self._constant(state.attributes))

    def diverged(self, state: _State, reason: str) -> None:
        """A static call left its program."""
        state.tries += 1
        self._refuse(state, reason)

    def _refuse(self, state: _State, reason: str) -> None:
        state.program = None
        state.programs, state.attributes = [], []
        with self._lock:
            if reason in self._refusals or len(self._refusals) < 100:
                self._refusals[reason] += 1

    # -- guards

    def before(self, args: tuple[object, ...], kwargs: dict[str, object]) -> CallState:
        """What a call starts from; taken before the call, which may change its own arguments."""
        tensors = {
            storage_key(leaf): place
            for place, leaf in enumerate(tree_leaves((args, kwargs)))
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
        }
        return CallState(self.settings(args, kwargs), tensors)

    def settings(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[object, ...]:
        """What a call depends on besides the tensors and the modules, as it stands before the call."""
        return (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            tuple(parameter.requires_grad for parameter in self._parameters),
            tuple(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _PLAIN)),
            tuple(leaf.requires_grad for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)),
        )

    def _attributes(self) -> Attributes:
        return {
            (number, name): value for number, table in enumerate(self._tables) for name, value in table.items() if isinstance(value, _PLAIN)
        }

    def _constant(self, seen: list[Attributes]) -> Iterator[tuple[dict[str, object], str, object]]:
        """The plain attributes of the modules that had one value in all live calls: flags, probabilities, scales."""
        first = seen[0]
        for (number, name), value in first.items():
            if all(other.get((number, name), _MISSING) == value for other in seen[1:]):
                yield self._tables[number], name, value

    def _tripped(self, state: _State, args: tuple[object, ...], kwargs: dict[str, object]) -> str:
        if self.settings(args, kwargs) != state.settings:
            return "autocast, a flag or a plain argument has changed"
        for table, name, value in state.guard:
            if table.get(name, _MISSING) != value:
                return f"the attribute {name!r} of a module has changed from {value!r} to {table.get(name)!r}"
        return ""

    # -- leaves

    def _leaves(self, program: Program, args: tuple[object, ...], kwargs: dict[str, object]) -> list[Held | None]:
        inputs = tree_leaves((args, kwargs)) if any(source.kind == "input" for source in program.leaves) else []
        return [self._leaf(source, inputs) for source in program.leaves]

    def _leaf(self, source: LeafSource, inputs: list[object]) -> Held | None:
        if source.kind == "saved":
            return None
        if source.kind == "input":
            tensor = inputs[source.place]
            assert isinstance(tensor, torch.Tensor)
            return Held(tensor, f"argument {source.place} of the model")
        module = self._module(source.path)
        tensor = (module._parameters if source.kind == "parameter" else module._buffers)[source.name]
        assert tensor is not None
        return Held(tensor, f"{source.path}.{source.name}" if source.path else source.name)

    def _module(self, path: str) -> torch.nn.Module:
        return self.model.get_submodule(path)


class _Watched(StaticCall):
    """A static call that tells the promotion when it left its program."""

    def __init__(
        self, promotion: Promotion, state: _State, program: Program, leaves: list[Held | None], inbox: Inbox | None = None
    ) -> None:
        super().__init__(program, leaves, inbox)
        self._told = (promotion, state)

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        if self.diverged:
            self._told[0].diverged(self._told[1], self.diverged)

    def rebuilt(self, token: Token) -> torch.Tensor:
        """See :meth:`StaticCall.rebuilt`; a mismatch also ends the program, so that the next call runs live."""
        try:
            return super().rebuilt(token)
        except ReplayMismatch:
            promotion, state = self._told
            if state.program is self.program:
                promotion.diverged(state, f"{token.saved.site} could not be rebuilt as the forward had it")
            raise


def _tables(model: torch.nn.Module) -> Iterator[dict[str, object]]:
    """Where the modules keep plain values: their own attributes, and those of a configuration object that they hold."""
    seen: set[int] = set()
    for module in model.modules():
        yield module.__dict__
        config = module.__dict__.get("config")
        if config is not None and hasattr(config, "__dict__") and id(config) not in seen:
            seen.add(id(config))
            yield config.__dict__
