"""Log-probabilities of prompts, by row: computed in pieces, sent in pieces, complete or nobody's.

Owns: what is there of them, and how they are cut into messages. The core fills one as it computes,
the worker as it receives. Does not know: messages' types, sockets, when something is sent.

Rules:
- Positions count from 0, which is the prompt's second token: its first has none.
- A piece that begins at 0 begins anew (a prompt is computed again after a preemption, said again
  after an attach); any other goes on where the last one ended. What is whole stays as it is.
- Nobody is given a part: only what is whole is read.
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
    num_tokens: int  # that have log-probabilities: all of the prompt but the first
    width: int


class PromptLogprobLog:
    """Rows that were asked for their prompts' log-probabilities."""

    def __init__(self) -> None:
        self._rows: dict[int, _PromptRow] = {}
        self._values = WideLogprobLog()

    def open(self, row: int, prompt_len: int, num_logprobs: int) -> None:
        """They are wanted of a row that is not here: the token's own and `num_logprobs` more."""
        self._rows[row] = _PromptRow(prompt_len - 1, 1 + num_logprobs)
        self._values.open(row, 1 + num_logprobs)

    def drop(self, row: int) -> None:
        """Free what is there of a row. Idempotent."""
        if self._rows.pop(row, None) is not None:
            self._values.drop(row)

    def is_whole(self, row: int) -> bool:
        """Whether a row wants them, and all are here."""
        wanted = self._rows.get(row)
        return wanted is not None and self._values.length(row) == wanted.num_tokens

    def num_bytes(self, row: int) -> int:
        """What is there of a row takes so many."""
        wanted = self._rows.get(row)
        return 0 if wanted is None else self._values.length(row) * wanted.width * LOGPROB_BYTES

    def add(self, row: int, start: int, piece: Candidates) -> bool:
        """More of a row, at least as wide as it asked; whether that made it whole.

        Raises ProtocolError for a piece that neither goes on nor begins anew.
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
        """The same, of what a message carries, one entry. Raises ProtocolError."""
        wanted = self._rows.get(row)
        if wanted is None:
            return False
        ranks = u32(columns.ranks, "logprobs.ranks")
        check_entry(columns, len(ranks), wanted.width)
        shape = (len(ranks), wanted.width)
        values, ids = f32(columns.values).reshape(shape), u32(columns.ids).reshape(shape)
        return self.add(row, start, Candidates(values, ids, ranks))

    def columns(self, row: int) -> LogprobColumns | None:
        """All of a row's as one entry; None unless they are whole."""
        return self._read(row, 0, self._rows[row].num_tokens) if self.is_whole(row) else None

    def pieces(self, row: int) -> Iterator[tuple[int, LogprobColumns]]:
        """The same cut into messages, with where each begins; none unless they are whole."""
        if not self.is_whole(row):
            return
        wanted = self._rows[row]
        size = max(1, MESSAGE_BUDGET_BYTES // (LOGPROB_BYTES * wanted.width + 4))
        for start in range(0, max(wanted.num_tokens, 1), size):  # of one token: an empty piece
            yield start, self._read(row, start, min(start + size, wanted.num_tokens))

    def _read(self, row: int, start: int, stop: int) -> LogprobColumns:
        found = self._values.read(row, start, stop)
        return LogprobColumns(
            self._rows[row].width,
            pack_f32(found.values),
            pack_u32(found.ids),
            pack_u32(found.ranks),
        )
