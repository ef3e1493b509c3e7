"""Lanes and their jobs."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

from recoup.torch.offload.workers import CLOSED, Job, Lane
from tests.offload.test_store import wait_until


class Noted(Job):
    def __init__(self, pieces: int, notes: list[tuple[int, int]], name: int = 0, *, fails_at: int = -1) -> None:
        super().__init__(pieces)
        self.notes, self.name, self.fails_at = notes, name, fails_at
        self.released: list[bool] = []

    def move(self, piece: int, buffer: Any) -> None:
        time.sleep(0.001)
        self.notes.append((self.name, piece))
        if piece == self.fails_at:
            raise RuntimeError("of this piece")

    def release(self) -> None:
        self.released.append(self.done())


def test_every_piece_is_moved_once() -> None:
    notes: list[tuple[int, int]] = []
    lane = Lane("offload-test", 3, [None] * 3)
    jobs = [Noted(pieces, notes, name) for name, pieces in enumerate((5, 1, 7, 2))]
    for job in jobs:
        lane.submit(job)
    for job in jobs:
        job.wait()
    assert sorted(notes) == [(job.name, piece) for job in jobs for piece in range(job.pieces)]
    lane.stop()
    lane.join()


def test_jobs_run_in_order() -> None:
    notes: list[tuple[int, int]] = []
    lane = Lane("offload-test", 1, [None])
    jobs = [Noted(pieces, notes, name) for name, pieces in enumerate((5, 1, 7, 2))]
    for job in jobs:
        lane.submit(job)
    jobs[-1].wait()
    assert notes == [(job.name, piece) for job in jobs for piece in range(job.pieces)]
    lane.stop()
    lane.join()


def test_memory_is_let_go_of_once_and_before_anybody_hears_of_the_end() -> None:
    lane = Lane("offload-test", 2, [None] * 2)
    jobs = [Noted(3, []), Noted(3, [], fails_at=1)]
    for job in jobs:
        lane.submit(job)
    for job in jobs:
        job.wait()
        assert job.released == [False]
    assert [job.failure for job in jobs] == ["", "RuntimeError: of this piece"]
    lane.stop()
    lane.join()
    refused = Noted(3, [])
    lane.submit(refused)
    assert (refused.released, refused.failure, refused.done()) == ([False], CLOSED, True)


def test_an_idle_lane_holds_no_job() -> None:
    gc.disable()
    try:
        lane = Lane("offload-test", 2, [None] * 2)
        job = Noted(4, [])
        gone = weakref.ref(job)
        lane.submit(job)
        job.wait()
        del job
        wait_until(lambda: gone() is None)
    finally:
        gc.enable()
    lane.stop()
    lane.join()


def test_stopping_fails_what_waits_and_wakes_who_waits_for_it() -> None:
    lane = Lane("offload-test", 1, [None])
    jobs = [Noted(20, []) for _ in range(20)]
    for job in jobs:
        lane.submit(job)
    woken = threading.Thread(target=jobs[-1].wait)
    woken.start()
    lane.stop()
    lane.join()
    woken.join(timeout=5)
    assert not woken.is_alive()
    assert all(job.done() for job in jobs)
    assert jobs[-1].failure == CLOSED
