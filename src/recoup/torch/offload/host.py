"""Activations in the host's memory: a bounded pool, and one small interface to what copies.

Two implementations of that interface, :class:`Copier`: side streams and pinned memory for CUDA, **not measured on a GPU**, and a
worker thread that copies into anonymous memory, with a latency and a rate to try slow links with. On a CPU the second saves nothing;
it is there so that everything above it runs, and is tested, without a device.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage

from recoup.cost import Target
from recoup.errors import OffloadError
from recoup.torch.offload.extents import BLOCK, Lease, Space, blocks_of
from recoup.torch.offload.memory import exact, fresh_bytes
from recoup.torch.offload.store import Fetch, Ticket
from recoup.torch.offload.tickets import Arrival, StoredTicket, Transfer
from recoup.torch.offload.workers import Refused

__all__ = ["Copier", "HostStore"]


class Copier(Protocol):
    """Copies between a device and host memory that it provides, each direction in order. A transfer holds its lease while it runs."""

    def foreign(self) -> str:
        """Why this process cannot use it, as in a forked child; '' where it can."""
        ...

    def segment(self, count: int) -> Any:
        """``count`` bytes of host memory, a multiple of 4096.

        Raises:
            OffloadError: there is none.
        """
        ...

    def out(self, source: UntypedStorage, lease: Lease) -> Transfer:
        """Starts to copy a storage to its lease, whose origin is a segment."""
        ...

    def back(self, lease: Lease, destination: Tensor, after: Transfer) -> Transfer:
        """Starts to copy from a lease to a tensor of bytes, once ``after`` has ended."""
        ...

    def settle(self, transfer: Transfer, destination: Tensor) -> None:
        """Makes whatever the calling thread does next on the destination come after the transfer."""
        ...

    def stop(self) -> None:
        """Lets transfers end. Does not wait."""
        ...

    def join(self) -> None:
        """Waits until they have."""
        ...


class HostStore:
    """A store in the host's memory; see :class:`recoup.torch.offload.store.Store`.

    Storages take whole blocks of 4096 bytes of the pool.

    Args:
        copier: what copies, for the device whose tensors are moved.
        device: that device.
        limit_bytes: the most that the pool may take. ``reserve`` takes it ahead of a step; a storage that finds no room in what
            was reserved makes the pool grow.

    Attributes:
        staging_bytes: 0, copies go straight to the pool.
    """

    target: Target = "host"
    staging_bytes = 0

    def __init__(self, copier: Copier, *, device: torch.device | str, limit_bytes: int) -> None:
        self._copier = copier
        self._device = exact(device)
        self._limit_bytes = limit_bytes // BLOCK * BLOCK
        self._spaces: list[Space] = []
        self._pool_bytes = 0
        self._lock = threading.Lock()
        self._closed = False
        self._finalizer = weakref.finalize(self, copier.stop)

    @property
    def used_bytes(self) -> int:
        """Bytes of the pool that tickets and running transfers hold, in whole blocks."""
        return sum(space.used_bytes for space in self._spaces)

    def reserve(self, count: int) -> None:
        """Makes the pool at least ``count`` bytes large.

        Raises:
            OffloadError: that is over the limit, or the memory is not to be had.
        """
        if foreign := self._copier.foreign():
            raise OffloadError(foreign)
        if self._closed:
            raise OffloadError("the store in the host's memory was closed; open another one")
        with self._lock:
            missing = blocks_of(count) * BLOCK - self._pool_bytes
            if missing <= 0:
                return
            if self._pool_bytes + missing > self._limit_bytes:
                raise OffloadError(
                    f"activations of {count} bytes are to wait in the host's memory, and its budget is {self._limit_bytes} bytes: "
                    "raise it, or plan with it"
                )
            self._grow(missing)

    def put(self, tensor: Tensor) -> Ticket:
        """Starts to copy; see :class:`recoup.torch.offload.store.Store`."""
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if storage.device != self._device:
            return self._refused(nbytes, f"the tensor is on {storage.device}, the store moves those on {self._device}")
        if foreign := self._copier.foreign():
            return self._refused(nbytes, foreign)
        try:
            lease = self._lease(nbytes)
        except OffloadError as problem:
            return self._refused(nbytes, str(problem))
        if lease is None:
            return self._refused(nbytes, f"the pool of {self._limit_bytes} bytes is full: {nbytes} more and {self.used_bytes} in use")
        return StoredTicket(nbytes, self._copier.out(storage, lease), lease, self._fetch)

    def rest(self) -> None:
        """There is nothing to give back: copies take no memory of the device."""

    def close(self) -> None:
        """Ends transfers and lets go of the pool; see :class:`recoup.torch.offload.store.Store`."""
        self._closed = True
        self._finalizer()
        self._copier.join()
        self._spaces.clear()

    def _lease(self, count: int) -> Lease | None:
        with self._lock:
            if self._closed:
                raise OffloadError("the store was closed")
            for space in self._spaces:
                if lease := space.lease(count):
                    return lease
            missing = max(1, blocks_of(count)) * BLOCK
            if self._pool_bytes + missing > self._limit_bytes:
                return None
            return self._grow(missing).lease(count)

    def _grow(self, count: int) -> Space:
        space = Space(limit=count // BLOCK, origin=self._copier.segment(count))
        self._spaces.append(space)
        self._pool_bytes += count
        return space

    def _refused(self, nbytes: int, failure: str) -> Ticket:
        return StoredTicket(nbytes, Refused(failure), None, self._fetch)

    def _fetch(self, nbytes: int, lease: Lease, written: Transfer) -> Fetch:
        tensor = fresh_bytes(nbytes, self._device)
        transfer = self._copier.back(lease, tensor, written)
        cure = "The backward cannot go on; no weight was touched"
        return Arrival(tensor, transfer, what="the host's memory", cure=cure, settle=self._copier.settle)
