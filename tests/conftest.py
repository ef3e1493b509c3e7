"""One hypothesis profile for all tests: no deadline, since machines are shared, and examples that repeat. Short garbage collections."""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("recoup", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "recoup"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Sets apart what stands before a test: who measures collects garbage again and again, and would look through all of PyTorch."""
    gc.collect()
    gc.freeze()
