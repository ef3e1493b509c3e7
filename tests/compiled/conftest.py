from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Every test compiles anew, on one thread, so that results compare bit for bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.compiler.reset()
    torch.manual_seed(0)
    yield
    torch.compiler.reset()
    torch.set_num_threads(before)
