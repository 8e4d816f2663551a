"""Records what a process did in the last second, as time spans that are reported with its beats.

It is always on; `trace` writes complete recordings to a file.

- Recording takes a fraction of a microsecond: three numbers go into preallocated columns.
- The newest CAPACITY spans are kept; with more, a report covers less time.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream_ipc.telemetry.spans import CAPACITY, TICK_US, TOLD_US, Spans

_MAX_TICKS = TOLD_US // TICK_US
_MAX_NUM = 2**16 - 1


class RecentSpans:
    """The newest spans of one thread's work."""

    def __init__(self, *, has_nums: bool = False) -> None:
        self._has_nums = has_nums
        self._num_added = array("q", [0])
        self._times: npt.NDArray[np.float64] = np.zeros((2, CAPACITY))
        self._nums: npt.NDArray[np.int64] = np.zeros(CAPACITY, np.int64)
        # setting an item of a memoryview takes half the time of an array's
        self._begin, self._end = (row.data for row in self._times)
        self._num = self._nums.data

    @property
    def columns(self) -> tuple[Any, Any, Any]:
        """The number of spans added so far (i64 [1]), and beginnings and ends of the newest in
        seconds (f64 [capacity]): to add spans without a number elsewhere.
        """
        return self._num_added, self._begin, self._end

    def add(self, begin: float, end: float, num: int = 0) -> None:
        """Record a span, in seconds of time.monotonic()."""
        at = self._num_added[0] % CAPACITY
        self._num_added[0] += 1
        self._begin[at] = begin
        self._end[at] = end
        self._num[at] = num

    def spans(self, now: float) -> Spans:
        """The spans that ended within the last TOLD_US before `now`, cut to that time."""
        num_added = self._num_added[0]
        num_kept = min(num_added, CAPACITY)
        order = np.arange(num_added - num_kept, num_added) % CAPACITY
        ticks = np.rint((now - self._times[:, order]) * (1e6 / TICK_US)).clip(0, _MAX_TICKS)
        is_told = ticks[1] < _MAX_TICKS
        begins, ends = ticks[:, is_told].astype("<u2")
        nums = self._nums[order][is_told].clip(0, _MAX_NUM).astype("<u2")
        return Spans(
            int(now * 1e6),
            begins.tobytes(),
            ends.tobytes(),
            nums.tobytes() if self._has_nums else b"",
        )


def since(spans: Spans, origin_us: int) -> list[tuple[int, int, int]]:
    """(begin, end, num) of each span, in µs after `origin_us`; what lies before that is cut off.

    num is 0 if the spans have no numbers.
    """
    begins, ends = (np.frombuffer(column, "<u2") for column in (spans.begins, spans.ends))
    nums = np.frombuffer(spans.nums, "<u2") if spans.nums else np.zeros(len(begins), "<u2")
    offset = spans.at_us - origin_us
    times = offset - np.stack([begins, ends]).astype(np.int64) * TICK_US
    shown = times[1] > 0
    begins_us, ends_us = times[:, shown].clip(0)
    return list(zip(begins_us.tolist(), ends_us.tolist(), nums[shown].tolist(), strict=True))
