"""The situations are small: one thread runs them fastest, and the process is left as it was found."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

from recoup.torch.private import below_modes, outer_saved_tensor_hooks


@pytest.fixture(scope="session", autouse=True)
def small_heap() -> Iterator[None]:
    """Recording collects garbage; what the imports made need not be looked through every time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """One thread; afterwards no mode, hook, device or autocast state may be left."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    assert below_modes() == 0
    assert outer_saved_tensor_hooks() is None
    assert _get_current_function_mode_stack() == []
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert torch.empty(1).device.type == "cpu"
