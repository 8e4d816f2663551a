"""The size limit of answers that are kept: a worker applies it, and a client that has all of the
answer comes to the same result.
"""

from __future__ import annotations

from collections.abc import Iterable

from slipstream_ipc.messages import KEPT_ENTRY_BYTES


def max_text_bytes(record_bytes: int, max_kept_bytes: int) -> int:
    """The number of text bytes that a kept answer may have beside a record of this size; negative
    if none is kept with it. max_kept_bytes: see `ModelCard`.
    """
    return max_kept_bytes - KEPT_ENTRY_BYTES - record_bytes


def num_text_bytes(texts: Iterable[str]) -> int:
    """The size of an answer's texts in UTF-8, in bytes: those of its events, or its one text."""
    return sum([len(text.encode()) for text in texts])
