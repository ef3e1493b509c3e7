"""The live gear: a dispatch mode captures, in every forward, the operations that replays will need.

It assumes nothing about the step. Random state, numbers that change from step to step and the order of operations
are captured as they come; what a policy does not ask for, and what cannot be replayed, is simply kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from recoup.torch.capture import Argument, Captured, Handle, Milestone, Version, capture_generator, generator_lock
from recoup.torch.holding import Held, Leaf
from recoup.torch.naming import Namer
from recoup.torch.offload.inbox import Inbox, Noted
from recoup.torch.offload.outbox import Moved, fetch
from recoup.torch.private import below_modes, outer_saved_tensor_hooks
from recoup.torch.rebuild import Rebuilder, draw
from recoup.torch.traits import Traits, is_random, traits_of, updated_statistics, written_tensors
from recoup.torch.views import Layout, is_plain, layout_of, tensors_in

__all__ = ["LiveSession", "Policy", "Uncapturable", "outer_recomputes"]


UNFILLED = "memory that no operation the dispatcher sees has filled"
# Fetches come before all operations of a rebuild, in the order in which what they fetch was made.
_FETCHES = -(1 << 40)


class Uncapturable(Exception):
    """An operation cannot be captured; the reason is its text. Never leaves this package."""


class Policy(Protocol):
    """Which operations to capture, and what to call them."""

    def wants(self, traits: Traits) -> bool:
        """Whether to capture the operation that is about to run; called once for every counted operation, in order."""
        ...

    def rebuilds(self) -> bool:
        """Whether anything of the operation last asked about is to be rebuilt, and not just offloaded."""
        ...

    def site(self, traits: Traits) -> str:
        """The name of the operation last asked about."""
        ...

    def keeps(self, op: Captured, place: int, tensor: Tensor) -> str:
        """Why an output of a captured operation is to be kept all the same; '' to let it be dropped."""
        ...

    def drops(self, version: Version, tensor: Tensor) -> bool:
        """Whether a tensor about to be saved, on a version that could be rebuilt, is to be dropped."""
        ...

    def namer(self) -> Namer:
        """Who can name a tensor that is read now and that the region did not make."""
        ...

    def kept(self, site: str, reason: str) -> None:
        """Told of everything that was to be captured and could not be."""
        ...


class _Entry:
    """What is known of one live storage: its current version, the version counters that go with it, its death watch."""

    __slots__ = ("counters", "version", "watch")

    def __init__(self, version: Version, counters: tuple[int, int], watch: weakref.ref[torch.UntypedStorage]) -> None:
        self.version = version
        self.counters = counters
        self.watch = watch


class _Seen(NamedTuple):
    """While one operation is captured: the storages it was given, the versions it reads, the storages it writes."""

    keys: set[int]
    inputs: dict[int, Version]
    writing: set[int]


class LiveSession:
    """One forward call under the live gear. Use ``on``/``off`` around the operations to watch; ``close`` when it is over."""

    def __init__(
        self,
        policy: Policy,
        observer: Callable[[Captured], None] | None = None,
        held_from: Mapping[str, str] | None = None,
        inbox: Inbox | None = None,
    ) -> None:
        self.policy = policy
        # The traffic of what the plan offloads; None where it offloads nothing.
        self.inbox = inbox
        # By site, the site that the backward must have asked for before a rebuilt value is held.
        self.held_from = held_from or {}
        self.milestones = {trigger: Milestone() for trigger in self.held_from.values()}
        self.rebuilder = Rebuilder(observer, None if inbox is None else inbox.fetch_ahead)
        self.outer = outer_saved_tensor_hooks()
        self.entries: dict[int, _Entry] = {}
        self.leaves: dict[int, weakref.ref[Leaf]] = {}
        self.mode = _LiveMode(self)
        self.sequence = 0
        self.packs: list[tuple[Version | Held, Layout]] | None = None  # filled when a static program is to be made of this call
        self.dropped_bytes = 0
        self.copied_bytes = 0

    # -- what the dispatch mode calls

    def run(self, func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run one operation of the forward and capture it if the policy wants it."""
        traits = traits_of(func)
        if traits.bookkeeping or traits.view:
            return func(*args, **kwargs)
        wanted = self.policy.wants(traits)
        if traits.mutable:
            return self._run_writing(func, traits, args, kwargs, wanted)
        if not wanted:
            return func(*args, **kwargs)
        if self.inbox is not None and not self.policy.rebuilds():
            return self._run_uncaptured(func, traits, args, kwargs)
        try:
            op, keys = self._capture(func, traits, args, kwargs)
        except Uncapturable as reason:
            self.policy.kept(self.policy.site(traits), str(reason))
            return self._run_uncaptured(func, traits, args, kwargs)
        result = self._call(op, func, args, kwargs)
        self._register(op, result, keys)
        return result

    def _run_uncaptured(self, func: torch._ops.OpOverload, traits: Traits, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run an operation that no replay can run; what the plan offloads of its results moves all the same."""
        if self.inbox is None:
            return func(*args, **kwargs)
        site = self.policy.site(traits)
        keys = {storage_key(tensor) for tensor in tensors_in((args, kwargs)) if is_plain(tensor)}
        result = func(*args, **kwargs)
        for place, tensor in self._fresh(result, keys):
            name = _output_site(site, place)
            if name in self.inbox.sites:
                self._enter(tensor, self._moved(self.inbox, traits, name, tensor))
        return result

    def _run_writing(
        self, func: torch._ops.OpOverload, traits: Traits, args: tuple[object, ...], kwargs: dict[str, object], wanted: bool
    ) -> object:
        written = written_tensors(traits, args, kwargs)
        entries: list[tuple[Tensor, _Entry | None]] = []
        for tensor in written:
            if not is_plain(tensor):
                continue
            key = storage_key(tensor)
            leaf = self.leaves.get(key)
            if leaf is not None and (found := leaf()) is not None:
                self.copied_bytes += found.protect()
                del self.leaves[key]
            entries.append((tensor, self._entry(tensor, key)))
        if not any(entry is not None for _, entry in entries):
            return self._run_uncaptured(func, traits, args, kwargs) if wanted else func(*args, **kwargs)
        try:
            if not all(entry is not None for _, entry in entries):
                raise Uncapturable("it writes a tensor that the region did not make")
            if any(entry is not None and _moved_of(entry.version) for _, entry in entries):
                raise Uncapturable("it writes what is offloaded")
            op, keys = self._capture(func, traits, args, kwargs, writing={storage_key(tensor) for tensor in written})
        except Uncapturable as reason:
            return self._write_uncaptured(func, traits, args, kwargs, entries, str(reason))
        result = self._call(op, func, args, kwargs)
        for tensor, entry in entries:
            if entry is not None:
                self._write(op, tensor, entry)
        if wanted:
            self._register(op, result, keys)
        return result

    def _write_uncaptured(
        self,
        func: torch._ops.OpOverload,
        traits: Traits,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        entries: list[tuple[Tensor, _Entry | None]],
        reason: str,
    ) -> object:
        """Run a write that no replay can run: what it writes is kept from here on, or offloaded as it will be."""
        for tensor, entry in entries:
            moved = None if entry is None else _moved_of(entry.version)
            if moved is not None:
                self.copied_bytes += moved.protect()
            elif entry is not None:
                self.policy.kept(entry.version.site, f"{self.policy.site(traits)} writes it in place: {reason}")
                self.entries.pop(storage_key(tensor), None)
        result = func(*args, **kwargs)
        for tensor, entry in entries:
            if entry is not None and self.inbox is not None and _moved_of(entry.version) is not None:
                entry.version = self._moved(self.inbox, traits, entry.version.site, tensor)
                entry.counters = (tensor._version, tensor._version + 1)
        return result

    def _write(self, op: Captured, tensor: Tensor, entry: _Entry) -> None:
        before = entry.version
        covered = before.covered if before.initialised else min(before.nbytes, before.covered + tensor.numel() * tensor.element_size())
        version = Version(op, before.site, before.nbytes, covered, before.held_from, before.milestone)
        op.overwrites.append((before, weakref.ref(version)))
        entry.version = version
        # The counter is bumped after this returns, except below ADInplaceOrView, where it is not bumped at all.
        entry.counters = (tensor._version, tensor._version + 1)

    def _call(self, op: Captured, func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if not is_random(op.traits, args, kwargs):
            return func(*args, **kwargs)
        device = next((tensor.device for tensor in tensors_in((args, kwargs))), torch.device("cpu"))
        # Under the lock no replay in another thread can move the default generator between the look at it and the draw.
        with generator_lock:
            op.generator = capture_generator(op.traits, args, kwargs, device)
            return draw(op, args, kwargs)

    # -- capturing

    def _capture(
        self,
        func: torch._ops.OpOverload,
        traits: Traits,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        writing: set[int] | None = None,
    ) -> tuple[Captured, set[int]]:
        if traits.refusal:
            raise Uncapturable(traits.refusal)
        op = Captured(self.sequence, func, traits, self.policy.site(traits))
        self.sequence += 1
        seen = _Seen(set(), {}, writing or set())
        hidden = updated_statistics(traits, args)
        op.arguments = tuple(None if place in hidden else self._reference(value, seen) for place, value in enumerate(args))
        op.keywords = {name: self._reference(value, seen) for name, value in kwargs.items()}
        op.inputs = tuple(seen.inputs.values())
        return op, seen.keys

    def _reference(self, value: object, seen: _Seen) -> object:
        if isinstance(value, Tensor):
            return self._argument(value, seen)
        if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
            return [self._reference(item, seen) for item in value]
        return value

    def _argument(self, tensor: Tensor, seen: _Seen) -> Argument:
        if not is_plain(tensor):
            raise Uncapturable(f"it reads a {type(tensor).__name__} of layout {tensor.layout}, which has no plain storage")
        key = storage_key(tensor)
        seen.keys.add(key)
        entry = self._entry(tensor, key)
        if entry is not None:
            written = key in seen.writing
            if entry.version.initialised or written:
                if not written:
                    seen.inputs[id(entry.version)] = entry.version
                    moved = _moved_of(entry.version)
                    if moved is not None:
                        moved.read_as(tensor)
                return Argument(entry.version, layout_of(tensor))
            self.policy.kept(entry.version.site, UNFILLED)
        return Argument(self._leaf(tensor, key), layout_of(tensor))

    def _leaf(self, tensor: Tensor, key: int) -> Leaf:
        ref = self.leaves.get(key)
        leaf = ref() if ref is not None else None
        if leaf is None:
            leaf = Leaf(tensor, key, self.policy.namer(), self.outer)
            self.leaves[key] = weakref.ref(leaf)
        return leaf

    def _entry(self, tensor: Tensor, key: int) -> _Entry | None:
        """What is known of the tensor's storage; nothing, if it has been written where nobody saw it."""
        entry = self.entries.get(key)
        if entry is not None and tensor._version not in entry.counters:
            del self.entries[key]
            return None
        return entry

    def _fresh(self, result: object, keys: set[int]) -> Iterator[tuple[int, Tensor]]:
        """The tensors among the results that lie on storages of their own, with their places."""
        for place, tensor in enumerate(tensors_in(result)):
            if is_plain(tensor) and (key := storage_key(tensor)) not in keys:
                keys.add(key)
                yield place, tensor

    def _register(self, op: Captured, result: object, keys: set[int]) -> None:
        """Make a version for every fresh storage among the results."""
        for place, tensor in self._fresh(result, keys):
            site = _output_site(op.site, place)
            if self.inbox is not None and site in self.inbox.sites:
                self._enter(tensor, self._moved(self.inbox, op.traits, site, tensor))
                continue
            reason = self.policy.keeps(op, place, tensor)
            if reason:
                self.policy.kept(site, reason)
                continue
            version = self._version(op, site, tensor.untyped_storage().nbytes())
            op.outputs.append((place, weakref.ref(version)))
            self._enter(tensor, version)

    def _enter(self, tensor: Tensor, version: Version) -> None:
        """A storage is known from here on."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        # The closure must not hold the session: a storage that outlives the step would keep it alive.
        watch = weakref.ref(storage, lambda _, entries=self.entries, key=key: entries.pop(key, None) and None)
        self.entries[key] = _Entry(version, (tensor._version, tensor._version), watch)

    def _version(self, op: Captured, site: str, nbytes: int) -> Version:
        trigger = self.held_from.get(site)
        return Version(
            op, site, nbytes, 0 if op.traits.uninitialised else nbytes,
            None if trigger is None else self.milestones[trigger], self.milestones.get(site),
        )  # fmt: skip

    def _moved(self, inbox: Inbox, traits: Traits, site: str, tensor: Tensor) -> Version:
        """A version that is fetched, not rebuilt."""
        moved = Moved(inbox, site, tensor)
        op = Captured(_FETCHES + self.sequence, fetch, traits, site)
        self.sequence += 1
        op.arguments = (moved,)
        version = Version(op, site, moved.nbytes, moved.nbytes, None, self.milestones.get(site))
        op.outputs.append((0, weakref.ref(version)))
        return version

    # -- saved tensors

    @property
    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Hooks to enter around the forward; made anew, since a session that held them would be a reference cycle."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, unpack)

    def pack(self, tensor: Tensor) -> Held | Handle:
        """Called by autograd for every tensor it saves."""
        if is_plain(tensor):
            entry = self._entry(tensor, storage_key(tensor))
            if entry is not None and not entry.version.initialised:
                self.policy.kept(entry.version.site, UNFILLED)
            elif entry is not None and self.policy.drops(entry.version, tensor):
                moved = _moved_of(entry.version)
                if moved is not None:
                    moved.put(tensor)
                self.dropped_bytes += entry.version.nbytes
                layout = layout_of(tensor)
                if self.packs is not None:
                    self.packs.append((entry.version, layout))
                return self.rebuilder.drop(entry.version, layout)
        held = self._held(tensor)
        if self.packs is not None:
            self.packs.append((held, Layout(tensor.shape, (), 0, tensor.dtype)))
        return held

    def _held(self, tensor: Tensor) -> Held:
        if self.inbox is None:
            return Held(tensor, self.policy.namer(), self.outer)
        noted = Noted(tensor, self.policy.namer(), self.outer)
        noted.inbox = self.inbox
        return noted

    # -- switching

    def on(self) -> None:
        """Start capturing in this thread, below the dispatch modes that are active, so that what they change is seen changed."""
        above: list[TorchDispatchMode] = [mode for _ in range(below_modes()) if (mode := _pop_mode()) is not None]
        _push_mode(self.mode)
        for mode in reversed(above):
            _push_mode(mode)

    def off(self) -> None:
        """Stop capturing in this thread."""
        above: list[TorchDispatchMode] = []
        while below_modes() > 0:
            mode = _pop_mode()
            if mode is self.mode or mode is None:
                break
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)

    def close(self) -> None:
        """The forward is over: forget the live storages; what the backward needs hangs on autograd's handles."""
        self.entries.clear()
        self.leaves.clear()
        self.packs = None


class _LiveMode(TorchDispatchMode):
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # No compiler runs below this mode; the guard against one would cost several microseconds an operation.
        return False

    def __init__(self, session: LiveSession) -> None:
        super().__init__()
        self._session = weakref.ref(session)

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        session = self._session()
        assert session is not None
        return session.run(func, args, kwargs or {})


def unpack(packed: Held | Handle) -> Tensor:
    """Called by autograd for every saved tensor that the backward reads."""
    if type(packed) is Handle:
        return packed.rebuilder.tensor(packed)
    return packed.get()  # type: ignore[union-attr]


def _output_site(site: str, place: int) -> str:
    return f"{site}:{place}" if place else site


def _moved_of(version: Version) -> Moved | None:
    """What an offloaded version moves; None for one that is rebuilt."""
    return version.op.arguments[0] if version.op.func is fetch else None  # type: ignore[return-value]


def storage_key(tensor: Tensor) -> int:
    """The identity of a tensor's storage while it lives."""
    return tensor.untyped_storage()._cdata


def outer_recomputes() -> bool:
    """Whether the innermost saved-tensor hooks are those of ``torch.utils.checkpoint``.

    It pairs what the forward saves with what its recomputation saves by order alone, so nothing may be dropped on the way to it.
    """
    outer = outer_saved_tensor_hooks()
    return outer is not None and getattr(outer[0], "__module__", "") == "torch.utils.checkpoint"
