"""Where in its grammar one stream is.

Owns: the library's matcher of one stream and how many outputs it has seen; what the streams of one
grammar share. Does not know: rows, plans, why a stream is here again.

Rules:
- The state is a function of the outputs: they are taken in once each, in order, whenever the next
  mask is wanted. So a preemption is nothing to it, and one that was lost is made again from them.
- An answer may end where the grammar is complete, by any of the stream's own ends. Where nothing
  else may follow, only they are allowed; behind one of them, too: a step may be in flight already.
- Copies of a matcher share a lexer, whose states are bounded and never given back. One that is full
  is no stream's end: it goes on in a new one, a few times, as its own answer may need that many.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream_ipc.errors import brief

Int32s = npt.NDArray[np.int32]


_LEXER_FULL = "too many states"
_MAX_RENEWED = 3  # lexers of one stream that were full


class GrammarBroken(Exception):  # noqa: N818  (an outcome of one stream)
    """The stream cannot go on in its grammar; says why, without quoting the answer."""


class LexerFull(GrammarBroken):
    """The lexer that the stream shares has no room: `GrammarMatcher.renew` gives it another."""


class SharedGrammar:
    """A compiled grammar, for all streams that follow it."""

    def __init__(self, compile_it: Callable[[], Any]) -> None:
        """`compile_it` makes a matcher at the start; GrammarError is the caller's."""
        self._compile = compile_it
        self._matcher = compile_it()
        self._generation = 0  # lexers before this one
        self._lock = threading.Lock()  # the loop and the compiler's thread come here

    def start(self) -> tuple[Any, int]:
        """A matcher of a stream's own, and which lexer it has."""
        with self._lock:
            return self._matcher.deep_copy(), self._generation

    def start_behind(self, generation: int) -> tuple[Any, int]:
        """The same with another lexer than that, which is full."""
        with self._lock:
            if self._generation == generation:  # it took longer to fill than this takes
                self._matcher = self._compile()
                self._generation += 1
            return self._matcher.deep_copy(), self._generation


class GrammarMatcher:
    """A stream in its grammar, at the start."""

    __slots__ = (
        "_end_ids",
        "_end_mask",
        "_generation",
        "_grammar",
        "_grammars_own",
        "_is_over",
        "_matcher",
        "_num_renewed",
        "num_taken",
    )

    def __init__(
        self, grammar: SharedGrammar, end_ids: frozenset[int], end_mask: Int32s, ends: Int32s
    ) -> None:
        """`end_mask` allows `end_ids`; `ends` are those ids by which the library would let an
        answer end. Masks are [ceil(vocab / 32)].
        """
        self._grammar = grammar
        self._matcher, self._generation = grammar.start()
        self._num_renewed = 0
        self._end_ids = end_ids
        self._end_mask = end_mask
        self._grammars_own = ~ends
        self._is_over = False
        self.num_taken = 0  # outputs

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        """The next outputs. Raises GrammarBroken where the grammar does not allow one of them."""
        for token_id in token_ids:
            if self._is_over:
                break
            if token_id in self._end_ids:
                self._is_over = True
            elif not self._matcher.consume_token(token_id):
                raise self._broken(f"does not allow output token {self.num_taken} of the stream")
            self.num_taken += 1

    def renew(self, token_ids: Sequence[int]) -> None:
        """Begin again in a lexer with room, and take `token_ids`: all outputs so far.

        Raises GrammarBroken as `take` does, and where that was done often enough.
        """
        while True:
            self._num_renewed += 1
            self._matcher, self._generation = self._grammar.start_behind(self._generation)
            self._is_over = False
            self.num_taken = 0
            try:
                return self.accept_tokens(token_ids)
            except LexerFull:
                pass

    def _broken(self, otherwise: str) -> GrammarBroken:
        """What the library says of its limits; what it says of a token would quote it."""
        why = self._matcher.get_error().partition("\n")[0]
        if not why or "satisfy the grammar" in why:
            return GrammarBroken(f"the grammar {otherwise}")
        may_go_on = _LEXER_FULL in why and self._num_renewed < _MAX_RENEWED
        kind = LexerFull if may_go_on else GrammarBroken
        return kind(brief(f"the grammar became too complex to follow: {why}"))

    @property
    def matcher(self) -> Any | None:
        """What is to fill the next mask; None where nothing but an end may follow."""
        return None if self._is_over else self._matcher

    def finish(self, mask: Int32s) -> None:
        """Make of what the matcher has filled what may come next; without one, of nothing.

        Raises GrammarBroken where that is no token at all.
        """
        if self._is_over:
            mask[:] = self._end_mask
            return
        if self._matcher.is_error():
            raise self._broken("cannot be followed")
        mask &= self._grammars_own
        if self._matcher.is_accepting():
            mask |= self._end_mask
        if not mask.any():
            raise GrammarBroken("no token of the model's vocabulary goes on in the grammar")
