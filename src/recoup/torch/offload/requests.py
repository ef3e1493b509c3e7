"""Reading and writing a file to the last byte, with every way in which a request can come short."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from recoup.torch.offload.extents import BLOCK

__all__ = ["Requests", "SystemRequests", "read_fully", "write_fully"]

_FRUITLESS = 2  # requests in a row that move nothing


class Requests(Protocol):
    """The three requests that a store makes of its file. Tests pass their own, which fail, fall short or take long."""

    def write(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Writes; bytes written."""
        ...

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Reads; bytes read, 0 at the end of the file."""
        ...

    def allocate(self, fd: int, offset: int, count: int) -> None:
        """Takes space on the disk for these bytes of the file."""
        ...


class SystemRequests:
    """The operating system's own."""

    def write(self, fd: int, buffer: memoryview, offset: int) -> int:
        """pwritev."""
        return os.pwritev(fd, [buffer], offset)

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        """preadv."""
        return os.preadv(fd, [buffer], offset)

    def allocate(self, fd: int, offset: int, count: int) -> None:
        """posix_fallocate."""
        os.posix_fallocate(fd, offset, count)


def write_fully(requests: Requests, fd: int, buffer: memoryview, offset: int) -> None:
    """Writes whole blocks, going on where a request came short.

    Raises:
        OSError: a request failed, or two in a row wrote less than a block.
    """
    _fully(requests.write, "write", fd, buffer, offset)


def read_fully(requests: Requests, fd: int, buffer: memoryview, offset: int) -> None:
    """Reads whole blocks, going on where a request came short.

    Raises:
        OSError: a request failed, or two in a row read less than a block.
    """
    _fully(requests.read, "read", fd, buffer, offset)


def _fully(request: Callable[[int, memoryview, int], int], kind: str, fd: int, buffer: memoryview, offset: int) -> None:
    moved = fruitless = 0
    while moved < len(buffer):
        try:
            count = request(fd, buffer[moved:], offset + moved)
        except InterruptedError:  # a signal; the interpreter has run its handler
            continue
        whole = count // BLOCK * BLOCK  # O_DIRECT goes on from whole blocks only
        moved += whole
        fruitless = 0 if whole else fruitless + 1
        if fruitless == _FRUITLESS:
            raise OSError(f"short {kind}: {moved} of {len(buffer)} bytes at offset {offset}")
