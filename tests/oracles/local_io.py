"""The two system calls of a local connection, as `slipstream_ipc._native` makes them."""

from __future__ import annotations

import os
from collections.abc import Callable

from slipstream_ipc.transport.local_socket import CHUNK_BYTES, PREFIX_BYTES


def send_message(fd: int, message: bytes) -> int:
    """Send a message's length and the message; how many bytes of both the kernel took.

    Raises: OSError where the connection is gone.
    """
    try:
        return os.write(fd, len(message).to_bytes(PREFIX_BYTES, "little") + message)
    except BlockingIOError:
        return 0


def read_messages(fd: int, append: Callable[[bytes], object], max_bytes: int) -> bytes | None:
    """Read what has arrived, at most CHUNK_BYTES, and pass each whole message to `append`, up to
    one of more than `max_bytes`.

    Returns the bytes behind the last message passed on; None where the connection is gone.
    """
    try:
        data = os.read(fd, CHUNK_BYTES)
    except BlockingIOError:
        return b""
    except OSError:
        return None
    if not data:
        return None
    begin = 0
    while len(data) - begin >= PREFIX_BYTES:
        first = begin + PREFIX_BYTES
        num = int.from_bytes(data[begin:first], "little")
        if num > min(len(data) - first, max_bytes):
            break
        append(data[first : first + num])
        begin = first + num
    return data[begin:]
