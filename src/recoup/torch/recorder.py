"""One recorded pass over a step: every operation, every storage from birth to death, every saved tensor.

A dispatch mode sees the operations, saved-tensor hooks what autograd keeps, weak references on storages their death.
Nothing here holds a tensor longer than the plain step would.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from recoup.graph import Kind, Phase, Ref
from recoup.torch.frames import OUTSIDE, Frame
from recoup.torch.interception import Interception
from recoup.torch.live import storage_key
from recoup.torch.meter import mark, standing_tensors
from recoup.torch.private import below_backward, current_backward, shared_alias
from recoup.torch.signature import signature_of
from recoup.torch.state import reachable
from recoup.torch.timing import Clock
from recoup.torch.traits import Traits, is_random, traits_of, updated_statistics, written_tensors
from recoup.torch.views import tensors_in, to_view

__all__ = ["RecordedOp", "RecordedSave", "RecordedStorage", "Recorder"]


@dataclass(slots=True)
class RecordedStorage:
    """A storage while the pass goes on; ``dies`` is -1 while it lives."""

    id: int
    bytes: int
    kind: Kind
    site: str
    producer: int | None
    born: int
    root: int
    dies: int = -1
    writes: list[int] = field(default_factory=list)
    watch: object = None


@dataclass(slots=True)
class RecordedOp:
    """An operation as it ran; ``span`` is what the clock said before and after it."""

    site: str
    target: str
    phase: Phase
    module: str
    call: int
    root: int
    inputs: tuple[Ref, ...]
    constants: tuple[str, ...]
    flags: tuple[str, ...]
    outputs: tuple[Ref, ...] = ()
    mutates: tuple[int, ...] = ()
    flops: int = 0
    span: tuple[object, object] = (None, None)


@dataclass(slots=True)
class RecordedSave:
    """A tensor that autograd packed."""

    ref: Ref
    packed_at: int
    root: int
    unpacked_at: list[int] = field(default_factory=list)
    released_at: int = -1


class _Token:
    """What autograd holds for a saved tensor while a pass is recorded: its own death is the tensor's release."""

    __slots__ = ("__weakref__", "number", "tensor")

    def __init__(self, number: int, tensor: Tensor) -> None:
        self.number = number
        self.tensor = tensor


class Recorder:
    """Records one pass of a step; read ``ops``, ``storages``, ``saves`` when it has returned.

    Args:
        model: whose modules give the places.
        clock: times each operation.
        saving: watch what autograd saves; off while something else holds the saved tensors.
        marking: label each operation for the memory profiler.
    """

    def __init__(self, model: torch.nn.Module, clock: Clock, *, saving: bool = True, marking: bool = False) -> None:
        self.model = model
        self.clock = clock
        self.saving = saving
        self.marking = marking
        self.ops: list[RecordedOp] = []
        self.storages: list[RecordedStorage] = []
        self.saves: list[RecordedSave] = []
        self.unpack_order: list[int] = []
        self.backwards: list[int] = []
        self.roots = 0
        self.signature = ""
        self._live: dict[int, RecordedStorage] = {}
        self._tokens: list[weakref.ref[_Token]] = []
        self._frame = Frame(OUTSIDE, 0)
        self._outside = self._frame
        self._calls: Counter[str] = Counter()
        self._apart = {"backward": Frame("~backward", 0), "optimizer": Frame("~optimizer", 0)}
        self._task = -1
        self._register_model()

    # -- running

    def record(self, step: Callable[[], object]) -> None:
        """Run the step once and write it down."""
        for held in reachable(step):
            for tensor in standing_tensors(held):
                self._known(tensor, "outside", "")
        interception = Interception(self.model, self._around)
        try:
            with ExitStack() as stack:
                if self.saving:
                    stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))
                stack.enter_context(_RecordMode(self))
                step()
        finally:
            interception.remove()
        self._close()

    def seconds(self) -> list[float]:
        """Seconds of each operation."""
        return [self.clock.seconds(*op.span) for op in self.ops]

    def _close(self) -> None:
        for storage in self.storages:
            storage.watch = None
            if storage.dies < 0:
                storage.dies = len(self.ops)
        for save in self.saves:
            if save.released_at < 0:
                save.released_at = len(self.ops)
        self._tokens = []
        self._live = {}

    def _around(self, path: str, inner: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        before = self._frame
        if below_backward() or (before is self._outside and not torch.is_grad_enabled()):
            return inner(*args, **kwargs)
        if before is self._outside:
            self._register_inputs(args, kwargs)
            self.roots += 1
        self._frame = Frame(path, self._calls[path])
        self._calls[path] += 1
        try:
            return inner(*args, **kwargs)
        finally:
            self._frame = before

    # -- storages

    def _register_model(self) -> None:
        for name, parameter in self.model.named_parameters():
            self._known(parameter, "parameter", name)
            if parameter.grad is not None:
                self._known(parameter.grad, "gradient", name)
        for name, buffer in self.model.named_buffers():
            self._known(buffer, "buffer", name)

    def _register_inputs(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if not self.roots:
            self.signature = signature_of(args, kwargs)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._known(leaf, "input", "")

    def _known(self, tensor: Tensor, kind: Kind, site: str, *, producer: int | None = None, root: int = -1) -> RecordedStorage | None:
        """The record of a tensor's storage, made if need be; None for a tensor without a storage of its own."""
        if tensor.layout is not torch.strided or type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        record = self._live.get(key)
        if record is None:
            born = -1 if producer is None else producer
            record = RecordedStorage(len(self.storages), storage.nbytes(), kind, site, producer, born, root)
            self.storages.append(record)
            self._live[key] = record
            record.watch = weakref.ref(storage, lambda _, record=record, key=key: self._died(key, record))
        return record

    def _died(self, key: int, record: RecordedStorage) -> None:
        record.dies = len(self.ops)
        if self._live.get(key) is record:
            del self._live[key]

    def _ref(self, tensor: Tensor) -> Ref | None:
        record = self._known(tensor, "outside", "")
        return None if record is None else Ref(record.id, len(record.writes), to_view(tensor))

    # -- operations

    def run(self, func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run one operation and write it down."""
        traits = traits_of(func)
        if traits.bookkeeping or traits.view:
            return func(*args, **kwargs)
        op = self._describe(func, traits, args, kwargs)
        number = len(self.ops)
        inputs = {storage_key(tensor) for tensor in tensors_in((args, kwargs)) if tensor.layout is torch.strided}
        with mark(number) if self.marking else nullcontext():
            begin = self.clock.now()
            result = func(*args, **kwargs)
            op.span = (begin, self.clock.now())
        self._finish(op, number, func, traits, args, kwargs, result, inputs)
        return result

    def _describe(self, func: torch._ops.OpOverload, traits: Traits, args: tuple[object, ...], kwargs: dict[str, object]) -> RecordedOp:
        phase = self._phase()
        # Backward and optimizer run in no module; counted apart, they do not move the forward's sites.
        frame = self._apart.get(phase, self._frame)
        frame.count(traits)
        hidden = updated_statistics(traits, args)
        tensors = [tensor for place, value in enumerate(args) if place not in hidden for tensor in tensors_in(value)]
        refs = [self._ref(tensor) for tensor in (*tensors, *tensors_in(kwargs))]
        return RecordedOp(
            site=frame.site(traits),
            target=str(func),
            phase=phase,
            module=frame.path,
            call=frame.call,
            root=self.roots if self._frame is not self._outside else 0,
            inputs=tuple(ref for ref in refs if ref is not None),
            constants=tuple(_printed(value) for value in (*args, *kwargs.values()) if not tensors_in(value)),
            flags=_flags(func, traits, args, kwargs),
        )

    def _phase(self) -> Phase:
        task = current_backward()
        if task != -1:
            if task != self._task:
                self._task = task
                self.backwards.append(len(self.ops))
            return "backward"
        return "optimizer" if self.backwards and self._frame is self._outside else "forward"

    def _finish(
        self,
        op: RecordedOp,
        number: int,
        func: torch._ops.OpOverload,
        traits: Traits,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        result: object,
        inputs: set[int],
    ) -> None:
        self.ops.append(op)
        op.mutates = tuple(self._written(number, traits, args, kwargs))
        kind: Kind = "activation" if op.phase == "forward" else "gradient"
        outputs: list[Ref] = []
        for place, tensor in enumerate(tensors_in(result)):
            fresh = tensor.layout is torch.strided and storage_key(tensor) not in inputs
            site = f"{op.site}:{place}" if place else op.site
            record = self._known(tensor, kind if fresh else "outside", site, producer=number if fresh else None, root=op.root)
            if record is not None:
                outputs.append(Ref(record.id, len(record.writes), to_view(tensor)))
        op.outputs = tuple(outputs)
        packet = func._overloadpacket if isinstance(func, torch._ops.OpOverload) else None
        if packet in flop_registry:
            op.flops = int(flop_registry[packet](*args, **kwargs, out_val=result))

    def _written(self, number: int, traits: Traits, args: tuple[object, ...], kwargs: dict[str, object]) -> list[int]:
        statistics = [tensor for place in updated_statistics(traits, args) for tensor in tensors_in(args[place])]
        tensors = [*written_tensors(traits, args, kwargs), *statistics]
        written: list[int] = []
        for tensor in tensors:
            record = self._known(tensor, "outside", "")
            if record is not None and record.id not in written:
                record.writes.append(number)
                written.append(record.id)
        return written

    # -- saved tensors

    def _pack(self, tensor: Tensor) -> _Token | Tensor:
        ref = self._ref(tensor)
        if ref is None:
            return tensor
        number = len(self.saves)
        self.saves.append(RecordedSave(ref, len(self.ops), self.roots if self._frame is not self._outside else 0))
        token = _Token(number, shared_alias(tensor) if tensor.grad_fn is not None else tensor)
        self._tokens.append(weakref.ref(token, lambda _, number=number: self._released(number)))
        return token

    def _released(self, number: int) -> None:
        self.saves[number].released_at = len(self.ops)

    def _unpack(self, packed: _Token | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self._phase()
        self.saves[packed.number].unpacked_at.append(len(self.ops))
        self.unpack_order.append(packed.number)
        return packed.tensor


class _RecordMode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        return self._recorder.run(func, args, kwargs or {})


def _flags(func: torch._ops.OpOverload, traits: Traits, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[str, ...]:
    flags: list[str] = []
    if isinstance(func, torch._ops.OpOverload) and is_random(traits, args, kwargs):
        flags.append("random")
    for flag, holds in (("decision", traits.decision), ("uninitialised", traits.uninitialised), ("sync", traits.sync)):
        if holds:
            flags.append(flag)
    if traits.refusal:
        flags.append("collective" if traits.refusal.startswith("a collective") else "effect")
    return tuple(flags)


def _printed(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
