"""Collectives by bandwidth and latency.

A ring over n devices passes ``bytes`` (the whole, unsharded size) in n - 1 steps:

    all_gather, reduce_scatter, all_to_all   (n - 1) / n * bytes / rate + (n - 1) * latency + start
    all_reduce                               twice that
    send                                     bytes / rate + latency + start

A group that spans domains is run level by level: within each domain first, then across domains by all its members at once, which
carry the part that is left (NCCL's rings and trees reach the same bytes through the same wires).
"""

from __future__ import annotations

from recoup.cost.device import Device, Link
from recoup.errors import UsageError

__all__ = ["COLLECTIVES", "collective_seconds", "link_between"]

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")


def collective_seconds(device: Device, kind: str, size_bytes: float, devices: int, stride: int = 1) -> float:
    """Seconds of one collective.

    Args:
        device: with its links, innermost first.
        kind: one of ``COLLECTIVES``.
        size_bytes: the whole size: of the gathered result, of what is reduced, of what one device sends to all.
        devices: how many take part.
        stride: how many devices lie between two neighbours of the group (the product of the inner parallel degrees).

    Raises:
        UsageError: there is no such collective.
    """
    if kind not in COLLECTIVES:
        raise UsageError(f"no collective is called {kind!r}; there are {', '.join(COLLECTIVES)}")
    if kind == "send":
        link = link_between(device, stride * 2 if devices < 2 else stride * devices)
        return size_bytes / _rate(link) + link.latency_seconds + link.start_seconds if size_bytes else 0.0
    if devices < 2 or not size_bytes:
        return 0.0
    once = _levels(device, size_bytes, devices, stride)
    return 2 * once if kind == "all_reduce" else once


def link_between(device: Device, span: int) -> Link:
    """The innermost link whose domain holds so many neighbouring devices."""
    return next((link for link in device.links if not link.devices or link.devices >= span), device.links[-1])


def _levels(device: Device, size_bytes: float, devices: int, stride: int) -> float:
    inner = device.links[0]
    within = min(devices, max(inner.devices // stride, 1)) if inner.devices else devices
    if within >= devices:
        return _ring(inner, size_bytes, devices)
    across = -(-devices // within)
    outer = link_between(device, stride * devices)
    return (_ring(inner, size_bytes, within) if within > 1 else 0.0) + _ring(outer, size_bytes / within, across)


def _ring(link: Link, size_bytes: float, devices: int) -> float:
    return (devices - 1) / devices * size_bytes / _rate(link) + (devices - 1) * link.latency_seconds + link.start_seconds


def _rate(link: Link) -> float:
    return link.bytes_per_second * link.efficiency
