"""The memory of one storage, as workers read and write it piece by piece, on the CPU and on CUDA devices."""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch
from torch import Tensor, UntypedStorage

from recoup.torch.offload.buffers import Buffer, PinnedBuffer

__all__ = ["CudaMemory", "HostMemory", "Memory", "bytes_of", "exact", "fresh_bytes", "memory_of"]


class Memory(Protocol):
    """A storage that a worker copies from and to. It holds the storage."""

    def to(self, buffer: Buffer, offset: int, count: int) -> None:
        """Fills the buffer's first ``count`` bytes from ``offset`` on; has ended when it returns."""
        ...

    def back(self, buffer: Buffer, offset: int, count: int) -> None:
        """Writes the buffer's first ``count`` bytes to ``offset``; has ended when it returns."""
        ...


class HostMemory:
    """A storage in the CPU's memory."""

    def __init__(self, storage: UntypedStorage) -> None:
        self._storage = storage
        self._address = storage.data_ptr()

    def to(self, buffer: Buffer, offset: int, count: int) -> None:
        """Copies out, without the interpreter's lock."""
        ctypes.memmove(buffer.address, self._address + offset, count)

    def back(self, buffer: Buffer, offset: int, count: int) -> None:
        """Copies back, without the interpreter's lock."""
        ctypes.memmove(self._address + offset, buffer.address, count)


class CudaMemory:
    """A storage on a CUDA device, copied through pinned buffers on a stream of the worker's lane. Not measured on a GPU.

    The copies wait for what the calling thread had queued when the transfer began, and each has ended on the device before the worker goes
    on: so the caller's stream has nothing to wait for once the transfer is done, and the allocator no stream to be told of.
    """

    def __init__(self, storage: UntypedStorage, stream: torch.cuda.Stream) -> None:
        self._bytes = bytes_of(storage)
        self._stream = stream
        self._ready = torch.cuda.current_stream(storage.device).record_event()

    def to(self, buffer: Buffer, offset: int, count: int) -> None:
        """Copies out on the lane's stream, and waits for it."""
        assert isinstance(buffer, PinnedBuffer)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            buffer.tensor[:count].copy_(self._bytes[offset : offset + count], non_blocking=True)
        self._stream.synchronize()

    def back(self, buffer: Buffer, offset: int, count: int) -> None:
        """Copies back on the lane's stream, and waits for it."""
        assert isinstance(buffer, PinnedBuffer)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            self._bytes[offset : offset + count].copy_(buffer.tensor[:count], non_blocking=True)
        self._stream.synchronize()


def memory_of(storage: UntypedStorage, stream: torch.cuda.Stream | None) -> Memory:
    """The memory of a storage; ``stream`` is the lane's own where the storage is on a CUDA device."""
    return HostMemory(storage) if stream is None else CudaMemory(storage, stream)


def exact(device: torch.device | str) -> torch.device:
    """The device with its number, as tensors on it name it."""
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device


def bytes_of(storage: UntypedStorage) -> Tensor:
    """All bytes of a storage as a ``uint8`` tensor on it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def fresh_bytes(count: int, device: torch.device) -> Tensor:
    """A new ``uint8`` tensor on a storage of exactly ``count`` bytes."""
    return torch.empty(count, dtype=torch.uint8, device=device)
