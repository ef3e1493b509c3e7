"""Tests of the JAX front-end: they need JAX and nothing of PyTorch, and run on CPU with two devices."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# What LLVM makes of a kernel changes neither a plan nor XLA's allocation, and is more than half of a test's time.
_FLAGS = {
    "--xla_force_host_platform_device_count": "2",
    "--xla_backend_optimization_level": "0",
    "--xla_llvm_disable_expensive_passes": "true",
}

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([_given, *(f"{flag}={value}" for flag, value in _FLAGS.items() if flag not in _given)]).strip()
sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("jax")
