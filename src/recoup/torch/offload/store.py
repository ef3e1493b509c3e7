"""What executors ask of a place where activations wait out of memory: three small protocols.

A *store* takes whole storages, never views: what an activation shares with others moves once. Nothing here raises in the forward; a
storage that could not be written has a ticket that says why, and the caller keeps the tensor. Only reading back raises.

Who holds what: the caller holds the tensor until it has seen ``done()``; the transfer holds its storage too while it runs and has let go of
it when ``done()`` says so, so the caller is always the last to hold it and memory is freed on the caller's thread. A ticket never
holds the tensor. The caller compares ``tensor._version`` before and after by itself: a store does not see writes in place.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from recoup.cost import Target

__all__ = ["Fetch", "Store", "Ticket"]


class Fetch(Protocol):
    """One storage on its way back."""

    def done(self) -> bool:
        """Whether ``get`` would return, or raise, without waiting for the link."""
        ...

    def get(self) -> Tensor:
        """The bytes, after waiting for them: a ``uint8`` tensor that spans a storage of exactly the ticket's ``nbytes``.

        The fetch holds the tensor as long as it lives itself.

        Raises:
            OffloadError: the bytes could not be read, also not on a second try.
        """
        ...


class Ticket(Protocol):
    """One storage on its way out, or out."""

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        ...

    @property
    def failure(self) -> str:
        """Why the write failed, '' while it runs and where it went well; the caller then keeps the tensor in memory."""
        ...

    def done(self) -> bool:
        """Whether the write has ended, well or not."""
        ...

    def wait(self) -> None:
        """Returns once the write has ended."""
        ...

    def fetch(self) -> Fetch:
        """Allocates ``nbytes`` now, on the calling thread, and starts to read into them; may be called several times.

        Raises:
            OffloadError: the ticket was freed, or its write failed.
        """
        ...

    def free(self) -> None:
        """Lets its space be used again once running transfers on it have ended; waits for none. Dropping the ticket does the same."""
        ...


class Store(Protocol):
    """Where offloaded activations wait."""

    @property
    def target(self) -> Target:
        """Kind of place."""
        ...

    @property
    def staging_bytes(self) -> int:
        """Memory of the device that transfers take themselves, from the first one until ``rest``."""
        ...

    def reserve(self, count: int) -> None:
        """Makes sure, before a step, that ``count`` bytes fit in all.

        Raises:
            OffloadError: they do not; the message gives the place, the bytes and what to do.
        """
        ...

    def put(self, tensor: Tensor) -> Ticket:
        """Starts to write the whole untyped storage of ``tensor`` and returns at once; never raises for want of space."""
        ...

    def rest(self) -> None:
        """Nothing is to move for now: gives back what transfers took of the device's memory, if none runs. The next one takes it again."""
        ...

    def close(self) -> None:
        """Ends what runs and frees everything; may be called again. Unfinished writes fail, later fetches raise."""
        ...
