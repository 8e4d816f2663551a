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

from slipstream.batch import Batch, TokenLogprobs
from slipstream_ipc.columns import check_entry, pack_u32
from slipstream_ipc.messages import Deltas, LogprobColumns

PromptTokenLogprobs = list[TokenLogprobs | None]  # a prompt's, None for its first token


class PromptPieces:
    """The pieces of one prompt."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, LogprobColumns]] = []  # and of how many tokens each is
        self._num_tokens = 0
        self._is_whole = False

    def take(self, start: int, columns: LogprobColumns, num_tokens: int) -> bool:
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
        self._pieces.append((num, columns))
        self._num_tokens += num
        self._is_whole = self._num_tokens == num_tokens
        return True

    def read(self) -> PromptTokenLogprobs:
        """Of all tokens of the prompt."""
        found: PromptTokenLogprobs = [None]
        for num, columns in self._pieces:
            message = Deltas(b"", b"", b"", [""], b"", pack_u32([num]), logprobs=columns)
            found += Batch(message, {}).logprobs(0, 0) or []
        return found

    @property
    def is_whole(self) -> bool:
        """Whether nothing is to come any more."""
        return self._is_whole


def prompt_logprobs_of(pieces: PromptPieces | None) -> PromptTokenLogprobs | None:
    """Of all tokens of the prompt, None for the first; None where they are not all here."""
    return pieces.read() if pieces is not None and pieces.is_whole else None
