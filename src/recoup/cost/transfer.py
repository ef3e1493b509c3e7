"""Moving activations out of a device's memory and back: over which link, at which measured figures.

A transfer of ``b`` bytes occupies a direction of the link for ``latency_seconds + b / bytes_per_second``; transfers of one direction
queue in order. Where both directions are one resource (a disk), reads also queue behind writes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["OffloadLink", "Target"]

Target = Literal["host", "disk"]


class OffloadLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One way for activations to leave a device's memory and come back.

    Attributes:
        target: where they wait: ``host`` memory or ``disk``.
        write_bytes_per_second: rate of the way out, sustained, at the executor's own concurrency.
        read_bytes_per_second: rate of the way back.
        latency_seconds: added to every transfer.
        call_seconds: what the thread that trains does itself for every transfer, out or back; the step's own work stands still.
        staging_bytes: memory that the transfers themselves take (bounce buffers), from the first put until all has come back; part of
            the planned peak.
        page_bytes: what waits takes whole pages of so many bytes.
        shared: whether reads and writes are one resource.
        drag: seconds that the step's own work loses for each second of transfer, 0 where transfers cost it nothing.
        where: the directory, or the device, that was measured.
        provenance: ``measured`` or ``assumed``.
    """

    target: Target
    write_bytes_per_second: float
    read_bytes_per_second: float
    latency_seconds: float = 0.0
    call_seconds: float = 0.0
    staging_bytes: int = 0
    page_bytes: int = 4096
    shared: bool = False
    drag: float = 0.0
    where: str = ""
    provenance: Literal["measured", "assumed"] = "measured"

    def __post_init__(self) -> None:
        """Checks that the figures are figures of a link.

        Raises:
            ValueError: a rate or a page is not above zero, or another figure is below zero.
        """
        if not (self.write_bytes_per_second > 0 and self.read_bytes_per_second > 0):
            raise ValueError(f"a link to {self.target} needs rates above 0 bytes a second")
        if self.page_bytes < 1:
            raise ValueError(f"pages of {self.page_bytes} bytes hold nothing; a link to {self.target} needs pages of at least 1 byte")
        if min(self.latency_seconds, self.call_seconds, self.staging_bytes, self.drag) < 0:
            raise ValueError(f"latency, calls, staging and drag of a link to {self.target} cannot be below 0")

    def waiting_bytes(self, count: int) -> int:
        """What ``count`` bytes take where they wait."""
        return -(-count // self.page_bytes) * self.page_bytes

    def write_seconds(self, count: int) -> float:
        """Seconds that the way out of ``count`` bytes occupies the link."""
        return self.latency_seconds + count / self.write_bytes_per_second

    def read_seconds(self, count: int) -> float:
        """Seconds that the way back of ``count`` bytes occupies the link."""
        return self.latency_seconds + count / self.read_bytes_per_second

    def drag_seconds(self, link_seconds: float) -> float:
        """Seconds that the step's own work loses to one transfer that occupies the link for so long."""
        return link_seconds * self.drag + self.call_seconds
