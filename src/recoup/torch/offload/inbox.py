"""The way back, for one call of the model: what the backward asks for, and what is fetched ahead of that.

After every unpacking the storages that were put last and not asked for yet are fetched, as long as so many bytes have been fetched and
not asked for. Each backward pass starts anew.
"""

from __future__ import annotations

import threading
import time
import weakref
from contextlib import nullcontext

from torch import Tensor

from recoup.torch.holding import Held
from recoup.torch.offload.outbox import Moved, Outbox
from recoup.torch.private import call_at_end_of_backward, current_backward
from recoup.torch.rebuild import is_quiet, replaying

__all__ = ["Inbox", "Noted"]


class Inbox:
    """The offloaded storages of one call of the model."""

    def __init__(self, outbox: Outbox, read_window_bytes: int, sites: frozenset[str]) -> None:
        self.outbox = outbox
        self.window = read_window_bytes
        self.sites = sites
        self.lock = threading.RLock()
        self.order: list[weakref.ref[Moved]] = []
        # Of the backward pass under way.
        self.task = -1
        self.queue: list[weakref.ref[Moved]] = []
        self.asked: set[int] = set()
        self.unasked: set[int] = set()
        self.ahead: dict[int, Moved] = {}
        self.ahead_bytes = 0

    def put(self, moved: Moved) -> None:
        """Send a storage on its way; see :class:`Outbox`."""
        self.outbox.put(moved)
        with self.lock:
            self.order.append(weakref.ref(moved))

    def take(self, moved: Moved) -> Tensor:
        """A tensor of bytes that spans the storage, from memory if it is still there, else fetched.

        Raises:
            OffloadError: it cannot be read back.
            ReplayMismatch: it was written in place while it was still in memory.
        """
        tensor = self._taken(moved)
        with self.lock:
            self.unasked.discard(id(moved))
            if not self.unasked:
                self.outbox.rest()
        return tensor

    def _taken(self, moved: Moved) -> Tensor:
        with self.lock:
            self._enter(current_backward())
            self.asked.add(id(moved))
            if self.ahead.pop(id(moved), None) is not None:
                self.ahead_bytes -= moved.nbytes
            fetched, moved.ahead = moved.ahead, None
        self.outbox.accept()
        tensor = moved.in_memory()
        if tensor is not None:
            if moved.ticket is not None and not moved.ticket.done():
                # Else the transfer might be the last to hold the storage, and memory would be freed later than the plan counts with.
                started = time.perf_counter()
                moved.ticket.wait()
                self.outbox.waited(started)
            return tensor
        if fetched is None:
            assert moved.ticket is not None
            fetched = moved.ticket.fetch()
        started = time.perf_counter()
        tensor = fetched.get()
        self.outbox.waited(started)
        self.outbox.tally.fetched_bytes += moved.nbytes
        return tensor

    def fetch_ahead(self) -> None:
        """Called after every unpacking of the call: so looks first, at little cost, whether there is anything to do."""
        self.outbox.accept()
        task = current_backward()
        if task == -1:
            return
        with self.lock:
            self._enter(task)
            if self._next() is None:
                return
            with nullcontext() if is_quiet() else replaying():
                while (moved := self._next()) is not None:
                    self._fetch(moved)

    def _next(self) -> Moved | None:
        """The next storage to fetch, if one is left and the window has room for it."""
        queue = self.queue
        while queue:
            moved = queue[-1]()
            if moved is not None and id(moved) not in self.asked:
                return None if self.ahead_bytes and self.ahead_bytes + moved.nbytes > self.window else moved
            queue.pop()
        return None

    def _fetch(self, moved: Moved) -> None:
        self.queue.pop()
        self.ahead[id(moved)] = moved
        self.ahead_bytes += moved.nbytes
        if moved.held is None and moved.base is None and moved.ticket is not None:
            moved.ahead = moved.ticket.fetch()

    def _enter(self, task: int) -> None:
        if task == self.task:
            return
        self._forget()
        self.task = task
        self.order = [ref for ref in self.order if ref() is not None]
        self.queue = list(self.order)
        self.unasked = {id(moved) for ref in self.order if (moved := ref()) is not None}
        if task != -1:
            call_at_end_of_backward(self._leave)

    def _leave(self) -> None:
        """The pass has ended."""
        self._forget()
        self.outbox.rest()

    def _forget(self) -> None:
        """What was fetched ahead and not asked for goes with the pass."""
        with self.lock:
            for moved in self.ahead.values():
                moved.ahead = None
            self.queue, self.asked, self.unasked, self.ahead, self.ahead_bytes, self.task = [], set(), set(), {}, 0, -1


class Noted(Held):
    """A kept tensor whose unpacking is a moment to fetch ahead."""

    __slots__ = ("inbox",)

    inbox: Inbox

    def get(self) -> Tensor:
        """See :meth:`Held.get`."""
        tensor = super().get()
        self.inbox.fetch_ahead()
        return tensor
