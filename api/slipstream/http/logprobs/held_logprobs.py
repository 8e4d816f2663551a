"""Log-probabilities that wait to be shown, in columns: as JSON they take eight times as much.

They are held in pieces of about equal size, so that the memory of one answer fits the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from slipstream.delta_batch import EntryColumns, divided
from slipstream_ipc.messages import LogprobColumns

_PIECE_BYTES = 2**14  # of values, and of ids


class HeldLogprobs:
    """The log-probabilities of consecutive tokens, all with equally many candidates."""

    __slots__ = ("_num_sealed", "_num_unsealed", "_pieces", "_unsealed", "width")

    def __init__(self) -> None:
        self.width = 0
        self._pieces = deque[LogprobColumns]()
        self._num_sealed = 0  # tokens in them
        self._unsealed: list[LogprobColumns] = []  # that follow, less than a piece
        self._num_unsealed = 0

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""
        return self._num_sealed + self._num_unsealed

    @property
    def num_candidates(self) -> int:
        """The number of candidates of all tokens together."""
        return self.num_tokens * self.width

    def add(self, columns: EntryColumns | LogprobColumns) -> None:
        """Add the tokens that follow, if these have log-probabilities."""
        width, num = columns.width, len(columns.ranks) // 4
        if not width:
            return
        self.width = width
        step = max(1, _PIECE_BYTES // (4 * width))
        for at in range(0, num, step):
            self._unsealed.append(_cut(columns, at, at + step))
            self._num_unsealed += min(step, num - at)
            if self._num_unsealed >= step:
                self._seal()

    def take(self, num_tokens: int) -> HeldLogprobs:
        """Remove the first tokens and return them."""
        self._seal()
        taken, num_left = HeldLogprobs(), min(num_tokens, self.num_tokens)
        while num_left:
            piece = self._pieces.popleft()
            num = len(piece.ranks) // 4
            if num > num_left:
                self._pieces.appendleft(_cut(piece, num_left, num))
                piece, num = _cut(piece, 0, num_left), num_left
            taken.add(piece)
            self._num_sealed -= num
            num_left -= num
        return taken

    def extend(self, other: HeldLogprobs) -> None:
        """Add the tokens of another one."""
        for piece in (*other._pieces, *other._unsealed):
            self.add(piece)

    def parts(self) -> Iterator[LogprobColumns]:
        """The tokens, some at a time."""
        self._seal()
        for piece in self._pieces:
            yield from divided(piece)

    def _seal(self) -> None:
        """Make a piece of what follows the last one."""
        some = self._unsealed
        if some:
            values, ids = (
                b"".join([one.values for one in some]),
                b"".join([one.ids for one in some]),
            )
            ranks = b"".join([one.ranks for one in some])
            self._pieces.append(LogprobColumns(self.width, values, ids, ranks))
            self._num_sealed += self._num_unsealed
            self._unsealed, self._num_unsealed = [], 0


def _cut(columns: EntryColumns | LogprobColumns, begin: int, end: int) -> LogprobColumns:
    tokens = slice(4 * begin, 4 * end)
    some = slice(4 * begin * columns.width, 4 * end * columns.width)
    return LogprobColumns(
        columns.width, columns.values[some], columns.ids[some], columns.ranks[tokens]
    )
