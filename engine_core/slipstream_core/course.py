"""The same rows, sampled step after step: counted, as long as nothing else happens to them.

Owns: the rows that a step gave tokens to last, while all of them live, and how many tokens the
first of them may still get. Does not know: tokens, who is to run.

Rules:
- The rows of a batch are one `RowSet` as long as nothing comes or goes (`SlotColumns.running`).
- A life that ends, anybody's, ends the course. Steps are answered in the order of their launch, so
  a row that lived at the answer of one step, with no life ended since, lives at that of the next.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slipstream_ipc.row_set import NO_ROWS, RowSet

Int64s = npt.NDArray[np.int64]


class Course:
    """What is known of the rows that were sampled last. Begins with nobody."""

    def __init__(self) -> None:
        self._rows = NO_ROWS
        self._index: Int64s = np.empty(0, np.int64)
        self._num_ended = 0  # lives
        self._num_left = 0  # tokens to the first limit

    def begin(self, rows: RowSet, index: Int64s, num_ended: int, num_left: int) -> None:
        """All of `rows` live, and each may get `num_left` tokens more; `index` counts them."""
        self._rows, self._index = rows, index
        self._num_ended, self._num_left = num_ended, num_left

    def go_on(self, rows: RowSet, num_ended: int) -> Int64s | None:
        """`rows` get a token each. The index of `begin`, where it is said of these rows, all of
        them live still and none reaches its limit by that token; else None, and the end.

        num_ended: the lives that have ended by now, of whatever row.
        """
        is_same = rows.version == self._rows.version and num_ended == self._num_ended
        if is_same and self._num_left > 1:
            self._num_left -= 1
            return self._index
        self._rows = NO_ROWS
        return None
