"""A disk store's file, which grows as storages need it, and the two transfers on it."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

from recoup.errors import OffloadError
from recoup.torch.offload.buffers import Buffer
from recoup.torch.offload.extents import BLOCK, Lease, Space, blocks_of
from recoup.torch.offload.files import free_bytes, open_spool
from recoup.torch.offload.memory import Memory
from recoup.torch.offload.requests import Requests, read_fully, write_fully
from recoup.torch.offload.tickets import Transfer
from recoup.torch.offload.workers import Job

__all__ = ["ReadJob", "Spool", "WriteJob"]


class Spool:
    """The file, who has which part of it, and how far it has grown.

    Attributes:
        file: open as long as anybody holds this object, or until it is closed.
        space: leases of its blocks.
        requests: how it is read and written.
    """

    def __init__(self, directory: Path, limit_bytes: int | None, requests: Requests, *, allow_memory_filesystem: bool) -> None:
        self.directory = directory
        self.file = open_spool(directory, allow_memory_filesystem=allow_memory_filesystem)
        self.requests = requests
        self.space = Space(limit=None if limit_bytes is None else limit_bytes // BLOCK)
        self._limit_bytes = limit_bytes
        self._allocated = 0
        self._lock = threading.Lock()
        self._pid = os.getpid()

    @property
    def foreign(self) -> bool:
        """Whether this is a forked child of the process that the file belongs to."""
        return os.getpid() != self._pid

    def why_none(self, count: int) -> str:
        """Why there is no lease of ``count`` bytes."""
        if self.foreign:
            return f"the store belongs to process {self._pid}; open another one in this process"
        return f"the disk budget of {self._limit_bytes} bytes has no room for {count} more: {self.space.used_bytes} are in use"

    def grow(self, end: int) -> None:
        """Makes sure that the disk has space for the file up to byte ``end``.

        Raises:
            OSError: the disk is full, or failed.
        """
        with self._lock:
            if end > self._allocated:
                self.requests.allocate(self.file.fd, self._allocated, end - self._allocated)
                self._allocated = end

    def reserve(self, count: int) -> None:
        """Grows to ``count`` bytes, ahead of a step.

        Raises:
            OffloadError: over the limit, or the disk has no space.
        """
        if self.foreign:
            raise OffloadError(self.why_none(count))
        if self.file.fd < 0:
            raise OffloadError(f"the store in {self.directory} was closed; open another one")
        if self._limit_bytes is not None and count > self._limit_bytes // BLOCK * BLOCK:
            raise OffloadError(
                f"activations of {count} bytes are to wait in {self.directory}, and the disk budget is {self._limit_bytes}: raise it, "
                "or plan with it"
            )
        missing = count - self._allocated
        free = free_bytes(self.file.fd)
        if missing > free:
            raise OffloadError(self._full(missing, free))
        try:
            self.grow(count)
        except OSError as problem:
            if problem.errno == errno.ENOSPC:
                raise OffloadError(self._full(missing, free_bytes(self.file.fd))) from problem
            raise OffloadError(
                f"{self.directory} cannot take {missing} bytes: {problem.strerror or problem}. Give another one"
            ) from problem

    def _full(self, missing: int, free: int) -> str:
        return f"{self.directory} has {free} bytes free and {missing} more are needed: free some, give another directory or a larger budget"


class WriteJob(Job):
    """One storage on its way to the file."""

    def __init__(self, spool: Spool, lease: Lease, memory: Memory, nbytes: int, chunk_bytes: int) -> None:
        super().__init__(max(1, -(-nbytes // chunk_bytes)))
        self._spool = spool
        self._lease: Lease | None = lease
        self._memory: Memory | None = memory
        self._nbytes = nbytes
        self._chunk_bytes = chunk_bytes

    def move(self, piece: int, buffer: Buffer) -> None:
        """Takes space at the first piece, and writes one."""
        memory, lease, spool = self._memory, self._lease, self._spool
        assert memory is not None
        assert lease is not None
        spool.grow(lease.end)
        offset, count = self._part(piece)
        memory.to(buffer, offset, count)
        padded = blocks_of(count) * BLOCK
        write_fully(spool.requests, spool.file.fd, buffer.view[:padded], lease.offset + offset)
        spool.file.forget_cached(lease.offset + offset, padded, written=True)

    def release(self) -> None:
        """Lets go of the tensor and of the space."""
        self._memory = self._lease = None

    def describe(self, problem: Exception) -> str:
        """Says a full disk in words."""
        if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{self._spool.directory} is full: no space for {self._nbytes} bytes"
        return f"writing {self._nbytes} bytes to {self._spool.directory} failed: {problem}"

    def _part(self, piece: int) -> tuple[int, int]:
        offset = piece * self._chunk_bytes
        return offset, min(self._chunk_bytes, self._nbytes - offset)


class ReadJob(WriteJob):
    """One storage on its way back, after its write."""

    def __init__(self, spool: Spool, lease: Lease, memory: Memory, nbytes: int, chunk_bytes: int, written: Transfer) -> None:
        super().__init__(spool, lease, memory, nbytes, chunk_bytes)
        self._written: Transfer | None = written

    def move(self, piece: int, buffer: Buffer) -> None:
        """Reads one piece, twice if the first time fails."""
        memory, lease, written = self._memory, self._lease, self._written
        assert memory is not None
        assert lease is not None
        assert written is not None
        written.wait()
        if written.failure:
            raise OSError(f"they were never written: {written.failure}")
        offset, count = self._part(piece)
        try:
            self._read(lease.offset + offset, count, buffer)
        except OSError:  # once more: what fails for good fails again
            self._read(lease.offset + offset, count, buffer)
        memory.back(buffer, offset, count)

    def release(self) -> None:
        """Lets go of the tensor, of the space and of the write."""
        super().release()
        self._written = None

    def describe(self, problem: Exception) -> str:
        """The message is about the read already."""
        return str(problem)

    def _read(self, offset: int, count: int, buffer: Buffer) -> None:
        spool, padded = self._spool, blocks_of(count) * BLOCK
        read_fully(spool.requests, spool.file.fd, buffer.view[:padded], offset)
        spool.file.forget_cached(offset, padded, written=False)
