"""Transfers off the training thread: a lane is a queue and a few threads that work on its jobs in order.

A job is cut into pieces, so that all threads of a lane work on the storage at its head; the next one starts when the pieces run out. The
system calls and the copies of memory that a piece consists of run without the interpreter's lock.

Threads hold their lane, never the store, so a store that nobody holds any more is collected, which ends them. They are daemons: a stuck
disk does not keep the interpreter from ending. In a forked child nothing runs: there are no threads there.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import weakref
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

__all__ = ["CLOSED", "Job", "Lane", "Refused"]

CLOSED = "the store was closed"


class Refused:
    """A transfer that never started."""

    def __init__(self, failure: str) -> None:
        self.failure = failure

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return True

    def wait(self) -> None:
        """There is nothing to wait for."""


class Job:
    """One transfer, in pieces. Subclasses move one piece in ``move`` and let go of what they hold in ``release``.

    Attributes:
        pieces: in how many parts it runs.
        failure: what went wrong, '' if nothing; final once ``done()``.
    """

    def __init__(self, pieces: int) -> None:
        self.pieces = pieces
        self.failure = ""
        self._next = itertools.count()
        self._left = pieces
        self._lock = threading.Lock()
        self._ended = False
        # Free once it has ended: an event, but for the cost of making one on the thread that trains.
        self._gate = threading.Lock()
        self._gate.acquire()

    def move(self, piece: int, buffer: Any) -> None:
        """Moves one piece by way of the worker's buffer; what it raises becomes the job's failure."""
        raise NotImplementedError

    def release(self) -> None:
        """Lets go of memory and space; called once, when no piece runs any more, before ``done()`` turns true."""
        raise NotImplementedError

    def describe(self, problem: Exception) -> str:
        """What went wrong, for people."""
        return f"{type(problem).__name__}: {problem}"

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended

    def wait(self) -> None:
        """Returns once it has ended."""
        if not self._ended:
            with self._gate:  # and on to whoever waits besides
                pass

    def run(self, number: int, lane: Lane) -> None:
        """Works on pieces, as thread ``number`` of the lane, until none is left; several threads may be at it."""
        while (piece := next(self._next)) < self.pieces:
            if not self.failure:
                self._try(piece, number, lane)
            with self._lock:
                self._left -= 1
                last = not self._left
            if last:
                self.release()
                lane.ended()
                self._end()

    def abandon(self, failure: str) -> None:
        """Ends a job that no thread has seen."""
        self.failure = failure
        self.release()
        self._end()

    def _end(self) -> None:
        self._ended = True
        self._gate.release()

    def _try(self, piece: int, number: int, lane: Lane) -> None:
        if lane.stopping:
            self.failure = CLOSED
            return
        try:
            # Nobody holds the buffer when the job has ended.
            self.move(piece, lane.buffers[number])
        except Exception as problem:  # whatever it is, the caller must hear of it rather than wait for ever
            self.failure = self.describe(problem)


class Lane:
    """Jobs in order, with so many threads, which start with the first job.

    Attributes:
        stopping: whether no further piece is started.
        buffers: one for each thread. They are there before a job is queued, and stay while one runs.
    """

    def __init__(self, name: str, workers: int, buffers: Sequence[Any] = ()) -> None:
        self.name = name
        self.workers = workers
        self.stopping = False
        self.buffers = list(buffers)
        self._running = 0
        self._threads: list[threading.Thread] = []
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = threading.RLock()
        self._pid = os.getpid()
        _LIVE.add(self)

    def submit(self, job: Job) -> None:
        """Queues the job; on a stopped lane, or in a forked child, it fails at once."""
        if os.getpid() != self._pid:
            job.abandon(f"the store belongs to process {self._pid}; open another one in this process")
            return
        with self._lock:
            open_still = not self.stopping
            if open_still:
                self._start()
                self._running += 1
                # one entry for each thread that can work on it
                for _ in range(min(len(self._threads), job.pieces)):
                    self._queue.put(job)
        if not open_still:
            job.abandon(CLOSED)

    def stop(self) -> None:
        """Lets threads end after the piece at hand; jobs still queued fail. Does not wait."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self.stopping:
                return
            self.stopping = True
            for _ in self._threads:
                self._queue.put(None)

    def join(self) -> None:
        """Waits for the threads, which ``stop`` has told to end."""
        if os.getpid() != self._pid:
            return
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def idle(self) -> bool:
        """Whether every job has ended."""
        with self._lock:
            return not self._running

    def ended(self) -> None:
        """One of its jobs has ended."""
        with self._lock:
            self._running -= 1

    def _start(self) -> None:
        if self._threads:
            return
        for number in range(self.workers):
            thread = threading.Thread(target=_serve, args=(self, number), name=f"recoup-{self.name}-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _take(self) -> Job | None:
        return self._queue.get()


def _serve(lane: Lane, number: int) -> None:
    while (job := lane._take()) is not None:
        job.run(number, lane)
        del job  # nothing is held while the lane waits for another


_LIVE: weakref.WeakSet[Lane] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """No thread may copy memory while the interpreter takes itself apart."""
    lanes = list(_LIVE)
    for lane in lanes:
        lane.stop()
    for lane in lanes:
        lane.join()
