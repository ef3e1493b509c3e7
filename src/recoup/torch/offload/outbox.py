"""The way out: storages put to a store, so many bytes at once, and let go of on the training thread once they are written.

A storage that could not be written stays in memory: the gradients are right, the peak is not, and the report says so. One that was
written in place while it was on its way stays in memory too, and autograd's own error is raised if the backward asks for it.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from recoup.torch.holding import Held
from recoup.torch.offload.store import Fetch, Store, Ticket
from recoup.torch.private import shared_alias
from recoup.torch.views import anchor

if TYPE_CHECKING:
    from recoup.torch.offload.inbox import Inbox

__all__ = ["Moved", "Outbox", "Tally", "fetch"]

_REPORTED = 1000


class Moved:
    """One storage that is offloaded: in memory until it is written and let go of, then on the store.

    ``ahead`` is what is being fetched before it is asked for in the backward pass under way.
    """

    __slots__ = ("__weakref__", "ahead", "base", "held", "inbox", "nbytes", "read", "site", "ticket")

    def __init__(self, inbox: Inbox, site: str, tensor: Tensor) -> None:
        self.inbox = inbox
        self.site = site
        self.nbytes = tensor.untyped_storage().nbytes()
        # An alias: the tensor itself will hold its autograd node, which holds what stands here.
        self.held: Held | None = Held(shared_alias(tensor), site)
        self.base: Tensor | None = None
        self.ticket: Ticket | None = None
        self.ahead: Fetch | None = None
        self.read = False

    def read_as(self, tensor: Tensor) -> None:
        """A replay will read it as it is now."""
        self.read = True
        if self.ticket is None and self.held is not None:
            self.held.version = tensor._version

    def put(self, tensor: Tensor) -> None:
        """Autograd saves it: send it on its way, unless it is."""
        if self.ticket is None and self.held is not None:
            self.held.version = tensor._version
            self.inbox.put(self)

    def protect(self) -> int:
        """It is about to be written in place: make sure that its content outlasts that; the number of bytes copied."""
        if self.ticket is not None:
            self.inbox.outbox.settle_now(self)
        if self.held is None or self.base is not None or not (self.read or self.ticket is not None):
            return 0
        tensor = self.held.get()
        self.base = anchor(tensor.untyped_storage().clone(), tensor.device)
        self.held = None
        return self.nbytes

    def in_memory(self) -> Tensor | None:
        """A tensor on the storage if it has not left; None if it is to be fetched.

        Raises:
            ReplayMismatch: it was written in place since.
        """
        if self.base is not None:
            return self.base
        held = self.held
        if held is None:
            return None
        tensor = held.get()
        return anchor(tensor.untyped_storage(), tensor.device)


def fetch(moved: Moved) -> Tensor:
    """The operation that makes an offloaded storage in the backward: a tensor of bytes that spans it.

    Raises:
        OffloadError: it cannot be read back.
        ReplayMismatch: it was written in place while it was still in memory.
    """
    return moved.inbox.take(moved)


class _Departing(NamedTuple):
    moved: weakref.ref[Moved]
    ticket: Ticket
    nbytes: int


@dataclass(slots=True)
class Tally:
    """What has moved so far: bytes sent out and fetched back, time that steps waited, and by site why what was to leave stayed."""

    put_bytes: int = 0
    fetched_bytes: int = 0
    waited_seconds: float = 0.0
    stayed: dict[str, str] = field(default_factory=dict)


class Outbox:
    """What all calls under one plan share: the store, and what is on its way to it."""

    def __init__(self, store: Store, write_window_bytes: int, tally: Tally) -> None:
        self.store = store
        self.tally = tally
        self.window = write_window_bytes
        self.lock = threading.RLock()
        # Weakly: what nobody will ask for any more need not stay for the sake of its transfer.
        self.on_the_way: deque[_Departing] = deque()
        self.bytes_on_the_way = 0

    def put(self, moved: Moved) -> None:
        """Send a storage on its way, after waiting for room in the window."""
        with self.lock:
            self.accept()
            while self.on_the_way and self.bytes_on_the_way + moved.nbytes > self.window:
                self._settle_oldest()
            held = moved.held
            assert held is not None
            assert held.tensor is not None
            moved.ticket = self.store.put(held.tensor)
            self.on_the_way.append(_Departing(weakref.ref(moved), moved.ticket, moved.nbytes))
            self.bytes_on_the_way += moved.nbytes
            self.tally.put_bytes += moved.nbytes

    def accept(self) -> None:
        """Let go of what has been written by now."""
        if not self.on_the_way:  # so it is in nearly all of a backward, which asks after every unpacking
            return
        with self.lock:
            while self.on_the_way and self.on_the_way[0].ticket.done():
                self._settle_oldest()

    def settle_now(self, moved: Moved) -> None:
        """Wait until one storage is written, and let go of it and of all that went before it."""
        with self.lock:
            while any(departing.ticket is moved.ticket for departing in self.on_the_way):
                self._settle_oldest()

    def rest(self) -> None:
        """All that a call sent out has come back: unless another one's is on its way, the store may rest."""
        with self.lock:
            self.accept()
            if not self.on_the_way:
                self.store.rest()

    def waited(self, since: float) -> None:
        """Counts time that the step waited for the link."""
        self.tally.waited_seconds += time.perf_counter() - since

    def _settle_oldest(self) -> None:
        ref, ticket, count = self.on_the_way.popleft()
        self.bytes_on_the_way -= count
        if not ticket.done():
            started = time.perf_counter()
            ticket.wait()
            self.waited(started)
        moved = ref()
        held = None if moved is None else moved.held
        if moved is None or held is None or held.tensor is None:
            return
        if ticket.failure:
            self._stays(moved, ticket.failure)
        elif held.tensor._version == held.version:
            # Only here, on a thread that runs the step, nothing of the step can be in the middle of a write in place: what was
            # written out is what autograd saved.
            moved.held = None

    def _stays(self, moved: Moved, reason: str) -> None:
        if not self.tally.stayed:
            warnings.warn(
                f"{moved.site} could not be offloaded and stays in memory: {reason}. Gradients are right; the peak may pass the budget.",
                RuntimeWarning,
                stacklevel=2,
            )
        if len(self.tally.stayed) < _REPORTED:
            self.tally.stayed.setdefault(moved.site, f"could not be offloaded: {reason}")
