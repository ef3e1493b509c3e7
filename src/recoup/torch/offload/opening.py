"""From what a plan says of its traffic to a store that carries it."""

from __future__ import annotations

from pathlib import Path

import torch

from recoup.errors import OffloadError
from recoup.plan import Plan, Traffic
from recoup.torch.offload.outbox import Outbox, Tally
from recoup.torch.offload.store import Store

__all__ = ["open_outbox"]


def open_outbox(plan: Plan, device: torch.device, where: str | Path | Store | None, tally: Tally) -> Outbox | None:
    """The traffic of a plan on a device, its space taken; None for a plan that offloads nothing.

    Args:
        plan: what offloads what, and how it moves.
        device: that the activations are on.
        where: the directory of a plan that offloads to disk, a store of your own, or None for where the link was measured.
        tally: what counts the traffic.

    Raises:
        OffloadError: there is no such place for this device, or too little space.
    """
    traffic = plan.traffic
    if traffic is None or not plan.offload_sites:
        return None
    room = traffic.offloaded_bytes
    store = _opened(traffic, device, where, room) if where is None or isinstance(where, (str, Path)) else where
    store.reserve(room)
    return Outbox(store, traffic.write_window_bytes, tally)


def _opened(traffic: Traffic, device: torch.device, where: str | Path | None, room: int) -> Store:
    if traffic.link.target == "disk":
        from recoup.torch.offload.disk import CHUNK_BYTES, DiskStore, chunk_within  # its threads and files only where a plan asks for them

        directory = where or traffic.link.where
        if not directory:
            raise OffloadError(
                "the plan offloads to disk and names no directory; say which, as in apply(model, plan, offload_to='/scratch')"
            )
        # On CUDA the buffers are in the host's memory, of which the plan's peak says nothing.
        chunk = CHUNK_BYTES if device.type == "cuda" else chunk_within(traffic.link.staging_bytes)
        return DiskStore(directory, device=device, limit_bytes=traffic.limit_bytes, chunk_bytes=chunk)
    if device.type != "cuda":
        raise OffloadError(
            f"the plan offloads to the host's memory, where activations on {device} are already; plan with a disk, or without offloading"
        )
    from recoup.torch.offload.copiers import CudaCopier
    from recoup.torch.offload.host import HostStore

    return HostStore(CudaCopier(device), device=device, limit_bytes=room if traffic.limit_bytes is None else traffic.limit_bytes)
