"""The two copiers between a device and the host's memory."""

from __future__ import annotations

import os
import threading
import time
from collections import deque

import torch
from torch import Tensor, UntypedStorage

from recoup.errors import OffloadError
from recoup.torch.offload.buffers import PageBuffer, PinnedBuffer
from recoup.torch.offload.extents import Lease
from recoup.torch.offload.memory import HostMemory, bytes_of, exact
from recoup.torch.offload.tickets import Transfer
from recoup.torch.offload.workers import CLOSED, Job, Lane, Refused

__all__ = ["CudaCopier", "ThreadCopier"]

_PIECE_BYTES = 2**20


class ThreadCopier:
    """Copies on a thread for each direction, into memory that no allocator counts; as slow a link as one likes.

    Args:
        latency_seconds: slept before each transfer.
        bytes_per_second: rate that copies are slowed to; None leaves them as they are.
    """

    def __init__(self, *, latency_seconds: float = 0.0, bytes_per_second: float | None = None) -> None:
        self._latency_seconds = latency_seconds
        self._seconds_per_byte = 1 / bytes_per_second if bytes_per_second else 0.0
        self._out = Lane("offload-out", 1, [None])
        self._back = Lane("offload-back", 1, [None])
        self._pid = os.getpid()

    def foreign(self) -> str:
        """Threads do not survive a fork."""
        return "" if os.getpid() == self._pid else f"the store belongs to process {self._pid}; open another one in this process"

    def segment(self, count: int) -> PageBuffer:
        """Anonymous memory."""
        try:
            return PageBuffer(count)
        except OSError as problem:
            raise OffloadError(f"the host has no {count} bytes for activations to wait in: {problem}") from problem

    def out(self, source: UntypedStorage, lease: Lease) -> Transfer:
        """Queues a copy out."""
        job = _CopyJob(HostMemory(source), source.nbytes(), lease, None, self._latency_seconds, self._seconds_per_byte)
        self._out.submit(job)
        return job

    def back(self, lease: Lease, destination: Tensor, after: Transfer) -> Transfer:
        """Queues a copy back."""
        memory = HostMemory(destination.untyped_storage())
        job = _CopyJob(memory, destination.nbytes, lease, after, self._latency_seconds, self._seconds_per_byte)
        self._back.submit(job)
        return job

    def settle(self, transfer: Transfer, destination: Tensor) -> None:
        """The calling thread itself waits."""
        transfer.wait()

    def stop(self) -> None:
        """Threads end after the piece at hand."""
        self._out.stop()
        self._back.stop()

    def join(self) -> None:
        """Waits for both threads."""
        self._out.join()
        self._back.join()


class _CopyJob(Job):
    """One copy between a tensor and a lease of a pool; back where ``after`` is given."""

    def __init__(
        self, memory: HostMemory, nbytes: int, lease: Lease, after: Transfer | None, latency_seconds: float, seconds_per_byte: float
    ) -> None:
        super().__init__(max(1, -(-nbytes // _PIECE_BYTES)))
        self._memory: HostMemory | None = memory
        self._lease: Lease | None = lease
        self._nbytes = nbytes
        self._after = after
        self._goes_back = after is not None
        self._latency_seconds = latency_seconds
        self._seconds_per_byte = seconds_per_byte

    def move(self, piece: int, buffer: object) -> None:
        """Sleeps as long as the link takes longer than memory, and copies one piece."""
        memory, lease, after = self._memory, self._lease, self._after
        assert memory is not None
        assert lease is not None
        assert isinstance(lease.origin, PageBuffer)
        if after is not None:
            after.wait()
            if after.failure:
                raise OSError(f"they were never written: {after.failure}")
        offset = piece * _PIECE_BYTES
        count = min(_PIECE_BYTES, self._nbytes - offset)
        time.sleep((0 if piece else self._latency_seconds) + count * self._seconds_per_byte)
        host = lease.origin.part(lease.offset + offset)
        if self._goes_back:
            memory.back(host, offset, count)
        else:
            memory.to(host, offset, count)

    def release(self) -> None:
        """Lets go of the tensor, of the space and of the write."""
        self._memory = self._lease = self._after = None

    def describe(self, problem: Exception) -> str:
        """The message says it."""
        return str(problem)


class CudaCopier:
    """Copies on two side streams, between a CUDA device and pinned memory. Not measured on a GPU.

    A side stream waits for what the current stream had queued when a transfer began, which also makes memory that the allocator has
    just handed out safe to write to; ``record_stream`` tells the allocator who else uses a tensor. The current stream is looked up at each
    call. Nothing here makes the host wait but ``join`` and a ticket's ``wait``.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = exact(device)
        self._out_stream = torch.cuda.Stream(self._device)
        self._back_stream = torch.cuda.Stream(self._device)
        self._running: deque[_StreamCopy] = deque()  # holds leases until the device is through with them
        self._lock = threading.Lock()
        self._stopped = False
        self._pid = os.getpid()

    def foreign(self) -> str:
        """CUDA does not survive a fork."""
        return "" if os.getpid() == self._pid else f"the store belongs to process {self._pid}; open another one in this process"

    def segment(self, count: int) -> PinnedBuffer:
        """Pinned memory."""
        try:
            return PinnedBuffer(count)
        except RuntimeError as problem:
            raise OffloadError(f"the host has no {count} bytes of pinned memory for activations to wait in: {problem}") from problem

    def out(self, source: UntypedStorage, lease: Lease) -> Transfer:
        """Queues a copy out on the side stream."""
        assert isinstance(lease.origin, PinnedBuffer)
        device_bytes = bytes_of(source)
        host_bytes = lease.origin.tensor[lease.offset : lease.offset + device_bytes.numel()]
        return self._copy(self._out_stream, device_bytes, host_bytes, device_bytes, lease)

    def back(self, lease: Lease, destination: Tensor, after: Transfer) -> Transfer:
        """Queues a copy back on the other side stream, behind the copy out."""
        assert isinstance(lease.origin, PinnedBuffer)
        if after.failure:
            return Refused(f"they were never written: {after.failure}")
        assert isinstance(after, _StreamCopy)
        self._back_stream.wait_event(after.event)
        host_bytes = lease.origin.tensor[lease.offset : lease.offset + destination.numel()]
        return self._copy(self._back_stream, host_bytes, destination, destination, lease)

    def settle(self, transfer: Transfer, destination: Tensor) -> None:
        """The current stream waits, and the allocator hears of it."""
        if isinstance(transfer, _StreamCopy):
            current = torch.cuda.current_stream(self._device)
            current.wait_event(transfer.event)
            destination.record_stream(current)

    def stop(self) -> None:
        """Starts nothing more; what is queued on the device ends by itself."""
        self._stopped = True

    def join(self) -> None:
        """Waits for the side streams."""
        if self.foreign():
            return
        self._out_stream.synchronize()
        self._back_stream.synchronize()
        self._sweep()

    def _copy(self, stream: torch.cuda.Stream, source: Tensor, target: Tensor, on_device: Tensor, lease: Lease) -> Transfer:
        if self._stopped:
            return Refused(CLOSED)
        self._sweep()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        copy = _StreamCopy(event, lease)
        on_device.record_stream(stream)
        with self._lock:
            self._running.append(copy)
        return copy

    def _sweep(self) -> None:
        with self._lock:
            running = [copy for copy in self._running if not copy.done()]
            self._running = deque(running)


class _StreamCopy:
    """A copy that a stream makes."""

    def __init__(self, event: torch.cuda.Event, lease: Lease) -> None:
        self.failure = ""
        self.event = event
        self._lease: Lease | None = lease

    def done(self) -> bool:
        """Whether the device is through with it."""
        ended = self._lease is None or self.event.query()
        if ended:
            self._lease = None
        return ended

    def wait(self) -> None:
        """The host waits."""
        self.event.synchronize()
        self._lease = None
