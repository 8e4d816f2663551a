"""Measures what the messages of a run cost on a real wire: ZeroMQ over a Unix socket with both ends
in this process. Only the message sizes matter.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import zmq

from slipstream_ipc.transport.sockets import bind_router, new_dealer

_PATIENCE_MS = 10_000
_AT_ONCE = 4  # messages, about as many as a step sends


def wire_us(sizes: Sequence[int]) -> float:
    """CPU microseconds of this process, ZeroMQ's own thread included, to send, poll and receive
    messages of the given sizes in bytes.

    Messages pass a few at a time: one by one, either end would sleep in between, and the cost of
    waking up would dominate, two to four times as much in a virtual machine.
    """
    with tempfile.TemporaryDirectory(prefix="slipstream-wire-") as folder:
        address = f"ipc://{Path(folder) / 'wire'}"
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            receiver = bind_router(context, address)
            sender = new_dealer(context, address, secrets.token_bytes(16))
            poller = zmq.Poller()
            poller.register(receiver, zmq.POLLIN)
            messages = [bytes(size) for size in sizes]
            _pass([b""], sender, receiver, poller)  # waits until connected
            begin = time.process_time_ns()
            for at in range(0, len(messages), _AT_ONCE):
                _pass(messages[at : at + _AT_ONCE], sender, receiver, poller)
            return (time.process_time_ns() - begin) / 1e3
        finally:
            context.destroy(linger=0)


def _pass(
    messages: Sequence[bytes],
    sender: zmq.Socket[bytes],
    receiver: zmq.Socket[bytes],
    poller: zmq.Poller,
) -> None:
    for message in messages:
        sender.send(message, zmq.NOBLOCK)
    for _ in messages:
        if not poller.poll(_PATIENCE_MS):
            raise TimeoutError("a message was lost between two sockets of this process")
        receiver.recv_multipart(zmq.NOBLOCK)
