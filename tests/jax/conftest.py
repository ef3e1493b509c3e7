"""Tests of the JAX front-end: they need JAX and nothing of PyTorch, and run on CPU with two devices."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "--xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2".strip()
sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("jax")
