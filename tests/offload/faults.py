"""Requests that fail, fall short or take long at a given one."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable

from recoup.torch.offload import SystemRequests
from recoup.torch.offload.extents import BLOCK


class FaultyRequests(SystemRequests):
    """The system's requests, but for what the given functions make of the n-th one of a kind (from 1)."""

    def __init__(
        self,
        *,
        write: Callable[[int, int], int] | None = None,
        read: Callable[[int, int], int] | None = None,
        allocate: Callable[[int, int], int] | None = None,
    ) -> None:
        self.written = self.reads = self.allocated = 0
        self._on_write, self._on_read, self._on_allocate = write or _all, read or _all, allocate or _all
        self._lock = threading.Lock()

    def reading(self, fault: Callable[[int, int], int] | None = None) -> None:
        """From now on reads go like this, counted anew."""
        with self._lock:
            self.reads, self._on_read = 0, fault or _all

    def write(self, fd: int, buffer: memoryview, offset: int) -> int:
        with self._lock:
            self.written += 1
            turn = self.written
        return _partly(super().write, fd, buffer, offset, self._on_write(turn, len(buffer)))

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        with self._lock:
            self.reads += 1
            turn = self.reads
        return _partly(super().read, fd, buffer, offset, self._on_read(turn, len(buffer)))

    def allocate(self, fd: int, offset: int, count: int) -> None:
        self.allocated += 1
        super().allocate(fd, offset, self._on_allocate(self.allocated, count))


def _partly(request: Callable[[int, memoryview, int], int], fd: int, buffer: memoryview, offset: int, count: int) -> int:
    """Moves the whole blocks of ``count`` only, as direct files ask for, and claims all of it."""
    request(fd, buffer[: count // BLOCK * BLOCK], offset)
    return count


def _all(turn: int, count: int) -> int:
    return count


def failing(code: int, *turns: int, always_from: int | None = None) -> Callable[[int, int], int]:
    def of(turn: int, count: int) -> int:
        if turn in turns or (always_from is not None and turn >= always_from):
            raise OSError(code, os.strerror(code))
        return count

    return of


def interrupted(*turns: int) -> Callable[[int, int], int]:
    return failing(errno.EINTR, *turns)


def short(part: int, *turns: int) -> Callable[[int, int], int]:
    """Only so many bytes, at these turns or always."""
    return lambda turn, count: min(part, count) if not turns or turn in turns else count


def slow(seconds: float) -> Callable[[int, int], int]:
    def of(turn: int, count: int) -> int:
        time.sleep(seconds)
        return count

    return of
