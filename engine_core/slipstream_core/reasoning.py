"""Where a stream is in its reasoning, which decides what its next token may be.

- The state is a function of the outputs and of the registration, so a successor of the core agrees.
- Free reasoning needs no mask. A mask is needed where the budget is spent, and where the stream's
  grammar applies: to what follows reasoning, or to an answer that begins without any.
- A token is looked at only where it may change the state: at a border every one, else those of
  `watched_ids`.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import IntEnum

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


class ReasoningState:
    """The state of one stream; indices count its outputs.

    grammar_start: the first output in the grammar; None: it has not begun, or there is none.
    masked_from: the index from which on a mask is needed, if no output before changes the state.
    """

    __slots__ = (
        "_begin",
        "_border_from",
        "_ids",
        "_num_left",
        "_place",
        "grammar_start",
        "has_grammar",
        "watched_ids",
    )

    def __init__(self, ids: ReasoningIds, budget: int | None, *, has_grammar: bool) -> None:
        """budget: the most tokens of reasoning; None: no limit."""
        self._ids = ids
        self._place = "border" if ids.start == "start" else ids.start
        self.has_grammar = has_grammar
        self._num_left = NEVER if budget is None else budget
        self._begin = 0  # of the reasoning that is open
        self._border_from = 0
        self.grammar_start: int | None = None
        if ids.start in ("border", "content") and has_grammar:
            self.grammar_start = 0
        self.watched_ids = frozenset((*ids.begins, *ids.ends, *ids.calls, *ids.borders))

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
        return self._place == "border" and not self.is_final

    @property
    def forced_id(self) -> int:
        """The id that ends reasoning."""
        return self._ids.ends[0]

    @property
    def begin_ids(self) -> tuple[int, ...]:
        """The ids that begin reasoning."""
        return self._ids.begins

    @property
    def masked_from(self) -> int:
        """See the class."""
        if self.grammar_start is not None:
            return self.grammar_start
        if self._place == "reasoning":
            return min(self._begin + self._num_left, NEVER)
        if self._place == "border" and (self.has_grammar or not self._num_left):
            return self._border_from  # without a grammar: reasoning that begins has to end
        return NEVER

    def allowed_at(self, index: int) -> Allowed:
        """What output `index` may be; all outputs before it have been taken."""
        if self.grammar_start is not None:
            return Allowed.GRAMMAR
        if self._place == "reasoning":
            return Allowed.END if index >= self._begin + self._num_left else Allowed.ANY
        if self._place == "border" and self.has_grammar:
            return Allowed.GRAMMAR_OR_REASONING
        return Allowed.ANY

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
        elif self._place == "border" and token_id in ids.begins:
            self._place, self._begin = "reasoning", index + 1
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

    def _end(self, end: int, behind: int) -> None:
        """Reasoning ends before output `end`; a grammar begins at `behind`."""
        if self._num_left < NEVER:
            self._num_left = max(self._num_left - (end - self._begin), 0)
        if self.has_grammar:
            self.grammar_start = behind


def reasoning_state(admit: Admit) -> ReasoningState | None:
    """The state behind a registration's outputs; None where nothing depends on reasoning."""
    budget = admit.params.thinking_token_budget
    has_grammar = admit.params.structured_outputs is not None
    if admit.reasoning is None or (budget is None and not has_grammar):
        return None
    state = ReasoningState(admit.reasoning, budget, has_grammar=has_grammar)
    state.take_all(u32(admit.output_ids))
    return state
