"""The items of a worker's columns, one by one.

Owns: which columns the scalar way reads and writes. Does not know: what they mean; see `columns`,
whose memory they are.
"""

from __future__ import annotations

from dataclasses import dataclass

NO_CELLS = memoryview(b"")


@dataclass(frozen=True, slots=True)
class Cells:
    """Columns as Python numbers, by line: several times cheaper one by one than arrays are.

    `columns` makes new ones when it grows.
    """

    is_fast: memoryview
    is_dirty: memoryview
    intervals: memoryview
    widths: memoryview
    handles: memoryview
    sent_tokens: memoryview
    sent_chars: memoryview
    delivered_at: memoryview[float]
    max_tokens: memoryview
    firsts: memoryview
    stop_low: memoryview
    stop_high: memoryview
    sets: memoryview
    # by entry of the vocabulary's table
    is_plain: memoryview
    lows: memoryview
    highs: memoryview
