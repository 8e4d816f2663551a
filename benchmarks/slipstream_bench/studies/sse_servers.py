"""The cost of a streamed server-sent event in an HTTP server, before anything is formatted.

    pip install uvicorn granian aiohttp h11
    python -m slipstream_bench.studies.sse_servers [--streams 512] [--json FILE]

Every candidate streams the same chunks to the same client, in a separate process; a ticker has one
chunk ready for every stream at every tick, as an engine's step does. Measured is the CPU time, user
and system, of the server's process and its children, from when all streams run until the first
ends, divided by the chunks that arrived meanwhile. The client reads with plain sockets, in this
process. Rounds take all candidates in turn; the table shows medians.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

from slipstream_bench.common.process_census import tree_cpu_s
from slipstream_bench.http_front.event_reader import read_streams
from slipstream_bench.peers.server_process import free_port

TICK_S = 0.02
TEXT = '{"id":"cmpl-%032d","object":"text_completion","created":1700000000,"model":"some-model",'
TEXT += '"choices":[{"index":0,"text":" token","logprobs":null,"finish_reason":null}]}'
EVENT = b"data: " + (TEXT % 7).encode() + b"\n\n"
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
REQUEST = b"GET /%d HTTP/1.1\r\nhost: localhost\r\n\r\n"  # %d: number of events
END = b"0\r\n\r\n"


class Ticker:
    """Calls back, or wakes tasks, at every tick of the running loop."""

    def __init__(self) -> None:
        self.streams: set[Callable[[], None]] = set()
        self._waiters: list[asyncio.Future[None]] = []
        self._loop = asyncio.get_running_loop()
        self._loop.call_later(TICK_S, self._tick)

    def wait(self) -> asyncio.Future[None]:
        """A future that is done at the next tick."""
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        return waiter

    def _tick(self) -> None:
        self._loop.call_later(TICK_S, self._tick)
        for stream in list(self.streams):
            stream()
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


TICKERS: list[Ticker] = []  # at most one, created by a request, since frameworks create the loop


def ticker() -> Ticker:
    """The process's ticker."""
    if not TICKERS:
        TICKERS.append(Ticker())
    return TICKERS[0]


# ---- the candidates --------------------------------------------------------------------------


class Direct(asyncio.Protocol):
    """Parses requests with httptools and writes chunks to the transport from the ticker's call."""

    def __init__(self) -> None:
        import httptools

        self._parser = httptools.HttpRequestParser(self)
        self._left = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._left = int(url[1:])

    def on_message_complete(self) -> None:
        self._transport.write(HEAD)
        ticker().streams.add(self._write)

    def _write(self) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
        self._left -= 1
        if not self._left:
            ticker().streams.discard(self._write)
            self._transport.write(END)


class DirectH11(Direct):
    """The same with h11, which also frames every chunk."""

    def __init__(self) -> None:
        import h11

        self._h11 = h11
        self._connection = h11.Connection(h11.SERVER)
        self._left = 0

    def data_received(self, data: bytes) -> None:
        h11, connection = self._h11, self._connection
        connection.receive_data(data)
        while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.Request):
                self._left = int(event.target[1:])
            elif isinstance(event, h11.EndOfMessage):
                headers = [("content-type", "text/event-stream")]
                head = h11.Response(status_code=200, headers=headers)
                self._transport.write(connection.send(head))
                ticker().streams.add(self._write)

    def _write(self) -> None:
        self._transport.write(self._connection.send(self._h11.Data(data=EVENT)))
        self._left -= 1
        if not self._left:
            ticker().streams.discard(self._write)
            self._transport.write(self._connection.send(self._h11.EndOfMessage()))


async def asgi_app(scope: Any, _receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
    """A bare ASGI application: a task per stream."""
    if scope["type"] != "http":
        return
    clock = ticker()
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for _ in range(int(scope["path"][1:])):
        await clock.wait()
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def serve_direct(port: int, protocol: type[Direct]) -> None:
    import uvloop

    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(protocol, "127.0.0.1", port, backlog=4096)
        await server.serve_forever()

    uvloop.run(main())


def serve_uvicorn(port: int) -> None:
    import uvicorn

    uvicorn.run(
        asgi_app,
        host="127.0.0.1",
        port=port,
        access_log=False,
        http="httptools",
        loop="uvloop",
        log_level="warning",
        backlog=4096,
    )


def serve_granian(port: int) -> None:
    from granian import Granian

    app = "slipstream_bench.studies.sse_servers:asgi_app"
    granian = Granian(app, "127.0.0.1", port, interface="asgi", loop="uvloop")
    granian.serve()


def serve_aiohttp(port: int) -> None:
    import uvloop
    from aiohttp import web

    async def stream(request: web.Request) -> web.StreamResponse:
        clock = ticker()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        for _ in range(int(request.path[1:])):
            await clock.wait()
            await response.write(EVENT)
        await response.write_eof()
        return response

    async def direct(request: web.Request) -> web.StreamResponse:
        """Writes chunks past the framework, from the ticker's call."""
        left = int(request.path.rpartition("/")[2])
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        done = asyncio.get_running_loop().create_future()
        assert request.transport is not None
        write = request.transport.write

        def on_tick() -> None:
            nonlocal left
            write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
            left -= 1
            if not left:
                ticker().streams.discard(on_tick)
                done.set_result(None)

        ticker().streams.add(on_tick)
        await done
        await response.write_eof()
        return response

    app = web.Application()
    app.router.add_get("/direct/{number}", direct)
    app.router.add_get("/{number}", stream)
    runner = web.AppRunner(app, access_log=None)

    async def main() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
        await asyncio.Event().wait()

    uvloop.run(main())


CANDIDATES: dict[str, tuple[str, str, Callable[[int], None], bytes]] = {
    "httptools": (
        "own Protocol, httptools, direct writes",
        "httptools",
        lambda port: serve_direct(port, Direct),
        REQUEST,
    ),
    "h11": (
        "own Protocol, h11, direct writes",
        "h11",
        lambda port: serve_direct(port, DirectH11),
        REQUEST,
    ),
    "granian": ("granian, bare ASGI", "granian", serve_granian, REQUEST),
    "uvicorn": ("uvicorn (httptools), bare ASGI", "uvicorn", serve_uvicorn, REQUEST),
    "aiohttp": ("aiohttp, StreamResponse.write", "aiohttp", serve_aiohttp, REQUEST),
    "aiohttp-direct": (
        "aiohttp, direct writes",
        "aiohttp",
        serve_aiohttp,
        REQUEST.replace(b"/%d", b"/direct/%d"),
    ),
}


# ---- the measurement -------------------------------------------------------------------------


def measure(name: str, num_streams: int, num_chunks: int) -> float:
    """Server CPU time per chunk of one run, in microseconds."""
    port = free_port()
    command = [sys.executable, __file__, "--serve", name, "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            wait_until_open(port)
            requests = [CANDIDATES[name][3] % num_chunks] * num_streams
            span = read_streams(
                ("127.0.0.1", port), requests, lambda: {name: tree_cpu_s(process.pid)}
            )
            return 1e6 * span.used[name] / span.num_events
        finally:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()


def wait_until_open(port: int) -> None:
    """Wait until a server listens on the port."""
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)  # other servers have no readiness signal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=150, help="of each stream")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=CANDIDATES, default=list(CANDIDATES))
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--serve", choices=CANDIDATES, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        CANDIDATES[options.serve][2](options.port)
        return 0
    wanted = [name for name in options.only if importlib.util.find_spec(CANDIDATES[name][1])]
    for name in set(options.only) - set(wanted):
        sys.stderr.write(f"{name}: not installed\n")
    runs: dict[str, list[float]] = {name: [] for name in wanted}
    for _ in range(options.runs):
        for name in wanted:
            runs[name].append(measure(name, options.streams, options.chunks))
    rows = [
        {
            "server": CANDIDATES[name][0],
            "us_per_chunk": round(statistics.median(found), 2),
            "least": round(min(found), 2),
            "most": round(max(found), 2),
        }
        for name, found in runs.items()
    ]
    table = [f"| server ({options.streams} streams) | µs of CPU to a chunk | least | most |"]
    table += ["|---|---|---|---|"]
    table += [f"| {' | '.join(str(value) for value in row.values())} |" for row in rows]
    sys.stdout.write("\n".join(table) + "\n")
    if options.json:
        about = {
            "streams": options.streams,
            "chunks": options.chunks,
            "runs": options.runs,
            "chunk_bytes": len(CHUNK),
            "python": platform.python_version(),
            "cpus": psutil.cpu_count(),
        }
        Path(options.json).write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
