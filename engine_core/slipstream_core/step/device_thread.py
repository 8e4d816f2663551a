"""The device as a thread: jobs run one after another, and their results are collected in order.

A job is a function. On a CPU the thread is the device: torch releases the GIL inside its operators,
so the engine's thread goes on scheduling while a step runs.

- Each job has one result, or the exception it raised; they come out in submission order.
- The descriptor counts finished jobs not yet collected, so it can be polled beside sockets.
- submit, collect and close are called from one thread, the engine's; `call` from any.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Called:
    """The outcome of a job that is not collected."""


class JobThread(Generic[T]):
    """A thread that runs jobs that return T, one after another, and hands over each outcome."""

    def __init__(
        self,
        name: str,
        prepare: Callable[[], None],
        hand_over: Callable[[T | None, BaseException | None], None],
    ) -> None:
        """`prepare` runs first in the thread, for thread-local settings; `hand_over` behind each
        job, with its result or what it raised.
        """
        self._hand_over = hand_over
        self._jobs: SimpleQueue[Callable[[], T] | None] = SimpleQueue()
        self._num_dropped = 0
        self.is_closing = False
        # daemonic, so that an interpreter exiting without close() does not wait for a step
        self._thread = threading.Thread(target=self._run, args=(prepare,), name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> None:
        """Enqueue a job; returns at once."""
        assert not self.is_closing
        self._jobs.put(job)

    def close(self) -> int:
        """Let the running job end, and stop the thread; returns how many jobs were dropped. Called
        once.
        """
        self.is_closing = True
        self._jobs.put(None)
        self._thread.join()
        return self._num_dropped

    def _run(self, prepare: Callable[[], None]) -> None:
        prepare()
        while (job := self._jobs.get()) is not None:
            if self.is_closing:
                self._num_dropped += 1
                continue
            try:
                outcome: tuple[T | None, BaseException | None] = (job(), None)
            except BaseException as error:
                outcome = (None, error)
            self._hand_over(*outcome)
            del job, outcome  # a result must not stay alive until the next job


class DeviceThread(Generic[T]):
    """Runs jobs that return T."""

    def __init__(self, name: str, prepare: Callable[[], None]) -> None:
        """`prepare` runs first in the thread, for thread-local settings."""
        self._results: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()
        self._num_pending = 0  # submitted but not yet collected
        self._finished_fd = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
        self._called: set[Future[Any]] = set()  # outcomes that have not come
        self._thread: JobThread[T] = JobThread(name, prepare, self._finished)

    def submit(self, job: Callable[[], T]) -> None:
        """Enqueue a job; returns at once."""
        self._thread.submit(job)
        self._num_pending += 1

    def call(self, job: Callable[[], Any]) -> Future[Any]:
        """Run a job between those that are collected; returns its outcome. Cancelled where the
        thread has stopped.
        """
        future: Future[Any] = Future()

        def run() -> Any:
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
            return _Called()

        self._called.add(future)
        future.add_done_callback(self._called.discard)
        if self._thread.is_closing:
            future.cancel()
        else:
            self._thread.submit(run)
        return future

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
        if not self._thread.is_closing:
            self._thread.close()
            for each in list(self._called):
                each.cancel()
            os.close(self._finished_fd)

    def _finished(self, result: T | None, error: BaseException | None) -> None:
        if isinstance(result, _Called):
            return
        self._results.put((result, error))
        os.eventfd_write(self._finished_fd, 1)
