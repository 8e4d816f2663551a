"""Lines from a pipe, read as they come, without ever waiting.

Owns: the half line that has not ended yet. Does not know: what the lines say, or when to look
(whoever polls the descriptor does).
"""

from __future__ import annotations

import os

_CHUNK_BYTES = 65536


class LineReader:
    """Takes over a pipe's reading end; `close` gives it back."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._rest = b""
        self._has_ended = False

    def fileno(self) -> int:
        """Readable when there is something new, or the end."""
        return self._fd

    def read(self) -> list[bytes]:
        """Every line that has arrived in full; `has_ended` once nobody can write any more."""
        while not self._has_ended:
            try:
                chunk = os.read(self._fd, _CHUNK_BYTES)
            except BlockingIOError:
                break
            self._rest += chunk
            self._has_ended = not chunk
        *lines, self._rest = self._rest.split(b"\n")
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
