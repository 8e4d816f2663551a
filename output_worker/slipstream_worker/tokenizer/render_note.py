"""A note of which prompts a prompt process is rendering, for its worker to read when it has died.

It is memory that both have mapped: it outlives the process however that ends, and to write it takes
no system call and no message. A key stands there from before its rendering begins until after it
has ended, and no longer: a process that was idle leaves none.
"""

from __future__ import annotations

import mmap
import os

_NUM_BYTES = 16  # two keys: of the short prompt and of the long one, 0 where none is rendered


class RenderNote:
    """Either end of it; the worker makes it, the prompt process is given its descriptor `fd`."""

    def __init__(self, fd: int | None = None) -> None:
        """fd: a note's that was made elsewhere; None makes one."""
        self.fd = os.memfd_create("slipstream-prompt-note") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, _NUM_BYTES)
        self._map = mmap.mmap(self.fd, _NUM_BYTES)
        self._keys = memoryview(self._map).cast("Q")

    def begin(self, key: int, *, is_long: bool) -> None:
        """A prompt is rendered from now on."""
        self._keys[is_long] = key

    def end(self, *, is_long: bool) -> None:
        """It is no more."""
        self._keys[is_long] = 0

    def under_way(self) -> list[int]:
        """What is being rendered, or was when its process died: the short one first."""
        return [key for key in self._keys if key]

    def clear(self) -> None:
        """A process begins anew."""
        self._keys[0] = self._keys[1] = 0

    def close(self) -> None:
        """Let go of it."""
        self._keys.release()
        self._map.close()
        os.close(self.fd)
