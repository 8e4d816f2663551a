"""The way of a connection's bytes to its socket: by its transport, or past it while the transport
holds none.

- The transport has a queue and a pass of its own over all connections, which cost a good part of a
  system call for each event of a stream.
- With TLS all bytes are the transport's.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from slipstream.compiled import SocketWriter as DirectWriter


class SocketWriter(Protocol):
    """Writes to one connection."""

    def __call__(self, data: bytes, /) -> None:
        """Write bytes behind those that were written before."""

    def wait(self) -> None:
        """The transport was written to otherwise."""

    def detach(self) -> None:
        """The transport is about to close its socket."""


class TransportWriter:
    """All bytes are the transport's."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def __call__(self, data: bytes, /) -> None:
        """See `SocketWriter`."""
        self._transport.write(data)

    def wait(self) -> None:
        """Do nothing."""

    def detach(self) -> None:
        """Do nothing."""


def writer_of(transport: asyncio.Transport) -> SocketWriter:
    """The writer of a new connection."""
    socket = transport.get_extra_info("socket")
    if socket is None or transport.get_extra_info("sslcontext") is not None:
        return TransportWriter(transport)
    return DirectWriter(socket.fileno(), transport.get_write_buffer_size, transport.write)
