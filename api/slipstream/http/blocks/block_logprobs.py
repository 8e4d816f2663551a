"""Log-probabilities of answers that are printed by blocks: each block of content gets those of its
tokens. Its printer leaves holes for them (`response_encoding.hole`), which have its index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from slipstream.http.blocks.blocks import Block, BlockKind
from slipstream.http.logprobs.content_tokens import add_content, content_of, tokens_of
from slipstream.http.logprobs.held_logprobs import HeldLogprobs
from slipstream.http.logprobs.logprob_pieces import ShownLogprobs, entry_pieces
from slipstream.http.logprobs.vocabulary import TokenTexts
from slipstream.http.response_encoding import filled
from slipstream.outputs import Delta, events_of, kind_of
from slipstream_ipc.messages import AnswerEvent, EventKind

Made = TypeVar("Made")


class LoggedDeltas(Generic[Made]):
    """Hands on the events of deltas, and adds log-probabilities to the open block."""

    def __init__(
        self,
        num_logprobs: int,
        texts: TokenTexts,
        hand_on: Callable[[Sequence[AnswerEvent]], list[Made]],
        open_block: Callable[[], Block | None],
    ) -> None:
        """num_logprobs: candidates per token. open_block: the one that grows, if any."""
        self._num_logprobs = num_logprobs
        self._texts = texts
        self._hand_on = hand_on
        self._open_block = open_block
        self._held = HeldLogprobs()  # of tokens without text before a block

    def take(self, delta: Delta, tokens: HeldLogprobs | None = None) -> list[Made]:
        """Return what `hand_on` makes of a delta's events. tokens: its log-probabilities, where it
        does not have them itself.
        """
        found: list[Made] = []
        left = content_of(tokens_of(delta) if tokens is None else tokens, delta)
        if kind_of(delta) is not None:
            for event in events_of(delta):
                found += self._hand_on((event,))
            self._growing().extend(left)
            return found
        for event in events_of(delta):
            found += self._hand_on((event,))
            if event.kind == EventKind.CONTENT:
                self._growing().extend(left.take(event.num_tokens))
        self._growing().extend(left)
        return found

    def take_tokens(self, delta: Delta) -> None:
        """Take the tokens of a delta that lists no events, which have been handed on."""
        add_content(self._growing(), delta)

    def _growing(self) -> HeldLogprobs:
        """The log-probabilities to which the next tokens belong."""
        block = self._open_block()
        if block is None or block.kind != BlockKind.CONTENT:
            return self._held
        if block.logprobs is None:
            block.logprobs, self._held = self._held, HeldLogprobs()
        elif self._held.num_tokens:
            block.logprobs.extend(self._held)
            self._held = HeldLogprobs()
        return block.logprobs

    def filled(self, encoded: bytes, blocks: Sequence[Block], *, is_line: bool) -> Iterator[bytes]:
        """The output of a printer for these blocks, in pieces. is_line: see `logprob_pieces`."""

        def fill(index: int) -> Iterator[bytes]:
            tokens = blocks[index].logprobs or HeldLogprobs()
            shown = ShownLogprobs(self._num_logprobs, self._texts, tokens)
            return entry_pieces(shown, is_line=is_line)

        return filled(encoded, fill)
