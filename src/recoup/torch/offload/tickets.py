"""Tickets and fetches, the same for all stores: what differs is the transfer beneath them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from recoup.errors import OffloadError
from recoup.torch.offload.extents import Lease
from recoup.torch.offload.store import Fetch

__all__ = ["Arrival", "StoredTicket", "Transfer"]


class Transfer(Protocol):
    """Bytes on their way.

    Attributes:
        failure: what went wrong, '' if nothing; final once ``done()``.
    """

    failure: str

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        ...

    def wait(self) -> None:
        """Returns once it has ended."""
        ...


class Arrival:
    """A storage on its way back into a tensor that is already there."""

    __slots__ = ("_cure", "_settle", "_tensor", "_transfer", "_what")

    def __init__(
        self, tensor: Tensor, transfer: Transfer, *, what: str, cure: str, settle: Callable[[Transfer, Tensor], None] | None = None
    ) -> None:
        self._tensor = tensor
        self._transfer = transfer
        self._what = what
        self._cure = cure
        self._settle = settle

    def done(self) -> bool:
        """Whether the bytes are there, or never will be."""
        return self._transfer.done()

    def get(self) -> Tensor:
        """The bytes; see :class:`recoup.torch.offload.store.Fetch`."""
        if self._settle is None:
            self._transfer.wait()
        else:
            self._settle(self._transfer, self._tensor)  # the device's stream waits, not this thread
        if self._transfer.failure:
            count, why = self._tensor.nbytes, self._transfer.failure
            raise OffloadError(f"cannot fetch {count} bytes back from {self._what}: {why}. {self._cure}")
        return self._tensor


class StoredTicket:
    """One storage in a store; see :class:`recoup.torch.offload.store.Ticket`."""

    __slots__ = ("_fetch", "_lease", "_out", "nbytes")

    def __init__(self, nbytes: int, out: Transfer, lease: Lease | None, fetch: Callable[[int, Lease, Transfer], Fetch]) -> None:
        self.nbytes = nbytes
        self._out = out
        self._lease = lease
        self._fetch = fetch  # a method of the store, which lives as long as its tickets

    @property
    def failure(self) -> str:
        """Why the write failed."""
        return self._out.failure if self.done() else ""

    def done(self) -> bool:
        """Whether the write has ended; a failed one gives its space back."""
        ended = self._out.done()
        if ended and self._out.failure:
            self._lease = None
        return ended

    def wait(self) -> None:
        """Returns once the write has ended."""
        self._out.wait()

    def fetch(self) -> Fetch:
        """Starts to read; see :class:`recoup.torch.offload.store.Ticket`."""
        lease = self._lease
        if failure := self.failure:
            raise OffloadError(f"{self.nbytes} bytes were never moved out ({failure}): the tensor in memory is the only copy")
        if lease is None:
            raise OffloadError(f"{self.nbytes} bytes cannot be fetched back: their ticket was freed")
        return self._fetch(self.nbytes, lease, self._out)

    def free(self) -> None:
        """Gives the space back, once transfers on it have ended."""
        self._lease = None
