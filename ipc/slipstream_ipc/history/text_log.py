"""The history of a stream's released text, readable from any position on.

Text is released in units. Token ids are kept elsewhere, by token position.

- A unit is text together with the tokens that produced it; neither is readable without the other.
- Units are a pure function of the token history: a restarted worker makes the same ones, so a
  position (chars, tokens) that an earlier worker process handed out is still valid.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple


class TextCursor(NamedTuple):
    """A position between two units."""

    unit: int
    num_chars: int
    num_tokens: int


START = TextCursor(0, 0, 0)


class TextLog:
    """Append-only units of one stream, from the position `start` on."""

    __slots__ = ("_num_chars", "_start", "_texts", "_token_ends", "num_tokens")

    def __init__(self, start: TextCursor = START) -> None:
        """`start`: the position of the stream at which the log begins; its unit is 0."""
        assert start.unit == 0
        self._start = start
        self._texts: list[str] = []
        self._token_ends: list[int] = []
        self._num_chars = start.num_chars
        # tokens of the stream released so far, those before `start` included
        self.num_tokens = start.num_tokens

    @property
    def end(self) -> TextCursor:
        """The position after everything released."""
        return TextCursor(len(self._texts), self._num_chars, self.num_tokens)

    @property
    def ends_within_token(self) -> bool:
        """True if the last unit has text but no token: its token is released with later text."""
        if not self._token_ends:
            return False
        before = self._token_ends[-2] if len(self._token_ends) > 1 else self._start.num_tokens
        return self._token_ends[-1] == before

    def append(self, text: str, num_tokens: int) -> None:
        """Release `text` together with all tokens up to the `num_tokens`-th."""
        self._texts.append(text)
        self._token_ends.append(num_tokens)
        self._num_chars += len(text)
        self.num_tokens = num_tokens

    def append_each(self, texts: Sequence[str], before: int) -> None:
        """Release each of `texts` together with one token, after the first `before` tokens."""
        self._texts += texts
        self._token_ends += range(before + 1, before + 1 + len(texts))
        self.num_tokens = self._token_ends[-1] if self._token_ends else self._start.num_tokens
        self._num_chars += sum(map(len, texts))

    @property
    def starts_at_zero(self) -> bool:
        """True if the log holds all units of the stream."""
        return self._start == START

    @property
    def num_units(self) -> int:
        """Units in this log."""
        return len(self._texts)

    def advance(
        self, cursor: TextCursor, max_chars: int, max_tokens: int = sys.maxsize
    ) -> TextCursor:
        """The end, or the last position within `max_chars` and `max_tokens` of `cursor`, but at
        least one unit further.
        """
        end = self.end
        if end.unit - cursor.unit <= 1:
            return end
        last_char, last_token = cursor.num_chars + max_chars, cursor.num_tokens + max_tokens
        if end.num_chars <= last_char and end.num_tokens <= last_token:
            return end
        unit = cursor.unit + 1
        num_chars = cursor.num_chars + len(self._texts[cursor.unit])
        while unit < end.unit:
            more = len(self._texts[unit])
            if num_chars + more > last_char or self._token_ends[unit] > last_token:
                break
            num_chars += more
            unit += 1
        return TextCursor(unit, num_chars, self._token_ends[unit - 1])

    def text_between(self, start: TextCursor, stop: TextCursor) -> str:
        """The text released between two cursors."""
        if stop.unit - start.unit == 1:
            return self._texts[start.unit]
        return "".join(self._texts[start.unit : stop.unit])

    def find(self, num_chars: int, num_tokens: int) -> TextCursor | None:
        """The cursor at a reader's position; None if this log has no such position."""
        unit = 0
        if num_tokens > self._start.num_tokens:
            unit = bisect_left(self._token_ends, num_tokens) + 1
        chars = self._start.num_chars + sum(map(len, self._texts[:unit]))
        # units may have text and no token (a flush at the end), so one token count may have many
        for end in range(unit, len(self._texts) + 1):
            tokens = self._token_ends[end - 1] if end else self._start.num_tokens
            if tokens != num_tokens or chars > num_chars:
                break
            if chars == num_chars:
                return TextCursor(end, num_chars, num_tokens)
            if end < len(self._texts):
                chars += len(self._texts[end])
        return None
