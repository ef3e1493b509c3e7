"""The links that activations would take, measured with the very stores that executors use.

Rates are those beside compute: while storages go out, or come back, the calling thread multiplies matrices, as a step would, since
threads and cores are shared. The same windows say what the transfers cost the compute (``drag``): the products that are missing in them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from recoup.cost import OffloadLink
from recoup.torch.offload.copiers import CudaCopier
from recoup.torch.offload.disk import DiskStore
from recoup.torch.offload.host import HostStore
from recoup.torch.offload.requests import Requests
from recoup.torch.offload.store import Store

__all__ = ["measure_disk", "measure_host"]

_STORAGE_BYTES = 4 * 2**20
_MOST_STORAGES = 16
_ROUNDS = 7
_SMALL_BYTES = 4096
_SMALL_TRANSFERS = 15
_WIDTH = 256  # of the matrices: a product takes some hundred microseconds on one core


class _Ending(Protocol):
    def done(self) -> bool: ...


def measure_disk(
    directory: str | Path,
    *,
    device: torch.device | str = "cpu",
    seconds: float = 2.0,
    allow_memory_filesystem: bool = False,
    requests: Requests | None = None,
) -> OffloadLink:
    """The way to a directory and back, for tensors of ``device``; takes up to 64 MiB there, and about ``seconds``.

    The file is written before it is timed, as it is from a training run's second step on.

    Raises:
        OffloadError: the directory cannot be used, or a transfer failed.
    """
    store = DiskStore(directory, device=device, allow_memory_filesystem=allow_memory_filesystem, requests=requests)
    try:
        return _measured(store, torch.device(device), seconds, where=str(directory), shared=True)
    finally:
        store.close()


def measure_host(device: torch.device | str, *, seconds: float = 2.0) -> tuple[OffloadLink, ...]:
    """The ways between a CUDA device and the host's memory: by pinned memory, which is what executors take, then by pageable memory.

    For the CPU there is none: its tensors are in the host's memory. Not measured on a GPU.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return ()
    store = HostStore(CudaCopier(device), device=device, limit_bytes=2 * _MOST_STORAGES * _STORAGE_BYTES)
    try:
        pinned = _measured(store, device, seconds, where=f"{device}, pinned", shared=False)
    finally:
        store.close()
    return (pinned, _pageable(device))


def _measured(store: Store, device: torch.device, seconds: float, *, where: str, shared: bool) -> OffloadLink:
    compute = _product_on(device)
    number = _storages_that_fit(store, device, seconds)
    sources = [torch.rand(_STORAGE_BYTES // 4, device=device) for _ in range(number)]
    _out(store, sources)  # the first time, a disk finds the space and the kernel maps the buffers
    products = _Products(compute)
    writes, reads, drags = [], [], []
    for _ in range(_ROUNDS):
        quiet = products.for_seconds(seconds / (6 * _ROUNDS))
        tickets = []
        write = products.until_done(lambda kept=tickets: kept.extend(store.put(source) for source in sources) or kept)
        if failed := [ticket.failure for ticket in tickets if ticket.failure]:
            raise _failed(failed[0])
        fetches = []
        read = products.until_done(lambda kept=fetches, wanted=tickets: kept.extend(ticket.fetch() for ticket in wanted) or kept)
        for fetch in fetches:
            fetch.get()
        writes.append(number * _STORAGE_BYTES / write.seconds)
        reads.append(number * _STORAGE_BYTES / read.seconds)
        drags.append(1 - (write.count + read.count) / (write.seconds + read.seconds) / (quiet.count / quiet.seconds))
    return OffloadLink(
        target=store.target,
        write_bytes_per_second=statistics.median(writes),
        read_bytes_per_second=statistics.median(reads),
        latency_seconds=_latency(store, device),
        staging_bytes=store.staging_bytes,
        shared=shared,
        drag=max(0.0, statistics.median(drags)),
        where=where,
    )
