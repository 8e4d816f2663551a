"""Bytes leave a socket in the order in which they were written, by the writer or the transport."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.http.server.socket_writer import writer_of


class FakeTransport:
    """Holds what it is given until `flush`."""

    def __init__(self, own: socket.socket, *, has_tls: bool = False) -> None:
        self.extra = {"socket": own, "sslcontext": object() if has_tls else None}
        self.own = own
        self.held = bytearray()
        self.num_writes = 0

    def get_extra_info(self, name: str) -> Any:
        """As asyncio's."""
        return self.extra[name]

    def get_write_buffer_size(self) -> int:
        """As asyncio's."""
        return len(self.held)

    def write(self, data: bytes) -> None:
        """As asyncio's, but for sending at once."""
        self.num_writes += 1
        self.held += data

    def flush(self) -> None:
        """Send what the socket takes."""
        try:
            del self.held[: self.own.send(self.held)]
        except BlockingIOError:
            return


def pair() -> tuple[socket.socket, socket.socket]:
    own, other = socket.socketpair()
    for each in (own, other):
        each.setblocking(False)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return own, other


def read(other: socket.socket) -> bytes:
    found = bytearray()
    while True:
        try:
            data = other.recv(1 << 16)
        except BlockingIOError:
            return bytes(found)
        if not data:
            return bytes(found)
        found += data


@given(st.lists(st.integers(1, 20_000) | st.sampled_from(["read", "flush", "other"]), max_size=20))
def test_bytes_arrive_in_order(steps: list[Any]) -> None:
    own, other = pair()
    with own, other:
        transport = FakeTransport(own)
        writer = writer_of(transport)  # type: ignore[arg-type]
        sent, received = bytearray(), bytearray()
        for number, step in enumerate(steps):
            if step == "read":
                received += read(other)
            elif step == "flush":
                transport.flush()
            elif step == "other":
                transport.write(b"other")
                sent += b"other"
                writer.wait()
            else:
                data = bytes([number]) * step
                writer(data)
                sent += data
        while len(received) < len(sent):
            transport.flush()
            received += read(other)
        assert received == sent


def test_the_transport_is_passed_while_it_holds_nothing() -> None:
    own, other = pair()
    with own, other:
        transport = FakeTransport(own)
        writer = writer_of(transport)  # type: ignore[arg-type]
        writer(b"a")
        assert (transport.num_writes, read(other)) == (0, b"a")
        transport.write(b"b")
        writer.wait()
        writer(b"c")
        assert (transport.num_writes, read(other)) == (2, b"")
        transport.flush()
        writer(b"d")
        assert (transport.num_writes, read(other)) == (2, b"bcd")


@pytest.mark.parametrize("how", ["tls", "detached", "broken"])
def test_all_else_is_left_to_the_transport(how: str) -> None:
    own, other = pair()
    with own, other:
        transport = FakeTransport(own, has_tls=how == "tls")
        writer = writer_of(transport)  # type: ignore[arg-type]
        if how == "detached":
            writer.detach()
        elif how == "broken":
            other.close()
        writer(b"a")
        assert (transport.num_writes, bytes(transport.held)) == (1, b"a")
