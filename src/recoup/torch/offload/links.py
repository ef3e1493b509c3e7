"""From what a user allows to measured links: ``host``, ``disk:DIRECTORY``, or links as they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from recoup.cost import OffloadLink
from recoup.errors import UsageError
from recoup.torch.offload.measure import measure_disk, measure_host

__all__ = ["Wanted", "links_of"]

Wanted = str | Path | OffloadLink


def links_of(wanted: Wanted | Sequence[Wanted] | None, device: torch.device | str) -> tuple[OffloadLink, ...]:
    """The links that activations of a device may be offloaded over, those that are not given as links measured now.

    Args:
        wanted: ``host``, ``disk:DIRECTORY`` or a directory as a ``Path``, an ``OffloadLink``, or several of these; None for none.
        device: that the activations are on.

    Raises:
        UsageError: a text names neither, or the host is asked for where it is the device itself.
        OffloadError: the directory cannot be used.
    """
    listed = () if wanted is None else (wanted,) if isinstance(wanted, (str, Path, OffloadLink)) else tuple(wanted)
    return tuple(link for one in listed for link in _links(one, torch.device(device)))


def _links(wanted: Wanted, device: torch.device) -> tuple[OffloadLink, ...]:
    if isinstance(wanted, OffloadLink):
        return (wanted,)
    if isinstance(wanted, Path):
        return (measure_disk(wanted, device=device),)
    if wanted == "host":
        pinned = measure_host(device)[:1]  # what executors take; pageable memory is slower
        if not pinned:
            raise UsageError(f"activations on {device} are in the host's memory already; offload to a disk, as in disk:/scratch")
        return pinned
    kind, _, directory = wanted.partition(":")
    if kind != "disk" or not directory:
        raise UsageError(f"offloading goes to 'host' or to 'disk:DIRECTORY', not to {wanted!r}")
    return (measure_disk(directory, device=device),)
