"""A card as two threads: one enqueues steps, the other waits until they are done.

A job returns as soon as its work is enqueued, with a `PendingStep`, whose `wait` releases the GIL
until the card is done. The next job is enqueued while the card computes the previous one, so the
card never waits for the host. The interface is that of a `DeviceThread`.

- Each job has one result, or the exception that it or its wait raised, in submission order.
- submit, collect and close are called from one thread, the engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

from slipstream_core.step.device_thread import DeviceThread, JobThread

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
        self._enqueued: SimpleQueue[PendingStep[T] | BaseException] = SimpleQueue()
        self._waiter: DeviceThread[T] = DeviceThread(f"{name}-waiter", _nothing)
        self._thread: JobThread[PendingStep[T]] = JobThread(name, prepare, self._has_enqueued)

    def submit(self, job: Callable[[], PendingStep[T]]) -> None:
        """Submit a job that enqueues its work; returns at once."""
        self._thread.submit(job)
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
        if self._thread.is_closing:
            return
        for _ in range(self._thread.close()):  # the waiting thread expects an outcome for every job
            self._enqueued.put(RuntimeError("the runner was closed"))
        self._waiter.close()

    def _finish(self) -> T:
        outcome = self._enqueued.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome.wait()

    def _has_enqueued(self, step: PendingStep[T] | None, error: BaseException | None) -> None:
        outcome = step if error is None else error
        assert outcome is not None
        self._enqueued.put(outcome)


def _nothing() -> None:
    """Prepare nothing: the waiting thread has no settings."""
