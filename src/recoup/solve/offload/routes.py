"""What a user allows: over which links activations may leave, and how much may wait at their ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recoup.cost import OffloadLink
from recoup.errors import UsageError
from recoup.plan import Capabilities
from recoup.units import parse_bytes

__all__ = ["Routes", "routes_of"]


@dataclass(frozen=True, slots=True)
class Routes:
    """Where activations may wait.

    Attributes:
        links: the ways there; a plan uses one.
        host_bytes: what may wait in the host's memory at once, None for no limit.
        disk_bytes: what may wait on disk at once, None for no limit.
    """

    links: tuple[OffloadLink, ...]
    host_bytes: int | None = None
    disk_bytes: int | None = None

    def cap(self, link: OffloadLink) -> int | None:
        """Bytes that may wait at the end of a link, None for no limit."""
        return self.host_bytes if link.target == "host" else self.disk_bytes

    def of(self, executor: Capabilities) -> tuple[OffloadLink, ...]:
        """The links that an executor can use."""
        return tuple(link for link in self.links if link.target in executor.offload_targets)


def routes_of(
    offload: OffloadLink | Sequence[OffloadLink] | None,
    host_budget: str | int | None,
    disk_budget: str | int | None,
    executors: Sequence[Capabilities],
) -> Routes | None:
    """The routes that a user allows; None if nothing may leave.

    Raises:
        UsageError: there is a budget for a target without a link to it, one that is no amount of bytes, or a link that none of
            the executors can use.
    """
    links = () if offload is None else (offload,) if isinstance(offload, OffloadLink) else tuple(offload)
    caps = {"host": _bytes(host_budget, "host_budget"), "disk": _bytes(disk_budget, "disk_budget")}
    for target, cap in caps.items():
        if cap is not None and not any(link.target == target for link in links):
            raise UsageError(f"{target}_budget says what may wait on the {target}, but offload names no link to it")
    for link in links:
        if not any(link.target in executor.offload_targets for executor in executors):
            names = ", ".join(executor.name for executor in executors)
            raise UsageError(f"nothing can be offloaded to {link.target} in the {names} gear; leave out offload, or take another gear")
    return Routes(links, caps["host"], caps["disk"]) if links else None


def _bytes(budget: str | int | None, name: str) -> int | None:
    count = parse_bytes(budget) if isinstance(budget, str) else budget
    if count is not None and count < 0:
        raise UsageError(f"{name} is {count} bytes; it cannot be below 0")
    return count
