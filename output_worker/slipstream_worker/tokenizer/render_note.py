"""A note of the prompts being rendered by a tokenizer process, and of its beats, for its worker to
read while it lives and after it has died.

It is memory mapped by both: it outlives the process however that ends, and writing to it takes no
system call or message, and wakes no process. A key is present from before its rendering begins
until after it has ended, and no longer, so an idle process leaves none.
"""

from __future__ import annotations

import mmap
import os

from slipstream_worker.tokenizer.long_prompts import NUM_LANES

# u64 each: the key of each lane's prompt, 0 if none is rendered; the beats
_NUM_BYTES = 8 * (NUM_LANES + 1)


class RenderNote:
    """Either end of the note. The worker creates it and passes its descriptor to the process."""

    def __init__(self, fd: int | None = None) -> None:
        """fd: the descriptor of an existing note; None creates one."""
        self.fd = os.memfd_create("slipstream-prompt-note") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, _NUM_BYTES)
        self._map = mmap.mmap(self.fd, _NUM_BYTES)
        self._keys = memoryview(self._map).cast("Q")

    def begin(self, key: int, *, lane: int) -> None:
        """Note a prompt whose rendering begins. lane: see `long_prompts.lane_of`."""
        self._keys[lane] = key

    def end(self, *, lane: int) -> None:
        """Remove the note."""
        self._keys[lane] = 0

    def in_progress(self) -> list[int]:
        """Keys of the prompts being rendered now, or when the process died; short ones first."""
        return [key for key in self._keys[:NUM_LANES] if key]

    def beat(self) -> None:
        """Note that the process's loop is turning."""
        self._keys[NUM_LANES] += 1

    @property
    def num_beats(self) -> int:
        """The number of beats of all processes that had this note."""
        return self._keys[NUM_LANES]

    def clear(self) -> None:
        """Remove all keys, before another process starts."""
        for lane in range(NUM_LANES):
            self._keys[lane] = 0

    def close(self) -> None:
        """Unmap the note and close its descriptor."""
        self._keys.release()
        self._map.close()
        os.close(self.fd)
