"""The listening end's turns: new requests leave room for what runs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import sys
from typing import Any

import pytest
import uvloop
from tests.helpers.patience import PATIENCE_S

from slipstream.http import time_slice
from slipstream.http.config import Limits
from slipstream.http.exchange import Exchange, HttpRequest
from slipstream.http.response_encoding import Response
from slipstream.http.server.connection import Connection
from slipstream.http.server.server import Server
from slipstream.stack.children.listeners import Listeners


class Waiting:
    """An exchange, as far as a server looks at it."""

    is_open = True


def begun_by(share_s: float, monkeypatch: Any, *, gone: int = -1) -> list[str]:
    """What happens in which order where three requests come at once and something else runs."""
    monkeypatch.setattr(time_slice, "SLICE_S", share_s)
    told: list[str] = []

    class App:
        def pattern_of(self, path: str) -> str:
            return path

        def tenant_of(self, _request: HttpRequest) -> bytes:
            return b""

        def has_to_wait(self, _request: HttpRequest) -> bool:
            return False

        def handle(self, request: HttpRequest, _exchange: object) -> None:
            told.append(request.path)

    async def main() -> None:
        running = Server(App(), Limits())
        loop = asyncio.get_running_loop()
        for number in range(3):
            exchange = Waiting()
            exchange.is_open = number != gone
            running.handle(HttpRequest(path=str(number)), exchange)

        def other(left: int) -> None:
            told.append("other")
            if left:
                loop.call_soon(other, left - 1)

        loop.call_soon(other, 3)
        while told.count("other") < 4:  # noqa: ASYNC110  (it has the loop turn)
            await asyncio.sleep(0)
        await running.close()

    asyncio.run(main())
    return told


def test_requests_that_come_at_once_are_begun_at_once_where_there_is_time(monkeypatch):
    assert begun_by(1000.0, monkeypatch) == [*"012", *["other"] * 4]


def test_without_time_others_have_their_turns_in_between(monkeypatch):
    assert begun_by(0.0, monkeypatch) == ["0", "other", "1", "other", "2", "other", "other"]


def test_who_has_left_meanwhile_is_not_begun(monkeypatch):
    assert begun_by(1000.0, monkeypatch, gone=1) == [*"02", *["other"] * 4]


REQUESTS = {
    "get": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "post": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
    "stream": b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n",
    "malformed": b"nonsense\r\n\r\n",
    "left": b"GET /never HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_connections_and_requests_leave_no_cycles_and_no_tasks(kind):
    """What they hold is free when they end: nothing waits for the garbage collector."""

    class App:
        is_draining = False

        def pattern_of(self, path: str) -> str:
            return path

        def check_head(self, _request: HttpRequest) -> None:
            return None

        def tenant_of(self, _request: HttpRequest) -> bytes:
            return b""

        def has_to_wait(self, _request: HttpRequest) -> bool:
            return False

        def handle(self, request: HttpRequest, exchange: Exchange) -> None:
            num_tasks.append(len(asyncio.all_tasks()))
            if request.path == "/stream":
                exchange.begin_stream()
                exchange.write(b"{}")
                exchange.finish()
            elif request.path == "/":
                exchange.respond(Response(200, b"{}"))

    num_tasks: list[int] = []

    async def one(port: int, num: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(num):
            writer.write(REQUESTS[kind])
            if kind == "left":
                break
            await reader.readuntil(b"}")
        writer.close()
        await writer.wait_closed()

    async def main() -> None:
        running = Server(App(), Limits(linger_s=0.01))
        listeners = Listeners.at("127.0.0.1", 0)
        port = listeners.port
        assert port is not None
        running.listen(listeners)
        await one(port, 1)
        await until_empty(running)
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                await one(port, 1 if kind == "malformed" else 3)
            await until_empty(running)
            living = [each for each in gc.get_objects() if isinstance(each, Connection)]
        finally:
            gc.enable()
        assert living == []
        if sys.version_info < (3, 12):  # later, aiohttp starts its tasks eagerly
            assert set(num_tasks) <= {2}  # the client's own, and one to a connection
        running.stop_listening()
        await running.close()

    uvloop.run(main())


def has_others() -> bool:
    return len(asyncio.all_tasks()) > 1


async def until_empty(running: Server) -> None:
    """All connections have ended, and their tasks."""
    async with asyncio.timeout(PATIENCE_S):
        while running.numbers().gauges.num_connections or has_others():  # noqa: ASYNC110
            await asyncio.sleep(0)
    for _ in range(5):  # the callbacks of the last
        await asyncio.sleep(0)


def test_the_answer_before_ends_before_a_client_may_send_its_body():
    """`100 Continue` keeps behind what the transport holds, though the socket has room."""
    large, received = b"x" * 2**24, bytearray()

    class App:
        is_draining = False

        def pattern_of(self, path: str) -> str:
            return path

        def check_head(self, request: HttpRequest) -> None:
            if request.path == "/post":
                read()

        def tenant_of(self, _request: HttpRequest) -> bytes:
            return b""

        def has_to_wait(self, _request: HttpRequest) -> bool:
            return False

        def handle(self, request: HttpRequest, exchange: Exchange) -> None:
            if request.path == "/stream":  # the socket's writer is in use from now on
                exchange.begin_stream()
                exchange.write(b"{}")
                exchange.finish()
            else:
                exchange.respond(Response(200, large))

    def read() -> None:
        with contextlib.suppress(BlockingIOError):
            while data := client.recv(2**20):
                received.extend(data)

    async def main() -> None:
        running = Server(App(), Limits(write_buffer_bytes=2 * len(large), drain_s=0.0))
        listeners = Listeners.at("127.0.0.1", 0)
        port = listeners.port
        assert port is not None
        running.listen(listeners)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
        heads = [
            f"{head} HTTP/1.1\r\nHost: x\r\n" for head in ("GET /stream", "GET /", "POST /post")
        ]
        more = "Expect: 100-continue\r\nContent-Length: 2\r\n\r\n"
        client.send(("\r\n".join(heads) + more).encode())
        async with asyncio.timeout(PATIENCE_S):
            while b"HTTP/1.1 100 " not in received:
                await asyncio.sleep(0.001)
                read()
        running.stop_listening()
        await running.close()

    with socket.socket() as client:
        uvloop.run(main())
    before, *_ = received.split(b"HTTP/1.1 100 ")
    assert before.endswith(large)


@pytest.mark.parametrize("closes_at", ["begin", "finish"])
def test_a_connection_that_is_closing_fails_nothing(closes_at: str) -> None:
    """Until its end is told, a stream may still begin and end."""
    failures: list[Exception] = []
    told: list[str] = []

    class App:
        is_draining = False

        def pattern_of(self, path: str) -> str:
            return path

        def check_head(self, _request: HttpRequest) -> None:
            return None

        def tenant_of(self, _request: HttpRequest) -> bytes:
            return b""

        def has_to_wait(self, _request: HttpRequest) -> bool:
            return False

        def handle(self, _request: HttpRequest, exchange: Exchange) -> None:
            connection: Any = exchange._sink
            exchange.on_disconnect = lambda: told.append("disconnect")
            try:
                if closes_at == "begin":
                    connection._transport.close()
                exchange.begin_stream()
                exchange.write(b"{}")
                if closes_at == "finish":
                    connection._transport.close()
                exchange.finish()
            except Exception as error:
                failures.append(error)
            told.append("handled")

    async def main() -> None:
        running = Server(App(), Limits(linger_s=0.01))
        listeners = Listeners.at("127.0.0.1", 0)
        port = listeners.port
        assert port is not None
        running.listen(listeners)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUESTS["left"])
        async with asyncio.timeout(PATIENCE_S):
            await reader.read()
        writer.close()
        await until_empty(running)
        running.stop_listening()
        await running.close()

    uvloop.run(main())
    assert failures == []
    assert told == ["handled"]
