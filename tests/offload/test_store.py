"""What both stores promise."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
from torch import Tensor

from recoup.errors import OffloadError
from recoup.torch.offload import Store, Ticket


def all_bytes(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def out(store: Store, tensor: Tensor) -> Ticket:
    ticket = store.put(tensor)
    ticket.wait()
    assert ticket.failure == ""
    return ticket


def offload_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("recoup-offload")]


def wait_until(true: object, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end, "not within the time"
        time.sleep(0.002)


@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 4097, 2**20 - 1, 2**20, 2**20 + 1, 5 * 2**20 + 12345])
def test_bytes_of_any_number_come_back(store: Store, count: int) -> None:
    source = torch.randint(0, 256, (count,), dtype=torch.uint8)
    ticket = out(store, source)
    back = ticket.fetch().get()
    assert ticket.nbytes == back.untyped_storage().nbytes() == count
    assert back.dtype == torch.uint8
    assert torch.equal(back, source)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int16, torch.bool])
def test_views_move_the_whole_storage(store: Store, dtype: torch.dtype) -> None:
    base = torch.randn(70, 91).to(dtype)
    view = base.t()[3:50:2]
    back = out(store, view).fetch().get()
    assert back.untyped_storage().nbytes() == base.untyped_storage().nbytes()
    again = torch.empty(0, dtype=dtype).set_(back.untyped_storage(), view.storage_offset(), view.shape, view.stride())
    assert torch.equal(again, view)


def test_many_in_flight_come_back_in_any_order_and_several_times(store: Store) -> None:
    torch.manual_seed(0)
    sources = [torch.randn(int(n)) for n in torch.randint(1, 400_000, (60,))]
    tickets = [store.put(source) for source in sources]
    fetches = [(place, tickets[place].fetch()) for place in torch.randperm(60).tolist() + list(range(0, 60, 3))]
    for place, fetch in reversed(fetches):  # the first fetches run while the last writes do
        assert torch.equal(fetch.get(), all_bytes(sources[place]))
    assert all(ticket.done() and ticket.failure == "" for ticket in tickets)
    first, second = tickets[0].fetch().get(), tickets[0].fetch().get()
    assert first.data_ptr() != second.data_ptr()


def test_space_is_used_again(store: Store) -> None:
    for _ in range(5):
        tickets = [out(store, torch.full((300_000,), float(number))) for number in range(8)]
        used = store.used_bytes  # type: ignore[attr-defined]
        assert used == 8 * 1_200_128  # whole blocks
        for number, ticket in enumerate(tickets):
            assert torch.equal(ticket.fetch().get().view(torch.float32), torch.full((300_000,), float(number)))
        tickets[0].free()
        tickets[0].free()
        del tickets, ticket
        wait_until(lambda: store.used_bytes == 0)  # type: ignore[attr-defined]


def test_space_is_not_used_again_while_a_fetch_reads_it(store: Store) -> None:
    for number in range(30):
        source = torch.full((700_000,), float(number))
        ticket = out(store, source)
        fetch = ticket.fetch()
        ticket.free()
        other = store.put(torch.full((700_000,), -1.0))
        assert torch.equal(fetch.get().view(torch.float32), source)
        other.wait()


def test_a_freed_ticket_cannot_be_fetched(store: Store) -> None:
    ticket = out(store, torch.ones(10))
    ticket.free()
    with pytest.raises(OffloadError, match="was freed"):
        ticket.fetch()


def test_nothing_but_the_caller_holds_the_tensor_once_it_is_out(store: Store) -> None:
    gc.disable()
    try:
        source = torch.randn(400_000)
        storage = source.untyped_storage()
        gone = weakref.ref(storage)
        ticket = store.put(source)
        wait_until(ticket.done)
        del source, storage
        assert gone() is None
        fetch = ticket.fetch()
        tensor = fetch.get()
        gone = weakref.ref(tensor)
        del fetch, tensor
        assert gone() is None
    finally:
        gc.enable()


def test_closing_ends_what_runs_and_may_be_done_twice(store: Store) -> None:
    sources = [torch.randn(2_000_000) for _ in range(12)]
    early = out(store, sources[0])
    tickets = [store.put(source) for source in sources]
    store.close()
    store.close()
    assert offload_threads() == []
    assert all(ticket.done() for ticket in tickets)
    assert all(ticket.failure in ("", "the store was closed") for ticket in tickets)
    late = store.put(sources[0])
    assert late.done()
    assert "closed" in late.failure
    with pytest.raises(OffloadError, match="closed"):
        early.fetch().get()
    with pytest.raises(OffloadError, match="closed"):
        store.reserve(2**20)


def test_a_ticket_without_its_write_is_not_fetched(store: Store) -> None:
    ticket = store.put(torch.empty(3, device="meta"))
    assert ticket.done()
    assert "meta" in ticket.failure
    with pytest.raises(OffloadError, match="only copy"):
        ticket.fetch()
