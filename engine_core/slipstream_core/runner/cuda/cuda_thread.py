"""A card as two threads: one enqueues steps, the other waits until they are done.

Owns: the way of a job from one to the other. Does not know: streams, events, models. A job returns
as soon as its work is enqueued, with a `PendingStep`, whose `wait` gives the GIL up until the card
is done. So the next job is enqueued while the card computes the one before, and the card never
waits for the host; the engine sees what it sees of a `DeviceThread`.

Rules:
- Results come out in the order the jobs went in, one per job, whatever a job or its wait raised.
- submit, collect and close are called from one thread, the engine's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

from slipstream_core.runner.device_thread import DeviceThread

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class PendingStep(Protocol[T_co]):
    """Work that is enqueued."""

    def wait(self) -> T_co:
        """What came of it, when it is done. Called once, on the waiting thread."""


class CudaThread(Generic[T]):
    """Runs jobs that enqueue, and waits for what they enqueued."""

    def __init__(self, name: str, prepare: Callable[[], None]) -> None:
        """`prepare` runs first in the enqueuing thread."""
        self._jobs: SimpleQueue[Callable[[], PendingStep[T]] | None] = SimpleQueue()
        self._enqueued: SimpleQueue[PendingStep[T] | BaseException] = SimpleQueue()
        self._waiter: DeviceThread[T] = DeviceThread(f"{name}-waiter", _nothing)
        self._closing = False
        # daemonic, so that an interpreter that ends without close() does not wait for a step
        self._thread = threading.Thread(target=self._run, args=(prepare,), name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], PendingStep[T]]) -> None:
        """Have a job enqueue its work; returns at once."""
        assert not self._closing
        self._jobs.put(job)
        self._waiter.submit(self._finish)

    def collect(self) -> T:
        """The oldest job's result; waits for it, and raises what it raised."""
        return self._waiter.collect()

    def done(self) -> bool:
        """Whether collect() would return without waiting."""
        return self._waiter.done()

    def fileno(self) -> int:
        """Readable while a finished job waits to be collected."""
        return self._waiter.fileno()

    def close(self) -> None:
        """Let what is being enqueued be done, drop the jobs behind it. Idempotent."""
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
            del job, outcome  # what a step holds must not live until the next job comes
        # the waiting thread expects an outcome of every job
        dropped = 0 if job is None else 1
        while True:
            try:
                dropped += self._jobs.get_nowait() is not None
            except Empty:
                break
        for _ in range(dropped):
            self._enqueued.put(RuntimeError("the runner was closed"))


def _nothing() -> None:
    """The waiting thread has no settings of its own."""
