"""Tells which tokens may end their stream by what its worker finds in them.

The core waits for the worker's check of such tokens before it plans on, if the device allows. It
need not wait for any other: the length of a stream is known here, and an abort follows from no
token. A worker names every end all the same, and an end that was not expected here costs its stream
the steps that were launched in the meantime, nothing else.

- A stream with stop strings or a repetition detector may end with any token, another one only with
  one of its stop ids.
- The reader of an answer's format ends no stream.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from slipstream_ipc._native import has_marked
from slipstream_ipc.arrays import Bools, Int64s, UInt32s
from slipstream_ipc.messages import Admit
from slipstream_ipc.row_set import NO_ROWS, RowSet
from slipstream_ipc.row_table import RowTable, column
from slipstream_ipc.validation.sampling_params import stop_strings

_NO_IDS: frozenset[int] = frozenset()


class PossibleEnds(RowTable):
    """The tokens that may end the stream of each row, from its admission until it is over."""

    _by_any: Bools = column(np.bool_)  # any token may end it

    def __init__(self, rows: int = 64) -> None:
        super().__init__(rows)
        self._stop_ids: dict[int, frozenset[int]] = {}  # by row
        self._num_rows_of: Counter[int] = Counter()  # by stop id
        self._is_stop_id = np.zeros(0, np.bool_)  # by id; no larger one is
        self._asked: tuple[RowSet, bool] = NO_ROWS, False  # the rows asked for last: by any token?

    def add(self, row: int, admit: Admit) -> None:
        """A stream is admitted."""
        self.drop(row)
        if row >= self.num_rows:
            self.grow(row + 1)
        self._asked = NO_ROWS, False
        params = admit.spec.params
        self._by_any[row] = bool(stop_strings(params)) or params.repetition_detection is not None
        if admit.derived.stop_token_ids:
            ids = self._stop_ids[row] = frozenset(admit.derived.stop_token_ids)
            self._num_rows_of.update(ids)
            num = max(ids) + 1
            if num > len(self._is_stop_id):
                self._is_stop_id = np.pad(self._is_stop_id, (0, num - len(self._is_stop_id)))
            self._is_stop_id[list(ids)] = True

    def drop(self, row: int) -> None:
        """A stream is over. Idempotent."""
        if row < self.num_rows:
            self._by_any[row] = False
            self._asked = NO_ROWS, False
        num_rows_of = self._num_rows_of
        for token_id in self._stop_ids.pop(row, _NO_IDS):
            num_rows_of[token_id] -= 1
            if not num_rows_of[token_id]:
                del num_rows_of[token_id]
                self._is_stop_id[token_id] = False

    @property
    def columns(self) -> tuple[Bools, Bools]:
        """By row, whether any token may end its stream; by id, whether it may end any. They are so
        until a stream is added.
        """
        return self._by_any, self._is_stop_id

    def are_among(self, rows: RowSet, counts: Int64s | None, token_ids: UInt32s) -> bool:
        """True if any of these tokens, `counts[i]` (None: one) of each row, may end its stream."""
        if rows.version != self._asked[0].version:
            self._asked = rows, bool(self._by_any.take(rows.array).any())
        if self._asked[1]:
            return True
        # one look at each token, whichever rows share the step (decision 011)
        if not self._num_rows_of or not has_marked(self._is_stop_id, token_ids):
            return False
        of_token = rows.array if counts is None else np.repeat(rows.array, counts)
        return any(
            token_id in self._stop_ids.get(row, _NO_IDS)
            for row, token_id in zip(of_token.tolist(), token_ids.tolist(), strict=True)
        )
