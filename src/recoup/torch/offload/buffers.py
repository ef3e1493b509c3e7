"""Page-aligned memory through which bytes go on their way between tensors and files."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Buffer", "PageBuffer", "PinnedBuffer", "Window"]


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
    """Part of a buffer, which it holds."""

    def __init__(self, view: memoryview, address: int) -> None:
        self.view = view
        self.address = address


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
