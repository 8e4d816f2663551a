"""The detokeniser of ByteLevel decoders: tokens are bytes, and the text is that of the joined
bytes.

Looks tokens up in a table of mode "bytelevel"; the state of a stream is the bytes of an incomplete
character. A special token between two halves of a character breaks it if special tokens are shown
and leaves it whole if they are skipped, as in decode, which joins the bytes after skipping.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from slipstream_worker.detokenizer.table import TokenTable
from slipstream_worker.detokenizer.utf8 import MAX_DANGLING, REPLACEMENT, decode_joined

__all__ = ["ByteDetokenizer", "ByteView"]


class ByteView(NamedTuple):
    """A table as a stream reads it: with the special tokens, or with nothing in their place."""

    pieces: list[bytes]
    texts: list[str | None]  # None: the piece is not valid UTF-8 by itself
    errors: Literal["replace", "ignore"]  # for bytes of no character

    @classmethod
    def of(cls, table: TokenTable, skip_special_tokens: bool) -> ByteView:
        """The view, shared by all streams with the same `skip_special_tokens`."""
        pieces = [piece or b"" for piece in table.pieces]
        if skip_special_tokens:
            for token_id in table.special:
                pieces[token_id] = b""
        return cls(pieces, [_own_text(piece) for piece in pieces], table.errors)


class ByteDetokenizer:
    """One stream's text, by table lookup."""

    __slots__ = ("_errors", "_num_inherited", "_pieces", "_texts", "_waiting", "num_pending")

    def __init__(self, view: ByteView, prompt_ids: Sequence[int]) -> None:
        self._pieces, self._texts, self._errors = view
        self._waiting = _dangling_bytes(view.pieces, prompt_ids)
        # Bytes of a character that the prompt has begun, and for which it shows U+FFFD.
        self._num_inherited = len(self._waiting)
        self.num_pending = 0

    @property
    def is_settled(self) -> bool:
        return not self._waiting

    def step(self, token_id: int) -> str:
        if not self._waiting:
            try:
                text = self._texts[token_id]
            except IndexError:
                return ""
            if text is not None:
                return text
        return self._decode(_piece(self._pieces, token_id))

    def step_many(self, token_ids: Sequence[int]) -> str:
        if not self._waiting:
            texts = self._texts
            try:  # nearly always; a check of each text would cost more than all the rest
                return "".join([texts[i] for i in token_ids])  # type: ignore[misc]
            except (IndexError, TypeError):
                pass  # an id beyond the vocabulary, or a text that is None
        return "".join([self.step(token_id) for token_id in token_ids])

    def flush(self) -> str:
        is_shown = self._waiting and not self._num_inherited and self._errors == "replace"
        tail = REPLACEMENT if is_shown else ""
        self._waiting = b""
        self._num_inherited = self.num_pending = 0
        return tail

    def _decode(self, more: bytes) -> str:
        """The text that a token's bytes complete."""
        data = self._waiting + more
        text, self._waiting = decode_joined(data, self._errors)
        is_used = len(self._waiting) < len(data)
        if is_used:  # all waiting bytes; those that wait now are this token's
            self.num_pending = 1 if self._waiting else 0
        elif len(self._waiting) > self._num_inherited:
            self.num_pending += 1
        if self._num_inherited and is_used:
            self._num_inherited = 0
            return text.removeprefix(REPLACEMENT) if self._errors == "replace" else text
        return text


def _own_text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def _piece(pieces: list[bytes], token_id: int) -> bytes:
    return pieces[token_id] if token_id < len(pieces) else b""


def _dangling_bytes(pieces: list[bytes], prompt_ids: Sequence[int]) -> bytes:
    """The incomplete character at the prompt's end, found from its last three bytes."""
    tail = b""
    for token_id in reversed(prompt_ids):
        tail = _piece(pieces, token_id) + tail
        if len(tail) >= MAX_DANGLING:
            break
    return decode_joined(tail)[1]
