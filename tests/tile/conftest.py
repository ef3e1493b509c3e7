from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from recoup.torch.private import below_modes, outer_saved_tensor_hooks


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, one seed; afterwards no mode or hook may be left."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    assert below_modes() == 0
    assert outer_saved_tensor_hooks() is None
