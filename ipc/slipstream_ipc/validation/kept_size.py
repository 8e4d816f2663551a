"""Whether an answer is small enough to be kept: a worker decides it, and a client that has all of
the answer finds the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from slipstream_ipc.messages import KEPT_ENTRY_BYTES


def max_text_bytes(record_bytes: int, max_kept_bytes: int) -> int:
    """How many bytes of text a kept answer may have beside a record of this size; less than 0: none
    is kept with it. max_kept_bytes: see `ModelCard`.
    """
    return max_kept_bytes - KEPT_ENTRY_BYTES - record_bytes


def num_text_bytes(texts: Iterable[str]) -> int:
    """What an answer's texts take in UTF-8: those of its events, or its one text."""
    return sum([len(text.encode()) for text in texts])
