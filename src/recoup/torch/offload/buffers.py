"""Page-aligned memory through which bytes go on their way between tensors and files."""

from __future__ import annotations

import ctypes
import mmap
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
    """Memory that a CUDA device copies from and to by itself. Not measured on a GPU."""

    def __init__(self, count: int) -> None:
        self.tensor: Tensor = torch.empty(count, dtype=torch.uint8, pin_memory=True)
        self.address = self.tensor.data_ptr()
        self.view = memoryview((ctypes.c_char * count).from_address(self.address)).cast("B")
