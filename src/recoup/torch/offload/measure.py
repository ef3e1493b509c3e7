"""The links that activations would take, measured with the very stores that executors use.

Rates are those beside compute: while storages go out, or come back, the calling thread multiplies and adds matrices, as a step would, since
threads and cores are shared. The same windows say what the transfers cost the compute (``drag``): the work that is missing in them. What
the calling thread itself does for a transfer is timed between pieces of that work, whose data have driven its own out of the caches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from recoup.cost import OffloadLink
from recoup.errors import OffloadError
from recoup.torch.offload.beside import until, work_on
from recoup.torch.offload.copiers import CudaCopier
from recoup.torch.offload.disk import DiskStore
from recoup.torch.offload.host import HostStore
from recoup.torch.offload.inbox import Inbox
from recoup.torch.offload.outbox import Moved, Outbox, Tally
from recoup.torch.offload.requests import Requests
from recoup.torch.offload.store import Fetch, Store, Ticket

__all__ = ["measure_disk", "measure_host"]

_STORAGE_BYTES = 4 * 2**20
_MOST_STORAGES = 16
_ROUNDS = 15
_SMALL_BYTES = 4096
_SMALL_TRANSFERS = 15


def measure_disk(
    directory: str | Path,
    *,
    device: torch.device | str = "cpu",
    seconds: float = 3.0,
    allow_memory_filesystem: bool = False,
    requests: Requests | None = None,
) -> OffloadLink:
    """The way to a directory and back, for tensors of ``device``; takes up to 64 MiB there, and about ``seconds`` where the disk is fast.

    The file is written once before it is timed, as it is from a training run's second step on.

    Raises:
        OffloadError: the directory cannot be used, or a transfer failed.
    """
    store = DiskStore(directory, device=device, allow_memory_filesystem=allow_memory_filesystem, requests=requests)
    try:
        return _measured(store, torch.device(device), seconds, where=str(directory), shared=True)
    finally:
        store.close()


def measure_host(device: torch.device | str, *, seconds: float = 3.0) -> tuple[OffloadLink, ...]:
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
    work, window = work_on(device), seconds / (3 * _ROUNDS)
    sources = _sources(store, device, window)
    moved = sum(source.nbytes for source in sources)
    writes, reads, drags = [], [], []
    for _ in range(_ROUNDS):
        quiet = until(work, list, at_least_seconds=window)
        tickets: list[Ticket] = []
        write = until(work, lambda kept=tickets: _put(store, sources, kept))
        _check(tickets)
        fetches: list[Fetch] = []
        read = until(work, lambda kept=fetches, stored=tickets: _fetch(stored, kept))
        for fetch in fetches:
            fetch.get()
        writes.append(moved / write.seconds)
        reads.append(moved / read.seconds)
        expected = (write.working_seconds + read.working_seconds) * quiet.rate
        drags.append(1 - (write.calls + read.calls) / expected)
    return OffloadLink(
        target=store.target,
        write_bytes_per_second=statistics.median(writes),
        read_bytes_per_second=statistics.median(reads),
        latency_seconds=_latency(store, device),
        call_seconds=_calls(store, sources[0], work),
        staging_bytes=store.staging_bytes,
        shared=shared,
        drag=max(0.0, statistics.median(drags)),
        where=where,
    )


def _sources(store: Store, device: torch.device, seconds: float) -> list[Tensor]:
    """As many storages as go out in that time, after one round of them that nobody times."""
    one = torch.rand(_STORAGE_BYTES // 4, device=device)
    begun = time.perf_counter()
    _wait(_put(store, [one], []))
    number = int(seconds / (time.perf_counter() - begun))
    sources = [one, *(torch.rand_like(one) for _ in range(min(_MOST_STORAGES, number) - 1))]
    tickets = _wait(_put(store, sources, []))
    for fetch in _fetch(tickets, []):
        fetch.get()
    return sources


def _latency(store: Store, device: torch.device) -> float:
    """Seconds that one small transfer takes, out or back, whichever takes longer; medians."""
    small = torch.zeros(_SMALL_BYTES, dtype=torch.uint8, device=device)
    outs, backs = [], []
    for _ in range(_SMALL_TRANSFERS):
        begun = time.perf_counter()
        (ticket,) = _wait(_put(store, [small], []))
        outs.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        ticket.fetch().get()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        backs.append(time.perf_counter() - begun)
    return max(statistics.median(outs), statistics.median(backs))


def _calls(store: Store, source: Tensor, work: Callable[[], None]) -> float:
    """Seconds that the calling thread itself needs for one transfer: half of what it does to send a storage out and to have it back."""
    outbox = Outbox(store, source.nbytes, Tally())
    inbox = Inbox(outbox, source.nbytes, frozenset())
    found = []
    for _ in range(_SMALL_TRANSFERS):
        work()
        begun = time.perf_counter()
        moved = Moved(inbox, "", source)
        moved.put(source)
        out = time.perf_counter() - begun
        assert moved.ticket is not None
        moved.ticket.wait()
        work()
        begun = time.perf_counter()
        outbox.accept()
        fetched = moved.ticket.fetch()
        back = time.perf_counter() - begun
        while not fetched.done():
            work()
        begun = time.perf_counter()
        fetched.get()
        found.append((out + back + time.perf_counter() - begun) / 2)
    return statistics.median(found)


def _pageable(device: torch.device) -> OffloadLink:
    """Plain copies, which make the host wait; shown beside pinned memory."""
    there = torch.rand(_MOST_STORAGES * _STORAGE_BYTES // 4, device=device)
    here = torch.zeros(there.shape)
    outs, backs = [], []
    for _ in range(_ROUNDS):
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        here.copy_(there)
        outs.append(there.nbytes / (time.perf_counter() - begun))
        begun = time.perf_counter()
        there.copy_(here)
        torch.cuda.synchronize(device)
        backs.append(there.nbytes / (time.perf_counter() - begun))
    write, read = statistics.median(outs), statistics.median(backs)
    # the host waits for such copies, so the step stands still while they run
    return OffloadLink(target="host", write_bytes_per_second=write, read_bytes_per_second=read, drag=1.0, where=f"{device}, pageable")


def _put(store: Store, sources: Sequence[Tensor], tickets: list[Ticket]) -> list[Ticket]:
    tickets.extend(store.put(source) for source in sources)
    return tickets


def _fetch(tickets: Sequence[Ticket], fetches: list[Fetch]) -> list[Fetch]:
    fetches.extend(ticket.fetch() for ticket in tickets)
    return fetches


def _wait(tickets: list[Ticket]) -> list[Ticket]:
    for ticket in tickets:
        ticket.wait()
    _check(tickets)
    return tickets


def _check(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        if ticket.failure:
            raise OffloadError(f"the link cannot be measured: {ticket.failure}")
