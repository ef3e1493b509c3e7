"""Versions and settings that costs depend on."""

from __future__ import annotations

import platform

import torch

__all__ = ["environment"]


def environment(device: torch.device) -> dict[str, str]:
    """Versions and settings that costs depend on."""
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine(),
        "threads": str(torch.get_num_threads()),
    }
