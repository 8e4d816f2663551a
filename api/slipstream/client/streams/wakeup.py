"""Wake-ups: how a reader that waits for its stream is woken.

A connection rings the wakeup that hangs on a stream once for each batch in which the stream has
news. A wakeup may ring without cause: the woken reader looks again. `TaskWakeup` and the wakeups of
HTTP's answers ring in the event loop that drives the connection; `ThreadWakeup` rings in another
thread. So no wake-up is lost without a lock: the reader hangs its wakeup up, looks once more, and
only then waits; the connection's thread adds first and looks for a wakeup afterwards.

A wakeup knows no stream but the one it is handed, so a stream that is not held any more is
collected.
"""

from __future__ import annotations

import asyncio
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

Rung = TypeVar("Rung")
RungOnly = TypeVar("RungOnly", contravariant=True)


class Wakeup(Protocol[RungOnly]):
    """What can be rung for a stream. It raises nothing."""

    def ring(self, cause: RungOnly, /) -> None:
        """There is news of `cause`."""


class ThreadWakeup(Generic[Rung]):
    """Wakes one thread; says for what, so that one wakeup can hang on many streams."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Rung] = SimpleQueue()

    def ring(self, cause: Rung) -> None:
        """From any thread."""
        self._queue.put(cause)

    def wait(self) -> Rung:
        """Until the next ring, or the first one not waited for yet."""
        return self._queue.get()


class TaskWakeup:
    """Wakes one task of the event loop that rings it."""

    def __init__(self) -> None:
        self._rung: asyncio.Future[None] | None = None

    def ring(self, _cause: object = None) -> None:
        """From the loop's own thread."""
        if self._rung is not None and not self._rung.done():
            self._rung.set_result(None)

    async def wait(self) -> None:
        """Until the next ring."""
        self._rung = asyncio.get_running_loop().create_future()
        await self._rung
