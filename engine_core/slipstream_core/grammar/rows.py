"""The grammars of the streams that are computed, by row, and the masks of a step.

Owns: each row's `GrammarState`, from admission to the stream's end. Does not know: how grammars are
compiled, who is in which step.

Rules:
- A state is brought up to its row's history when its mask is wanted.
- One stream's trouble is its own: its mask allows everything, and it is named.
- Masks of one step are filled one after another; each call of the library gives the interpreter's
  lock up. (Its own pool of threads would compete with a model on the CPU for the cores.)
"""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt

from slipstream_core.columns import NO_ROW
from slipstream_core.grammar.library import num_words
from slipstream_core.grammar.state import GrammarBroken, GrammarState
from slipstream_ipc.log import PagedLog

logger = logging.getLogger(__name__)

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

_EVERYTHING = -1  # 32 bits that are set


class GrammarRows:
    """Grammars by row."""

    def __init__(self, tokens: PagedLog, vocab_size: int) -> None:
        """`tokens` holds the histories; a mask has a bit for each of `vocab_size` ids."""
        self._tokens = tokens
        self._num_words = num_words(vocab_size)
        self._states: dict[int, tuple[GrammarState, int]] = {}  # and where the outputs begin

    def __len__(self) -> int:
        return len(self._states)

    def add(self, row: int, state: GrammarState, prompt_len: int) -> None:
        """The stream of this row follows a grammar; `state` has seen some of its outputs."""
        self._states[row] = state, prompt_len

    def drop(self, row: int) -> None:
        """The stream is computed no more. Dropping a row without a grammar does nothing."""
        self._states.pop(row, None)

    def masks(self, rows: Int64s) -> tuple[Int32s, list[tuple[int, str]]]:
        """What each of `rows` [G] may sample behind its history, [G, ceil(vocab / 32)].

        NO_ROW may sample anything, as nobody will look at it. Also returns who cannot go on, and
        why; everything is allowed there, too.
        """
        masks = np.empty((len(rows), self._num_words), np.int32)
        broken: list[tuple[int, str]] = []
        for i, row in enumerate(rows.tolist()):
            if row == NO_ROW:
                masks[i] = _EVERYTHING
                continue
            try:
                self._fill(row, masks[i])
            except GrammarBroken as error:
                broken.append((row, f"structured_outputs: {error}"))
                masks[i] = _EVERYTHING
            except Exception as error:
                logger.exception("a grammar failed")
                why = f"structured_outputs: {type(error).__name__} while its grammar was followed"
                broken.append((row, why))
                masks[i] = _EVERYTHING
        return masks, broken

    def _fill(self, row: int, mask: Int32s) -> None:
        state, prompt_len = self._states[row]
        begin, end = prompt_len + state.num_taken, self._tokens.length(row)
        if begin < end:
            state.take(self._tokens.read(row, begin, end).tolist())
        state.fill(mask)
