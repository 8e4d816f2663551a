"""A note of which streams the device computes, for whoever comes after a core that died.

Owns: the file, one page of it to each step that can be in flight. Memory that is mapped from a file
outlives its process, however that ends: writing the note is a copy, and no system call.

Does not know: why a core died, what becomes of the streams.

Rules:
- A step is noted before it is launched and struck out when it has been collected. So what stands
  there after a death was being computed, or was about to be.
- A page's count is written behind its ids and struck out alone: at any moment the note is true.
- What cannot be read is no note, never an error: a core starts without it. So it does where there
  is no room for its own.
- The file is given its room before it is mapped: a write to memory whose file system is full would
  end the core (SIGBUS).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]  # stream ids are [n, 2] of them

ID_BYTES = 16
MAX_STEPS = 2  # that can be in flight
_NAME = "core-in-flight"
_MAGIC = 0x3174_6867_696C_6673
_HEADER = 2  # magic, ids to a page; then to each page its count, then its ids


class CrashNote:
    """The note of one core. `close` leaves what stands there."""

    def __init__(self, directory: Path, max_num_seqs: int) -> None:
        """Begin an empty note; `read_note` must have read the one before.

        Raises: OSError where there is no room for it.
        """
        words = _num_words(max_num_seqs)
        with open(directory / _NAME, "w+b") as file:
            os.posix_fallocate(file.fileno(), 0, 8 * words)
            self._map = mmap.mmap(file.fileno(), 8 * words)
        self._words: UInt64s | None = np.frombuffer(self._map, np.uint64)
        self._words[1] = max_num_seqs
        self._pages = self._words[_HEADER:].reshape(MAX_STEPS, -1)
        self._ids = self._pages[:, 1:].reshape(MAX_STEPS, max_num_seqs, 2)
        self._words[0] = _MAGIC

    def launch(self, step: int, ids: UInt64s, rows: Int64s) -> None:
        """The streams of `rows` are computed next, their ids in `ids` by row, [·, 2]."""
        page = step % MAX_STEPS
        assert not self._pages[page, 0], "as many steps as that are never in flight"
        np.take(ids, rows, 0, self._ids[page, : len(rows)], "clip")
        self._pages[page, 0] = len(rows)

    def collect(self, step: int) -> None:
        """A step's outcome is known."""
        self._pages[step % MAX_STEPS, 0] = 0

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        if self._words is not None:
            del self._ids, self._pages
            self._words = None
            self._map.close()


def begin_note(directory: Path, max_num_seqs: int) -> CrashNote | None:
    """An empty note; None, and a line in the log, where there can be none."""
    try:
        return CrashNote(directory, max_num_seqs)
    except OSError as error:
        logger.error(
            "no note is kept of what is computed: %s; a request that ends cores is not found", error
        )
        with contextlib.suppress(OSError):
            (directory / _NAME).unlink()  # what stands there is of another core
        return None


def read_note(directory: Path) -> tuple[bytes, ...]:
    """Ids of the streams in the steps that the last core in `directory` was computing."""
    path = directory / _NAME
    try:
        words = np.fromfile(path, np.uint64)
    except OSError as error:
        logger.warning("what the last core was computing is not known: %s", error)
        return ()
    if len(words) < _HEADER or words[0] != _MAGIC or len(words) != _num_words(int(words[1])):
        logger.warning("what the last core was computing is not known: %s is no such note", path)
        return ()
    ids: dict[bytes, None] = {}  # in their order, each once
    for page in words[_HEADER:].reshape(MAX_STEPS, -1):
        count = min(int(page[0]), int(words[1]))
        ids.update(dict.fromkeys(row.tobytes() for row in page[1 : 1 + 2 * count].reshape(-1, 2)))
    return tuple(ids)


def _num_words(max_num_seqs: int) -> int:
    return _HEADER + MAX_STEPS * (1 + 2 * max_num_seqs)
