"""Log-probabilities of a prompt, as they come to a client, and as its caller sees them.

Owns: one stream's pieces until they are whole. Does not know: streams, the wire's order beyond
this.

Rules:
- Positions count from 0, which is the prompt's second token: the first has none.
- A piece that begins at 0 begins anew, for the server says all of them again after an attach; what
  is whole stays as it is. So nothing is doubled, and no two computations are mixed.
- They stay in the columns they came in until somebody looks at them.
"""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.delta_batch import TokenLogprobs, columns_in_parts
from slipstream_ipc.columns import check_entry
from slipstream_ipc.messages import LogprobColumns

PromptTokenLogprobs = list[TokenLogprobs | None]  # a prompt's, None for its first token


class PromptPieces:
    """The pieces of one prompt."""

    def __init__(self) -> None:
        self._pieces: list[LogprobColumns] = []
        self._num_tokens = 0
        self._is_whole = False

    def add_piece(self, start: int, columns: LogprobColumns, num_tokens: int) -> bool:
        """A piece of the log-probabilities of `num_tokens`; False where something is missing.

        Raises: ProtocolError.
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
        """Of all tokens of the prompt, some at a time."""
        yield [None]
        for columns in self._pieces:
            for part in columns_in_parts(columns):
                yield [*part]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is to come any more."""
        return self._is_whole


def prompt_logprobs_of(pieces: PromptPieces | None) -> PromptTokenLogprobs | None:
    """Of all tokens of the prompt, None for the first; None where they are not all here."""
    if pieces is None or not pieces.is_whole:
        return None
    return [entry for part in pieces.read_in_parts() for entry in part]
