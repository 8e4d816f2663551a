"""Divisions of an answer's text, as detokenised tokens divide it."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class AnswerPiece(NamedTuple):
    """A piece of an answer: text, or a token of the vocabulary that is a delimiter."""

    text: str
    is_token: bool


def pieces(text: str, added_tokens: Sequence[str]) -> list[AnswerPiece]:
    """The text in order, cut at the added tokens, of which the longest wins."""
    if not added_tokens:
        return [AnswerPiece(text, False)] if text else []
    longest_first = sorted(added_tokens, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
    return [AnswerPiece(part, i % 2 == 1) for i, part in enumerate(parts) if part]


def divided(
    whole: Iterable[AnswerPiece], generator: random.Random, max_len: int
) -> list[AnswerPiece]:
    """The same answer with each text cut into random pieces of 1 to `max_len` characters."""
    cut: list[AnswerPiece] = []
    for piece in whole:
        at, text = 0, piece.text
        while not piece.is_token and at < len(text):
            end = at + generator.randint(1, max_len)
            cut.append(AnswerPiece(text[at:end], False))
            at = end
        if piece.is_token:
            cut.append(piece)
    return cut
