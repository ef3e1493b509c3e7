"""Page-aligned memory through which bytes go on their way between tensors and files."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import Protocol

import torch
from torch import Tensor

from recoup.torch.offload.extents import BLOCK

__all__ = ["Buffer", "PageBuffer", "PinnedBuffer", "Window", "counted_buffers", "counted_bytes"]


class Buffer(Protocol):
    """Memory that starts at a page: a view for system calls, an address for copies."""

    @property
    def view(self) -> memoryview:
        """All of it."""
        ...

    @property
    def address(self) -> int:
        """Of its first byte."""
        ...


class PageBuffer:
    """Anonymous memory of the process; no allocator counts it."""

    def __init__(self, count: int) -> None:
        self.view = memoryview(mmap.mmap(-1, count))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))

    def part(self, offset: int) -> Window:
        """What begins at ``offset``."""
        return Window(self.view[offset:], self.address + offset)


class Window:
    """Part of a buffer; who makes it says what it holds."""

    def __init__(self, view: memoryview, address: int, owner: object = None) -> None:
        self.view = view
        self.address = address
        self._owner = owner


def counted_bytes(number: int, count: int) -> int:
    """What :func:`counted_buffers` takes."""
    return number * count + BLOCK


def counted_buffers(number: int, count: int) -> list[Window]:
    """Page-aligned buffers of ``count`` bytes in one block of PyTorch's own memory, which goes when the last of them does.

    Its allocator counts them, so that they are in every peak that is measured.
    """
    block = torch.UntypedStorage(counted_bytes(number, count))
    first = -(-block.data_ptr() // BLOCK) * BLOCK
    parts = [first + place * count for place in range(number)]
    return [Window(memoryview((ctypes.c_char * count).from_address(start)), start, block) for start in parts]


class PinnedBuffer:
    """Memory that a CUDA device copies from and to by itself. Not measured on a GPU.

    Registered, not allocated by PyTorch, whose allocator of pinned memory rounds up to powers of two and would take up to twice a budget.
    Whoever copies holds this object until the device is through.
    """

    def __init__(self, count: int) -> None:
        pages = PageBuffer(count)
        self.view = pages.view
        self.address = pages.address
        self.tensor: Tensor = torch.frombuffer(pages.view, dtype=torch.uint8)
        runtime = torch.cuda.cudart()
        assert runtime is not None
        torch.cuda.check_error(int(runtime.cudaHostRegister(self.address, count, 0)))
        # while the interpreter ends the driver may be gone already, and gives the pages back by itself
        weakref.finalize(self, runtime.cudaHostUnregister, self.address).atexit = False
