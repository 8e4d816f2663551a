"""Where a stream is in its reasoning and its calls, which decides what its next token may be.

- The state is a function of the outputs and of the registration, so a successor of the core agrees.
- Free reasoning needs no mask. A mask is needed where the budget is spent, and where the stream's
  grammar applies: to what follows reasoning, or to an answer that begins without any; or to calls
  alone, each from the id that begins it up to the first token with which it is complete.
- A token is looked at only where it may change the state: at a border and in a call in the grammar
  every one, else those of `watched_ids`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from enum import IntEnum
from typing import Protocol

import numpy as np

from slipstream_ipc.columns import UInt32s, u32
from slipstream_ipc.messages import Admit, ReasoningIds

NEVER = 2**62  # an index that no output has


class Allowed(IntEnum):
    """What the next token may be."""

    ANY = 0
    END = 1  # the id that ends reasoning
    GRAMMAR = 2
    GRAMMAR_OR_REASONING = 3  # what the grammar allows at its start, or an id that begins reasoning
    CALL = 4  # what continues the call in the grammar


class CallFollower(Protocol):
    """The grammar of a call; errors are kept until a mask is wanted."""

    def begin(self, token_id: int) -> bool:
        """A call begins with this token; whether it is complete."""

    def take(self, token_id: int) -> bool:
        """The call goes on with this token; whether it is complete."""


class ReasoningState:
    """The state of one stream; indices count its outputs.

    grammar_start: the first output in the grammar; None: it has not begun, or there is none.
    masked_from: the index from which on a mask is needed, if no output before changes the state.
    """

    __slots__ = (
        "_begin",
        "_border_from",
        "_calls",
        "_has_called",
        "_ids",
        "_num_left",
        "_place",
        "grammar_start",
        "has_grammar",
        "watched_ids",
    )

    def __init__(
        self,
        ids: ReasoningIds,
        budget: int | None,
        *,
        has_grammar: bool,
        calls: CallFollower | None = None,
    ) -> None:
        """budget: the most tokens of reasoning; None: no limit. has_grammar: of the whole content.
        calls: a grammar of the calls that the triggers begin.
        """
        self._ids = ids
        self._place: str = "border" if ids.start == "start" else ids.start
        self.has_grammar = has_grammar
        self._num_left = NEVER if budget is None else budget
        self._begin = 0  # of the reasoning that is open
        self._border_from = 0  # also of a call in the grammar
        self._calls = calls
        self._has_called = False
        self.grammar_start: int | None = None
        if ids.start in ("border", "content") and has_grammar:
            self.grammar_start = 0
        self.watched_ids = frozenset(
            (*ids.begins, *ids.ends, *ids.calls, *ids.borders, *ids.triggers)
        )

    @property
    def is_final(self) -> bool:
        """Whether no output can change the state any more."""
        return self.grammar_start is not None

    @property
    def is_reasoning(self) -> bool:
        """Whether reasoning is open."""
        return self._place == "reasoning"

    @property
    def watches_all(self) -> bool:
        """Whether the next output has to be looked at, whatever it is."""
        return self._place in ("border", "call") and not self.is_final

    @property
    def masks_ids(self) -> bool:
        """Whether ids must not be sampled: those that end the answer in reasoning that a grammar
        follows, those that begin calls where there has been the one.
        """
        if self._calls is not None:
            return self._has_called and self._ids.is_single
        return self.has_grammar and self._place == "reasoning"

    @property
    def forced_id(self) -> int:
        """The id that ends reasoning."""
        return self._ids.ends[0]

    @property
    def calls(self) -> CallFollower | None:
        """The grammar of calls, if there is one."""
        return self._calls

    @property
    def begin_ids(self) -> tuple[int, ...]:
        """The ids that begin reasoning."""
        return self._ids.begins

    def masked_ids(self, end_ids: Collection[int]) -> Collection[int]:
        """The ids of `masks_ids`, whether or not they are masked now. end_ids: end the answer."""
        if self._calls is not None:
            return self._ids.triggers if self._ids.is_single else ()
        return set(end_ids).difference(self._ids.ends)

    @property
    def masked_from(self) -> int:
        """See the class."""
        if self.grammar_start is not None:
            return self.grammar_start
        if self._place == "reasoning":
            return min(self._begin + self._num_left, NEVER)
        if self._place == "border" and (self.has_grammar or not self._num_left):
            return self._border_from  # without a grammar: reasoning that begins has to end
        if self._place == "call":
            return self._border_from
        return NEVER

    def allowed_at(self, index: int) -> Allowed:
        """What output `index` may be; all outputs before it have been taken."""
        if self.grammar_start is not None:
            return Allowed.GRAMMAR
        if self._place == "reasoning":
            return Allowed.END if index >= self._begin + self._num_left else Allowed.ANY
        if self._place == "border" and self.has_grammar:
            return Allowed.GRAMMAR_OR_REASONING
        return Allowed.CALL if self._place == "call" else Allowed.ANY

    def take(self, token_id: int, index: int) -> None:
        """Take output `index`. Those that are not watched may be left out."""
        if self.grammar_start is not None:
            return
        ids = self._ids
        if self._place == "reasoning":
            if token_id in ids.ends:
                self._end(index, index + 1)
                self._place, self._border_from = "border", index + 1
            elif token_id in ids.calls:
                self._end(index, index)
                self._place = "content"
                self._begin_call(token_id, index)
        elif self._place == "call":
            assert self._calls is not None
            self._go_on(index, is_complete=self._calls.take(token_id))
        elif token_id in ids.triggers:
            self._place = "content"
            self._begin_call(token_id, index)
        elif self._place == "border" and token_id in ids.begins:
            self._place, self._begin = "reasoning", index + 1 + ids.num_behind
        elif self._place == "border" and self.has_grammar:
            self.grammar_start = index
        elif token_id in ids.borders:
            self._place, self._border_from = "border", index + 1
        elif self._place == "border" and token_id not in (*ids.blanks, *ids.ends):
            self._place = "content"

    def take_all(self, token_ids: UInt32s) -> None:
        """Take the first outputs, [n]."""
        watched = np.array(sorted(self.watched_ids), np.uint32)
        hits = np.flatnonzero(np.isin(token_ids, watched)).tolist()
        index = 0
        while not self.is_final:
            if not self.watches_all:
                at = bisect_left(hits, index)
                index = hits[at] if at < len(hits) else len(token_ids)
            if index >= len(token_ids):
                return
            self.take(int(token_ids[index]), index)
            index += 1

    def _begin_call(self, token_id: int, index: int) -> None:
        if self._calls is not None and token_id in self._ids.triggers and not self.masks_ids:
            self._place = "call"
            self._go_on(index, is_complete=self._calls.begin(token_id))

    def _go_on(self, index: int, *, is_complete: bool) -> None:
        self._border_from = index + 1
        if is_complete:
            self._place, self._has_called = "border", True

    def _end(self, end: int, behind: int) -> None:
        """Reasoning ends before output `end`; a grammar begins at `behind`."""
        if self._num_left < NEVER:
            self._num_left = max(self._num_left - max(end - self._begin, 0), 0)
        if self.has_grammar:
            self.grammar_start = behind


def has_triggers(admit: Admit) -> bool:
    """Whether a registration's grammar is of calls alone."""
    return admit.reasoning is not None and bool(admit.reasoning.triggers)


def reasoning_state(admit: Admit, calls: CallFollower | None = None) -> ReasoningState | None:
    """The state behind a registration's outputs; None where nothing depends on it. calls: of one
    that has triggers.
    """
    budget = admit.params.thinking_token_budget
    has_grammar = admit.params.structured_outputs is not None
    if admit.reasoning is None or (budget is None and not has_grammar):
        return None
    state = ReasoningState(
        admit.reasoning,
        budget,
        has_grammar=has_grammar and not has_triggers(admit),
        calls=calls,
    )
    state.take_all(u32(admit.output_ids))
    return state
