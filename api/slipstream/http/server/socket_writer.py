"""The way of a connection's bytes to its socket: by its transport, or past it while the transport
holds none.

- The transport has a queue and a pass of its own over all connections, which cost a good part of a
  system call for each event of a stream.
- With TLS, and without the C extension `socket_writer`, all bytes are the transport's.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import ModuleType
from typing import Protocol

from slipstream_ipc.native.extension import load_extension

_SOURCE = Path(__file__).with_suffix(".c")


class SocketWriter(Protocol):
    """Writes to one connection."""

    def __call__(self, data: bytes, /) -> None:
        """Write bytes behind those that were written before."""

    def wait(self) -> None:
        """The transport was written to otherwise."""

    def detach(self) -> None:
        """The transport is about to close its socket."""


class TransportWriter:
    """The reference: all bytes are the transport's."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def __call__(self, data: bytes, /) -> None:
        """See `SocketWriter`."""
        self._transport.write(data)

    def wait(self) -> None:
        """Do nothing."""

    def detach(self) -> None:
        """Do nothing."""


def load_native() -> ModuleType | None:
    """The C extension, compiled if it has not been on this machine: that takes a moment."""
    return load_extension("socket_writer", _SOURCE)


def writer_of(transport: asyncio.Transport) -> SocketWriter:
    """The writer of a new connection."""
    native = load_native()
    socket = transport.get_extra_info("socket")
    if native is None or socket is None or transport.get_extra_info("sslcontext") is not None:
        return TransportWriter(transport)
    unsent, write = transport.get_write_buffer_size, transport.write
    writer: SocketWriter = native.SocketWriter(socket.fileno(), unsent, write)
    return writer
