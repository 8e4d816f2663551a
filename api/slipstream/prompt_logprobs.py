"""The log-probabilities of a prompt: collected from pieces, and converted for the caller.

- Positions count from 0, the prompt's second token; the first has no log-probability.
- A piece that starts at 0 discards the pieces before it, as the server sends all of them again
  after an attach. A complete set is not replaced. So nothing is duplicated, and two computations
  are never mixed.
- The values stay in the columns of their messages until they are accessed.
"""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.delta_batch import TokenLogprobs, columns_in_parts, divided
from slipstream_ipc.columns import check_entry
from slipstream_ipc.messages import LogprobColumns

PromptTokenLogprobs = list[TokenLogprobs | None]  # an entry to a prompt token, None for the first


class PromptPieces:
    """The log-probabilities of one prompt, in the pieces in which they arrive."""

    def __init__(self) -> None:
        self._pieces: list[LogprobColumns] = []
        self._num_tokens = 0
        self._is_whole = False

    def add_piece(self, start: int, columns: LogprobColumns, num_tokens: int) -> bool:
        """Add the piece that starts at position `start`, of `num_tokens` positions in all.

        Returns False where the piece leaves a gap or exceeds `num_tokens`. Raises: ProtocolError.
        """
        num = len(columns.ranks) // 4
        check_entry(columns, num, columns.width)
        if self._is_whole:
            return True
        if start == 0:
            self._pieces, self._num_tokens = [], 0
        if start != self._num_tokens or start + num > num_tokens:
            return False
        self._pieces.append(columns)
        self._num_tokens += num
        self._is_whole = self._num_tokens == num_tokens
        return True

    def read_in_parts(self) -> Iterator[PromptTokenLogprobs]:
        """The log-probabilities of all prompt tokens, some tokens at a time."""
        yield [None]
        for columns in self._pieces:
            for part in columns_in_parts(columns):
                yield [*part]

    def parts(self) -> Iterator[LogprobColumns]:
        """The columns of all prompt tokens but the first, some tokens at a time."""
        for columns in self._pieces:
            yield from divided(columns)

    @property
    def is_whole(self) -> bool:
        """True if all pieces have arrived."""
        return self._is_whole


def prompt_logprobs_of(pieces: PromptPieces | None) -> PromptTokenLogprobs | None:
    """The log-probabilities of all prompt tokens, None for the first; None until all are here."""
    if pieces is None or not pieces.is_whole:
        return None
    return [entry for part in pieces.read_in_parts() for entry in part]
