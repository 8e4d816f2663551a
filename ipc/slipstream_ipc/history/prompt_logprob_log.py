"""Log-probabilities of prompts, by row: collected in pieces, and read once they are complete.

The core adds pieces as it computes them, the worker as it receives them; both split complete ones
into messages.

- Positions count from 0, which is the prompt's second token: the first has no log-probability.
- A piece at 0 starts over (a prompt is computed again after a preemption, and sent again after an
  attach); any other piece continues where the last one ended. A complete row ignores pieces.
- Only a complete row can be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slipstream_ipc.columns import check_entry, f32, pack_f32, pack_u32, u32
from slipstream_ipc.errors import ProtocolError
from slipstream_ipc.history.wide_logprobs import Candidates, WideLogprobLog
from slipstream_ipc.messages import LogprobColumns
from slipstream_ipc.messages.budgets import LOGPROB_BYTES, MESSAGE_BUDGET_BYTES


@dataclass(frozen=True, slots=True)
class _PromptRow:
    num_tokens: int  # tokens with log-probabilities: all of the prompt but the first
    width: int


class PromptLogprobLog:
    """The prompt log-probabilities of the rows that asked for them."""

    def __init__(self) -> None:
        self._rows: dict[int, _PromptRow] = {}
        self._values = WideLogprobLog()

    def open(self, row: int, prompt_len: int, num_logprobs: int) -> None:
        """Open a row that is not open yet, for the token's own and `num_logprobs` more values."""
        self._rows[row] = _PromptRow(prompt_len - 1, 1 + num_logprobs)
        self._values.open(row, 1 + num_logprobs)

    def drop(self, row: int) -> None:
        """Free what a row holds. Idempotent."""
        if self._rows.pop(row, None) is not None:
            self._values.drop(row)

    def is_whole(self, row: int) -> bool:
        """True if a row is open and complete."""
        wanted = self._rows.get(row)
        return wanted is not None and self._values.length(row) == wanted.num_tokens

    def num_bytes(self, row: int) -> int:
        """The size of what a row holds, in bytes of messages."""
        wanted = self._rows.get(row)
        return 0 if wanted is None else self._values.length(row) * wanted.width * LOGPROB_BYTES

    def add(self, row: int, start: int, piece: Candidates) -> bool:
        """Add a piece, at least as wide as the row; returns whether that completes it.

        Raises: ProtocolError for a piece that neither continues the row nor starts it over.
        """
        wanted = self._rows.get(row)
        if wanted is None or self.is_whole(row):
            return False
        if start == 0 and self._values.length(row):
            self._values.drop(row)
            self._values.open(row, wanted.width)
        have = self._values.length(row)
        if start != have or have + len(piece) > wanted.num_tokens:
            raise ProtocolError(
                f"log-probabilities of {len(piece)} prompt tokens from {start} on, of a prompt of "
                f"{wanted.num_tokens} of which {have} are here"
            )
        width = wanted.width
        self._values.append(
            row, Candidates(piece.values[:, :width], piece.ids[:, :width], piece.ranks)
        )
        return self.is_whole(row)

    def add_columns(self, row: int, start: int, columns: LogprobColumns) -> bool:
        """Add, as `add` does, the columns of one entry that a message carries. Raises:
        ProtocolError.
        """
        wanted = self._rows.get(row)
        if wanted is None:
            return False
        ranks = u32(columns.ranks, "logprobs.ranks")
        check_entry(columns, len(ranks), wanted.width)
        shape = (len(ranks), wanted.width)
        values, ids = f32(columns.values).reshape(shape), u32(columns.ids).reshape(shape)
        return self.add(row, start, Candidates(values, ids, ranks))

    def columns(self, row: int) -> LogprobColumns | None:
        """All values of a row as one entry; None unless it is complete."""
        return self._read(row, 0, self._rows[row].num_tokens) if self.is_whole(row) else None

    def pieces(self, row: int) -> Iterator[tuple[int, LogprobColumns]]:
        """All values of a row, split for messages, with the start of each; none unless complete."""
        if not self.is_whole(row):
            return
        wanted = self._rows[row]
        size = max(1, MESSAGE_BUDGET_BYTES // (LOGPROB_BYTES * wanted.width + 4))
        for start in range(0, max(wanted.num_tokens, 1), size):  # a one-token prompt: empty piece
            yield start, self._read(row, start, min(start + size, wanted.num_tokens))

    def _read(self, row: int, start: int, stop: int) -> LogprobColumns:
        found = self._values.read(row, start, stop)
        return LogprobColumns(
            self._rows[row].width,
            pack_f32(found.values),
            pack_u32(found.ids),
            pack_u32(found.ranks),
        )
