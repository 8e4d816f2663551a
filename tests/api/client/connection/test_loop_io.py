"""The connection that an event loop drives: wakeups are rung in the loop, nothing else wakes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop
from tests.helpers.fake_worker import Entry, FakeWorker, deltas, end_of
from tests.helpers.patience import PATIENCE_S

from slipstream.client.connection.loop_io import LoopIO
from slipstream.client.streams.stream_state import StreamState
from slipstream.errors import ClosedError, ConnectionLostError, OverloadedError
from slipstream.request.requests import new_submit
from slipstream_ipc.messages import Abort, Fault, Goodbye, Resume, SamplingParams, Submit


class Reader:
    """A stream's wakeup: it reads in the call that rings it."""

    def __init__(self, io: LoopIO, *, wants_whole: bool = False) -> None:
        self.text = ""
        self.num_rings = 0
        self.state = StreamState(new_submit("x", SamplingParams()), wants_whole)
        self.state.wakeup = self
        self._news = asyncio.Event()
        io.submit(self.state)

    def ring(self, state: StreamState) -> None:
        """There is news."""
        self.num_rings += 1
        while state.deltas:
            self.text += state.deltas.popleft().text
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for rings until it holds."""
        while not condition():
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), PATIENCE_S)

    async def end(self) -> str:
        """What the stream has said in all."""
        await self.until(lambda: self.state.is_over)
        return self.text


async def away(function: Callable[..., Any], *arguments: Any) -> Any:
    """What waits in the worker must not hold up the loop."""
    return await asyncio.to_thread(function, *arguments)


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: Any) -> Callable[[Awaitable[None]], None]:
    return request.param


def test_streams(worker: FakeWorker, run: Any) -> None:
    async def main() -> None:
        io = LoopIO(worker.address, 10.0)
        assert (await io.connect()).name == "fake"
        assert io.cluster.is_attached
        readers = [Reader(io) for _ in range(40)]  # more than a link's window
        whole = Reader(io, wants_whole=True)
        handles = [await away(worker.expect_and_accept) for _ in range(41)]
        entries = [Entry(handle, "a") for handle in handles]
        worker.send(deltas(*entries))
        for reader in readers:
            await reader.until(lambda reader=reader: reader.text == "a")
        worker.send(deltas(*[Entry(handle, "b", 1, end=end_of("ab")) for handle in handles]))
        assert [await reader.end() for reader in readers] == ["ab"] * 40
        assert await whole.end() == "ab"
        assert whole.num_rings == 1
        await io.close()
        await away(worker.expect, Goodbye)

    run(main())


def test_asked_for_before_there_is_a_server_and_over_attaches(address: str, run: Any) -> None:
    async def main() -> None:
        io = LoopIO(address, 10.0)
        reader = Reader(io)
        worker = await away(FakeWorker, address)
        handle = await away(worker.expect_and_accept)
        await away(worker.send, deltas(Entry(handle, "a")))
        await reader.until(lambda: reader.text == "a")
        await away(worker.tell_to_attach)
        resume = await away(worker.expect, Resume)
        assert resume.num_chars == 1
        await away(worker.send, deltas(Entry(handle, "ab", end=end_of("ab"))))
        assert await reader.end() == "ab"
        await io.close()
        await away(worker.stop)

    run(main())


def test_what_a_bell_asks_for_is_done(worker: FakeWorker, run: Any) -> None:
    async def main() -> None:
        io = LoopIO(worker.address, 10.0)
        first, other = Reader(io), Reader(io)
        handle, _ = await away(worker.expect_and_accept), await away(worker.expect_and_accept)
        followers: list[Reader] = []
        read = first.ring

        def follow(state: StreamState) -> None:
            read(state)
            io.abandon(other.state)
            followers.append(Reader(io))

        first.ring = follow  # type: ignore[method-assign]
        await away(worker.send, deltas(Entry(handle, "a", end=end_of("a"))))
        told = {type(await away(worker.expect, object)) for _ in range(2)}
        assert told == {Abort, Submit}
        await other.end()
        assert other.state.end is None
        await io.close()
        assert isinstance(followers[0].state.error, ClosedError)

    run(main())


def test_failures(worker: FakeWorker, run: Any) -> None:
    async def main() -> None:
        io = LoopIO(worker.address, 10.0)
        refused, closed = Reader(io), Reader(io)
        worker.reject(await away(worker.expect, Submit), Fault("overloaded", "full"))
        await refused.end()
        assert isinstance(refused.state.error, OverloadedError)
        await away(worker.expect, Submit)
        await io.close()
        await io.close()
        assert isinstance(closed.state.error, ClosedError)

    run(main())


def test_nobody_there(address: str, run: Any) -> None:
    async def main() -> None:
        io = LoopIO(address, 0.1)
        reader = Reader(io)
        with pytest.raises(ConnectionLostError):
            await io.connect()
        await reader.end()
        assert isinstance(reader.state.error, ConnectionLostError)
        assert io.models == ()
        await io.close()

    run(main())


def test_a_server_that_says_nothing_does_not_hold_up_the_end(worker: FakeWorker, run: Any) -> None:
    async def main() -> None:
        io = LoopIO(worker.address, 10.0)
        await io.connect()
        await away(worker.stop)
        await asyncio.wait_for(io.close(), PATIENCE_S)

    run(main())
