"""Activations on disk: one nameless file, written and read by a few threads through page-aligned buffers past the page cache.

Weighed for the asynchronous part: KvikIO (GPUDirect Storage) and DeepSpeed's DeepNVMe are made for NVIDIA devices, KvikIO's wheels bring a
CUDA stack along and DeepNVMe is compiled at its first use against libaio; caio and aiofile bind Linux AIO for asyncio, copy through bytes
objects, and know nothing of aligned buffers; the liburing binding is young and asks for kernels and containers that permit io_uring.
Threads of the standard library need none of that: ``pwritev``, ``preadv`` and ``memmove`` run without the interpreter's lock, two threads
a direction come close to what the disk gives, and any filesystem will do.

The buffers are memory of the device where that is the CPU: they are taken with the first transfer, and given back when none is left.
"""

from __future__ import annotations

import threading
import weakref
from pathlib import Path

import torch
from torch import Tensor

from recoup.cost import Target
from recoup.errors import OffloadError
from recoup.torch.offload.buffers import PinnedBuffer, counted_buffers, counted_bytes
from recoup.torch.offload.extents import BLOCK, Lease, blocks_of
from recoup.torch.offload.memory import exact, fresh_bytes, memory_of
from recoup.torch.offload.requests import Requests, SystemRequests
from recoup.torch.offload.spool import ReadJob, Spool, WriteJob
from recoup.torch.offload.store import Fetch, Ticket
from recoup.torch.offload.tickets import Arrival, StoredTicket, Transfer
from recoup.torch.offload.workers import Job, Lane, Refused

__all__ = ["CHUNK_BYTES", "DiskStore", "chunk_within"]

_WORKERS = 2
CHUNK_BYTES = 2**19


class DiskStore:
    """A store in a directory of the user's choice; see :class:`recoup.torch.offload.store.Store`.

    Storages take whole blocks of 4096 bytes. With two threads for each direction and buffers of 512 KiB the transfers take 2 MiB and a
    page themselves.

    Args:
        directory: where the file lies; it must be on a disk.
        device: whose tensors are moved.
        limit_bytes: the most that the file may take; None for all that is free.
        workers: threads for each direction.
        chunk_bytes: size of each thread's buffer, a multiple of 4096.
        allow_memory_filesystem: whether a directory in memory (tmpfs) is taken too.
        requests: how the file is read and written.

    Attributes:
        directory: as given.
        direct: whether the file is read and written past the page cache; if not, the filesystem cannot do that.
        staging_bytes: bytes of all buffers while there are any, where they are in the memory of the device: 0 on CUDA.

    Raises:
        OffloadError: the directory cannot be used; the message says what to do.
    """

    target: Target = "disk"

    def __init__(
        self,
        directory: str | Path,
        *,
        device: torch.device | str = "cpu",
        limit_bytes: int | None = None,
        workers: int = _WORKERS,
        chunk_bytes: int = CHUNK_BYTES,
        allow_memory_filesystem: bool = False,
        requests: Requests | None = None,
    ) -> None:
        assert workers > 0
        assert chunk_bytes > 0
        assert chunk_bytes % BLOCK == 0
        self.directory = Path(directory)
        self._device = exact(device)
        on_cuda = self._device.type == "cuda"
        self.staging_bytes = 0 if on_cuda else counted_bytes(2 * workers, chunk_bytes)
        self._workers, self._chunk_bytes = workers, chunk_bytes
        self._spool = Spool(self.directory, limit_bytes, requests or SystemRequests(), allow_memory_filesystem=allow_memory_filesystem)
        self.direct = self._spool.file.direct
        pinned = [PinnedBuffer(chunk_bytes) for _ in range(2 * workers)] if on_cuda else []
        self._writes = Lane("offload-write", workers, pinned[:workers])
        self._reads = Lane("offload-read", workers, pinned[workers:])
        self._lock = threading.RLock()
        self._out_stream = torch.cuda.Stream(self._device) if on_cuda else None
        self._back_stream = torch.cuda.Stream(self._device) if on_cuda else None
        self._finalizer = weakref.finalize(self, _retire, self._writes, self._reads)

    @property
    def used_bytes(self) -> int:
        """Bytes of the file that tickets and running transfers hold, in whole blocks."""
        return self._spool.space.used_bytes

    def reserve(self, count: int) -> None:
        """Takes disk space so that the file can hold ``count`` bytes in all.

        Raises:
            OffloadError: the limit or the disk is too small for that, with bytes needed and free.
        """
        self._spool.reserve(blocks_of(count) * BLOCK)

    def put(self, tensor: Tensor) -> Ticket:
        """Starts to write; see :class:`recoup.torch.offload.store.Store`."""
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if storage.device != self._device:
            return self._refused(nbytes, f"the tensor is on {storage.device}, the store moves those on {self._device}")
        lease = None if self._spool.foreign else self._spool.space.lease(nbytes)
        if lease is None:
            return self._refused(nbytes, self._spool.why_none(nbytes))
        job = WriteJob(self._spool, lease, memory_of(storage, self._out_stream), nbytes, self._chunk_bytes)
        del storage
        self._submit(self._writes, job)
        return StoredTicket(nbytes, job, lease, self._fetch)

    def rest(self) -> None:
        """Gives the buffers back, if no transfer runs; see :class:`recoup.torch.offload.store.Store`."""
        if self._device.type == "cuda" or self._spool.foreign:
            return
        with self._lock:
            if self._writes.idle() and self._reads.idle():
                self._writes.buffers, self._reads.buffers = [], []

    def close(self) -> None:
        """Ends transfers after the chunk at hand and gives the disk space back; see :class:`recoup.torch.offload.store.Store`."""
        self._finalizer()
        self._writes.join()
        self._reads.join()
        self.rest()
        self._spool.file.close()

    def _submit(self, lane: Lane, job: Job) -> None:
        with self._lock:
            if not lane.buffers:
                buffers = counted_buffers(2 * self._workers, self._chunk_bytes)
                self._writes.buffers, self._reads.buffers = buffers[: self._workers], buffers[self._workers :]
            lane.submit(job)

    def _refused(self, nbytes: int, failure: str) -> Ticket:
        return StoredTicket(nbytes, Refused(failure), None, self._fetch)

    def _fetch(self, nbytes: int, lease: Lease, written: Transfer) -> Fetch:
        tensor = fresh_bytes(nbytes, self._device)
        job = ReadJob(self._spool, lease, memory_of(tensor.untyped_storage(), self._back_stream), nbytes, self._chunk_bytes, written)
        self._submit(self._reads, job)
        cure = "The backward cannot go on; no weight was touched. Check the disk, or give another directory"
        return Arrival(tensor, job, what=str(self.directory), cure=cure)


def _retire(*lanes: Lane) -> None:
    for lane in lanes:
        lane.stop()


def chunk_within(staging_bytes: int) -> int:
    """The chunk with which all buffers of a store take no more than ``staging_bytes``, those of the link that a plan was made for.

    Raises:
        OffloadError: there is no room for a block in each buffer.
    """
    buffers = 2 * _WORKERS
    chunk = (staging_bytes - counted_bytes(buffers, 0)) // buffers // BLOCK * BLOCK
    if chunk < BLOCK:
        raise OffloadError(
            f"the plan's link leaves {staging_bytes} bytes for the buffers of transfers; {counted_bytes(buffers, BLOCK)} is the least"
            " that they take: measure the link (recoup doctor --offload-dir), and plan with what it says"
        )
    return chunk
