"""Devices as data: peak rates from datasheets, efficiencies with where they come from, links, host memory.

``devices.json`` beside this module holds those that are known; a file of the same form describes another one, such as a
machine that the user measured. Rates are bytes or operations a second; a link's rate is one direction of one device.
"""

from __future__ import annotations

import difflib
import os
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal

import msgspec

from recoup.errors import UsageError

__all__ = ["AttentionEfficiency", "Device", "Link", "MatmulEfficiency", "Rates", "Saturation", "device", "device_names"]

Provenance = Literal["measured", "fitted", "datasheet", "assumed"]


class Saturation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An efficiency that grows with the size of the work: ``ceiling * work / (work + half)``."""

    ceiling: float
    half: float = 0.0

    def at(self, work: float) -> float:
        """The share of the peak rate reached by so much work."""
        return self.ceiling * work / (work + self.half) if work > 0 else self.ceiling


class MatmulEfficiency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``ceiling * outputs / (outputs + half_outputs) * depth / (depth + half_depth)`` of the peak.

    ``outputs`` are elements of all results together (they fill the device), ``depth`` is the length of the inner sum. Products that
    add to a result in four bytes, as gradients of weights do, reach ``accumulating`` of that; those in fp8 reach ``fp8_tensor`` or
    ``fp8_row`` of it, of the peak for fp8, by how their operands are scaled.
    """

    ceiling: float
    half_outputs: float
    half_depth: float
    accumulating: float = 1.0
    fp8_tensor: float = 0.7
    fp8_row: float = 0.4
    provenance: Provenance = "assumed"
    source: str = ""


class AttentionEfficiency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fused attention, by query rows in flight (batch * heads * queries); of operations really done (half of the square if causal)."""

    forward: Saturation
    backward: Saturation
    provenance: Provenance = "assumed"
    source: str = ""


class Rates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Peak dense operations a second of matrix products by precision; 0 where the device does not have it."""

    bf16: float
    fp8: float = 0.0


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What joins devices.

    Attributes:
        name: such as ``nvlink``.
        devices: how many devices one domain joins; 0 for any number.
        bytes_per_second: of one device, one direction, by the datasheet.
        efficiency: share of that which a ring of large messages reaches.
        latency_seconds: of one step of a ring.
        start_seconds: of beginning any collective.
    """

    name: str
    devices: int
    bytes_per_second: float
    efficiency: float
    latency_seconds: float
    start_seconds: float = 0.0
    provenance: Provenance = "assumed"
    source: str = ""


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One accelerator and what it is joined by.

    Attributes:
        name: what it is called.
        aliases: other names for it.
        memory_bytes: of one device, by the datasheet.
        flops: peak dense operations a second by precision.
        memory_bytes_per_second: by the datasheet.
        memory_efficiency: share of it that element-wise kernels reach.
        matmul: efficiency of matrix products.
        attention: efficiency of fused attention.
        kernel_seconds: of starting and ending any kernel, when the device waits for nothing else.
        links: from the innermost (fastest) to the outermost.
        host_bytes_per_second: to host memory, one direction, as reached; 0 if there is none.
        reserved_bytes: not to be had by the job: context, libraries, buffers of collectives, fragments.
        dollars_per_hour: of one device; 0 if not known.
        source: of the datasheet's numbers.
    """

    name: str
    aliases: tuple[str, ...] = ()
    memory_bytes: int
    flops: Rates
    memory_bytes_per_second: float
    memory_efficiency: Saturation
    matmul: MatmulEfficiency
    attention: AttentionEfficiency
    kernel_seconds: float
    links: tuple[Link, ...]
    host_bytes_per_second: float = 0.0
    reserved_bytes: int = 0
    dollars_per_hour: float = 0.0
    source: str = ""

    def rate(self, precision: str) -> float:
        """Peak operations a second of ``bf16`` or ``fp8`` products.

        Raises:
            UsageError: the device does not have this precision.
        """
        rate = getattr(self.flops, precision, 0.0)
        if not rate:
            has = ", ".join(name for name in self.flops.__struct_fields__ if getattr(self.flops, name))
            raise UsageError(f"device {self.name} has no rate for {precision!r}; its field `flops` has {has}")
        return rate


def device(name: str | os.PathLike[str] | Device) -> Device:
    """A device by name, from a JSON file, or as it is.

    Raises:
        UsageError: no device has that name, or the file is no device; the message names the field or the names there are.
    """
    if isinstance(name, Device):
        return name
    text = os.fspath(name)
    if text.endswith(".json"):
        return _checked(_read(Path(text)), text)
    known = _known()
    key = text.lower()
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UsageError(f"no device is called {text!r}{hint}; there are {', '.join(device_names())}, or give a JSON file of one")
    return known[key]


def device_names() -> tuple[str, ...]:
    """Names of the devices in the data file."""
    return tuple(item.name for item in _listed())


@cache
def _listed() -> tuple[Device, ...]:
    data = resources.files("recoup.cost").joinpath("devices.json").read_bytes()
    return tuple(_checked(item, item.name) for item in msgspec.json.decode(data, type=tuple[Device, ...]))


@cache
def _known() -> dict[str, Device]:
    return {name: item for item in _listed() for name in (item.name, *item.aliases)}


def _read(path: Path) -> Device:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Device)
    except OSError as error:
        raise UsageError(f"cannot read the device {path}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} is no device: {error}") from error


def _checked(item: Device, where: str) -> Device:
    """The device, if its numbers can be divided by.

    Raises:
        UsageError: one cannot; the message names the field.
    """
    positive = {
        "memory_bytes": item.memory_bytes,
        "memory_bytes_per_second": item.memory_bytes_per_second,
        "memory_efficiency.ceiling": item.memory_efficiency.ceiling,
        "matmul.ceiling": item.matmul.ceiling,
        "attention.forward.ceiling": item.attention.forward.ceiling,
        "attention.backward.ceiling": item.attention.backward.ceiling,
        "flops.bf16": item.flops.bf16,
        **{f"links[{place}].bytes_per_second": link.bytes_per_second for place, link in enumerate(item.links)},
        **{f"links[{place}].efficiency": link.efficiency for place, link in enumerate(item.links)},
    }
    for field, value in positive.items():
        if not value > 0:
            raise UsageError(f"device {where}: field `{field}` must be a positive number, got {value}")
    if not item.links:
        raise UsageError(f"device {where}: field `links` must have at least one link, the innermost first")
    return item
