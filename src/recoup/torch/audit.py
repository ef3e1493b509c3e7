"""The replay audit: what may be rebuilt is found by rebuilding it, not by a list of names.

Two passes over the step. In the first, every operation of the model's forward is run a second time right after the
first, by the route of the executor, and compared bit by bit, side effects included; and every saved tensor is compared
with what its operation left, so that memory written behind the dispatcher's back shows. In the second, everything that
passed is dropped and rebuilt in the backward as a whole, each rebuilt tensor compared by checksum with the dropped
one; that pass also shows when each storage would die if autograd did not hold it.
"""

from __future__ import annotations

import ctypes
import weakref
import zlib
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from recoup.errors import CaptureError
from recoup.torch.capture import Captured, Handle, Version
from recoup.torch.frames import Frame
from recoup.torch.holding import Held
from recoup.torch.interception import Interception
from recoup.torch.live import LiveSession, storage_key, unpack
from recoup.torch.naming import Namer, tensor_names
from recoup.torch.private import below_backward
from recoup.torch.rebuild import replaying, run
from recoup.torch.state import as_bytes, same_bits
from recoup.torch.traits import Traits, updated_statistics, written_tensors
from recoup.torch.views import anchor, lay, layout_of, tensors_in

__all__ = ["checksum", "probe_operations", "rebuild_everything"]

_WATCHED_BYTES = 1 << 20
_ROUNDS = 4


def checksum(tensor: Tensor) -> int:
    """CRC-32 over a tensor's elements, in order; seen by no dispatch mode."""
    with replaying():
        content = as_bytes(tensor).cpu()
        # Not through numpy(): it would forbid the storage to be resized ever after, and sharding resizes storages.
        return zlib.crc32((ctypes.c_char * content.numel()).from_address(content.data_ptr())) if content.numel() else 0


class _AuditPolicy:
    """Captures everything in the model's modules, except what was refused before."""

    def __init__(self, calls: Counter[str], names: Callable[[], dict[int, str]], refused: dict[str, str]) -> None:
        self.calls = calls
        self.names = names
        self.refused = refused
        self.frame = Frame("", 0)
        self.dropping = False

    def enter(self, path: str) -> Frame:
        before = self.frame
        self.frame = Frame(path, self.calls[path])
        self.calls[path] += 1
        return before

    def wants(self, traits: Traits) -> bool:
        self.frame.count(traits)
        return True

    def rebuilds(self) -> bool:
        return True

    def site(self, traits: Traits) -> str:
        return self.frame.site(traits)

    def keeps(self, op: Captured, place: int, tensor: Tensor) -> str:
        if op.traits.decision and not tensor.is_floating_point():
            return "a decision (indices), which must not flip"
        return self.refused.get(f"{op.site}:{place}" if place else op.site, "")

    def drops(self, version: Version, tensor: Tensor) -> bool:
        return self.dropping and version.site not in self.refused

    def namer(self) -> Namer:
        return self.frame.names(self.names)

    def kept(self, site: str, reason: str) -> None:
        self.refused.setdefault(site, reason)


class _ProbeSession(LiveSession):
    """Runs every captured operation twice and compares."""

    def __init__(self, policy: _AuditPolicy) -> None:
        super().__init__(policy)
        self.sums: weakref.WeakKeyDictionary[Version, int] = weakref.WeakKeyDictionary()

    def _call(self, op: Captured, func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        written = written_tensors(op.traits, args, kwargs)
        spare = {id(tensor): lay(anchor(tensor.untyped_storage().clone(), tensor.device), layout_of(tensor)) for tensor in written}
        watched = [
            tensor
            for tensor in tensors_in((args, kwargs))
            if id(tensor) not in spare and tensor.untyped_storage().nbytes() <= _WATCHED_BYTES
        ]
        result = super()._call(op, func, args, kwargs)
        before = [checksum(tensor) for tensor in watched]
        generator = torch.default_generator.get_state()
        with replaying():
            hidden = updated_statistics(op.traits, args)
            again = run(
                op,
                tuple(None if place in hidden else _swapped(value, spare) for place, value in enumerate(args)),
                {name: _swapped(value, spare) for name, value in kwargs.items()},
            )
        reason = ""
        if not all(same_bits(first, second) for first, second in zip(tensors_in(result), tensors_in(again), strict=True)):
            reason = "run twice on the same inputs, it gives two results"
        elif not all(same_bits(tensor, spare[id(tensor)]) for tensor in written):
            reason = "run twice on the same inputs, it writes two results"
        elif before != [checksum(tensor) for tensor in watched]:
            reason = "running it again changes what it reads"
        elif not torch.equal(generator, torch.default_generator.get_state()):
            reason = "running it again moves the random number generator"
        if reason and not op.traits.uninitialised:
            self._refuse(op, written, reason)
        return result

    def _refuse(self, op: Captured, written: list[Tensor], reason: str) -> None:
        self.policy.kept(op.site, reason)
        for tensor in written:
            entry = self.entries.get(storage_key(tensor))
            if entry is not None:
                self.policy.kept(entry.version.site, f"{op.site}: {reason}")

    def _register(self, op: Captured, result: object, keys: set[int]) -> None:
        super()._register(op, result, keys)
        for place, ref in op.outputs:
            version = ref()
            if version is not None and version.initialised:
                self.sums[version] = checksum(_whole(tensors_in(result)[place]))

    def _write(self, op: Captured, tensor: Tensor, entry: object) -> None:
        super()._write(op, tensor, entry)  # type: ignore[arg-type]
        if entry.version.initialised:  # type: ignore[attr-defined]
            self.sums[entry.version] = checksum(_whole(tensor))  # type: ignore[attr-defined]

    def pack(self, tensor: Tensor) -> Held | Handle:
        entry = self.entries.get(storage_key(tensor)) if tensor.layout is torch.strided else None
        if entry is not None and entry.version in self.sums and self.sums[entry.version] != checksum(_whole(tensor)):
            self.policy.kept(entry.version.site, "its memory is written by something that the dispatcher does not see")
        return super().pack(tensor)


class _DropSession(LiveSession):
    """Drops everything that passed and compares each rebuilt tensor with the dropped one."""

    def __init__(self, policy: _AuditPolicy) -> None:
        super().__init__(policy)
        policy.dropping = True
        self.wrong: dict[str, str] = {}

    @property
    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self._checked)

    def pack(self, tensor: Tensor) -> Held | Handle:
        packed = super().pack(tensor)
        if type(packed) is Handle:
            packed.probe = checksum(tensor)
        return packed

    def _checked(self, packed: Held | Handle) -> Tensor:
        tensor = unpack(packed)
        if type(packed) is Handle and checksum(tensor) != packed.probe:
            self.wrong.setdefault(packed.version.site, "rebuilt from what is kept, it is not what the forward had")
        return tensor


class _Calls:
    """Runs the model's outermost calls under sessions of one kind."""

    def __init__(self, model: torch.nn.Module, make: Callable[[_AuditPolicy], LiveSession], refused: dict[str, str]) -> None:
        self.model = model
        self.make = make
        self.refused = refused
        self.names = tensor_names([model])
        self.calls: Counter[str] = Counter()
        self.session: LiveSession | None = None
        self.sessions: list[LiveSession] = []

    def run(self, step: Callable[[], object]) -> None:
        interception = Interception(self.model, self._around)
        try:
            step()
        finally:
            interception.remove()

    def _around(self, path: str, inner: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        if below_backward():
            return inner(*args, **kwargs)
        if self.session is None:
            return self._root(path, inner, args, kwargs)
        policy = self.session.policy
        assert isinstance(policy, _AuditPolicy)
        before = policy.enter(path)
        try:
            return inner(*args, **kwargs)
        finally:
            policy.frame = before

    def _root(self, path: str, inner: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        policy = _AuditPolicy(self.calls, self.names, self.refused)
        policy.enter(path)
        self.session = session = self.make(policy)
        self.sessions.append(session)
        session.on()
        try:
            with session.hooks:
                return inner(*args, **kwargs)
        finally:
            session.off()
            session.close()
            self.session = None


def probe_operations(step: Callable[[], object], model: torch.nn.Module) -> dict[str, str]:
    """Run the step once, each operation of the model's forward twice; sites that must not be rebuilt, with the reason."""
    refused: dict[str, str] = {}
    _Calls(model, _ProbeSession, refused).run(step)
    return refused


def rebuild_everything(step: Callable[[], object], model: torch.nn.Module, refused: dict[str, str], restore: Callable[[], None]) -> int:
    """Run the step with everything dropped that is not in ``refused``; add to it what does not come back right, until all does.

    Returns how many passes that took.

    Raises:
        CaptureError: the step fails under the executor for another reason than a wrong rebuild.
    """
    wrong: dict[str, str] = {}
    for passes in range(1, _ROUNDS + 1):
        calls = _Calls(model, _DropSession, refused)
        error: Exception | None = None
        try:
            calls.run(step)
        except Exception as failure:
            error = failure
        wrong = {site: reason for session in calls.sessions if isinstance(session, _DropSession) for site, reason in session.wrong.items()}
        refused.update({site: reason for site, reason in wrong.items() if site not in refused})
        if error is None and not wrong:
            return passes
        if error is not None and not wrong:
            raise CaptureError(f"the step fails when its activations are rebuilt: {type(error).__name__}: {error}") from error
        restore()
    raise CaptureError(f"after {_ROUNDS} passes some activations still do not come back right: {', '.join(sorted(wrong)[:3])}")


def _swapped(value: object, spare: dict[int, Tensor]) -> object:
    if isinstance(value, Tensor):
        return spare.get(id(value), value)
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        return [_swapped(item, spare) for item in value]
    return value


def _whole(tensor: Tensor) -> Tensor:
    with replaying():
        return anchor(tensor.untyped_storage(), tensor.device)
