"""The grammars of running streams by row, and the masks of a step.

- A matcher takes the new tokens of its row's history when a mask is wanted. In free reasoning it
  takes none, and fills no mask.
- An error in one stream does not affect the others: its mask allows everything, and its row is
  reported.
- The library releases the GIL while it fills masks.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream_core.grammar.llguidance_backend import fill_masks, ids_as_mask, num_words
from slipstream_core.grammar.matcher import (
    CallMatcher,
    GrammarBroken,
    GrammarMatcher,
    GrammarTooComplex,
    LexerFull,
)
from slipstream_core.grammar.reasoning.reasoning_state import Allowed, ReasoningState
from slipstream_core.step.limits import NO_ROW
from slipstream_ipc.arrays import Int32s, Int64s
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.messages import Fault

logger = logging.getLogger(__name__)


_EVERYTHING = -1  # 32 set bits


@dataclass(frozen=True, slots=True)
class _MaskedRow:
    prompt_len: int
    matcher: GrammarMatcher | None  # None: there is no grammar
    reasoning: ReasoningState | None  # None: the grammar applies from the first output on
    permitted: Int32s | None = None  # what the request's own constraints allow; None: all
    has_words: bool = False  # and words of several tokens that it forbids

    @property
    def grammar_start(self) -> int:
        """The position in the history at which the grammar began."""
        start = 0 if self.reasoning is None else self.reasoning.grammar_start
        assert start is not None
        return self.prompt_len + start


class GrammarBitmasks:
    """Grammars and reasoning by row. num_filled: masks that grammars have filled."""

    def __init__(self, tokens: TokenLog, vocab_size: int) -> None:
        """`tokens` holds the histories; a mask has a bit for each of `vocab_size` ids."""
        self._tokens = tokens
        self.vocab_size = vocab_size
        self._rows: dict[int, _MaskedRow] = {}
        # by row: the length of its history, and the masks behind it and behind each draft
        self._ahead: dict[int, tuple[int, Int32s]] = {}
        self.num_filled = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def decides(self, row: int) -> bool:
        """True if a grammar alone decides what a row may sample next."""
        held = self._rows.get(row)
        return held is not None and (held.reasoning is None or held.reasoning.follows_grammar)

    def add(
        self,
        row: int,
        matcher: GrammarMatcher | None,
        prompt_len: int,
        reasoning: ReasoningState | None = None,
        *,
        permitted: Int32s | None = None,
        has_words: bool = False,
    ) -> None:
        """Add the grammar of a row's stream, which may have taken some of its outputs, or its
        reasoning, whose state the scheduler advances.

        permitted, has_words: what the sampler applies beside masks: the ids that the request's own
        constraints leave, int32 [ceil(vocab / 32)], or None for all; and whether it forbids words
        of several tokens.
        """
        self._rows[row] = _MaskedRow(prompt_len, matcher, reasoning, permitted, has_words)

    def drop(self, row: int) -> None:
        """Drop a row's grammar, if it has one."""
        self._rows.pop(row, None)
        self._ahead.pop(row, None)

    def forced(self, row: int) -> list[int]:
        """The text that the grammar of a row that it `decides` forces next, as the tokenizer has
        it. A model may spell it otherwise.
        """
        try:
            state = self._matcher_up_to_date(row)
            return [] if state is None else state.forced()
        except Exception:  # `masks` finds it, too
            return []

    def foresee(self, row: int, token_ids: Sequence[int]) -> int:
        """Fill the masks behind drafts of a row that a grammar `decides`, for the step that is
        planned next. Returns how many of them it allows, up to one that completes a call: what
        may follow that is not its grammar's.
        """
        masks = np.empty((1 + len(token_ids), num_words(self.vocab_size)), np.int32)
        permitted, num = self._rows[row].permitted, 0
        with suppress(Exception):  # what lies in front of it is allowed; `masks` finds it, too
            state = self._matcher_up_to_date(row)
            if state is None:
                return 0
            state, is_call = state.copy(), self._calls(row) is not None
            for mask in state.masks_behind(token_ids, masks):
                if permitted is not None and not (mask & permitted).any():
                    break
                if num and is_call and state.is_complete:
                    break
                num += 1
        self.num_filled += num
        self._ahead[row] = self._tokens.length(row), masks[:num]
        return max(num - 1, 0)

    def _masks_ahead(self, row: int) -> Int32s | None:
        """The masks that `foresee` has filled, if no token of the row has arrived since."""
        length, masks = self._ahead.get(row, (-1, None))
        return masks if length == self._tokens.length(row) else None

    def masks(self, rows: Int64s) -> tuple[Int32s, list[tuple[int, Fault]]]:
        """The masks of what each of `rows` [G] may sample next, int32 [G, ceil(vocab / 32)].

        A row that stands there several times samples behind its drafts, too (`foresee`). Also
        returns the rows that cannot go on, with the fault that ends each. These, and NO_ROW, whose
        token will be dropped, may sample anything.
        """
        masks = np.empty((len(rows), num_words(self.vocab_size)), np.int32)
        broken: list[tuple[int, Fault]] = []
        states: list[tuple[int, int, GrammarMatcher]] = []
        to_fill: list[tuple[Any, int]] = []
        every, ahead, num_ahead = rows.tolist(), None, 0
        for i, row in enumerate(every):
            if row == NO_ROW:
                masks[i] = _EVERYTHING
                continue
            if i and every[i - 1] == row:
                assert ahead is not None, "a row has drafts that were not foreseen"
                num_ahead += 1
                masks[i] = ahead[num_ahead]
                continue
            ahead, num_ahead = self._masks_ahead(row), 0
            if ahead is not None and len(ahead):
                masks[i] = ahead[0]
                continue
            try:
                if (mask := self._mask_of_reasoning(row)) is not None:
                    masks[i] = mask
                    continue
                state = self._matcher_up_to_date(row)
                if state is None:
                    masks[i] = self._mask_of_begins(row)
                    continue
                if state.matcher is not None:
                    to_fill.append((state.matcher, i))
                states.append((i, row, state))
            except Exception as error:
                broken.append((row, self._fault_of(row, error)))
                masks[i] = _EVERYTHING
        fill_masks(to_fill, masks)
        self.num_filled += len(to_fill)
        for i, row, state in states:
            try:
                self._finish(row, state, masks[i : i + 1])
            except Exception as error:
                broken.append((row, self._fault_of(row, error)))
                masks[i] = _EVERYTHING
        return masks, broken

    def _fault_of(self, row: int, error: Exception) -> Fault:
        held = self._rows.get(row)
        has_words = held is not None and held.has_words and isinstance(error, GrammarBroken)
        if not (has_words or isinstance(error, NothingPermitted)):
            return _fault_of(error)
        what = "allowed_token_ids and bad_words leave none of the tokens that it allows next"
        return Fault("bad_request", f"structured_outputs: {what}", "structured_outputs")

    def _allowed(self, row: int) -> Allowed:
        held = self._rows[row]
        if held.reasoning is None:
            return Allowed.GRAMMAR
        return held.reasoning.allowed_at(self._tokens.length(row) - held.prompt_len)

    def _mask_of_reasoning(self, row: int) -> Int32s | None:
        """The mask of a row whose grammar has not begun; None if its grammar decides."""
        held, allowed = self._rows[row], self._allowed(row)
        if allowed not in (Allowed.ANY, Allowed.END, Allowed.NO_CALL):
            return None
        assert held.reasoning is not None
        if allowed is Allowed.END:
            return ids_as_mask((held.reasoning.next_end,), self.vocab_size)
        masked: Collection[int] = ()
        if held.reasoning.masks_ids:
            end_ids = () if held.matcher is None else held.matcher.end_ids
            masked = held.reasoning.masked_ids(end_ids)
        if allowed is Allowed.NO_CALL:
            masked = {*masked, *held.reasoning.next_triggers}
        return ~ids_as_mask(masked, self.vocab_size)

    def _calls(self, row: int) -> CallMatcher | None:
        """The grammar of calls, if the row is in one."""
        if self._allowed(row) is not Allowed.CALL:
            return None
        reasoning = self._rows[row].reasoning
        assert reasoning is not None
        assert isinstance(reasoning.calls, CallMatcher)
        return reasoning.calls

    def _matcher_up_to_date(self, row: int) -> GrammarMatcher | None:
        """The matcher of the next mask; None: reasoning has begun in part, and what there is of it
        is not the grammar's.
        """
        held = self._rows[row]
        if (calls := self._calls(row)) is not None:
            return calls.current
        state = held.matcher
        assert state is not None
        if begun := self._begun(row):
            return state.behind(begun)
        if self._allowed(row) is Allowed.GRAMMAR:
            begin, end = held.grammar_start + state.num_taken, self._tokens.length(row)
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
                state.finish(mask[0])
                break
            except LexerFull:
                self._renew(row, state)
                if state.matcher is not None:
                    fill_masks([(state.matcher, 0)], mask)
        if self._allowed(row) is Allowed.GRAMMAR_OR_REASONING:
            mask |= self._mask_of_begins(row)
        permitted = self._rows[row].permitted
        if permitted is not None and not (mask[0] & permitted).any():
            raise NothingPermitted

    def _mask_of_begins(self, row: int) -> Int32s:
        """The mask of what begins reasoning, or goes on with its beginning."""
        reasoning = self._rows[row].reasoning
        assert reasoning is not None
        return ids_as_mask(reasoning.next_begins, self.vocab_size)

    def _begun(self, row: int) -> list[int]:
        """The outputs that are the grammar's first ones, unless reasoning begins with them."""
        reasoning = self._rows[row].reasoning
        end = self._tokens.length(row)
        num = 0 if reasoning is None else reasoning.num_held
        return self._tokens.read(row, end - num, end).tolist() if num else []

    def _renew(self, row: int, state: GrammarMatcher) -> None:
        if (calls := self._calls(row)) is not None:
            calls.renew()
            return
        token_ids = self._begun(row)
        if self._allowed(row) is Allowed.GRAMMAR:
            begin = self._rows[row].grammar_start
            token_ids = self._tokens.read(row, begin, self._tokens.length(row)).tolist()
        state.renew(token_ids)


class NothingPermitted(GrammarBroken):
    """The request's other constraints allow none of the tokens of its grammar."""


def _fault_of(error: Exception) -> Fault:
    if isinstance(error, GrammarTooComplex):
        return Fault("bad_request", f"structured_outputs: {error}", "structured_outputs")
    if isinstance(error, GrammarBroken):
        return Fault("engine", f"structured_outputs: {error}")
    logger.error("a grammar failed", exc_info=error)
    return Fault(
        "engine", f"structured_outputs: {type(error).__name__} while advancing the grammar"
    )
