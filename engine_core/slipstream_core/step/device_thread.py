"""The device as a thread: jobs run one after another, and their results are collected in order.

A job is a function. On a CPU the thread is the device: torch releases the GIL inside its operators,
so the engine's thread goes on scheduling while a step runs.

- Each job has one result, or the exception it raised; they come out in submission order.
- The descriptor counts finished jobs not yet collected, so it can be polled beside sockets.
- submit, collect and close are called from one thread, the engine's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class DeviceThread(Generic[T]):
    """Runs jobs that return T."""

    def __init__(self, name: str, prepare: Callable[[], None]) -> None:
        """`prepare` runs first in the thread, for thread-local settings."""
        self._jobs: SimpleQueue[Callable[[], T] | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()
        self._num_pending = 0  # submitted but not yet collected
        self._finished_fd = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
        self._closing = False
        # daemonic, so that an interpreter exiting without close() does not wait for a step
        self._thread = threading.Thread(target=self._run, args=(prepare,), name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> None:
        """Enqueue a job; returns at once."""
        assert not self._closing
        self._num_pending += 1
        self._jobs.put(job)

    def collect(self) -> T:
        """Wait for the oldest job and return its result; raises what it raised."""
        assert self._num_pending > 0, "nothing was submitted"
        self._num_pending -= 1
        result, error = self._results.get()
        os.eventfd_read(self._finished_fd)
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # None only where T includes it

    def done(self) -> bool:
        """True if collect() would return without waiting."""
        return not self._results.empty()

    def fileno(self) -> int:
        """Return a descriptor that is readable while a finished job is not yet collected."""
        return self._finished_fd

    def close(self) -> None:
        """Let the running job end, drop queued ones, stop the thread. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._jobs.put(None)
        self._thread.join()
        os.close(self._finished_fd)

    def _run(self, prepare: Callable[[], None]) -> None:
        prepare()
        while (job := self._jobs.get()) is not None and not self._closing:
            try:
                outcome: tuple[T | None, BaseException | None] = (job(), None)
            except BaseException as error:
                outcome = (None, error)
            self._results.put(outcome)
            os.eventfd_write(self._finished_fd, 1)
            del job, outcome  # a result must not stay alive until the next job
