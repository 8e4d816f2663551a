"""A memory-mapped note of the streams that the device computes, for the next core after a crash.

The file has one page for each step that can be in flight, and one for an image. Memory mapped from
a file outlives its process however that ends: writing the note is a copy, without a system call.

- A step is noted before its launch and struck out once it is collected. What stands in the note
  after a crash was being computed, or was about to be.
- So is the stream whose image is encoded, by the thread that does it.
- A page's count is written after its ids, and striking out resets the count alone: the note is
  valid at any moment.
- An unreadable note is no error: the core starts without it. It also starts where there is no room
  for a note.
- The file is allocated before it is mapped: a write to a mapped page of a full file system would
  kill the core (SIGBUS).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slipstream_ipc.arrays import Int64s, UInt64s
from slipstream_ipc.crash_note import (
    HEADER_WORDS,
    IMAGE_WORD,
    MAX_STEPS,
    NOTE_MAGIC,
    NOTE_NAME,
    num_words,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Succession:
    """Facts about the core before this one, and the note for the next."""

    incarnation: int  # this core's
    suspects: tuple[bytes, ...]  # the streams that the previous one was computing
    predecessor_ended_s: float  # CLOCK_MONOTONIC; 0.0: there was none
    note: CrashNote | None


class CrashNote:
    """The note of one core. `close` leaves its content in the file."""

    def __init__(self, directory: Path, max_num_seqs: int) -> None:
        """Begin an empty note; the predecessor's has to be read before (`read_note`).

        Raises OSError where there is no room for it.
        """
        words = num_words(max_num_seqs)
        with open(directory / NOTE_NAME, "w+b") as file:
            os.posix_fallocate(file.fileno(), 0, 8 * words)
            self._map = mmap.mmap(file.fileno(), 8 * words)
        self._words: UInt64s | None = np.frombuffer(self._map, np.uint64)
        self._words[1] = max_num_seqs
        self._pages = self._words[HEADER_WORDS:].reshape(MAX_STEPS, -1)
        self._image = self._words[IMAGE_WORD:HEADER_WORDS]
        self._ids = self._pages[:, 1:].reshape(MAX_STEPS, max_num_seqs, 2)
        self._words[0] = NOTE_MAGIC

    def launch(self, step: int, ids: UInt64s, rows: Int64s) -> None:
        """The streams of `rows` are computed next; `ids` [·, 2] holds the ids by row."""
        page = step % MAX_STEPS
        assert not self._pages[page, 0], "too many steps in flight"
        np.take(ids, rows, 0, self._ids[page, : len(rows)], "clip")
        self._pages[page, 0] = len(rows)

    def collect(self, step: int) -> None:
        """Strike out a step, whose outcome is known."""
        self._pages[step % MAX_STEPS, 0] = 0

    def encode(self, stream_id: bytes) -> None:
        """An image of this stream is encoded next."""
        self._image[1:] = np.frombuffer(stream_id, np.uint64)
        self._image[0] = 1

    def encoded(self) -> None:
        """Strike out the image, whose outcome is known."""
        self._image[0] = 0

    def close(self) -> None:
        """Unmap the file. Idempotent."""
        if self._words is not None:
            del self._ids, self._pages, self._image
            self._words = None
            self._map.close()


def begin_note(directory: Path, max_num_seqs: int) -> CrashNote | None:
    """An empty note; None, and an error in the log, where it cannot be created."""
    try:
        return CrashNote(directory, max_num_seqs)
    except OSError as error:
        logger.error(
            "cannot write the crash note: %s; a request that crashes cores will not be found", error
        )
        with contextlib.suppress(OSError):
            (directory / NOTE_NAME).unlink()  # its content is another core's
        return None
