"""The host store behind its interface to what copies."""

from __future__ import annotations

import gc
import time

import pytest
import torch

from recoup.errors import OffloadError
from recoup.torch.meter import meter_for
from recoup.torch.offload import HostStore, ThreadCopier
from tests.offload.conftest import MIB
from tests.offload.test_store import offload_threads, out, wait_until


def test_a_full_pool_fails_one_ticket_and_no_other() -> None:
    store = HostStore(ThreadCopier(), device="cpu", limit_bytes=8 * MIB)
    store.reserve(8 * MIB)
    sources = [torch.randn(MIB) for _ in range(3)]
    tickets = [store.put(source) for source in sources]
    assert tickets[2].done()
    assert tickets[2].failure == f"the pool of {8 * MIB} bytes is full: {4 * MIB} more and {8 * MIB} in use"
    assert all(torch.equal(ticket.fetch().get().view(torch.float32), source) for ticket, source in zip(tickets[:2], sources, strict=False))
    tickets[0].free()
    out(store, sources[2])
    store.close()


def test_reserving_more_than_the_limit() -> None:
    store = HostStore(ThreadCopier(), device="cpu", limit_bytes=8 * MIB)
    with pytest.raises(OffloadError, match=rf"its budget is {8 * MIB} bytes"):
        store.reserve(8 * MIB + 1)
    store.close()


def test_a_slow_link_takes_its_time_and_the_caller_none() -> None:
    store = HostStore(ThreadCopier(latency_seconds=0.2, bytes_per_second=100 * MIB), device="cpu", limit_bytes=64 * MIB)
    source = torch.randn(MIB)
    begun = time.monotonic()
    ticket = store.put(source)
    fetch = ticket.fetch()
    assert time.monotonic() - begun < 0.15
    assert not ticket.done()
    ticket.wait()
    assert time.monotonic() - begun >= 0.24  # the latency, and 4 MiB at the rate
    assert not fetch.done()
    assert torch.equal(fetch.get().view(torch.float32), source)
    assert time.monotonic() - begun >= 0.48
    store.close()


def test_the_pool_is_no_memory_of_the_device() -> None:
    store = HostStore(ThreadCopier(), device="cpu", limit_bytes=64 * MIB)
    kept: list[object] = []

    def step() -> None:
        source = torch.ones(MIB)
        ticket = store.put(source)
        ticket.wait()
        del source
        kept.append(ticket.fetch().get())

    assert meter_for(torch.device("cpu")).peak_above(step) == 4 * MIB  # the tensor is gone before its copy is there
    store.close()


def test_a_store_nobody_holds_leaves_no_thread() -> None:
    gc.disable()
    try:
        store = HostStore(ThreadCopier(), device="cpu", limit_bytes=64 * MIB)
        ticket = store.put(torch.ones(MIB))
        assert offload_threads()
        del store
        assert torch.equal(ticket.fetch().get().view(torch.float32), torch.ones(MIB))
        del ticket
        wait_until(lambda: offload_threads() == [])
    finally:
        gc.enable()
