"""Which part of a file, or of a pool, each stored object takes: first fit over blocks, and leases that end by themselves.

A free part is as large as its neighbours allow: parts that come back are joined with those beside them. First fit is within a small
factor of any other rule for sizes as alike as a step's (Knuth, The Art of Computer Programming 1, section 2.5), and a step that
stores in its forward and frees in its backward leaves one single free part behind.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque

__all__ = ["BLOCK", "Extents", "Lease", "Space", "blocks_of"]

BLOCK = 4096  # bytes: what O_DIRECT asks of disks with large sectors, and a page of memory


def blocks_of(count: int) -> int:
    """Blocks that ``count`` bytes take."""
    return -(-count // BLOCK)


class Extents:
    """First fit over blocks ``0 .. size``, which grows up to ``limit``. Not thread-safe.

    Attributes:
        size: blocks spanned so far, free ones included.
        limit: blocks that may be spanned, None for any number.
    """

    def __init__(self, *, limit: int | None = None, size: int = 0) -> None:
        self.limit = limit
        self.size = size
        self._starts: list[int] = [0] if size else []
        self._counts: list[int] = [size] if size else []

    @property
    def free(self) -> int:
        """Blocks within ``size`` that nobody has."""
        return sum(self._counts)

    def take(self, count: int) -> int | None:
        """The first block of ``count`` consecutive ones, or None where the limit forbids it."""
        for place, there in enumerate(self._counts):
            if there >= count:
                return self._cut(place, count)
        at_end = bool(self._starts) and self._starts[-1] + self._counts[-1] == self.size
        start = self._starts[-1] if at_end else self.size
        if self.limit is not None and start + count > self.limit:
            return None
        if at_end:
            del self._starts[-1], self._counts[-1]
        self.size = start + count
        return start

    def give(self, start: int, count: int) -> None:
        """Takes blocks back that ``take`` gave."""
        place = bisect_left(self._starts, start)
        end = start + count
        assert place == len(self._starts) or end <= self._starts[place], "blocks came back twice"
        assert place == 0 or self._starts[place - 1] + self._counts[place - 1] <= start, "blocks came back twice"
        if place < len(self._starts) and self._starts[place] == end:
            count += self._counts[place]
            del self._starts[place], self._counts[place]
        if place and self._starts[place - 1] + self._counts[place - 1] == start:
            self._counts[place - 1] += count
        else:
            self._starts.insert(place, start)
            self._counts.insert(place, count)

    def _cut(self, place: int, count: int) -> int:
        start = self._starts[place]
        if self._counts[place] == count:
            del self._starts[place], self._counts[place]
        else:
            self._starts[place] += count
            self._counts[place] -= count
        return start


class Lease:
    """Blocks lent to whoever holds this object: the ticket and each transfer on them. They come back when the last one lets go.

    Attributes:
        origin: what the blocks are part of.
    """

    __slots__ = ("_blocks", "_returned", "_start", "origin")

    def __init__(self, start: int, blocks: int, returned: deque[tuple[int, int]], origin: object) -> None:
        self._start = start
        self._blocks = blocks
        self._returned = returned
        self.origin = origin

    @property
    def offset(self) -> int:
        """First byte."""
        return self._start * BLOCK

    @property
    def end(self) -> int:
        """First byte behind."""
        return (self._start + self._blocks) * BLOCK

    def __del__(self) -> None:
        # May run inside the garbage collector on any thread, perhaps one that holds the lock of the space: so no lock here.
        self._returned.append((self._start, self._blocks))


class Space:
    """Leases of blocks, thread-safe.

    Attributes:
        origin: what the blocks are part of; each lease holds it.
    """

    def __init__(self, *, limit: int | None = None, size: int = 0, origin: object = None) -> None:
        self.origin = origin
        self._extents = Extents(limit=limit, size=size)
        self._returned: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()

    def lease(self, count: int) -> Lease | None:
        """Room for ``count`` bytes, or None where the limit forbids it."""
        blocks = max(1, blocks_of(count))
        with self._lock:
            self._collect()
            start = self._extents.take(blocks)
        return None if start is None else Lease(start, blocks, self._returned, self.origin)

    @property
    def used_bytes(self) -> int:
        """Bytes that are lent out, whole blocks."""
        with self._lock:
            self._collect()
            return (self._extents.size - self._extents.free) * BLOCK

    def _collect(self) -> None:
        while self._returned:
            self._extents.give(*self._returned.popleft())
