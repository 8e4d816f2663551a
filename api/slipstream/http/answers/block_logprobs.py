"""Log-probabilities of answers that are printed by blocks: each block of content gets those of its
tokens, as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from msgspec import Raw

from slipstream.http.answers.blocks import Block, BlockKind
from slipstream.http.answers.content_tokens import only_content
from slipstream.http.openai.logprob_bodies import chat_logprobs
from slipstream.http.openai.vocabulary import TokenTexts
from slipstream.http.response_encoding import json_raw
from slipstream.http.time_slice import Parts, run_all
from slipstream.outputs import Delta, events_of, kind_of, logprobs_in_parts
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
        self._held: list[Raw] = []  # of tokens without text before a block

    def take(self, delta: Delta) -> list[Made]:
        """What `hand_on` makes of a delta's events."""
        return run_all(self.take_in_parts(delta))

    def take_in_parts(self, delta: Delta) -> Parts[list[Made]]:
        """`take`, for a delta with very many tokens."""
        found: list[Made] = []
        left = yield from self._shown(delta)
        is_listed = kind_of(delta) is None
        for event in events_of(delta):
            found += self._hand_on((event,))
            if event.kind == EventKind.CONTENT:
                num = event.num_tokens if is_listed else len(left)
                self._add(left[:num])
                del left[:num]
        self._add(left)
        return found

    def _shown(self, delta: Delta) -> Parts[list[Raw]]:
        k, texts = self._num_logprobs, self._texts
        found: list[Raw] = []
        for part in only_content(logprobs_in_parts(delta), delta):
            found += [json_raw(token) for token in chat_logprobs(part, k, texts).content]
            yield
        return found

    def _add(self, shown: list[Raw]) -> None:
        block = self._open_block()
        if block is None or block.kind != BlockKind.CONTENT:
            self._held += shown
            return
        block.logprobs += self._held
        block.logprobs += shown
        self._held.clear()
