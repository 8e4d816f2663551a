"""Lines through pipes, read as they come and written as there is room, without ever waiting.

Owns: the half line that has not ended yet. Does not know: what the lines say, or when to look
(whoever polls the descriptor does).

Rules:
- Whoever writes without end neither keeps us reading nor fills our memory: a call reads READ_BYTES
  at most, and of a line that is longer than that nothing is kept.
"""

from __future__ import annotations

import fcntl
import os
import sys
import termios

READ_BYTES = 2**20  # at once; as much as a pipe can hold
_CHUNK_BYTES = 65536


class LineReader:
    """Takes over a pipe's reading end; `close` gives it back."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._rest = b""
        self._is_too_long = False  # the line that has begun
        self._has_ended = False

    def fileno(self) -> int:
        """Readable when there is something new, or the end."""
        return self._fd

    def read(self) -> list[bytes]:
        """Lines that have arrived in full; `has_ended` once nobody can write any more."""
        chunks, num_bytes = [self._rest], 0
        while not self._has_ended and num_bytes < READ_BYTES:
            try:
                chunk = os.read(self._fd, _CHUNK_BYTES)
            except BlockingIOError:
                break
            chunks.append(chunk)
            num_bytes += len(chunk)
            self._has_ended = not chunk
        *lines, self._rest = b"".join(chunks).split(b"\n")
        if lines and self._is_too_long:
            del lines[0]
            self._is_too_long = False
        if len(self._rest) > READ_BYTES or self._is_too_long:
            self._rest, self._is_too_long = b"", True
        return lines

    def has_ended(self) -> bool:
        """Whether everything there will ever be has been read."""
        return self._has_ended

    def close(self) -> None:
        """Close the pipe's reading end."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self._has_ended = True


class LineWriter:
    """Writes to a pipe's other end, however slowly that is read; `close` closes it.

    What found no room is kept; where nobody can read any more it is dropped, and no error.
    """

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._unsent = b""

    def write(self, line: bytes) -> None:
        """Write it, and before it what had found no room."""
        self._unsent += line + b"\n"
        self._flush()

    def offer(self, line: bytes) -> None:
        """Write it where all that came before has been read; else drop it."""
        if self._flush() and not _num_unread(self._fd):
            self.write(line)

    def close(self) -> None:
        """Close the pipe's writing end."""
        os.close(self._fd)

    def _flush(self) -> bool:
        """Whether everything has left, to somebody."""
        while self._unsent:
            try:
                self._unsent = self._unsent[os.write(self._fd, self._unsent) :]
            except BlockingIOError:
                return False
            except BrokenPipeError:
                self._unsent = b""
                return False
        return True


def _num_unread(fd: int) -> int:
    """Bytes that lie in a pipe."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)
