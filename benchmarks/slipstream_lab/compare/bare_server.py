"""A server that only writes, as the baseline of `bench compare front`: the cost of the sockets
without receiving, decoding or formatting.

`python -m slipstream_lab.compare.bare_server`, in a separate process with a config (JSON) on
its standard input. It writes its port to standard output, answers every request with the configured
chunk, and writes it to every connection at every tick, as an engine's step has one for each stream.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import msgspec
import uvloop
from msgspec import Struct

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_END = b"0\r\n\r\n"


class BareConfig(Struct, frozen=True):
    """chunk: as it goes over the wire. tick_s: between two chunks of a stream. num_streams: writing
    begins when this many are connected, and ends after `num_events` each.
    """

    chunk: bytes
    tick_s: float
    num_streams: int
    num_events: int


class _Streams:
    """All connected streams."""

    def __init__(self, config: BareConfig) -> None:
        self._config = config
        self._transports: list[asyncio.Transport] = []
        self._left = config.num_events
        self._loop = asyncio.get_running_loop()
        self.has_ended = self._loop.create_future()

    def add(self, transport: asyncio.Transport) -> None:
        """Another stream was requested."""
        transport.write(_HEAD)
        self._transports.append(transport)
        if len(self._transports) == self._config.num_streams:
            self._due = self._loop.time()
            self._tick()

    def _tick(self) -> None:
        chunk = self._config.chunk if self._left else _END
        for transport in self._transports:
            transport.write(chunk)
        self._left -= 1
        if self._left < 0:
            self.has_ended.set_result(None)
            return
        self._due = max(self._due + self._config.tick_s, self._loop.time())
        self._loop.call_at(self._due, self._tick)


class _BareConnection(asyncio.Protocol):
    def __init__(self, streams: _Streams) -> None:
        self._streams = streams
        self._has_asked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it

    def data_received(self, _data: bytes) -> None:
        if not self._has_asked:
            self._has_asked = True
            self._streams.add(self._transport)


async def _serve(config: BareConfig) -> None:
    streams = _Streams(config)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: _BareConnection(streams), "127.0.0.1", 0, backlog=config.num_streams
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await streams.has_ended
    await asyncio.to_thread(sys.stdin.buffer.read)  # until the parent has read everything


def main() -> int:
    """Serve all streams once and wait for the end of standard input; exit code 0."""
    uvloop.run(_serve(msgspec.json.decode(sys.stdin.buffer.readline(), type=BareConfig)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
