"""Lines through pipes, read and written without blocking.

A writer that never stops can neither keep the reader busy nor fill its memory: a call reads little
more than READ_BYTES, and a longer line is dropped.
"""

from __future__ import annotations

import fcntl
import os
import sys
import termios

READ_BYTES = 2**20  # for one call; as much as a pipe can hold
_CHUNK_BYTES = 65536


class LineReader:
    """Reads lines from a pipe's reading end, which it owns and closes."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._rest = b""
        self._is_too_long = False  # the current line
        self._has_ended = False

    def fileno(self) -> int:
        """Readable when there is new data, or at the end."""
        return self._fd

    def read(self) -> list[bytes]:
        """The complete lines that have arrived. Sets `has_ended` once no writer is left."""
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
        """True if the end of the pipe has been read."""
        return self._has_ended

    def close(self) -> None:
        """Close the pipe's reading end."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self._has_ended = True


class LineWriter:
    """Writes lines to a pipe without blocking, however slowly it is read.

    What does not fit is kept. Where no reader is left it is dropped without an error.
    """

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._unsent = b""

    def write(self, line: bytes) -> None:
        """Write a line, after what did not fit before."""
        self._unsent += line + b"\n"
        self._flush()

    def offer(self, line: bytes) -> bool:
        """Write a line if everything before has been read, else drop it; return True if written."""
        is_read = self._flush() and not _num_unread(self._fd)
        if is_read:
            self.write(line)
        return is_read

    def close(self) -> None:
        """Close the pipe's writing end."""
        os.close(self._fd)

    def _flush(self) -> bool:
        """Write what is kept; return True if all of it was written and a reader is left."""
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
    """The number of unread bytes in a pipe."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)
