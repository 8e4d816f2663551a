"""A card as two threads: one enqueues steps, the other waits until they are done.

A job returns as soon as its work is enqueued, with a `PendingStep`, whose `wait` releases the GIL
until the card is done. The next job is enqueued while the card computes the previous one, so the
card never waits for the host. The interface is that of a `DeviceThread`.

- Each job has one result, or the exception that it or its wait raised, in submission order.
- submit, collect and close are called from one thread, the engine's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

from slipstream_core.step.device_thread import DeviceThread

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class PendingStep(Protocol[T_co]):
    """Work that has been enqueued."""

    def wait(self) -> T_co:
        """Wait until it is done and return its result. Called once, on the waiting thread."""


class CudaThread(Generic[T]):
    """Runs jobs that enqueue work, and waits for that work."""

    def __init__(self, name: str, prepare: Callable[[], None]) -> None:
        """`prepare` runs first in the enqueuing thread."""
        self._jobs: SimpleQueue[Callable[[], PendingStep[T]] | None] = SimpleQueue()
        self._enqueued: SimpleQueue[PendingStep[T] | BaseException] = SimpleQueue()
        self._waiter: DeviceThread[T] = DeviceThread(f"{name}-waiter", _nothing)
        self._closing = False
        # daemonic, so that an interpreter exiting without close() does not wait for a step
        self._thread = threading.Thread(target=self._run, args=(prepare,), name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], PendingStep[T]]) -> None:
        """Submit a job that enqueues its work; returns at once."""
        assert not self._closing
        self._jobs.put(job)
        self._waiter.submit(self._finish)

    def collect(self) -> T:
        """Wait for the oldest job and return its result; raises what it raised."""
        return self._waiter.collect()

    def done(self) -> bool:
        """True if collect() would return without waiting."""
        return self._waiter.done()

    def fileno(self) -> int:
        """Return a descriptor that is readable while a finished job is not yet collected."""
        return self._waiter.fileno()

    def close(self) -> None:
        """Finish the work enqueued so far, drop the remaining jobs. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._jobs.put(None)
        self._thread.join()
        self._waiter.close()

    def _finish(self) -> T:
        outcome = self._enqueued.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome.wait()

    def _run(self, prepare: Callable[[], None]) -> None:
        prepare()
        while (job := self._jobs.get()) is not None and not self._closing:
            try:
                outcome: PendingStep[T] | BaseException = job()
            except BaseException as error:
                outcome = error
            self._enqueued.put(outcome)
            del job, outcome  # a step's tensors must not stay alive until the next job
        # the waiting thread expects an outcome for every job
        dropped = 0 if job is None else 1
        while True:
            try:
                dropped += self._jobs.get_nowait() is not None
            except Empty:
                break
        for _ in range(dropped):
            self._enqueued.put(RuntimeError("the runner was closed"))


def _nothing() -> None:
    """Prepare nothing: the waiting thread has no settings."""
