"""The loops over the rows of a step and of a message, in C (`row_loops.c`).

Columns that a message carries are bytes (u32); rows are i64. Rows are distinct.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream_ipc.arrays import Int64s, UInt32s
from slipstream_worker._native import RowLoops
from slipstream_worker.detokenizer.text_columns import TextColumns

__all__ = ["Entries", "RowLoops", "new_row_loops"]


Buffer = Any  # bytes, or an array

Entries = tuple[bytes, bytes, bytes, list[str], bytes, bytes, bytes]


class Views(NamedTuple):
    """The columns under the names that `row_loops.c` knows."""

    is_fast: npt.NDArray[np.bool_]
    is_dirty: npt.NDArray[np.bool_]
    intervals: Int64s
    handles: UInt32s
    lengths: Int64s
    last_ids: UInt32s
    sent_tokens: Int64s
    sent_chars: Int64s
    kinds: Int64s
    delivered_at: npt.NDArray[np.float64]
    max_tokens: Int64s
    firsts: Int64s
    sets: Int64s
    stop_low: npt.NDArray[np.uint64]
    stop_high: npt.NDArray[np.uint64]
    is_plain: npt.NDArray[np.bool_]  # by entry of `TextColumns`
    low: npt.NDArray[np.uint64]
    high: npt.NDArray[np.uint64]
    harmless: npt.NDArray[np.bool_]  # [set of stop strings, token id]


def new_row_loops(views: Views, fast: TextColumns | None) -> RowLoops:
    """The loops over these columns. They are as good as the arrays: to be made anew when one is
    replaced.
    """
    texts, vocab_size = ([], 0) if fast is None else (fast.texts, fast.vocab_size)
    return RowLoops(views._asdict(), texts, vocab_size)
