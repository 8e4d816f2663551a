"""Drafts of rows with a grammar: what it forces, spelled as its tokenizer would, or what another
drafter foresees, as far as the grammar allows it.

- A model may spell what is forced otherwise. What arrives is compared with what was foreseen,
  drafted or not; the share of right ones, smoothed, decides as it does for other drafts.
- Where reasoning is followed, a row has a grammar once that `decides`, and free drafts before.
- The masks behind the drafts of a row are filled when they are proposed: all tokens of the row are
  known then, and a draft that the grammar forbids is known to be wrong.
"""

from __future__ import annotations

import numpy as np

from slipstream_core.drafting.drafter import Drafter, Drafts
from slipstream_core.drafting.guesses import Guess, joined, pays, with_guesses
from slipstream_core.drafting.step_costs import StepCosts
from slipstream_core.grammar.bitmasks import GrammarBitmasks
from slipstream_ipc.arrays import Int64s, UInt32s
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.row_set import RowSet

_FIRST_SHARE = 0.8  # of forced tokens that are spelled as foreseen, before any has arrived
_SMOOTHING = 0.05


class GrammarDrafter:
    """Implements Drafter."""

    def __init__(
        self,
        other: Drafter,
        grammars: GrammarBitmasks,
        *,
        num_speculative_tokens: int,
        costs: StepCosts,
    ) -> None:
        """other: of all rows; its drafts are taken where a grammar forces nothing.

        num_speculative_tokens: the most drafts of a row in a step.
        """
        self._other = other
        self._grammars = grammars
        self._most = num_speculative_tokens
        self._costs = costs
        self._rows: set[int] = set()  # with a grammar, which may begin later
        self._forced: dict[int, list[int]] = {}  # by row, behind its last known token
        self._right_share = _FIRST_SHARE
        self._awaits_tokens = False

    @property
    def awaits_tokens(self) -> bool:
        """See Drafter."""
        return self._awaits_tokens or self._other.awaits_tokens

    def open(self, row: int, root: bytes, prompt_len: int, prediction: UInt32s) -> None:
        """See Drafter."""
        if row in self._grammars:
            self._rows.add(row)
        self._other.open(row, root, prompt_len, prediction)

    def close(self, rows: Int64s) -> None:
        """See Drafter."""
        if self._rows:
            for row in rows.tolist():
                self._rows.discard(row)
                self._forced.pop(row, None)
        self._other.close(rows)

    def observe(self, rows: RowSet, ids: UInt32s, counts: Int64s | None, tokens: TokenLog) -> None:
        """See Drafter."""
        self._other.observe(rows, ids, counts, tokens)
        if not self._rows:
            return
        if counts is None:
            counts = np.ones(len(rows), np.int64)
        ends = np.cumsum(counts)
        may_pay = pays(self._costs, len(rows), [1.0] * len(rows), self._most)
        for at, row in enumerate(rows.tolist()):
            if row in self._rows:
                self._compare(self._forced.pop(row, []), ids[ends[at] - counts[at] : ends[at]])
                may_force = may_pay and self._grammars.decides(row)
                forced = self._grammars.forced(row)[: self._most] if may_force else []
                if forced:
                    self._forced[row] = forced
        longest = max(map(len, self._forced.values()), default=0)
        shares = [self._right_share] * len(self._forced)
        self._awaits_tokens = pays(self._costs, len(rows), shares, longest)

    def propose(self, rows: RowSet, most: Int64s, num_beside: int) -> Drafts | None:
        """See Drafter."""
        others = self._other.propose(rows, most, num_beside)
        if not self._rows:
            return others
        every = enumerate(rows.tolist())
        masked = [
            (at, row) for at, row in every if row in self._rows and self._grammars.decides(row)
        ]
        guesses = {
            at: Guess(self._forced[row][: int(most[at])], self._right_share)
            for at, row in masked
            if row in self._forced
        }
        drafts = with_guesses(others, guesses, len(rows), self._costs, num_beside)
        for at, row in masked:
            if drafts[at]:
                drafts[at] = drafts[at][: self._grammars.foresee(row, drafts[at])]
        return joined(drafts)

    def _compare(self, foreseen: list[int], arrived: UInt32s) -> None:
        """Learn from what arrived where something was foreseen."""
        for draft, token_id in zip(foreseen, arrived.tolist(), strict=False):
            is_right = draft == token_id
            self._right_share += (is_right - self._right_share) * _SMOOTHING
            if not is_right:
                return
