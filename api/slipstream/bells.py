"""How a reader that waits for its stream is woken from the I/O thread.

Owns: waiting, for threads and for event loops. Does not know: what is waited for.

Rules:
- Whatever has `ring(stream)` is a bell: it is called by whoever drives the connection, once for
  each batch in which the stream has news. Where that is an event loop (`loop_io`), a bell may do
  its work right there.
- A reader hangs its bell on the stream, looks once more, and only then waits; the I/O thread adds
  first and looks for a bell afterwards. So no wake-up is lost, without a lock on the way.
- A bell may ring without cause: who wakes looks again.
- An event loop is woken once for all of a batch's streams, not once for each; and a bell whose ring
  it has not come to yet is not rung again, or a loop that is held up would find a heap of them.
- A bell knows no stream but the one it is handed, so a stream that nobody holds is collected. A
  `group` knows its streams, and is not what the caller holds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

Rung = TypeVar("Rung")
RungOnly = TypeVar("RungOnly", contravariant=True)


class Bell(Protocol[RungOnly]):
    """What can be rung for a stream. It raises nothing."""

    def ring(self, cause: RungOnly, /) -> None:
        """There is news of `cause`."""


class ThreadBell(Generic[Rung]):
    """Wakes one thread; says for what, so that one bell can hang on many streams."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Rung] = SimpleQueue()

    def ring(self, cause: Rung) -> None:
        """From any thread."""
        self._queue.put(cause)

    def wait(self) -> Rung:
        """Until the next ring, or the first one not waited for yet."""
        return self._queue.get()


class LoopBell:
    """Wakes one task of the event loop that was running when the bell was made."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.is_rung = False  # since `prepare`; the ring itself may be still on its way
        self._future: asyncio.Future[None] | None = None

    def prepare(self) -> asyncio.Future[None]:
        """What to await; made before the last look, see the rules."""
        self._future = self.loop.create_future()
        self.is_rung = False
        return self._future

    def ring(self) -> None:
        """From the loop's own thread."""
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


def ring_loops(bells: Iterable[LoopBell]) -> None:
    """Ring all of them, from the I/O thread."""
    by_loop: dict[asyncio.AbstractEventLoop, list[LoopBell]] = {}
    for bell in bells:
        if not bell.is_rung:
            bell.is_rung = True
            by_loop.setdefault(bell.loop, []).append(bell)
    for loop, some in by_loop.items():
        with contextlib.suppress(RuntimeError):  # a closed loop: nobody waits there any more
            loop.call_soon_threadsafe(_ring, some)


def _ring(bells: list[LoopBell]) -> None:
    for bell in bells:
        bell.ring()
