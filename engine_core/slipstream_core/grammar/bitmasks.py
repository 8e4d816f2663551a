"""The grammars of running streams by row, and the masks of a step.

- A matcher takes the new tokens of its row's history when a mask is wanted.
- An error in one stream does not affect the others: its mask allows everything, and its row is
  reported.
- The library releases the GIL while it fills masks.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream_core.grammar.llguidance_backend import fill_masks, num_words
from slipstream_core.grammar.matcher import GrammarBroken, GrammarMatcher, LexerFull
from slipstream_core.step.limits import NO_ROW
from slipstream_ipc.history.token_log import TokenLog

logger = logging.getLogger(__name__)

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

_EVERYTHING = -1  # 32 set bits


class GrammarBitmasks:
    """Grammars by row."""

    def __init__(self, tokens: TokenLog, vocab_size: int) -> None:
        """`tokens` holds the histories; a mask has a bit for each of `vocab_size` ids."""
        self._tokens = tokens
        self._num_words = num_words(vocab_size)
        # by row, with the prompt's length
        self._matchers: dict[int, tuple[GrammarMatcher, int]] = {}

    def __len__(self) -> int:
        return len(self._matchers)

    def add(self, row: int, state: GrammarMatcher, prompt_len: int) -> None:
        """Add the grammar of a row's stream; `state` may have taken some of its outputs."""
        self._matchers[row] = state, prompt_len

    def drop(self, row: int) -> None:
        """Drop a row's grammar, if it has one."""
        self._matchers.pop(row, None)

    def masks(self, rows: Int64s) -> tuple[Int32s, list[tuple[int, str]]]:
        """What each of `rows` [G] may sample next, int32 [G, ceil(vocab / 32)].

        Also returns the rows that cannot go on, with the reason. These, and NO_ROW, whose token
        will be dropped, may sample anything.
        """
        masks = np.empty((len(rows), self._num_words), np.int32)
        broken: list[tuple[int, str]] = []
        states: list[tuple[int, int, GrammarMatcher]] = []
        to_fill: list[tuple[Any, int]] = []
        for i, row in enumerate(rows.tolist()):
            if row == NO_ROW:
                masks[i] = _EVERYTHING
                continue
            try:
                state = self._brought_up(row)
                if state.matcher is not None:
                    to_fill.append((state.matcher, i))
                states.append((i, row, state))
            except Exception as error:
                broken.append((row, _why(error)))
                masks[i] = _EVERYTHING
        fill_masks(to_fill, masks)
        for i, row, state in states:
            try:
                self._finish(row, state, masks[i : i + 1])
            except Exception as error:
                broken.append((row, _why(error)))
                masks[i] = _EVERYTHING
        return masks, broken

    def _brought_up(self, row: int) -> GrammarMatcher:
        state, prompt_len = self._matchers[row]
        begin, end = prompt_len + state.num_taken, self._tokens.length(row)
        if begin < end:
            try:
                state.accept_tokens(self._tokens.read(row, begin, end).tolist())
            except LexerFull:
                self._renew(row, state)
        return state

    def _finish(self, row: int, state: GrammarMatcher, mask: Int32s) -> None:
        """Finish a filled mask, [1, words]; if the lexer was full, fill it again with another."""
        while True:
            try:
                return state.finish(mask[0])
            except LexerFull:
                self._renew(row, state)
                if state.matcher is not None:
                    fill_masks([(state.matcher, 0)], mask)

    def _renew(self, row: int, state: GrammarMatcher) -> None:
        prompt_len = self._matchers[row][1]
        state.renew(self._tokens.read(row, prompt_len, self._tokens.length(row)).tolist())


def _why(error: Exception) -> str:
    if isinstance(error, GrammarBroken):
        return f"structured_outputs: {error}"
    logger.error("a grammar failed", exc_info=error)
    return f"structured_outputs: {type(error).__name__} while advancing the grammar"
