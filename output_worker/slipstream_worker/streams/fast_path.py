"""Tokens that need no check: whole tokens that end no stream and begin no stop string.

- A token that ends any open stream is plain for none. So is a delimiter's of a stream that is read
  as events, and one without text, except where no text is wanted.
- Which whole tokens may begin a stop string is refined as tokens are seen: at first all that
  contain the first character of one, until a token has been checked against that set of stop
  strings and found harmless. For a stream that is read as events, the same holds of its reader's
  hazards, in each mode of its own (see `AnswerOutput.mode`).
- At most _MAX_SETS sets are tracked. A new set then takes the number of the oldest, whose streams
  fall back to the check by first characters.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import lru_cache

import numpy as np

from slipstream_ipc.arrays import Bools
from slipstream_worker.detokenizer.text_columns import TextColumns, VocabularyView, character_sets

_MAX_SETS = 64  # sets of stop strings with a record of harmless tokens


class PlainTokens:
    """The plain and harmless tokens of a vocabulary; none of them if `fast` is None."""

    def __init__(self, fast: TextColumns | None) -> None:
        self._fast = fast
        self._num_stopping: dict[int, int] = {}  # token id -> number of streams that it ends
        self._set_of: dict[tuple[VocabularyView, tuple[str, ...], Hashable], int] = {}
        self._may_be_plain = np.zeros(0, np.bool_) if fast is None else _may_be_plain(fast)
        self.is_plain: Bools = self._may_be_plain.copy()  # for each entry of `fast`
        num_ids = fast.vocab_size + 1 if fast is not None else 0
        # [set, token id]; set 0: none. Memory is taken as sets are used
        self.harmless: Bools = np.zeros((1 + _MAX_SETS, num_ids), np.bool_)
        self.is_known: Bools = np.zeros((1 + _MAX_SETS, num_ids), np.bool_)  # it was checked

    def add_stops(self, token_ids: Iterable[int]) -> None:
        """Count a stream that these tokens end."""
        for token_id in token_ids:
            self._count_stop(token_id, 1)

    def remove_stops(self, token_ids: Iterable[int]) -> None:
        """Undo `add_stops` for one stream."""
        for token_id in token_ids:
            self._count_stop(token_id, -1)

    def set_of(
        self, view: VocabularyView, stops: tuple[str, ...], mode: Hashable = None
    ) -> tuple[int, bool]:
        """The number of this set of stop strings, 0 for none; and whether another set lost it.

        mode: of a stream that is read as events, with the name of its format.
        """
        if (not stops and mode is None) or self._fast is None:
            return 0, False
        key = view, stops, mode
        number = self._set_of.get(key, 0)
        if number:
            return number, False
        if len(self._set_of) < _MAX_SETS:
            number = self._set_of[key] = 1 + len(self._set_of)
            return number, False
        oldest = next(iter(self._set_of))
        number = self._set_of[key] = self._set_of.pop(oldest)
        self.harmless[number] = self.is_known[number] = False
        return number, True

    def record_harmless(self, number: int, token_id: int, *, is_harmless: bool) -> None:
        """Record whether a token is harmless for a set of stop strings."""
        self.is_known[number, token_id] = True
        self.harmless[number, token_id] = is_harmless

    @staticmethod
    def first_characters(stops: tuple[str, ...]) -> tuple[int, int]:
        """The set of their first characters, as two 64-bit words; see `text_columns`."""
        return _set_of_characters(frozenset(stop[0] for stop in stops)) if stops else (0, 0)

    @staticmethod
    def hazard_characters(characters: frozenset[str]) -> tuple[int, int]:
        """A set of characters as two 64-bit words; see `text_columns`."""
        return _set_of_characters(characters) if characters else (0, 0)

    def _count_stop(self, token_id: int, change: int) -> None:
        fast = self._fast
        if fast is None or token_id >= fast.vocab_size:
            return  # never on the fast path
        number = self._num_stopping.get(token_id, 0) + change
        if number:
            self._num_stopping[token_id] = number
        else:
            self._num_stopping.pop(token_id, None)
        for view in VocabularyView:
            at = fast.first(view) + token_id
            self.is_plain[at] = not number and self._may_be_plain[at]


def _may_be_plain(fast: TextColumns) -> Bools:
    """True for entries that are plain as long as they end no stream: whole, with text if any is
    wanted.
    """
    found = fast.lens > 0
    silent = fast.first(VocabularyView.SILENT)
    found[silent:] = fast.lens[silent:] >= 0
    return found


@lru_cache(256)
def _set_of_characters(characters: frozenset[str]) -> tuple[int, int]:
    low, high = character_sets(list(characters))
    return int(np.bitwise_or.reduce(low)), int(np.bitwise_or.reduce(high))
