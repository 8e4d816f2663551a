"""Wakeups for readers that wait for a stream.

A connection rings the wakeup set on a stream once for each batch with news of the stream. Wakeups
may be spurious; the reader checks again. `TaskWakeup` and the wakeups of HTTP answers ring in the
event loop that drives the connection, `ThreadWakeup` wakes another thread.

No wakeup is lost, without a lock: the reader sets its wakeup, checks once more, and only then
waits, while the connection adds deltas first and looks for a wakeup afterwards. A wakeup refers to
no stream but the cause it is rung for, so an unused stream is garbage collected.
"""

from __future__ import annotations

import asyncio
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

Rung = TypeVar("Rung")
RungOnly = TypeVar("RungOnly", contravariant=True)


class Wakeup(Protocol[RungOnly]):
    """Rung when a stream has news. `ring` must not raise."""

    def ring(self, cause: RungOnly, /) -> None:
        """Wake the reader: `cause` has news."""


class ThreadWakeup(Generic[Rung]):
    """Wakes one thread and passes the cause on, so that one wakeup can serve many streams."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Rung] = SimpleQueue()

    def ring(self, cause: Rung) -> None:
        """Wake the thread. May be called from any thread."""
        self._queue.put(cause)

    def wait(self, timeout_s: float | None = None) -> Rung | None:
        """Wait for the next ring and return its cause; None after `timeout_s`. Earlier rings are
        queued.
        """
        try:
            return self._queue.get(timeout=timeout_s)
        except Empty:
            return None


class TaskWakeup:
    """Wakes one task of the event loop that rings it. It may be rung while no task waits."""

    __slots__ = ("_rung",)

    def __init__(self) -> None:
        self._rung: asyncio.Future[None] | None = None

    @property
    def is_awaited(self) -> bool:
        """True if a task waits for the next ring."""
        return self._rung is not None and not self._rung.done()

    def ring(self, _cause: object = None) -> None:
        """Wake the task. Called in the event loop's thread."""
        rung = self._rung
        if rung is not None:
            self._rung = None
            if not rung.done():
                rung.set_result(None)

    def next_ring(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """The future of the next ring. loop: the running one."""
        self._rung = rung = loop.create_future()
        return rung
