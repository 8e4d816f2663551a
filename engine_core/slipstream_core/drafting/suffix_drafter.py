"""Drafts from answers that were given before: to the same prompt, or with the same last tokens.

A row follows one answer as long as its tokens are those of the answer; where they part, it looks
for another place. The share of tokens that were as foreseen, smoothed, decides as it does for
other drafts. Where steps are so large that no draft is worth its time, nothing is looked up.

Suffix decoding (Oliaro et al., 2024, arXiv 2411.04975) with a table of the last four tokens in
place of its tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slipstream_core.drafting.answer_memory import MATCH, AnswerMemory, Place
from slipstream_core.drafting.drafter import Drafter, Drafts
from slipstream_core.drafting.guesses import Guess, joined, pays, with_guesses
from slipstream_core.drafting.step_costs import StepCosts
from slipstream_ipc.arrays import Int64s, UInt32s
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.row_set import RowSet

_FIRST_SHARE = 0.6
_SMOOTHING = 0.2


@dataclass(slots=True)
class _Row:
    root: bytes
    prompt_len: int
    place: Place | None = None  # in front of the token that is foreseen
    share: float = _FIRST_SHARE


class SuffixDrafter:
    """Implements Drafter."""

    def __init__(
        self, other: Drafter, memory: AnswerMemory, *, num_speculative_tokens: int, costs: StepCosts
    ) -> None:
        """other: drafts of rows that follow no answer are its.

        num_speculative_tokens: the most drafts of a row in a step.
        """
        self._other = other
        self._memory = memory
        self._most = num_speculative_tokens
        self._costs = costs
        self._rows: dict[int, _Row] = {}
        self._tokens: TokenLog | None = None
        self._awaits_tokens = False

    @property
    def awaits_tokens(self) -> bool:
        """See Drafter."""
        return self._awaits_tokens or self._other.awaits_tokens

    def open(self, row: int, root: bytes, prompt_len: int, prediction: UInt32s) -> None:
        """See Drafter."""
        self._rows[row] = _Row(root, prompt_len)
        self._other.open(row, root, prompt_len, prediction)

    def close(self, rows: Int64s) -> None:
        """See Drafter."""
        for row in rows.tolist():
            closed = self._rows.pop(row, None)
            if closed is not None and self._tokens is not None:
                ids = self._tokens.read(row, 0, self._tokens.length(row))
                num = closed.prompt_len
                self._memory.add(closed.root, ids[:num], ids[num:])
        self._other.close(rows)

    def observe(self, rows: RowSet, ids: UInt32s, counts: Int64s | None, tokens: TokenLog) -> None:
        """See Drafter."""
        self._other.observe(rows, ids, counts, tokens)
        self._tokens = tokens
        self._awaits_tokens = False
        if not len(self._memory) or not self._pay([1.0] * len(rows), len(rows)):
            for state in self._rows.values():
                state.place = None
            return
        if counts is None:
            counts = np.ones(len(rows), np.int64)
        shares, ends = [], np.cumsum(counts)
        for row, num, end in zip(rows.tolist(), counts.tolist(), ends.tolist(), strict=True):
            followed = self._rows.get(row)
            if followed is not None:
                self._follow(row, followed, ids[end - num : end], tokens)
                if followed.place is not None:
                    shares.append(followed.share)
        self._awaits_tokens = self._pay(shares, len(rows))

    def _pay(self, shares: list[float], num_rows: int) -> bool:
        return pays(self._costs, num_rows, shares, self._most)

    def _follow(self, row: int, state: _Row, arrived: UInt32s, tokens: TokenLog) -> None:
        """Go on behind what arrived, in the answer that foresaw it or in another."""
        length = tokens.length(row)
        if length - len(arrived) == state.prompt_len:
            prompt = tokens.read(row, 0, state.prompt_len)
            state.place = self._memory.behind_prompt(state.root, prompt)
        if state.place is not None:
            foreseen = self._memory.read(state.place, len(arrived))
            for draft, token_id in zip(foreseen, arrived.tolist(), strict=False):
                state.share += ((draft == token_id) - state.share) * _SMOOTHING
                if draft != token_id:
                    break
            if foreseen == arrived.tolist():
                state.place = Place(state.place.answer, state.place.position + len(arrived))
                return
        last = tokens.read(row, max(state.prompt_len, length - MATCH), length)
        state.place = self._memory.behind(state.root, last)

    def propose(self, rows: RowSet, most: Int64s, num_beside: int) -> Drafts | None:
        """See Drafter."""
        others = self._other.propose(rows, most, num_beside)
        guesses = {}
        for at, (row, num) in enumerate(zip(rows.tolist(), most.tolist(), strict=True)):
            state = self._rows.get(row)
            if state is not None and state.place is not None:
                token_ids = self._memory.read(state.place, min(num, self._most))
                if token_ids:
                    guesses[at] = Guess(token_ids, state.share)
        if not guesses:
            return others
        return joined(with_guesses(others, guesses, len(rows), self._costs, num_beside))
