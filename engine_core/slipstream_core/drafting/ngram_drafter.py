"""Drafts from a row's own history: what followed when its last tokens occurred before.

- The longest match counts, of `prompt_lookup_max` tokens down to `prompt_lookup_min`, and of equal
  ones the latest. Where the copied tokens reach the end of the history they go on with themselves,
  as a repetition does.
- Each token that arrives is compared with what the index would have said, drafted or not. The share
  of right ones, smoothed, is the probability that a row's next draft is right, and its j-th power
  that the j-th is kept. So a row whose text repeats nothing costs a look-up a token, and one that
  begins to repeat itself is drafted for.
- Of all rows' drafts those are computed that give most tokens a second (`StepCosts`).
- A prompt is taken in when its first token is sampled, a bounded part with each step.
"""

from __future__ import annotations

import numpy as np

from slipstream_core import _native
from slipstream_core.drafting.drafter import Drafts
from slipstream_core.drafting.step_costs import StepCosts
from slipstream_ipc.arrays import Int64s, UInt32s
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.row_set import RowSet

_MAX_TAKEN = 2048  # tokens of prompts that are taken in with one step
_MAX_WEIGHED = 256  # drafts among which a step's are chosen
_CLOSED, _NEW, _BEHIND, _OPEN = range(4)


class NgramDrafter:
    """Implements Drafter."""

    def __init__(
        self,
        *,
        num_speculative_tokens: int,
        prompt_lookup_min: int,
        prompt_lookup_max: int,
        costs: StepCosts,
    ) -> None:
        """num_speculative_tokens: the most drafts of a row in a step."""
        self._index = _native.NgramIndex(prompt_lookup_min, prompt_lookup_max)
        self._costs = costs
        self._powers = np.arange(1, 1 + num_speculative_tokens, dtype=np.float64)
        self._states = np.zeros(64, np.uint8)  # by row
        self._behind: dict[int, int] = {}  # row: tokens taken in, in the order in which they came
        self._awaits_tokens = False

    @property
    def awaits_tokens(self) -> bool:
        """See Drafter."""
        return self._awaits_tokens

    def open(self, row: int, _root: bytes, _prompt_len: int, _prediction: UInt32s) -> None:
        """See Drafter."""
        self._open(row)

    def _open(self, row: int) -> None:
        if row >= len(self._states):
            more = np.zeros(max(row + 1, 2 * len(self._states)) - len(self._states), np.uint8)
            self._states = np.concatenate([self._states, more])
        self._states[row] = _NEW

    def close(self, rows: Int64s) -> None:
        """See Drafter."""
        for row in rows[rows < len(self._states)].tolist():
            if self._states[row] >= _BEHIND:
                self._index.close(row)
                self._behind.pop(row, None)
            self._states[row] = _CLOSED

    def observe(self, rows: RowSet, ids: UInt32s, counts: Int64s | None, tokens: TokenLog) -> None:
        """See Drafter."""
        at = rows.array
        if counts is None:
            counts = np.ones(len(at), np.int64)
        most = int(at.max(initial=-1))
        if most >= len(self._states):
            self._open(most)
            self._states[most] = _CLOSED
        states = self._states.take(at)
        if states.min(initial=_OPEN) < _OPEN:
            for row in at[states == _NEW].tolist():
                self._index.open(row)
                self._behind[row] = 0
                self._states[row] = _BEHIND
            is_open = states == _OPEN
            ids, at, counts = ids[np.repeat(is_open, counts)], at[is_open], counts[is_open]
        self._index.append(at, counts, ids, True)
        if self._behind:
            self._take_in(tokens)
        self._awaits_tokens = self._lens(rows.array, None) is not None

    def propose(self, rows: RowSet, most: Int64s, num_beside: int) -> Drafts | None:
        """See Drafter."""
        lens = self._lens(rows.array, most, num_beside)
        if lens is None:
            return None
        token_ids = np.empty(int(lens.sum()), np.int64)
        self._index.draft(rows.array, lens, token_ids)
        return Drafts(lens, token_ids)

    def _take_in(self, tokens: TokenLog) -> None:
        """Take in what lacks of rows whose histories are behind, up to the bound."""
        left = _MAX_TAKEN
        for row, begin in list(self._behind.items()):
            length = tokens.length(row)
            end = min(length, begin + left)
            ids = tokens.read(row, begin, end)
            self._index.append(np.array([row]), np.array([end - begin]), ids, False)
            left -= end - begin
            if end < length:
                self._behind[row] = end
                return
            del self._behind[row]
            self._states[row] = _OPEN

    def _lens(self, rows: Int64s, most: Int64s | None, num_beside: int = 0) -> Int64s | None:
        """The worthwhile number of drafts of each row, [n]; None: no row has any."""
        scores = np.empty(len(rows), np.float64)
        if not self._index.scores(rows, scores):
            return None
        found = np.flatnonzero(scores)
        if self._behind:
            found = found[self._states[rows[found]] == _OPEN]
        values = scores[found, None] ** self._powers  # [found, num_speculative_tokens]
        if most is not None:
            values[self._powers > most[found, None]] = 0
        order = np.argsort(-values, axis=None, kind="stable")[:_MAX_WEIGHED]
        sorted_values = values.ravel()[order]
        kept = sorted_values[sorted_values > 0]
        num = self._costs.num_worthwhile(len(rows), kept, num_beside)
        if not num:
            return None
        lens = np.zeros(len(rows), np.int64)
        np.add.at(lens, found[order[:num] // len(self._powers)], 1)
        return lens
