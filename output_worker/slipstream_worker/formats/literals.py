"""Looks for literals in text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Generic, TypeVar

from slipstream_ipc.formats.answer_format import Delimiter, LiteralText

T = TypeVar("T")


def split_literals(
    meanings: Mapping[Delimiter | LiteralText, T], token_ids: Mapping[str, int]
) -> tuple[dict[str, T], dict[int, T]]:
    """The meanings of literals that are read as text, and of those that are read as a token's id.
    `token_ids`: of the added tokens.
    """
    texts, ids = {}, {}
    for literal, meaning in meanings.items():
        is_token = isinstance(literal, Delimiter) and literal.literal in token_ids
        if is_token:
            ids[token_ids[literal.literal]] = meaning
        if not is_token or (isinstance(literal, Delimiter) and literal.as_text):
            texts[literal.literal] = meaning
    return texts, ids


class Literals(Generic[T]):
    """Literals and what each of them means. No literal begins another one."""

    def __init__(self, meanings: Mapping[str, T]) -> None:
        """Raises ValueError for an empty literal, or one that begins or ends another or with a
        blank.
        """
        for literal in meanings:
            if not literal or literal != literal.strip():
                raise ValueError(f"literal: got {literal!r}, allowed: without outer blanks")
            for other in meanings:
                if other != literal and other.startswith(literal):
                    raise ValueError(f"literal: {literal!r} begins {other!r}")
        self.meanings = meanings
        self.first_chars = frozenset(literal[0] for literal in meanings)
        self._inner_chars = frozenset("".join(literal[:-1] for literal in meanings))
        self._longest = max(map(len, meanings), default=0)
        self._pattern = re.compile("|".join(map(re.escape, meanings))) if meanings else None

    def match(self, text: str, pos: int) -> str:
        """The literal that stands at `pos`; empty: none."""
        match = self._pattern.match(text, pos) if self._pattern else None
        return match.group() if match else ""

    def begins(self, text: str, pos: int) -> bool:
        """True if the text from `pos` on begins some literal and completes none."""
        num_chars = len(text) - pos
        return num_chars < self._longest and any(
            len(literal) > num_chars and text.startswith(literal[:num_chars], pos)
            for literal in self.meanings
        )

    def find(self, text: str, pos: int, is_final: bool = False) -> tuple[int, str]:
        """The first place from `pos` on where a literal stands, or begins and may be completed by
        what follows, and the literal; empty: not yet. (len(text), ""): there is no such place.
        is_final: nothing follows.
        """
        match = self._pattern.search(text, pos) if self._pattern else None
        found = match.start() if match else len(text)
        if not is_final and text[-1:] in self._inner_chars:
            for start in range(max(pos, len(text) - self._longest + 1), min(found, len(text))):
                if text[start] in self.first_chars and self.begins(text, start):
                    return start, ""
        return found, match.group() if match else ""
