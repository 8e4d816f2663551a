"""The two system calls of a local connection: send a message, and read those that have arrived.

They are functions of a descriptor that does not block. They exist twice: here, which is the
reference, and in C (`local_io.c`), which is used where it can be compiled.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from slipstream_ipc.native.extension import load_extension

PREFIX_BYTES = 4  # a message's length, u32 little-endian
CHUNK_BYTES = 2**14

Append = Callable[[bytes], object]
SendMessage = Callable[[int, bytes], int]
ReadMessages = Callable[[int, Append, int], bytes | None]


def send_message(fd: int, message: bytes) -> int:
    """Send a message's length and the message; how many bytes of both the kernel took.

    Raises: OSError where the connection is gone.
    """
    try:
        return os.write(fd, len(message).to_bytes(PREFIX_BYTES, "little") + message)
    except BlockingIOError:
        return 0


def read_messages(fd: int, append: Append, max_bytes: int) -> bytes | None:
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


def local_calls() -> tuple[SendMessage, ReadMessages]:
    """`send_message` and `read_messages`, in C where that can be had."""
    native = load_extension("local_io", Path(__file__).with_name("local_io.c"))
    if native is None:
        return send_message, read_messages
    return native.send_message, native.read_messages
