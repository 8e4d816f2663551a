"""The floor of the output path: what its messages cost with nothing between them.

The messages of a run (steps, reports, deltas and what acknowledges them) are encoded, passed
through a bare socket and decoded again, by the encoder, the decoders and the kinds of sockets that
the hops use, without links, histories or text.
"""

from __future__ import annotations

import secrets
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from select import EPOLLIN, epoll
from typing import Any, Literal, NamedTuple, get_args

import zmq

from slipstream_ipc.messages.budgets import MAX_MESSAGE_BYTES
from slipstream_ipc.transport.channel import LocalChannel
from slipstream_ipc.transport.codec import (
    client_codec,
    core_codec,
    front_codec,
    worker_codec,
)
from slipstream_ipc.transport.local_socket import LocalConnection, LocalListener, connect_local
from slipstream_ipc.transport.poller import Poller
from slipstream_ipc.transport.sockets import bind_router, new_dealer

Bare = Literal["zeromq", "unix"]
BARE: tuple[Bare, ...] = get_args(Bare)
Transport = Literal["zeromq", "unix", "local"]  # local: the product's connections over Unix sockets
Hop = Literal["step", "report", "deltas", "receipt"]
_FROM_LISTENER: frozenset[Hop] = frozenset(("step", "deltas"))

_CODECS: dict[Hop, Callable[[], Any]] = {  # of the receiving end
    "step": worker_codec,
    "report": core_codec,
    "deltas": client_codec,
    "receipt": front_codec,
}
_PATIENCE_MS = 10_000
_AT_ONCE = 4  # messages, about as many as a step sends
_CHUNK_BYTES = 2**14
_LENGTH = struct.Struct("<I")

Pass = Callable[[Sequence["Sent"]], None]


class Sent(NamedTuple):
    """A message of a run, and the hop that it took."""

    hop: Hop
    data: bytes


class Floor(NamedTuple):
    """CPU microseconds of all messages of a run."""

    encode_us: float
    decode_us: float
    wire_us: dict[Bare, float]


def floor_of(messages: Sequence[Sent], transports: Sequence[Bare] = BARE) -> Floor:
    """Encode, pass and decode the messages once more."""
    codecs = {hop: codec() for hop, codec in _CODECS.items()}
    decodes = [(codecs[hop].decode, data) for hop, data in messages]
    begin = time.thread_time_ns()
    for decode, data in decodes:
        decode(data)
    decode_ns = time.thread_time_ns() - begin
    encode = next(iter(codecs.values())).encode
    frames = [decode(data) for decode, data in decodes]
    begin = time.thread_time_ns()
    for frame in frames:
        encode(frame)
    encode_ns = time.thread_time_ns() - begin
    return Floor(
        encode_ns / 1e3,
        decode_ns / 1e3,
        {transport: wire_us(messages, transport) for transport in transports},
    )


def wire_us(messages: Sequence[Sent], transport: Transport) -> float:
    """CPU microseconds of this process, ZeroMQ's own thread included, to send, poll and receive
    messages of the sizes of these; with "local" each from the end that sends it, to the other.

    Over ZeroMQ a few pass at a time: one by one, this thread and ZeroMQ's would sleep in between,
    and waking up would dominate, two to four times as much in a virtual machine.
    """
    match transport:
        case "zeromq":
            wire, num_at_once = _zeromq(), _AT_ONCE
        case "unix":
            wire, num_at_once = _unix(), 1
        case "local":
            wire, num_at_once = _local(), 1
    with wire as pass_all:
        pass_all([Sent("report", b"")])  # waits until connected
        begin = time.process_time_ns()
        for at in range(0, len(messages), num_at_once):
            pass_all(messages[at : at + num_at_once])
        return (time.process_time_ns() - begin) / 1e3


@contextmanager
def _zeromq() -> Iterator[Pass]:
    with tempfile.TemporaryDirectory(prefix="slipstream-wire-") as folder:
        address = f"ipc://{Path(folder) / 'wire'}"
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            receiver = bind_router(context, address)
            sender = new_dealer(context, address, secrets.token_bytes(16))
            poller = zmq.Poller()
            poller.register(receiver, zmq.POLLIN)

            def pass_all(messages: Sequence[Sent]) -> None:
                for message in messages:
                    sender.send(message.data, zmq.NOBLOCK)
                for _ in messages:
                    if not poller.poll(_PATIENCE_MS):
                        raise _lost()
                    receiver.recv_multipart(zmq.NOBLOCK)

            yield pass_all
        finally:
            context.destroy(linger=0)


@contextmanager
def _unix() -> Iterator[Pass]:
    """A stream with a length before each message."""
    sender, receiver = socket.socketpair()
    with sender, receiver, epoll() as poller:
        sender.setblocking(False)
        receiver.setblocking(False)
        poller.register(receiver, EPOLLIN)

        def pass_all(messages: Sequence[Sent]) -> None:
            for _, message in messages:
                data = _LENGTH.pack(len(message)) + message
                missing = len(data)
                num_sent = sender.send(data)
                while missing:
                    if not poller.poll(_PATIENCE_MS / 1e3):
                        raise _lost()
                    missing -= len(
                        receiver.recv(_CHUNK_BYTES if missing < _CHUNK_BYTES else missing)
                    )
                    if num_sent < len(data):
                        num_sent += sender.send(memoryview(data)[num_sent:])

        yield pass_all


@contextmanager
def _local() -> Iterator[Pass]:
    """A server's listener and a client's connection to it."""
    with tempfile.TemporaryDirectory(prefix="slipstream-wire-") as folder, ExitStack() as stack:
        address = f"ipc://{Path(folder) / 'wire'}"
        listener = LocalListener(address, max_message_bytes=MAX_MESSAGE_BYTES, max_connections=1)
        stack.callback(listener.close)
        client = connect_local(address, MAX_MESSAGE_BYTES)
        assert client is not None
        server_poller, client_poller = Poller(), Poller()
        server_poller.register(listener.fd)
        channel = LocalChannel(client, client_poller)
        stack.callback(channel.close)
        server: LocalConnection | None = None  # known from its first message on

        def pass_up(message: bytes) -> None:
            nonlocal server
            assert client.send(message)
            while True:
                client.flush()
                if not server_poller.poll(_PATIENCE_MS):
                    raise _lost()
                unread = listener.ready()
                while unread:
                    server = unread.popleft()
                    listener.heard(server)
                    if server.messages:
                        server.messages.popleft()
                        return

        def pass_down(message: bytes) -> None:
            assert server is not None
            assert server.send(message)
            while not channel.messages:
                server.flush()
                if not client_poller.poll(_PATIENCE_MS):
                    raise _lost()
                channel.fill()
            channel.messages.popleft()

        def pass_all(messages: Sequence[Sent]) -> None:
            for hop, message in messages:
                (pass_down if hop in _FROM_LISTENER else pass_up)(message)

        yield pass_all


def _lost() -> TimeoutError:
    return TimeoutError("a message was lost between two sockets of this process")
