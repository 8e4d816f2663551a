"""The position of one stream in its grammar, and what the streams of a grammar share.

- The state is a function of the outputs, which are taken once each, in order, when the next mask is
  wanted. So preemptions do not affect it, and a lost state can be rebuilt.
- An answer may end where the grammar is complete, by any of the stream's end tokens. Where nothing
  else may follow, only they are allowed, and also behind one of them, as a step may already be in
  flight.
- Copies of a matcher share a lexer, whose states are bounded and never freed. A full lexer does not
  end the stream: it goes on in a new one, up to _MAX_RENEWED times, as its own answer may need that
  many states.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any

from slipstream_ipc.arrays import Int32s
from slipstream_ipc.errors import brief

_LEXER_FULL = "too many states"
_MAX_RENEWED = 3  # full lexers per stream: their states are never freed (decision 021)


class GrammarBroken(Exception):  # noqa: N818  (an outcome of one stream)
    """The stream cannot go on in its grammar; the message does not quote the answer."""


class GrammarTooComplex(GrammarBroken):
    """The grammar exceeds a limit of the library."""


class LexerFull(GrammarBroken):
    """The shared lexer of the stream is full: `GrammarMatcher.renew` gives it another."""


class SharedGrammar:
    """A compiled grammar, shared by all streams that follow it."""

    def __init__(
        self,
        compile_it: Callable[[], Any],
        left_out: tuple[str, ...] = (),
        *,
        spell: Callable[[bytes], list[int]],
    ) -> None:
        """`compile_it` makes a matcher at the start; its GrammarError is passed on. left_out: paths
        of keywords of schemas that it lacks. spell: text as the model's tokenizer has it.
        """
        self.left_out = left_out
        self.spell = spell
        self._compile = compile_it
        self._matcher = compile_it()
        self._generation = 0  # lexers before the current one
        self._lock = threading.Lock()  # the loop and the compiler's thread both call

    def start(self) -> tuple[Any, int]:
        """A matcher for one stream, and the generation of its lexer."""
        with self._lock:
            return self._matcher.deep_copy(), self._generation

    def start_behind(self, generation: int) -> tuple[Any, int]:
        """Start as `start` does, with a later lexer than that of `generation`, which is full."""
        with self._lock:
            if self._generation == generation:  # filling it took longer than compiling
                self._matcher = self._compile()
                self._generation += 1
            return self._matcher.deep_copy(), self._generation


class GrammarMatcher:
    """The position of a stream in its grammar; at first the start."""

    __slots__ = (
        "_end_mask",
        "_generation",
        "_grammar",
        "_grammars_own",
        "_is_over",
        "_matcher",
        "_num_renewed",
        "end_ids",
        "num_taken",
    )

    def __init__(
        self, grammar: SharedGrammar, end_ids: frozenset[int], end_mask: Int32s, ends: Int32s
    ) -> None:
        """`end_mask` allows `end_ids`; `ends` allows the ids by which the library would let an
        answer end. Masks are int32 [ceil(vocab / 32)].
        """
        self._grammar = grammar
        self._matcher, self._generation = grammar.start()
        self._num_renewed = 0
        self.end_ids = end_ids  # that end the answer
        self._end_mask = end_mask
        self._grammars_own = ~ends
        self._is_over = False
        self.num_taken = 0  # outputs taken

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        """Take the next outputs. Raises GrammarBroken at one that the grammar does not allow."""
        for token_id in token_ids:
            if self._is_over:
                break
            if token_id in self.end_ids:
                self._is_over = True
            elif not self._matcher.consume_token(token_id):
                raise self._broken(f"does not allow output token {self.num_taken} of the stream")
            self.num_taken += 1

    def renew(self, token_ids: Sequence[int]) -> None:
        """Start again with a new lexer and take `token_ids`, which are all outputs so far.

        Raises GrammarBroken as `accept_tokens` does, and after _MAX_RENEWED lexers.
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
        """The error, with the library's reason if it is a limit: others quote the token."""
        why = self._matcher.get_error().partition("\n")[0]
        if not why or "satisfy the grammar" in why:
            return GrammarBroken(f"the grammar {otherwise}")
        may_go_on = _LEXER_FULL in why and self._num_renewed < _MAX_RENEWED
        kind = LexerFull if may_go_on else GrammarTooComplex
        return kind(brief(f"the grammar became too complex: {why}"))

    def behind(self, token_ids: Sequence[int]) -> GrammarMatcher | None:
        """A copy, at the start of the grammar, that has taken these; None: they are not allowed."""
        other = GrammarMatcher(self._grammar, self.end_ids, self._end_mask, ~self._grammars_own)
        try:
            other.accept_tokens(token_ids)
        except LexerFull:
            other.renew(token_ids)
        except GrammarBroken:
            return None
        return other

    def copy(self) -> GrammarMatcher:
        """A copy at the same position."""
        found = copy(self)
        found._matcher = self._matcher.deep_copy()
        return found

    def forced(self) -> list[int]:
        """The text that must follow, as the model's tokenizer has it; empty where a choice does."""
        if self._is_over:
            return []
        text = self._matcher.compute_ff_bytes()
        return self._grammar.spell(text) if text else []

    def masks_behind(self, token_ids: Sequence[int], masks: Int32s) -> Iterator[Int32s]:
        """Fill the masks here and behind each of these tokens, [1 + n, words], until one is not
        allowed, or ends the answer. Moves on; meant for a copy. Raises GrammarBroken.
        """
        if self._is_over:
            return
        for number, mask in enumerate(masks):
            if number:
                token_id = token_ids[number - 1]
                if token_id in self.end_ids or not self._matcher.try_consume_tokens([token_id]):
                    return
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self.finish(mask)
            yield mask

    @property
    def is_complete(self) -> bool:
        """True if the grammar may end here."""
        return bool(self._matcher.is_accepting())

    @property
    def matcher(self) -> Any | None:
        """The matcher that fills the next mask; None where only an end may follow."""
        return None if self._is_over else self._matcher

    def finish(self, mask: Int32s) -> None:
        """Turn the mask filled by the matcher, if there is one, into the mask of the next token.

        Raises GrammarBroken where no token is allowed.
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
            raise GrammarBroken("no token of the model's vocabulary continues the grammar")


class CallMatcher:
    """The position of a stream in the call that it writes, each of which is one pass through the
    grammar. An error of the grammar is kept until `current` is asked for.
    """

    def __init__(self, start: Callable[[], GrammarMatcher]) -> None:
        """`start` makes a matcher at the start of the grammar."""
        self._start = start
        self._state: GrammarMatcher | None = None
        self._token_ids: list[int] = []
        self._error: Exception | None = None

    @property
    def current(self) -> GrammarMatcher:
        """The position in the call. Raises GrammarBroken, or what the library raised."""
        if self._error is not None:
            raise self._error
        assert self._state is not None
        return self._state

    def begin(self, token_ids: Sequence[int]) -> bool:
        """See CallFollower."""
        self._token_ids = []
        try:
            self._state = self._start()
        except Exception as error:
            self._error = error
        return self._taken(token_ids)

    def take(self, token_id: int) -> bool:
        """See CallFollower."""
        return self._taken((token_id,))

    def _taken(self, token_ids: Sequence[int]) -> bool:
        self._token_ids.extend(token_ids)
        try:
            state = self.current
            try:
                state.accept_tokens(token_ids)
            except LexerFull:
                state.renew(self._token_ids)
            return state.is_complete
        except Exception as error:  # the scheduler, which asks, must not fail for one stream
            self._error = error
            return False

    def renew(self) -> None:
        """Go on with a new lexer. Raises GrammarBroken."""
        self.current.renew(self._token_ids)
