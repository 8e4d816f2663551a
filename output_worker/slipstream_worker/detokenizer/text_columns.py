"""The vocabulary as columns: the text of every token whose text does not depend on its neighbours.

For each `VocabularyView`: every token's text, its length, and the set of characters in it.

- A token is whole if its text is the same after any tokens, as long as nothing waits (see
  `Detokenizer.is_settled`). The others, and ids beyond the vocabulary, have length NOT_WHOLE.
- A set of characters has 128 bits in two words. ASCII letters, digits and signs have a bit each;
  all other characters share those of control characters. Two texts without a common bit have no
  common character; the converse does not hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from slipstream_ipc.arrays import UInt64s

NOT_WHOLE = -1
_FIRST_SHARED_BIT, _NUM_SHARED_BITS = 14, 16  # of control characters that are rare in text
_ONE = np.uint64(1)


class VocabularyView(IntEnum):
    """A stream's view of the vocabulary."""

    SHOWN = 0  # special tokens have their text
    SKIPPED = 1  # special tokens have none
    SILENT = 2  # no text is wanted


class TextColumns:
    """One entry for each view and token, at `first(view) + token id`."""

    def __init__(self, shown: Sequence[str | None], skipped: Sequence[str | None]) -> None:
        """Texts by token id; None for a token that is not whole."""
        assert len(shown) == len(skipped)
        self.vocab_size = len(shown)  # also stands for all ids beyond the vocabulary
        beyond = [None]
        entries = [*shown, *beyond, *skipped, *beyond, *([""] * len(shown)), *beyond]
        self.texts = [text or "" for text in entries]
        self.lens = np.fromiter(
            (NOT_WHOLE if text is None else len(text) for text in entries), np.int64, len(entries)
        )
        self.low, self.high = character_sets(self.texts)

    def first(self, view: VocabularyView) -> int:
        """Index of the view's first entry."""
        return view * (self.vocab_size + 1)


def character_sets(texts: Sequence[str]) -> tuple[UInt64s, UInt64s]:
    """The characters of each text: words of bits 0-63 and of bits 64-127, each u64 [len(texts)]."""
    lens = np.fromiter(map(len, texts), np.int64, len(texts))
    points = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)
    shared = _FIRST_SHARED_BIT + points % _NUM_SHARED_BITS
    bits = np.where(points < 128, points, shared).astype(np.uint64)
    words = []
    for first_bit in (0, 64):
        inside = (bits >= first_bit) & (bits < first_bit + 64)
        flags = np.where(inside, _ONE << (bits % np.uint64(64)), np.uint64(0))
        word = np.zeros(len(texts), np.uint64)
        some = np.flatnonzero(lens)
        if len(some):
            begins = (np.cumsum(lens) - lens)[some]
            word[some] = np.bitwise_or.reduceat(flags, begins)
        words.append(word)
    return words[0], words[1]
