"""A drafter that has been told what rows will say, and is right for a random number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import numpy.typing as npt

from slipstream_core.drafting.drafter import Drafts
from slipstream_ipc.arrays import Int64s
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.row_set import RowSet


class ToldDrafts:
    """Implements Drafter. texts: prompt and outputs of each row; where two begin alike, one goes on
    behind the other's end.
    """

    awaits_tokens = True

    def __init__(
        self, texts: Sequence[Sequence[int]], vocab_size: int, most: int, seed: int = 0
    ) -> None:
        self._texts, self._vocab_size, self._most = texts, vocab_size, most
        self._random = Random(seed)
        self._tokens: TokenLog | None = None
        self._rows = set[int]()

    def open(
        self, row: int, root: bytes, prompt_len: int, prediction: npt.NDArray[np.uint32]
    ) -> None:
        """See Drafter."""
        self._rows.add(row)

    def close(self, rows: Int64s) -> None:
        """See Drafter."""
        self._rows.difference_update(rows.tolist())

    def observe(
        self, rows: RowSet, ids: npt.NDArray[np.uint32], counts: Int64s | None, tokens: TokenLog
    ) -> None:
        """See Drafter."""
        self._tokens = tokens

    def propose(self, rows: RowSet, most: Int64s, num_beside: int) -> Drafts | None:
        """See Drafter."""
        lens, ids = [], list[int]()
        for row, limit in zip(rows.tolist(), most.tolist(), strict=True):
            draft = self._draft(row, limit) if row in self._rows else []
            lens.append(len(draft))
            ids += draft
        return Drafts(np.array(lens), np.array(ids, np.int64)) if ids else None

    def _draft(self, row: int, limit: int) -> list[int]:
        assert self._tokens is not None
        begin = self._tokens.length(row)
        said = self._tokens.read(row, 0, begin).tolist()
        # a core goes on until it hears that a text has ended
        alike = [each for each in self._texts if list(each[:begin]) == said[: len(each)]]
        text = max(alike, key=len, default=())  # nothing behind what was not told
        draft = list(text[begin : begin + min(limit, self._most)])
        right = self._random.randint(0, self._most)
        if right < len(draft):
            draft[right] = (draft[right] + 1) % self._vocab_size
        return draft[: self._random.randint(0, self._most)]
