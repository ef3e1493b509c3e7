"""Files, faults and deaths of the disk store."""

from __future__ import annotations

import errno
import gc
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from recoup.errors import OffloadError
from recoup.torch.meter import meter_for
from recoup.torch.offload import DiskStore, Fetch, Ticket
from recoup.torch.offload.disk import chunk_within
from recoup.torch.offload.files import free_bytes
from tests.offload.conftest import MIB
from tests.offload.faults import FaultyRequests, failing, interrupted, short, slow
from tests.offload.test_store import offload_threads, out, wait_until


def net_bytes(act: Callable[[], object]) -> int:
    return meter_for("cpu").net_and_peak(act)[0]


def descriptors() -> set[str]:
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


def deleted_files(pid: int, directory: Path) -> list[str]:
    found = (os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd"))
    return [name for name in found if name.startswith(str(directory))]


def others_with(fd: int) -> list[int]:
    """Other processes that have this file open."""
    wanted, found = os.fstat(fd), []
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) == os.getpid():
            continue
        for link in process.glob("fd/*"):
            try:
                there = link.stat()
            except OSError:  # closed meanwhile
                continue
            if (there.st_dev, there.st_ino) == (wanted.st_dev, wanted.st_ino):
                found.append(int(process.name))
    return found


def test_the_file_has_no_name_and_is_the_users_alone(directory: Path) -> None:
    store = DiskStore(directory)
    out(store, torch.ones(100_000))
    assert os.listdir(directory) == []
    kept = os.fstat(store._spool.file.fd)
    assert stat.S_IMODE(kept.st_mode) == 0o600
    assert kept.st_nlink == 0
    assert kept.st_blocks * 512 >= 400_000
    store.close()


def test_buffers_are_counted_and_stand_from_the_first_transfer_until_the_store_rests(directory: Path) -> None:
    store, meter = DiskStore(directory, workers=2, chunk_bytes=MIB), meter_for("cpu")
    source, tickets = torch.randn(600_001), []

    def go_out(*, rest: bool) -> None:
        tickets.append(out(store, source))
        if rest:
            store.rest()

    taken = store.staging_bytes
    assert taken == 4 * MIB + 4096
    assert meter.net_and_peak(lambda: go_out(rest=False)) == (taken, taken)
    assert meter.net_and_peak(lambda: go_out(rest=False)) == (0, 0)
    store.rest()
    # They are taken again for what comes later, and the bytes are right.
    assert meter.net_and_peak(lambda: go_out(rest=True)) == (0, taken)
    assert all(torch.equal(ticket.fetch().get().view(torch.float32), source) for ticket in tickets)
    store.close()


def test_buffers_stay_while_a_transfer_runs(directory: Path) -> None:
    store, meter = DiskStore(directory, requests=FaultyRequests(write=slow(0.2))), meter_for("cpu")
    source = torch.ones(3 * MIB, dtype=torch.uint8)
    tickets: list[Ticket] = []

    def rest_early() -> None:
        tickets.append(store.put(source))
        store.rest()

    assert meter.net_and_peak(rest_early) == (store.staging_bytes, store.staging_bytes)
    assert torch.equal(tickets[0].fetch().get(), source)
    store.close()


def test_filesystems_without_nameless_files(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_TMPFILE")
    store = DiskStore(directory)
    source = torch.randn(300_001)
    assert torch.equal(out(store, source).fetch().get().view(torch.float32), source)
    assert os.listdir(directory) == []
    kept = os.fstat(store._spool.file.fd)
    assert (stat.S_IMODE(kept.st_mode), kept.st_nlink) == (0o600, 0)
    store.close()


def test_filesystems_without_direct_access(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    store = DiskStore(directory)
    assert not store.direct
    source = torch.randn(600_001)
    assert torch.equal(out(store, source).fetch().get().view(torch.float32), source)
    store.close()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no filesystem in memory at hand")
def test_memory_is_no_disk() -> None:
    with pytest.raises(OffloadError, match="/dev/shm is on tmpfs, which is memory"):
        DiskStore("/dev/shm")
    store = DiskStore("/dev/shm", allow_memory_filesystem=True)
    source = torch.randn(600_001)
    assert torch.equal(out(store, source).fetch().get().view(torch.float32), source)
    store.close()


def test_directories_that_will_not_do(directory: Path) -> None:
    with pytest.raises(OffloadError, match=r"nowhere is no directory; give an existing one"):
        DiskStore(directory / "nowhere")
    with pytest.raises(OffloadError, match="give a directory that can be written"):
        DiskStore("/proc/self")


def test_reserving_takes_the_space_or_says_what_is_missing(directory: Path) -> None:
    store = DiskStore(directory, limit_bytes=40 * MIB)
    store.reserve(30 * MIB)
    fd = store._spool.file.fd
    assert os.fstat(fd).st_blocks * 512 >= 30 * MIB
    store.reserve(10 * MIB)
    with pytest.raises(OffloadError, match=rf"activations of {41 * MIB} bytes .* the disk budget is {40 * MIB}"):
        store.reserve(41 * MIB)
    store.close()
    boundless = DiskStore(directory)
    wanted = free_bytes(boundless._spool.file.fd) + 2**40
    with pytest.raises(OffloadError, match=rf"{directory} has \d+ bytes free and {wanted} more are needed"):
        boundless.reserve(wanted)
    boundless.close()


def test_reserving_on_a_disk_that_fills_meanwhile(directory: Path) -> None:
    store = DiskStore(directory, requests=FaultyRequests(allocate=failing(errno.ENOSPC, 1)))
    with pytest.raises(OffloadError, match=r"bytes free and \d+ more are needed"):
        store.reserve(MIB)
    store.reserve(MIB)
    store.close()


def test_over_the_disk_budget_the_caller_keeps_the_tensor(directory: Path) -> None:
    store = DiskStore(directory, limit_bytes=3 * MIB)
    first = out(store, torch.ones(2 * MIB, dtype=torch.uint8))
    second = store.put(torch.ones(2 * MIB, dtype=torch.uint8))
    assert second.done()
    assert second.failure == f"the disk budget of {3 * MIB} bytes has no room for {2 * MIB} more: {2 * MIB} are in use"
    first.free()
    out(store, torch.ones(2 * MIB, dtype=torch.uint8))
    store.close()


@pytest.mark.parametrize("kind", ["write", "allocate"])
def test_a_full_disk_fails_one_ticket_and_no_other(directory: Path, kind: str) -> None:
    store = DiskStore(directory, workers=1, requests=FaultyRequests(**{kind: failing(errno.ENOSPC, 2)}))
    sources = [torch.randn(50_000) for _ in range(4)]
    tickets = [store.put(source) for source in sources]
    for ticket in tickets:
        ticket.wait()
    assert [bool(ticket.failure) for ticket in tickets] == [False, True, False, False]
    assert tickets[1].failure == f"{directory} is full: no space for 200000 bytes"
    for place in (0, 2, 3):
        assert torch.equal(tickets[place].fetch().get().view(torch.float32), sources[place])
    assert store.used_bytes == 3 * 49 * 4096
    store.close()


def test_an_error_at_the_nth_write(directory: Path) -> None:
    store = DiskStore(directory, requests=FaultyRequests(write=failing(errno.EIO, 5)))
    tickets = [store.put(torch.randn(MIB)) for _ in range(3)]  # four requests each
    for ticket in tickets:
        ticket.wait()
    failures = [ticket.failure for ticket in tickets if ticket.failure]
    assert failures == [f"writing {4 * MIB} bytes to {directory} failed: [Errno 5] Input/output error"]
    store.close()


@pytest.mark.parametrize(
    ("staging_bytes", "chunk_bytes"), [(4 * MIB + 4096, MIB), (2 * MIB + 4096, MIB // 2), (2 * MIB, 127 * 4096), (5 * 4096, 4096)]
)
def test_buffers_take_no_more_than_a_plan_counts(directory: Path, staging_bytes: int, chunk_bytes: int) -> None:
    assert chunk_within(staging_bytes) == chunk_bytes
    store = DiskStore(directory, chunk_bytes=chunk_bytes)
    assert store.staging_bytes <= staging_bytes
    store.close()


def test_a_plan_that_counts_too_few_bytes_for_buffers_is_refused() -> None:
    with pytest.raises(OffloadError, match=r"leaves 4096 bytes for the buffers.*20480 is the least.*recoup doctor --offload-dir"):
        chunk_within(4096)


def test_an_error_at_the_nth_read_is_tried_once_more(directory: Path) -> None:
    requests = FaultyRequests(read=failing(errno.EIO, 3))
    store = DiskStore(directory, requests=requests, chunk_bytes=MIB)
    source = torch.randn(MIB)
    assert torch.equal(out(store, source).fetch().get().view(torch.float32), source)
    assert requests.reads == 5
    store.close()


def test_a_read_that_fails_twice_raises(directory: Path) -> None:
    store = DiskStore(directory, requests=FaultyRequests(read=failing(errno.EIO, 1, 2)), workers=1)
    source = torch.randn(1000)
    ticket = out(store, source)
    fetch = ticket.fetch()
    with pytest.raises(OffloadError, match=rf"cannot fetch 4000 bytes back from {directory}: \[Errno 5\].*no weight was touched"):
        fetch.get()
    assert torch.equal(ticket.fetch().get().view(torch.float32), source)  # the bytes are still there
    store.close()


@pytest.mark.parametrize("part", [3 * 4096, 5 * 4096 + 17])
def test_short_writes_and_reads_go_on(directory: Path, part: int) -> None:
    store = DiskStore(directory, requests=FaultyRequests(write=interrupted(1, 4), read=short(part)))
    source = torch.randn(300_001)
    assert torch.equal(out(store, source).fetch().get().view(torch.float32), source)
    store.close()
    store = DiskStore(directory, requests=FaultyRequests(write=short(part)))
    assert torch.equal(out(store, source).fetch().get().view(torch.float32), source)
    store.close()


def test_writes_and_reads_that_stay_short(directory: Path) -> None:
    store = DiskStore(directory, requests=FaultyRequests(write=short(0)))
    ticket = store.put(torch.ones(5000))
    ticket.wait()
    assert ticket.failure == f"writing 20000 bytes to {directory} failed: short write: 0 of 20480 bytes at offset 0"
    store.close()
    store = DiskStore(directory, requests=FaultyRequests(read=short(0)))
    fetch = out(store, torch.ones(5000)).fetch()
    with pytest.raises(OffloadError, match="short read: 0 of 20480 bytes"):
        fetch.get()
    store.close()


def test_a_file_cut_short_behind_our_back(directory: Path) -> None:
    store = DiskStore(directory)
    ticket = out(store, torch.ones(MIB))
    os.ftruncate(store._spool.file.fd, MIB)
    with pytest.raises(OffloadError, match="short read"):
        ticket.fetch().get()
    store.close()


def test_putting_does_not_wait_for_a_slow_disk(directory: Path) -> None:
    store = DiskStore(directory, requests=FaultyRequests(write=slow(0.03), read=slow(0.03)))
    source = torch.randn(MIB)
    begun = time.monotonic()
    tickets = [store.put(source) for _ in range(4)]
    fetches = [ticket.fetch() for ticket in tickets]
    assert time.monotonic() - begun < 0.15
    assert not tickets[-1].done()
    assert tickets[-1].failure == ""
    assert not fetches[-1].done()
    tickets[0].free()
    assert all(torch.equal(fetch.get().view(torch.float32), source) for fetch in fetches)
    assert time.monotonic() - begun > 0.2  # 16 requests each way, two at a time
    store.close()


def test_a_freed_ticket_gives_its_space_back_when_its_write_ends(directory: Path) -> None:
    store = DiskStore(directory, requests=FaultyRequests(write=slow(0.05)))
    ticket = store.put(torch.randn(1000))
    ticket.free()
    assert store.used_bytes == 4096
    ticket.wait()
    assert store.used_bytes == 0
    store.close()


def test_transfers_run_in_order(directory: Path) -> None:
    store = DiskStore(directory, workers=1)
    tickets = [store.put(torch.randn(20_000)) for _ in range(30)]
    while not tickets[-1].done():
        ended = [ticket.done() for ticket in reversed(tickets)]  # asked later, an earlier one has ended if a later one had
        assert ended == sorted(ended)
    store.close()


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_storing_fetching_and_freeing(directory: Path, seed: int) -> None:
    random = Random(seed)

    def at_times_late(turn: int, count: int) -> int:
        return slow(random.choice((0.0, 0.0, 0.002)))(turn, count)

    requests = FaultyRequests(write=at_times_late, read=at_times_late)
    store = DiskStore(directory, requests=requests, chunk_bytes=16384, limit_bytes=MIB)
    held: list[tuple[Tensor, Ticket]] = []
    coming: list[tuple[Tensor, Fetch]] = []
    full = 0
    for number in range(300):
        kind = random.random()
        if kind < 0.4:
            source = torch.full((random.randrange(1, 20_000),), float(number))
            ticket = store.put(source)
            full += "has no room" in (ticket.failure if ticket.done() else "")
            held.append((source, ticket))
        elif kind < 0.65 and held:
            source, ticket = random.choice(held)
            if not (ticket.done() and ticket.failure):
                coming.append((source, ticket.fetch()))
        elif kind < 0.9 and held:
            held.pop(random.randrange(len(held)))[1].free()
        elif coming:
            source, fetch = coming.pop(random.randrange(len(coming)))
            assert torch.equal(fetch.get().view(torch.float32), source)
    for source, fetch in coming:
        assert torch.equal(fetch.get().view(torch.float32), source)
    held.clear()
    del ticket
    wait_until(lambda: store.used_bytes == 0)
    assert os.fstat(store._spool.file.fd).st_size <= MIB
    assert full  # the limit was met, too
    store.close()


def test_a_store_nobody_holds_leaves_nothing(directory: Path) -> None:
    wait_until(lambda: offload_threads() == [])
    gc.disable()
    try:
        before = descriptors()
        store = DiskStore(directory)
        tickets = [store.put(torch.randn(MIB)) for _ in range(8)]
        assert descriptors() - before
        assert len(offload_threads()) == 2
        tickets[0].fetch().get()
        del store
        assert len(offload_threads()) == 4  # tickets can still be fetched
        assert tickets[1].fetch().get().nbytes == 4 * MIB
        del tickets
        wait_until(lambda: offload_threads() == [] and descriptors() == before)
    finally:
        gc.enable()


def test_a_store_in_a_reference_cycle_leaves_nothing(directory: Path) -> None:
    before = descriptors()
    store = DiskStore(directory)
    loop: list[object] = [store, store.put(torch.randn(MIB))]
    loop.append(loop)
    del store, loop
    gc.collect()
    wait_until(lambda: offload_threads() == [] and descriptors() == before)


_KILLED = """
import sys, torch
from recoup.torch.offload import DiskStore
store = DiskStore(sys.argv[1])
source = torch.ones(2**22)
tickets = [store.put(source) for _ in range(8)]
tickets[0].wait()
print("writing", flush=True)
while True:
    tickets = [store.put(source) for _ in range(8)]
    for ticket in tickets:
        ticket.wait()
"""


def test_killed_in_the_middle_of_a_write_it_leaves_no_file_and_no_space(directory: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", _KILLED, str(directory)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    assert os.listdir(directory) == []
    (name,) = deleted_files(child.pid, directory)
    assert name.endswith("(deleted)")
    proc = next(entry for entry in Path(f"/proc/{child.pid}/fd").iterdir() if os.readlink(entry) == name)
    held = os.open(proc, os.O_RDONLY)  # the very file, to see it go: while this is open its space is kept
    assert os.fstat(held).st_nlink == 0
    assert others_with(held) == [child.pid]
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    blocks = os.fstat(held).st_blocks * 512
    assert others_with(held) == []  # no name, and nobody but this descriptor: the kernel frees the space when it is closed
    assert blocks >= 16 * MIB
    os.close(held)
    assert os.listdir(directory) == []


def test_ending_the_interpreter_while_transfers_run(directory: Path) -> None:
    program = _KILLED.split("print(")[0]
    ended = subprocess.run([sys.executable, "-c", program, str(directory)], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert os.listdir(directory) == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_leaves_the_parents_file_alone(directory: Path) -> None:
    store = DiskStore(directory)
    source = torch.randn(300_000)
    ticket = out(store, source)
    child = os.fork()
    if not child:
        try:
            late = store.put(source)
            assert late.done()
            assert "belongs to process" in late.failure
            with pytest.raises(OffloadError, match="belongs to process"):
                ticket.fetch().get()
            with pytest.raises(OffloadError, match="belongs to process"):
                store.reserve(MIB)
            store.close()
            del store, ticket
            gc.collect()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(ticket.fetch().get().view(torch.float32), source)
    store.close()
