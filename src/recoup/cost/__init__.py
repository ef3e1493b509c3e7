"""What things cost: devices as data, a roofline with stated efficiencies, collectives over links. No framework."""

from recoup.cost.device import Device, Link, device, device_names
from recoup.cost.links import collective_seconds
from recoup.cost.roofline import attention_seconds, matmul_seconds, memory_seconds
from recoup.cost.transfer import OffloadLink, Target

__all__ = [
    "Device",
    "Link",
    "OffloadLink",
    "Target",
    "attention_seconds",
    "collective_seconds",
    "device",
    "device_names",
    "matmul_seconds",
    "memory_seconds",
]
