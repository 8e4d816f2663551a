"""Histories of log-probabilities of rows that want very many to a token: arrays, not pages.

Owns: the values of wide rows, each as the pieces they came in. A page of 64 positions would take
megabytes for one token of such a row, and a pool of pages far more than all of them hold; here a
row costs what it holds. Does not know: cursors, messages, where a row's positions begin.

Rules:
- Python runs for each row and piece: a token of such a row is hundreds of values, so that is little
  beside copying them.
- Pieces are never written again, nor may whoever gave or read one do so.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
UInt32s = npt.NDArray[np.uint32]
Float32s = npt.NDArray[np.float32]

MAX_NARROW = 64  # values to a token, up to which rows are paged


@dataclass(frozen=True, slots=True)
class Candidates:
    """Of N tokens: column 0 is the token itself, then the most likely ones in its place."""

    values: Float32s  # [N, width], natural logarithm, of the raw logits
    ids: UInt32s  # [N, width]
    ranks: UInt32s  # [N] rank of the token itself, 1 is the most likely

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, some: slice) -> Candidates:
        return Candidates(self.values[some], self.ids[some], self.ranks[some])


def joined(pieces: list[Candidates], width: int) -> Candidates:
    """All of them, one behind the other; `width` says how wide none at all are."""
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
    ends: list[int] = field(default_factory=list)  # the position behind each piece


class WideLogprobLog:
    """Wide rows by number. Positions count from 0 for each."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._num_of_width: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    @property
    def num_values(self) -> int:
        """Values that are held, of all rows."""
        return sum(row.width * row.ends[-1] for row in self._rows.values() if row.ends)

    def has_width(self, width: int) -> bool:
        """Whether any row has this width."""
        return width in self._num_of_width

    def open(self, row: int, width: int) -> None:
        """Begin an empty history of a row that is not here."""
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
        """How many positions a row holds."""
        ends = self._rows[row].ends
        return ends[-1] if ends else 0

    def append(self, row: int, piece: Candidates) -> None:
        """More positions of a row."""
        if len(piece):
            at = self._rows[row]
            at.ends.append(len(piece) + (at.ends[-1] if at.ends else 0))
            at.pieces.append(piece)

    def read(self, row: int, start: int, stop: int) -> Candidates:
        """Positions [start, stop) of a row; IndexError where they are not there."""
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
