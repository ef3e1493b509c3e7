"""How many bytes a step really takes: the allocator's high-water mark, resident bytes, scratch of single operations.

On CPU the truth is the allocator's own event stream, read through PyTorch's profiler; it agrees to the byte with an
allocator that counts. The resident set size of the process is never used: it depends on what the C library gives back.

The allocator reports a release only if it also saw the allocation. Memory that stood before a session and is released
in it would therefore seem to stay; :func:`measure_peak` runs the step once more inside the session for that reason.
"""

from __future__ import annotations

import gc
import heapq
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import chain
from typing import Literal, NamedTuple, final

import torch
from torch.autograd import ProfilerConfig, ProfilerState
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from recoup.errors import CaptureError, UsageError
from recoup.torch.state import reachable

__all__ = [
    "CpuMeter",
    "CudaMeter",
    "Meter",
    "device_of",
    "mark",
    "measure_peak",
    "meter_for",
    "profile_operations",
    "resident_bytes",
    "standing_tensors",
]

_LABEL = "recoup:"
_MEASURED = "recoup:measured"


class Meter(ABC):
    """Reads what an allocator did while something ran."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device whose allocator is read."""

    @abstractmethod
    def net_and_peak(self, run: Callable[[], object], before: Callable[[], object] | None = None) -> tuple[int, int]:
        """Bytes that ``run`` left allocated, and bytes by which its high-water mark rose above what stood before.

        ``before`` runs first and is not counted; what it allocates and ``run`` releases is counted as released.
        ``run``'s result is dropped at once, and its dropping is counted.
        """

    def peak_above(self, run: Callable[[], object], before: Callable[[], object] | None = None) -> int:
        """Bytes by which the allocator's high-water mark rose above what stood before ``run``; see :meth:`net_and_peak`."""
        return self.net_and_peak(run, before)[1]


@final
class CpuMeter(Meter):
    """The CPU allocator, read from the profiler's memory events in the order in which they happened.

    Memory that libraries take without the allocator (some oneDNN and MKL work areas) is not seen, nor is what
    threads started by Python code allocate.
    """

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def net_and_peak(self, run: Callable[[], object], before: Callable[[], object] | None = None) -> tuple[int, int]:
        """See :meth:`Meter.net_and_peak`."""

        def whole() -> None:
            if before is not None:
                before()
            with torch._C._profiler._RecordFunctionFast(_MEASURED):
                run()

        return _net_and_high(_memory_events(whole))


@final
class CudaMeter(Meter):
    """The caching allocator of one CUDA device, by its own statistics. Not measured on a GPU yet."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def device(self) -> torch.device:
        """The CUDA device given."""
        return self._device

    def net_and_peak(self, run: Callable[[], object], before: Callable[[], object] | None = None) -> tuple[int, int]:
        """See :meth:`Meter.net_and_peak`."""
        if before is not None:
            before()
        torch.cuda.synchronize(self.device)
        stood = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        torch.cuda.synchronize(self.device)
        high = torch.cuda.max_memory_allocated(self.device)
        return torch.cuda.memory_allocated(self.device) - stood, high - stood


def meter_for(device: torch.device | str) -> Meter:
    """The meter of a device.

    Raises:
        UsageError: no meter knows this kind of device.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return CpuMeter()
    if device.type == "cuda":
        return CudaMeter(device)
    raise UsageError(f"cannot measure memory on {device}; Recoup measures on cpu and cuda")


def device_of(model: torch.nn.Module) -> torch.device:
    """The device of the model's first parameter or buffer; ``cpu`` for a model that has neither."""
    first = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def resident_bytes(model: torch.nn.Module, *others: object, device: torch.device | str | None = None) -> int:
    """Bytes of parameters, buffers, standing gradients and ``others`` on a device, each storage once.

    ``others`` are tensors, modules, optimizers (their state counts), or containers of these. ``device`` is the
    model's own if not given.
    """
    device = device_of(model) if device is None else torch.device(device)
    return sum(storage.nbytes() for storage in _storages((model, *others), device).values())


def measure_peak(step: Callable[[], object], model: torch.nn.Module, *, warm: bool = False) -> int:
    """Peak bytes of the whole step on the model's device: what stands before it and what it adds.

    Counted as standing: the model's parameters, buffers and gradients, and tensors, modules and optimizers that the
    step's code names (closure, defaults, globals, attributes of the object it is bound to). The step runs twice;
    with ``warm``, which says that it has run before, once if that is enough to be exact.

    Raises:
        UsageError: the model is on a device that cannot be measured.
        CaptureError: a profiler is already running.
    """
    meter = meter_for(device_of(model))

    def standing() -> list[tuple[int, weakref.ref[torch.UntypedStorage]]]:
        gc.collect()
        # Weak, so that measuring keeps nothing alive that the step would release.
        return [(storage.nbytes(), weakref.ref(storage)) for storage in _storages((model, *reachable(step)), meter.device).values()]

    if warm:
        before = standing()
        above = meter.peak_above(step)
        if all(storage() is not None for _, storage in before):
            return sum(size for size, _ in before) + above
        # The step released memory whose allocation no session had seen, so the mark is too high: measure again.
    resident: list[int] = []

    def warm_up() -> None:
        step()
        resident.extend(size for size, _ in standing())

    above = meter.peak_above(step, before=warm_up)
    return sum(resident) + above


def mark(label: int) -> AbstractContextManager[None]:
    """Labels what is allocated inside, for :func:`profile_operations`; works inside a dispatch mode, which does not see it."""
    return torch._C._profiler._RecordFunctionFast(f"{_LABEL}{label}")


def profile_operations(run: Callable[[], object], labels: Iterable[int] | None = None) -> dict[int, int]:
    """For each label of :func:`mark` opened in ``run``, the bytes by which memory rose above its start, outputs included.

    A label opened several times has the largest rise. With ``labels`` given, just those are returned, 0 for one that
    was never opened. CPU only.
    """
    highs: dict[int, int] = {}
    for thread in _memory_events(run):
        for label, high in _label_highs(thread):
            highs[label] = max(highs.get(label, 0), high)
    return highs if labels is None else {label: highs.get(label, 0) for label in labels}


class _Event(NamedTuple):
    """What a profiler session saw on one thread: a range opened, a range closed, or bytes that came or went."""

    kind: Literal["push", "pop", "memory"]
    name: str
    size: int
    at: float


def _memory_events(run: Callable[[], object]) -> list[list[_Event]]:
    """Events of each thread in order, while ``run`` runs in a profiler session."""
    if torch._C._autograd._profiler_enabled():
        raise CaptureError("a PyTorch profiler is already running on this thread; memory is measured with one of its own: leave it first")
    return _legacy_events(run) if hasattr(torch._C._autograd, "_enable_profiler_legacy") else _kineto_events(run)


def _legacy_events(run: Callable[[], object]) -> list[list[_Event]]:
    # The older in-process profiler: it keeps the order exactly, writes nothing to the terminal and costs half of Kineto.
    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, torch._C._profiler._ExperimentalConfig())
    torch._C._autograd._enable_profiler_legacy(config)
    try:
        run()
    finally:
        records = torch._C._autograd._disable_profiler_legacy()
    first = next((event for thread in records for event in thread if event.kind() == "mark"), None)
    streams: list[list[_Event]] = []
    for thread in records:
        stream: list[_Event] = []
        for event in thread:
            kind, at = event.kind(), first.cpu_elapsed_us(event) if first is not None and len(records) > 1 else 0.0
            if kind == "memory_alloc":
                if event.cpu_memory_usage():
                    stream.append(_Event("memory", "", event.cpu_memory_usage(), at))
            elif kind == "push":
                stream.append(_Event("push", event.name(), 0, at))
            elif kind == "pop":
                stream.append(_Event("pop", "", 0, at))
        streams.append(stream)
    return streams


def _kineto_events(run: Callable[[], object]) -> list[list[_Event]]:
    # For a PyTorch without the older profiler. Ranges come with a start and a duration; only labels are needed of them.
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as session:
        run()
    streams: dict[int, list[_Event]] = {}
    assert session is not None
    results = session.kineto_results
    for event in results.events() if results is not None else ():
        stream = streams.setdefault(event.start_thread_id(), [])
        if event.name() == "[memory]":
            if event.device_type() == torch.autograd.DeviceType.CPU:
                stream.append(_Event("memory", "", event.nbytes(), event.start_ns()))  # pyrefly: ignore[missing-attribute]
        elif event.name().startswith(_LABEL):
            stream.append(_Event("push", event.name(), 0, event.start_ns()))
            stream.append(_Event("pop", "", 0, event.start_ns() + event.duration_ns()))
    return [sorted(stream, key=lambda event: event.at) for stream in streams.values()]


def _net_and_high(threads: list[list[_Event]]) -> tuple[int, int]:
    """Net bytes and high-water mark of the range ``_MEASURED``, events of all threads in time order."""
    main = next(thread for thread in threads if any(event.name == _MEASURED for event in thread))
    begin = next(place for place, event in enumerate(main) if event.name == _MEASURED)
    end = _closing(main, begin)
    streams = [main[begin:end]]
    for thread in threads:
        if thread is not main:
            streams.append([event for event in thread if main[begin].at <= event.at <= main[end].at])
    total = high = 0
    for event in heapq.merge(*streams, key=lambda event: event.at):
        total += event.size
        high = max(high, total)
    return total, high


def _closing(thread: list[_Event], begin: int) -> int:
    depth = 0
    for place in range(begin, len(thread)):
        depth += {"push": 1, "pop": -1, "memory": 0}[thread[place].kind]
        if depth == 0:
            return place
    raise CaptureError("the profiler session ended inside the measured range")


def _label_highs(thread: list[_Event]) -> Iterator[tuple[int, int]]:
    """Each label's rise above its start, one entry for each time it was opened."""
    opened: list[tuple[int | None, int, int]] = []  # label, total at its start, highest total since
    total = 0
    for event in thread:
        total += event.size
        if event.kind == "push":
            number = event.name.removeprefix(_LABEL) if event.name.startswith(_LABEL) else ""
            opened.append((int(number) if number.isdecimal() else None, total, total))
        elif event.kind == "pop" and opened:
            label, start, high = opened.pop()
            if label is not None:
                yield label, high - start
            if opened:
                opened[-1] = (*opened[-1][:2], max(opened[-1][2], high))
        elif opened:
            opened[-1] = (*opened[-1][:2], max(opened[-1][2], total))


def _storages(roots: Iterable[object], device: torch.device) -> dict[int, torch.UntypedStorage]:
    """The distinct storages on a device that ``roots`` hold, by identity."""
    found: dict[int, torch.UntypedStorage] = {}
    for root in roots:
        for tensor in standing_tensors(root):
            if tensor.device.type != device.type or (device.index is not None and tensor.device.index != device.index):
                continue
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage
    return found


def standing_tensors(root: object) -> Iterator[torch.Tensor]:
    """Plain strided tensors in a module, an optimizer, a tensor or a container of these, gradients included."""
    if isinstance(root, torch.nn.Module):
        children: Iterable[object] = chain(root.parameters(), root.buffers())
    elif isinstance(root, torch.optim.Optimizer):
        children = chain((group["params"] for group in root.param_groups), root.state.values())
    elif isinstance(root, torch.Tensor):
        if root.is_leaf and root.grad is not None:
            yield from standing_tensors(root.grad)
        if is_traceable_wrapper_subclass(root):
            children = [getattr(root, name) for name in root.__tensor_flatten__()[0]]
        elif root.layout != torch.strided:
            children = [root.values(), *([root.indices()] if root.layout == torch.sparse_coo and root.is_coalesced() else [])]
        else:
            yield root
            return
    else:
        children = [leaf for leaf in tree_leaves(root) if isinstance(leaf, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer))]
    for child in children:
        yield from standing_tensors(child)
