"""The note that a core leaves of the streams it was computing, in steps or as an image, as it is
read after a crash.

The core writes it (`slipstream_core.workers.crash_note_writer`). It lies in the stack's runtime
directory until the next core begins one of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

NOTE_NAME = "core-in-flight"
NOTE_MAGIC = 0x3274_6867_696C_6673
IMAGE_WORD = 2
HEADER_WORDS = 5  # magic, ids per page, the page of an image; then for each its count and its ids
MAX_STEPS = 2  # in flight at most; each has a page
ID_BYTES = 16
SUSPECT_BYTES = 8

logger = logging.getLogger(__name__)


def num_words(max_num_seqs: int) -> int:
    """Words of 8 bytes in the note of a core that runs so many requests at a time."""
    return HEADER_WORDS + MAX_STEPS * (1 + 2 * max_num_seqs)


def read_note(directory: Path) -> tuple[bytes, ...] | None:
    """Ids of the streams in the steps that the last core in `directory` was computing, and of the
    one whose image it encoded; None, and a warning in the log, where there is no note of it.
    """
    path = directory / NOTE_NAME
    try:
        data = path.read_bytes()
    except OSError as error:
        logger.warning("cannot read the last core's crash note: %s", error)
        return None
    words = memoryview(data[: len(data) - len(data) % 8]).cast("Q")
    if len(words) < HEADER_WORDS or words[0] != NOTE_MAGIC or len(data) != 8 * num_words(words[1]):
        logger.warning("cannot read the last core's crash note: %s is not one", path)
        return None
    ids: dict[bytes, None] = {}  # an ordered set
    page_words = 1 + 2 * words[1]
    pages = [(HEADER_WORDS + page * page_words, words[1]) for page in range(MAX_STEPS)]
    for begin, most in [*pages, (IMAGE_WORD, 1)]:
        for at in range(min(words[begin], most)):
            ids[words[begin + 1 + 2 * at :][:2].tobytes()] = None
    return tuple(ids)


def suspect_digest(stream_id: bytes) -> bytes:
    """The name of a suspect for clients: those that know the stream's id recognise it, and it
    grants nothing to the others.
    """
    return blake2b(stream_id, digest_size=SUSPECT_BYTES).digest()


def suspect_digests(stream_ids: Iterable[bytes]) -> bytes:
    """The digests of several, one behind the other."""
    return b"".join([suspect_digest(stream_id) for stream_id in stream_ids])
