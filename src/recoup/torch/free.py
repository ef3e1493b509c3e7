"""What a device can still give, for the budget ``auto``."""

from __future__ import annotations

from pathlib import Path

import torch

from recoup.torch.meter import device_of, resident_bytes

__all__ = ["RESERVE", "free_bytes"]

RESERVE = 0.05
"""The share of the device's free memory that stays free: allocators fragment, and others want some too."""


def free_bytes(model: torch.nn.Module) -> int | None:
    """Bytes that a step of this model may use in all, what stands already included; None if the device does not say.

    On CUDA what the driver has free and what PyTorch's allocator holds, on a CPU what Linux calls available; less the reserve.
    """
    device = device_of(model)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return torch.cuda.memory_reserved(device) + int(free * (1 - RESERVE))
    available = _available_bytes(Path("/proc/meminfo")) if device.type == "cpu" else None
    return None if available is None else resident_bytes(model) + int(available * (1 - RESERVE))


def _available_bytes(meminfo: Path) -> int | None:
    if not meminfo.is_file():
        return None
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    available = fields.get("MemAvailable")
    return None if available is None else int(available.split()[0]) * 1024
