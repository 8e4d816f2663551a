"""A stream's place within its reasoning and its calls, which decides what its next token may be.

- The state is a function of the outputs and of the registration, so a successor of the core agrees.
- Free reasoning needs no mask. A mask is needed where the budget is spent, and where the stream's
  grammar applies: to what follows reasoning, or to an answer that begins without any; or to calls
  alone, each from the id that begins it up to the first token with which it is complete.
- A token is looked at only where it may change the state: at a border, in a call in the grammar and
  behind the beginning of a delimiter every one, else those of `watched_ids`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum
from typing import Protocol

import numpy as np
from msgspec.structs import replace

from slipstream_core.grammar.reasoning.delimiters import DelimiterMove, IdPlace, delimiter_automaton
from slipstream_ipc.arrays import UInt32s
from slipstream_ipc.columns import u32
from slipstream_ipc.messages import Admit, ReasoningIds
from slipstream_ipc.messages.answer import ReasoningPlace

NEVER = 2**62  # an index that no output has


class Allowed(IntEnum):
    """The tokens that are allowed next."""

    ANY = 0
    END = 1  # the id that ends reasoning, or goes on with its end
    GRAMMAR = 2
    GRAMMAR_OR_REASONING = 3  # what the grammar allows, or an id that begins reasoning
    CALL = 4  # what continues the call in the grammar
    NO_CALL = 5  # what does not continue the beginning of another call


class CallFollower(Protocol):
    """The grammar of a call; errors are kept until a mask is wanted."""

    def begin(self, token_ids: Sequence[int]) -> bool:
        """Begin a call with these tokens; return True if it is complete."""

    def take(self, token_id: int) -> bool:
        """Continue the call with this token; return True if it is complete."""


class ReasoningState:
    """The state of one stream; indices count its outputs.

    grammar_start: the first output in the grammar; None: it has not begun, or there is none.
    masked_from: the index from which on a mask is needed, if no output before changes the state.
    """

    __slots__ = (
        "_automaton",
        "_begin",
        "_calls",
        "_changed_at",
        "_has_called",
        "_ids",
        "_is_in_grammar",
        "_num_left",
        "_state",
        "grammar_start",
        "has_grammar",
    )

    def __init__(
        self,
        ids: ReasoningIds,
        budget: int | None,
        *,
        has_grammar: bool,
        calls: CallFollower | None = None,
    ) -> None:
        """budget: the most tokens of reasoning; None: no limit. has_grammar: of the whole content,
        or, with `in_grammar`, of reasoning, too. calls: a grammar of the calls that the triggers
        begin.
        """
        self._ids = ids
        self._automaton = delimiter_automaton(
            replace(ids, start="start", is_single=False, num_behind=0, in_grammar=False)
        )
        self._is_in_grammar = has_grammar and ids.in_grammar
        self.has_grammar = has_grammar and not ids.in_grammar  # of what follows reasoning
        self._num_left = NEVER if budget is None else budget
        self._begin = 0  # of the reasoning that is open
        self._changed_at = 0  # behind the output that made the state
        self._calls = calls
        self._has_called = False
        self.grammar_start: int | None = None
        place = (_GRAMMAR_PLACES if self.has_grammar else _PLACES)[ids.start]
        if place is IdPlace.GRAMMAR or self._is_in_grammar:
            self.grammar_start = 0
        self._state = self._automaton.state(place)

    @property
    def watched_ids(self) -> frozenset[int]:
        """The ids that change the state where it does not `watches_all`."""
        return self._automaton.first_ids

    @property
    def is_final(self) -> bool:
        """True if no output can change the state any more."""
        return self._state.is_grammar

    @property
    def follows_grammar(self) -> bool:
        """True if a grammar alone decides what is allowed next, until a call in it is complete."""
        return self._state.is_grammar or self._state.is_call

    @property
    def is_reasoning(self) -> bool:
        """True if reasoning is open."""
        return self._state.is_reasoning

    @property
    def watches_all(self) -> bool:
        """True if the next output has to be looked at, whatever it is."""
        return self._state.watches_all

    @property
    def masks_ids(self) -> bool:
        """True if ids must not be sampled: those that end the answer in reasoning that a grammar
        follows, those that begin calls where there has been the one.
        """
        if self._calls is not None:
            return self._has_called and self._ids.is_single
        return self.has_grammar and self.is_reasoning

    @property
    def next_end(self) -> int:
        """The id that ends reasoning, or goes on with its end."""
        return self._automaton.next_end(self._state)

    @property
    def next_begins(self) -> set[int]:
        """The ids that begin reasoning, or go on with its beginning."""
        return self._automaton.next_begins(self._state)

    @property
    def next_triggers(self) -> set[int]:
        """The ids that would make a call of what has begun as one does."""
        return self._automaton.next_triggers(self._state)

    @property
    def num_held(self) -> int:
        """The number of last outputs that are the grammar's unless reasoning begins with them."""
        return self._state.num_held if self._state.place is IdPlace.START else 0

    @property
    def calls(self) -> CallFollower | None:
        """The grammar of calls, if there is one."""
        return self._calls

    def masked_ids(self, end_ids: Collection[int]) -> Collection[int]:
        """The ids of `masks_ids`, whether or not they are masked now. end_ids: end the answer."""
        if self._calls is not None:
            return self._ids.triggers if self._ids.is_single else ()
        return set(end_ids).difference(self._ids.ends)

    @property
    def masked_from(self) -> int:
        """See the class."""
        if self._is_in_grammar:
            return 0
        match self._state.place:
            case IdPlace.GRAMMAR:
                assert self.grammar_start is not None
                return self.grammar_start
            case IdPlace.REASONING if self._num_left < NEVER:
                least = self._begin + self._num_left
                return min(least, self._changed_at) if self._excludes else least
            case IdPlace.BORDER if not self._num_left:
                return self._changed_at  # reasoning that begins has to end
            case IdPlace.START | IdPlace.CALL:
                return self._changed_at
        return self._changed_at if self._excludes else NEVER

    def allowed_at(self, index: int) -> Allowed:
        """The tokens that are allowed as output `index`; all outputs before it have been taken."""
        match self._state.place:
            case IdPlace.GRAMMAR:
                return Allowed.GRAMMAR
            case IdPlace.START:
                return Allowed.GRAMMAR_OR_REASONING
            case IdPlace.CALL:
                return Allowed.CALL
            case IdPlace.REASONING if index >= self._begin + self._num_left:
                return Allowed.END
        if self._is_in_grammar:
            return Allowed.GRAMMAR
        return Allowed.NO_CALL if self._excludes else Allowed.ANY

    @property
    def _excludes(self) -> bool:
        return bool(self._state.recent and self._has_called and self.masks_ids) and bool(
            self.next_triggers
        )

    def take(self, token_id: int, index: int) -> None:
        """Take output `index`. Those that are not watched may be left out."""
        old = self._state
        if old.is_call:
            assert self._calls is not None
            self._go_on(index, is_complete=self._calls.take(token_id))
        elif not old.is_grammar:
            move = self._automaton.move(old, token_id)
            if move.to is not old or move.trigger:
                self._follow(move, index)

    def take_all(self, token_ids: UInt32s) -> None:
        """Take the first outputs, [n]."""
        automaton = self._automaton
        watched = np.array(sorted(automaton.first_ids), np.uint32)
        hits = np.flatnonzero(np.isin(token_ids, watched)).tolist()
        ids, num = token_ids.data, len(token_ids)  # hands out ints, without a copy
        index, state = 0, self._state
        while not state.is_grammar:
            if not state.watches_all:
                at = bisect_left(hits, index)
                index = hits[at] if at < len(hits) else num
            if index >= num:
                return
            if state.is_call:
                self.take(ids[index], index)
                state = self._state
            else:
                move = state.moves.get(ids[index]) or automaton.move(state, ids[index])
                if move.to is not state or move.trigger:
                    self._follow(move, index)
                    state = self._state
            index += 1

    def _follow(self, move: DelimiterMove, index: int) -> None:
        """Output `index` makes this move."""
        old, self._state = self._state, move.to
        self._changed_at = index + 1
        if old.is_reasoning:
            if not move.to.is_reasoning:
                begin = index + 1 - move.num  # of what ends it
                self._end(begin, begin if move.is_within else index + 1)
        elif move.to.is_reasoning:
            self._begin = index + 1 + self._ids.num_behind
        elif move.to.is_grammar:
            self.grammar_start = index - old.num_held
        if move.trigger and self._calls is not None and not self.is_final and not self.masks_ids:
            self._state = self._automaton.state(IdPlace.CALL)
            self._go_on(index, is_complete=self._calls.begin(move.trigger))

    def _go_on(self, index: int, *, is_complete: bool) -> None:
        """Output `index` is the call's."""
        self._changed_at = index + 1
        if is_complete:
            self._state, self._has_called = self._automaton.state(IdPlace.BORDER), True

    def _end(self, end: int, behind: int) -> None:
        """Reasoning ends before output `end`; a grammar begins at `behind`."""
        num = end - self._begin
        if num > 0 and self._num_left < NEVER:
            self._num_left = max(self._num_left - num, 0)
        if self.has_grammar:
            self.grammar_start = behind
            self._state = self._automaton.state(IdPlace.GRAMMAR)


_PLACES: Mapping[ReasoningPlace, IdPlace] = {
    "start": IdPlace.BORDER,
    "border": IdPlace.BORDER,
    "reasoning": IdPlace.REASONING,
    "content": IdPlace.CONTENT,
}
_GRAMMAR_PLACES: Mapping[ReasoningPlace, IdPlace] = {
    "start": IdPlace.START,
    "border": IdPlace.GRAMMAR,
    "reasoning": IdPlace.REASONING,
    "content": IdPlace.GRAMMAR,
}


def has_triggers(admit: Admit) -> bool:
    """True if a registration's grammar is of calls alone."""
    return admit.derived.reasoning is not None and admit.derived.reasoning.has_triggers


def reasoning_state(admit: Admit, calls: CallFollower | None = None) -> ReasoningState | None:
    """The state behind a registration's outputs; None where nothing depends on it. calls: of one
    that has triggers.
    """
    budget = admit.spec.params.thinking_token_budget
    has_grammar = admit.spec.params.structured_outputs is not None
    if admit.derived.reasoning is None or (budget is None and not has_grammar):
        return None
    state = ReasoningState(
        admit.derived.reasoning,
        budget,
        has_grammar=has_grammar and not has_triggers(admit),
        calls=calls,
    )
    state.take_all(u32(admit.begun.output_ids))
    return state
