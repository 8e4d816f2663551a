"""The detokeniser of BPEDecoder: a suffix ends words, and becomes a blank, or nothing at the end.

Looks tokens up in a table with `last_pieces`; the state of a stream is what its last token becomes
before another token, and at the end. The blank after a word is emitted with the token that follows,
since decode shows it no earlier. The part of a token that is the same in both cases is emitted at
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from typing import NamedTuple

from slipstream_worker.detokenizer.table import TokenTable

__all__ = ["SuffixDetokenizer", "SuffixView"]

_Parts = tuple[str, str, str]  # common part, then the rest before another token, and at the end


class SuffixView(NamedTuple):
    """A table as a stream reads it: with the special tokens, or without them."""

    parts: list[_Parts | None]  # None: decode leaves the token out

    @classmethod
    def of(cls, table: TokenTable, skip_special_tokens: bool) -> SuffixView:
        """The view, shared by all streams with the same `skip_special_tokens`."""
        parts = [
            None if piece is None or last is None else _parts(piece.decode(), last.decode())
            for piece, last in zip(table.pieces, table.last_pieces, strict=True)
        ]
        if skip_special_tokens:
            for token_id in table.special:
                parts[token_id] = None
        return cls(parts)


class SuffixDetokenizer:
    """One stream's text, by table lookup."""

    __slots__ = ("_at_end", "_before_next", "_parts", "num_pending")

    def __init__(self, view: SuffixView, prompt_ids: Sequence[int]) -> None:
        self._parts = view.parts
        self._before_next = ""
        for token_id in reversed(prompt_ids):
            parts = self._parts[token_id] if token_id < len(self._parts) else None
            if parts is not None:
                self._before_next = parts[1]
                break
        self._at_end = ""  # the prompt shows what its last token becomes at the end
        self.num_pending = 0

    @property
    def is_settled(self) -> bool:
        return False

    def step(self, token_id: int) -> str:
        parts = self._parts[token_id] if token_id < len(self._parts) else None
        if parts is None:
            self.num_pending += self.num_pending > 0
            return ""
        before = self._before_next
        text, self._before_next, self._at_end = parts
        self.num_pending = 1 if self._at_end else 0
        return before + text

    def step_many(self, token_ids: Sequence[int]) -> str:
        return "".join([self.step(token_id) for token_id in token_ids])

    def flush(self) -> str:
        tail = self._at_end
        self._at_end = ""
        self.num_pending = 0
        return tail


def _parts(followed: str, last: str) -> _Parts:
    certain = commonprefix((followed, last))  # noqa: RUF071 - it is characters that are meant
    return certain, followed[len(certain) :], last[len(certain) :]
