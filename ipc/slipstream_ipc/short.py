"""Short columns: bytes to Python integers and back, without numpy.

Owns: what `columns` does for u32 columns, for so few entries that numpy's fixed cost is more than
all the rest. Does not know: messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct, pack

MOST_SHORT = 64  # entries
_COLUMNS = [Struct(f"<{num}I") for num in range(MOST_SHORT + 1)]


def pack_short(values: Sequence[int]) -> bytes:
    """A u32 column of integers in [0, 2**32)."""
    num = len(values)
    return _COLUMNS[num].pack(*values) if num <= MOST_SHORT else pack(f"<{num}I", *values)


def unpack_short(column: bytes) -> tuple[int, ...]:
    """A u32 column's entries, at most MOST_SHORT: its length is to be a whole number of them."""
    return _COLUMNS[len(column) >> 2].unpack(column)
