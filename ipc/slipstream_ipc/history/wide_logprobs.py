"""Histories of log-probabilities for rows with very many values per token, in arrays, not pages.

Each row keeps its values in the pieces in which they were appended, so it takes only the memory of
what it holds. Pages of 64 positions would take megabytes for the first token of such a row, and a
pool of them far more than its rows hold.

- Python code runs for each row and piece: a token of such a row has hundreds of values, whose
  copying takes longer.
- Pieces are kept and returned without a copy, so neither the caller that appends one nor the one
  that reads it may write to it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np

from slipstream_ipc.arrays import Float32s, UInt32s

MAX_NARROW = 64  # values per token up to which rows are paged


@dataclass(frozen=True, slots=True)
class Candidates:
    """Log-probabilities of N tokens: column 0 is the token itself, then its alternatives."""

    values: Float32s  # [N, width], natural logarithm, of the raw logits
    ids: UInt32s  # [N, width]
    ranks: UInt32s  # [N] rank of the token itself, 1 is the most likely

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, some: slice) -> Candidates:
        return Candidates(self.values[some], self.ids[some], self.ranks[some])


def joined(pieces: list[Candidates], width: int) -> Candidates:
    """The pieces concatenated; `width` is that of the result if there are none."""
    if len(pieces) == 1:
        return pieces[0]
    if not pieces:
        none = np.empty((0, width))
        return Candidates(none.astype(np.float32), none.astype(np.uint32), np.empty(0, np.uint32))
    return Candidates(
        np.concatenate([piece.values for piece in pieces]),
        np.concatenate([piece.ids for piece in pieces]),
        np.concatenate([piece.ranks for piece in pieces]),
    )


@dataclass(slots=True)
class _Row:
    width: int
    pieces: list[Candidates] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # the position after each piece


class WideLogprobLog:
    """Wide rows by number. The positions of each count from 0."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._num_of_width: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def has_width(self, width: int) -> bool:
        """True if any row has this width."""
        return width in self._num_of_width

    def open(self, row: int, width: int) -> None:
        """Add a row, which must not be open, with an empty history."""
        assert row not in self._rows
        self._rows[row] = _Row(width)
        self._num_of_width[width] = self._num_of_width.get(width, 0) + 1

    def drop(self, row: int) -> None:
        """Free all that a row holds."""
        width = self._rows.pop(row).width
        self._num_of_width[width] -= 1
        if not self._num_of_width[width]:
            del self._num_of_width[width]

    def length(self, row: int) -> int:
        """The number of positions that a row holds."""
        ends = self._rows[row].ends
        return ends[-1] if ends else 0

    def append(self, row: int, piece: Candidates) -> None:
        """Append positions to a row."""
        if len(piece):
            at = self._rows[row]
            at.ends.append(len(piece) + (at.ends[-1] if at.ends else 0))
            at.pieces.append(piece)

    def read(self, row: int, start: int, stop: int) -> Candidates:
        """Positions [start, stop) of a row. Raises: IndexError if it does not hold them."""
        at = self._rows[row]
        if not 0 <= start <= stop <= self.length(row):
            raise IndexError("positions outside of the history")
        found: list[Candidates] = []
        index = bisect_right(at.ends, start)
        while start < stop:
            begin = at.ends[index - 1] if index else 0
            piece = at.pieces[index][start - begin : stop - begin]
            found.append(piece)
            start += len(piece)
            index += 1
        return joined(found, at.width)
