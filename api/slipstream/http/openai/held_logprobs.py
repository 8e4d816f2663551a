"""Log-probabilities that wait to be shown, in columns: as JSON they take eight times as much.

They are held in pieces of about equal size, so that the memory of one answer fits the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from slipstream.delta_batch import EntryColumns, divided
from slipstream_ipc.messages import LogprobColumns

_PIECE_BYTES = 2**15  # of values, and of ids


class HeldLogprobs:
    """The log-probabilities of consecutive tokens, all with equally many candidates."""

    __slots__ = ("_ids", "_num_sealed", "_pieces", "_ranks", "_values", "width")

    def __init__(self) -> None:
        self.width = 0
        self._pieces = deque[LogprobColumns]()
        self._num_sealed = 0  # tokens in them
        self._values, self._ids, self._ranks = bytearray(), bytearray(), bytearray()  # the rest

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""
        return self._num_sealed + len(self._ranks) // 4

    @property
    def num_candidates(self) -> int:
        """The number of candidates of all tokens together."""
        return self.num_tokens * self.width

    def add(self, columns: EntryColumns | LogprobColumns) -> None:
        """Add the tokens that follow, if these have log-probabilities."""
        if not columns.width:
            return
        self.width = width = columns.width
        num, step = len(columns.ranks) // 4, max(1, _PIECE_BYTES // (4 * width))
        for at in range(0, num, step):
            begin, end = 4 * at, 4 * (at + step)
            self._values += columns.values[begin * width : end * width]
            self._ids += columns.ids[begin * width : end * width]
            self._ranks += columns.ranks[begin:end]
            if len(self._values) >= _PIECE_BYTES:
                self._seal()

    def take(self, num_tokens: int) -> HeldLogprobs:
        """Remove the first tokens and return them."""
        taken, num_left = HeldLogprobs(), min(num_tokens, self.num_tokens)
        while num_left:
            self._seal()
            piece = self._pieces.popleft()
            num = len(piece.ranks) // 4
            self._num_sealed -= num
            if num > num_left:
                tokens, candidates = 4 * num_left, 4 * num_left * piece.width
                rest = _cut(piece, slice(tokens, None), slice(candidates, None))
                piece = _cut(piece, slice(tokens), slice(candidates))
                self._pieces.appendleft(rest)
                self._num_sealed += num - num_left
                num = num_left
            taken.add(piece)
            num_left -= num
        return taken

    def extend(self, other: HeldLogprobs) -> None:
        """Add the tokens of another one."""
        for piece in other._pieces:
            if self._ranks:
                self.add(piece)
            else:
                self.width = piece.width
                self._pieces.append(piece)
                self._num_sealed += len(piece.ranks) // 4
        self.add(other._rest)

    def parts(self) -> Iterator[LogprobColumns]:
        """The tokens, some at a time."""
        for piece in (*self._pieces, self._rest):
            if piece.ranks:
                yield from divided(piece)

    def _seal(self) -> None:
        """Make a piece of the rest."""
        if self._ranks:
            self._pieces.append(self._rest)
            self._num_sealed += len(self._ranks) // 4
            self._values, self._ids, self._ranks = bytearray(), bytearray(), bytearray()

    @property
    def _rest(self) -> LogprobColumns:
        """The tokens behind the pieces."""
        return LogprobColumns(self.width, bytes(self._values), bytes(self._ids), bytes(self._ranks))


def _cut(columns: LogprobColumns, tokens: slice, candidates: slice) -> LogprobColumns:
    return LogprobColumns(
        columns.width, columns.values[candidates], columns.ids[candidates], columns.ranks[tokens]
    )
