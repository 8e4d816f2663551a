"""Drafts from a draft model: a smaller one with the same tokenizer, which foresees several tokens
of its rows in steps of its own.

- How often a row's drafts were right, smoothed, is the probability that its next one is, and the
  j-th power of it that the j-th is kept. All rows have as many as give most tokens a second: those
  cost the draft model a step each, and the model a row each. A place that is hardly ever reached is
  left out.
- A row that is not drafted for learns nothing: its share goes back, slowly, to what is assumed of a
  new one. So is it tried again.
- It draws with the noise of the row and position for which it drafts. Where two distributions are
  alike, equal noise has them draw the same token almost as often as any method could, and far more
  often than a greedy draft is drawn (Daliri, Musco, Suresh, 2024, arXiv 2408.07978).
"""

from __future__ import annotations

import numpy as np

from slipstream_core.drafting.drafter import Drafts
from slipstream_core.drafting.guesses import Guess, joined, with_guesses
from slipstream_core.drafting.step_costs import LEAST_GAIN, SYNC_S, StepCosts
from slipstream_ipc.arrays import Bools, Float64s, Int64s, UInt32s
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.row_set import RowSet
from slipstream_ipc.row_table import RowTable, column

_FIRST_SHARE = 0.7
_SMOOTHING, _FORGETTING = 0.1, 0.01  # by a token that was foreseen, and by one that was not
_CATCH_UP_SHARE = 0.5  # of a step's time, in which the draft model computes what it lacks of rows
_LEAST_SLICE = 16  # tokens of that, however long they take
_LEAST_VALUE = 0.05  # probability with which a draft has to be reached and right


class _Rows(RowTable):
    is_open: Bools = column(np.bool_)
    share: Float64s = column(np.float64, _FIRST_SHARE)
    num: Int64s = column(np.int64)  # tokens foreseen behind the last known one


class ModelDrafter:
    """Implements Drafter. What the draft model computes is in `scheduler/proposals`."""

    def __init__(
        self, *, num_speculative_tokens: int, max_len: int, costs: StepCosts, draft_costs: StepCosts
    ) -> None:
        """num_speculative_tokens: the most drafts of a row in a step. max_len: the tokens that the
        draft model takes. costs: of the model's steps; draft_costs: of the draft model's.
        """
        self._most = num_speculative_tokens
        self._max_len = max_len
        self._costs, self._draft_costs = costs, draft_costs
        self._powers = np.arange(1, 1 + num_speculative_tokens, dtype=np.float64)
        self._rows = _Rows(64)
        self._ids = np.zeros((64, num_speculative_tokens), np.int64)  # foreseen, by row
        self._awaits_tokens = False
        self._is_off = False

    @property
    def awaits_tokens(self) -> bool:
        """See Drafter."""
        return self._awaits_tokens

    def open(self, row: int, _root: bytes, _prompt_len: int, _prediction: UInt32s) -> None:
        """See Drafter."""
        self._grow(row)
        rows = self._rows
        rows.is_open[row], rows.share[row], rows.num[row] = not self._is_off, _FIRST_SHARE, 0

    def close(self, rows: Int64s) -> None:
        """See Drafter."""
        self._rows.is_open[rows[rows < self._rows.num_rows]] = False

    def switch_off(self) -> None:
        """Foresee nothing any more, of these rows and of those to come."""
        self._is_off, self._awaits_tokens = True, False
        self._rows.is_open[:] = False

    def observe(self, rows: RowSet, ids: UInt32s, counts: Int64s | None, tokens: TokenLog) -> None:
        """See Drafter."""
        table, at = self._rows, rows.array
        self._grow(int(at.max(initial=0)))
        num = np.ones(len(at), np.int64) if counts is None else counts
        foreseen = np.minimum(table.num[at], num)
        share = table.share[at]
        if foreseen.any():
            right = self.num_right(at, ids, num)
            share = 1 - (1 - share) * (1 - _SMOOTHING) ** right
            share = np.where(right < foreseen, share * (1 - _SMOOTHING), share)
        unseen = num - foreseen
        table.share[at] = _FIRST_SHARE + (share - _FIRST_SHARE) * (1 - _FORGETTING) ** unseen
        table.num[at] = 0
        most = np.minimum(self._most, self._max_len - tokens.lengths(rows))
        self._awaits_tokens = self._lens(at, most) is not None

    def num_right(self, rows: Int64s, ids: UInt32s, counts: Int64s) -> Int64s:
        """The number of tokens, [n], that were foreseen of each of these rows as they arrive now:
        `counts` [n] of each, ids [sum(counts)] row by row.
        """
        self._grow(int(rows.max(initial=0)))
        foreseen = np.minimum(self._rows.num[rows], counts)
        if not foreseen.any():
            return foreseen
        places = np.arange(int(foreseen.max()))
        is_seen = places < foreseen[:, None]
        firsts = np.cumsum(counts) - counts
        arrived = ids[np.where(is_seen, firsts[:, None] + places, 0)]
        is_right = (arrived == self._ids[rows, : len(places)]) & is_seen
        return np.asarray(np.logical_and.accumulate(is_right, axis=1).sum(1))

    def wanted(
        self, rows: Int64s, most: Int64s, lens: Int64s, num_beside: int = 0
    ) -> Int64s | None:
        """The number of tokens to be foreseen of each of these rows, [n], at most `most` of each;
        None where a step without drafts gives more tokens a second. lens: [n] known tokens of each.
        num_beside: as of `propose`, as far as it is known by now.
        """
        return self._lens(rows, np.minimum(most, self._max_len - lens), num_beside)

    def num_beside(self, num_rows: int, most: int) -> int:
        """The number of tokens, at most `most`, that the draft model computes beside a step of
        `num_rows` rows in a part of its time.
        """
        seconds = _CATCH_UP_SHARE * float(self._costs.seconds(np.array([num_rows]))[0])
        return min(max(self._draft_costs.num_within(seconds, most), _LEAST_SLICE), most)

    def foreseen(self, rows: Int64s, lens: Int64s, ids: Int64s) -> None:
        """The draft model has foreseen `lens` tokens of each of these rows, [n]; ids: [sum(lens)]
        row by row.
        """
        places = np.arange(len(ids)) - np.repeat(np.cumsum(lens) - lens, lens)
        self._ids[np.repeat(rows, lens), places] = ids
        self._rows.num[rows] = lens

    def propose(self, rows: RowSet, most: Int64s, num_beside: int) -> Drafts | None:
        """See Drafter."""
        table, at = self._rows, rows.array
        nums = np.where(table.is_open[at], np.minimum(table.num[at], most), 0)
        if not nums.any():
            return None
        found = np.flatnonzero(nums)
        ids, shares = self._ids[at[found]].tolist(), table.share[at[found]].tolist()
        guesses = {
            number: Guess(each[:num], share)
            for number, num, each, share in zip(
                found.tolist(), nums[found].tolist(), ids, shares, strict=True
            )
        }
        return joined(with_guesses(None, guesses, len(at), self._costs, num_beside))

    def _lens(self, rows: Int64s, most: Int64s, num_beside: int = 0) -> Int64s | None:
        """The number of drafts of each row, [n], that gives most tokens a second; None: none do."""
        table = self._rows
        most = np.where(table.is_open[rows], np.maximum(most, 0), 0)
        values = table.share[rows][:, None] ** self._powers  # [n, num_speculative_tokens]
        is_worth = (values >= _LEAST_VALUE) & (self._powers <= most[:, None])
        by_length = is_worth.sum(0)
        num_rows = len(rows)
        if not by_length[0]:
            return None
        num_fixed = num_rows + num_beside
        alone = num_rows / float(self._costs.seconds(np.array([num_fixed]))[0])
        tokens = num_rows + np.cumsum((values * is_worth).sum(0))
        seconds = self._costs.seconds(num_fixed + np.cumsum(by_length))
        seconds += np.cumsum(np.where(by_length, self._draft_costs.seconds(by_length), 0))
        rates = tokens / (seconds + 2 * SYNC_S)  # the draft model's steps are planned apart
        best = int(np.argmax(rates))
        if rates[best] <= LEAST_GAIN * alone:
            return None
        return np.asarray(is_worth[:, : best + 1].sum(1))

    def _grow(self, row: int) -> None:
        if row >= self._rows.num_rows:
            self._rows.grow(row + 1)
        if len(self._ids) < self._rows.num_rows:
            ids = np.zeros((self._rows.num_rows, self._most), np.int64)
            ids[: len(self._ids)] = self._ids
            self._ids = ids
