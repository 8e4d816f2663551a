"""A connection over a transport that a test plays: what is begun when, and who is given up when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.patience import Patience

from slipstream.http.config import Limits
from slipstream.http.connection import Connection, Exchange
from slipstream.http.counters import Counters
from slipstream.http.parsing import Request
from slipstream.http.wire import Response

GET = b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n"
CLOSING = b"GET /x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
LIMITS = Limits(write_buffer_bytes=1000, ahead_bytes=10 * len(GET), stall_s=50.0, idle_s=7.0)


class Transport:
    """Holds what is written until the test, as the client, reads it."""

    def __init__(self) -> None:
        self.connection: Connection
        self.num_unsent = 0
        self.is_reading = True
        self.is_closing = self.is_aborted = False
        self._high = 0
        self._is_full = False

    def set_write_buffer_limits(self, high: int) -> None:
        self._high = high

    def write(self, data: bytes) -> None:
        """As a transport does: all of it, whatever the room."""
        self.num_unsent += len(data)
        if self.num_unsent > self._high and not self._is_full:
            self._is_full = True
            self.connection.pause_writing()

    def read(self, num_bytes: int) -> None:
        """The client takes so much."""
        self.num_unsent -= num_bytes
        if self.num_unsent <= self._high // 4 and self._is_full:
            self._is_full = False
            self.connection.resume_writing()

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def close(self) -> None:
        self.is_closing = True

    def abort(self) -> None:
        self.is_aborted = True


class Host:
    """Answers with `size` bytes each, at once; with None the test answers."""

    def __init__(self, size: int | None) -> None:
        self.limits, self.counters = LIMITS, Counters()
        self.is_draining = self.is_stopping = False
        self.begun: list[Exchange] = []
        self.num_gone = 0
        self._size = size

    def connected(self, connection: Connection) -> None: ...

    def disconnected(self, connection: Connection) -> None: ...

    def answered(self) -> None: ...

    def hold(self, connection: Connection, num_bytes: int) -> None: ...

    def check_head(self, request: Request) -> None: ...

    def handle(self, request: Request, exchange: Exchange) -> None:
        self.begun.append(exchange)
        exchange.on_gone = self._gone
        if self._size is not None:
            exchange.respond(Response(200, b"x" * self._size))

    def _gone(self) -> None:
        self.num_gone += 1


Play = Callable[[Host, Transport, Connection], Any]


def play(test: Play, size: int | None) -> None:
    """Run it on a connection to a host that answers so."""

    async def main() -> None:
        host, transport = Host(size), Transport()
        transport.connection = connection = Connection(host)
        connection.connection_made(transport)  # type: ignore[arg-type]
        done = test(host, transport, connection)
        if done is not None:
            await done

    asyncio.run(main())


def check(connection: Connection) -> None:
    """Its time is over."""
    connection.check_deadline(connection.deadline)


def test_who_sends_requests_and_reads_no_answers_gets_no_more_than_fill_the_buffer() -> None:
    async def test(host: Host, transport: Transport, connection: Connection) -> None:
        sent = 0
        while transport.is_reading:
            connection.data_received(GET)
            sent += 1
            for _ in range(3):
                await asyncio.sleep(0)
            assert sent < 100
        most = LIMITS.write_buffer_bytes + 500  # one answer more than fits
        assert transport.num_unsent <= most
        num_begun = len(host.begun)
        assert 1 < num_begun < sent
        patience = Patience()
        while len(host.begun) < sent:  # who reads gets all of them
            patience.check()
            transport.read(transport.num_unsent)
            assert transport.num_unsent <= most
            await asyncio.sleep(0)
        assert transport.is_reading

    play(test, size=200)


def test_what_comes_while_answers_are_unread_gives_their_reader_no_more_time() -> None:
    def test(host: Host, transport: Transport, connection: Connection) -> None:
        connection.data_received(GET)
        due = connection.deadline
        connection.data_received(GET)
        connection.data_received(GET[:9])
        assert connection.deadline == due
        check(connection)
        assert transport.is_aborted
        assert len(host.begun) == 1

    play(test, size=5000)


@pytest.mark.parametrize("asks", [GET, CLOSING])
def test_a_slow_reader_of_a_large_answer_has_as_long_again_wherever_it_has_read(asks) -> None:
    def test(host: Host, transport: Transport, connection: Connection) -> None:
        connection.data_received(asks)
        assert transport.is_closing == (asks is CLOSING)
        for _ in range(50):
            transport.read(1000)
            check(connection)
            assert not transport.is_aborted
        check(connection)
        assert transport.is_aborted

    play(test, size=100_000)


def test_the_time_for_a_request_begins_when_the_answer_before_has_been_read() -> None:
    def test(host: Host, transport: Transport, connection: Connection) -> None:
        connection.data_received(GET)
        transport.read(transport.num_unsent)
        now = asyncio.get_running_loop().time()
        assert connection.deadline <= now + LIMITS.idle_s < now + LIMITS.stall_s
        check(connection)
        assert transport.is_closing
        assert not transport.is_aborted

    play(test, size=5000)


def test_who_leaves_after_having_sent_ahead_is_noticed() -> None:
    def test(host: Host, transport: Transport, connection: Connection) -> None:
        connection.data_received(GET)
        connection.data_received(GET)
        assert transport.is_reading  # or its end would not be seen
        connection.eof_received()
        assert (len(host.begun), host.num_gone) == (1, 1)

    play(test, size=None)


def test_what_is_sent_far_ahead_is_left_unread_until_it_is_begun() -> None:
    async def test(host: Host, transport: Transport, connection: Connection) -> None:
        connection.data_received(GET)
        num = 0
        while transport.is_reading:
            connection.data_received(GET)
            num += 1
        assert 10 <= num <= 12
        for at in range(num):
            assert not transport.is_reading
            host.begun[at].respond(Response(200, b""))
            transport.read(transport.num_unsent)
            await asyncio.sleep(0)
            assert len(host.begun) == at + 2
        assert transport.is_reading
        connection.data_received(GET)
        assert transport.is_reading

    play(test, size=None)
