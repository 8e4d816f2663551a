"""What a process did in the last second: spans of time, few enough to travel with a beat.

Owns: the ring that they are kept in, and their form on the way. Does not know: what they are spans
of, who shows them. (`trace` keeps everything, for a file; this is always on.)

Rules:
- Recording costs a fraction of a microsecond: three numbers go into columns made beforehand.
- Times are CLOCK_MONOTONIC's, one clock for all processes of a machine. On their way they are
  counted in TICK_US backwards from the report's own time, so that TOLD_US fit into 16 bits.
- The newest CAPACITY spans are kept. Where there were more, less than that is told.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

CAPACITY = 256
SPAN_US = 1_000_000  # how far back is shown …
TOLD_US = 1_300_000  # … and told, as processes tell at moments of their own
TICK_US = 20
_MOST_TICKS = TOLD_US // TICK_US
_MOST_NUM = 2**16 - 1

Column = Annotated[bytes, Meta(max_length=2 * CAPACITY)]


class Spans(Struct, frozen=True, omit_defaults=True):
    """What is told. at_us: when, by CLOCK_MONOTONIC.

    Columns are little-endian u16, [n], oldest span first. begins, ends: ticks before at_us. nums:
    what belongs to each, requests of a step say, at most 65535; empty where nothing does.
    """

    at_us: Annotated[int, Meta(ge=0, le=2**62)] = 0
    begins: Column = b""
    ends: Column = b""
    nums: Column = b""

    def __post_init__(self) -> None:
        """Raises: ValueError, which decoding tells as what it raises itself."""
        num = len(self.begins)
        if num % 2 or len(self.ends) != num or len(self.nums) not in (0, num):
            raise ValueError(f"spans: columns of {num}, {len(self.ends)}, {len(self.nums)} bytes")


class RecentSpans:
    """The newest spans of one thread's work."""

    def __init__(self, *, has_nums: bool = False) -> None:
        self._has_nums = has_nums
        self._num_added = 0
        self._times: npt.NDArray[np.float64] = np.zeros((2, CAPACITY))
        self._nums: npt.NDArray[np.int64] = np.zeros(CAPACITY, np.int64)
        # items of a memoryview are set in half the time of an array's
        self._begin, self._end = (row.data for row in self._times)
        self._num = self._nums.data

    def add(self, begin: float, end: float, num: int = 0) -> None:
        """Record a span, in seconds of time.monotonic()."""
        at = self._num_added % CAPACITY
        self._num_added += 1
        self._begin[at] = begin
        self._end[at] = end
        self._num[at] = num

    def spans(self, now: float) -> Spans:
        """Those of the last TOLD_US that have ended; what began before them is cut."""
        num_kept = min(self._num_added, CAPACITY)
        order = np.arange(self._num_added - num_kept, self._num_added) % CAPACITY
        ticks = np.rint((now - self._times[:, order]) * (1e6 / TICK_US)).clip(0, _MOST_TICKS)
        is_told = ticks[1] < _MOST_TICKS
        begins, ends = ticks[:, is_told].astype("<u2")
        nums = self._nums[order][is_told].clip(0, _MOST_NUM).astype("<u2")
        return Spans(
            int(now * 1e6),
            begins.tobytes(),
            ends.tobytes(),
            nums.tobytes() if self._has_nums else b"",
        )


def since(spans: Spans, origin_us: int) -> list[tuple[int, int, int]]:
    """(begin, end, num) of each span, in µs behind `origin_us`; what lies before it is cut off, and
    num is 0 where there is none.
    """
    begins, ends = (np.frombuffer(column, "<u2") for column in (spans.begins, spans.ends))
    nums = np.frombuffer(spans.nums, "<u2") if spans.nums else np.zeros(len(begins), "<u2")
    offset = spans.at_us - origin_us
    times = offset - np.stack([begins, ends]).astype(np.int64) * TICK_US
    shown = times[1] > 0
    begins_us, ends_us = times[:, shown].clip(0)
    return list(zip(begins_us.tolist(), ends_us.tolist(), nums[shown].tolist(), strict=True))
