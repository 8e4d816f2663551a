"""The spans of a process over the last second, as it reports them with its beats.

Times are CLOCK_MONOTONIC, which all processes of a machine share. In a report they are ticks of
TICK_US before the report's time, so that TOLD_US fit into 16 bits.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

CAPACITY = 256  # spans of a report
PART_SUFFIX = ".part"  # of the file of spans that a process records for a trace
SPAN_US = 1_000_000  # how far back is shown
TOLD_US = 1_300_000  # how far back is reported: more, as processes report at different times
TICK_US = 20  # so that spans fit into a beat's line (decision 014)

Column = Annotated[bytes, Meta(max_length=2 * CAPACITY)]


class Spans(Struct, frozen=True, omit_defaults=True):
    """Reported spans. at_us: time of the report, CLOCK_MONOTONIC.

    Columns are little-endian u16, [n], oldest span first. begins, ends: ticks before at_us. nums: a
    number for each span, such as the requests of a step, at most 65535; empty if there are none.
    """

    at_us: Annotated[int, Meta(ge=0, le=2**62)] = 0
    begins: Column = b""
    ends: Column = b""
    nums: Column = b""

    def __post_init__(self) -> None:
        """Raises: ValueError, which msgspec's decoders turn into a ValidationError."""
        num = len(self.begins)
        if num % 2 or len(self.ends) != num or len(self.nums) not in (0, num):
            raise ValueError(f"spans: columns of {num}, {len(self.ends)}, {len(self.nums)} bytes")
