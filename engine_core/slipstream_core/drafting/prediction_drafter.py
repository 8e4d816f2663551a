"""Drafts from what a request says that its answer will say (OpenAI's predicted outputs).

A row follows its own prediction as far as it goes, and is found in it again where it went another
way (`FollowedPrediction`). The share of tokens that were as foreseen, smoothed, decides as it does
for other drafts. No other row sees them.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream_core.drafting.drafter import Drafter, Drafts
from slipstream_core.drafting.guesses import Guess, joined, pays, with_guesses
from slipstream_core.drafting.step_costs import StepCosts
from slipstream_ipc.arrays import Int64s, UInt32s
from slipstream_ipc.history.prediction import FollowedPrediction
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.row_set import RowSet

_FIRST_SHARE = 0.8
_SMOOTHING = 0.2


@dataclass(slots=True)
class _Row:
    prediction: UInt32s
    prompt_len: int
    followed: FollowedPrediction | None = None  # from the row's first token here on
    share: float = _FIRST_SHARE


class PredictionDrafter:
    """Implements Drafter."""

    def __init__(self, other: Drafter, *, num_speculative_tokens: int, costs: StepCosts) -> None:
        """other: drafts of rows that follow no prediction are its.

        num_speculative_tokens: the most drafts of a row in a step.
        """
        self._other = other
        self._most = num_speculative_tokens
        self._costs = costs
        self._rows: dict[int, _Row] = {}  # with a prediction
        self._awaits_tokens = False

    @property
    def awaits_tokens(self) -> bool:
        """See Drafter."""
        return self._awaits_tokens or self._other.awaits_tokens

    def open(self, row: int, root: bytes, prompt_len: int, prediction: UInt32s) -> None:
        """See Drafter."""
        if len(prediction):
            self._rows[row] = _Row(prediction, prompt_len)
        self._other.open(row, root, prompt_len, prediction)

    def close(self, rows: Int64s) -> None:
        """See Drafter."""
        if self._rows:
            for row in rows.tolist():
                self._rows.pop(row, None)
        self._other.close(rows)

    def observe(self, rows: RowSet, ids: UInt32s, counts: Int64s | None, tokens: TokenLog) -> None:
        """See Drafter."""
        self._other.observe(rows, ids, counts, tokens)
        self._awaits_tokens = False
        if not self._rows:
            return
        shares = []
        for row in rows.tolist():
            state = self._rows.get(row)
            if state is not None and _follow(state, row, tokens).foreseen(1):
                shares.append(state.share)
        self._awaits_tokens = pays(self._costs, len(rows), shares, self._most)

    def propose(self, rows: RowSet, most: Int64s, num_beside: int) -> Drafts | None:
        """See Drafter."""
        others = self._other.propose(rows, most, num_beside)
        if not self._rows:
            return others
        guesses = {}
        for at, (row, num) in enumerate(zip(rows.tolist(), most.tolist(), strict=True)):
            state = self._rows.get(row)
            if state is None or state.followed is None:
                continue
            token_ids = state.followed.foreseen(min(num, self._most))
            if token_ids:
                guesses[at] = Guess(token_ids, state.share)
        if not guesses:
            return others
        return joined(with_guesses(others, guesses, len(rows), self._costs, num_beside))


def _follow(state: _Row, row: int, tokens: TokenLog) -> FollowedPrediction:
    """Take in what a row has said since it was looked at."""
    followed = state.followed
    if followed is None:
        followed = state.followed = FollowedPrediction(state.prediction)
    num_right, num_wrong = followed.num_right, followed.num_wrong
    followed.follow(tokens.read(row, state.prompt_len + followed.num_tokens, tokens.length(row)))
    state.share = 1 - (1 - state.share) * (1 - _SMOOTHING) ** (followed.num_right - num_right)
    state.share *= (1 - _SMOOTHING) ** (followed.num_wrong - num_wrong)
    return followed
