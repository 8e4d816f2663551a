"""Chats for a simulated fleet: shared system prompts, answers, and pauses between the turns.

Lengths are in tokens, prompts are lists of hashes of chunks of CHUNK tokens. A conversation has a
system prompt that it shares with others, some more popular than others; a quarter of them have a
long first turn of their own in its place, or of all conversations alike if it `is_popular`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from slipstream.fleet.prompt_keys import PromptKey

CHUNK = 128
_NUM_SYSTEM_PROMPTS = 24
_SYSTEM_WEIGHTS = [1 / (rank + 1) for rank in range(_NUM_SYSTEM_PROMPTS)]
_OWN_SHARE = 0.25
_OWN_LEN = 1800
_POPULAR_CHUNKS = 8
_GOES_ON = 0.86
_MAX_LEN = 16_000
_PAUSE_S = 18.0
_U64 = 2**64 - 1
# what a hash is of: numbers, as hashes of words differ from process to process
_SHARED, _OWN, _FIRST, _SECOND, _POPULAR = range(5)
_LENGTHS = CHUNK * np.arange(1, 257)


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedKey(PromptKey):
    """A prompt's key. session: the conversation; chunks: hashes of all full chunks."""

    session: int
    chunks: list[int]


@dataclass(slots=True, eq=False)
class Conversation:
    """A conversation and what has been said in it.

    length: tokens, answers included. shared_len: of them, those of a prompt that others have too.
    """

    session: int
    shared: int
    shared_len: int
    length: int
    turn: int = 0
    chunks: list[int] = field(default_factory=list)

    def chunks_of(self, length: int) -> list[int]:
        """Hashes of the full chunks of the first `length` tokens."""
        for at in range(len(self.chunks), length // CHUNK):
            is_shared = CHUNK * (at + 1) <= self.shared_len
            owner = (_SHARED, self.shared) if is_shared else (_OWN, self.session)
            self.chunks.append(hash((*owner, at)))
        return self.chunks[: length // CHUNK]


class ChatWorkload:
    """Makes conversations and their turns, the same ones for the same seed."""

    def __init__(self, seed: int, *, is_popular: bool) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a simulation's
        self._is_popular = is_popular
        self._num_sessions = 0

    def conversation(self) -> Conversation:
        """A new one."""
        self._num_sessions += 1
        session = self._num_sessions
        if self._random.random() >= _OWN_SHARE:
            system = self._random.choices(range(_NUM_SYSTEM_PROMPTS), _SYSTEM_WEIGHTS)[0]
            length = 512 + CHUNK * (system % 12)
            return Conversation(session, system, length, length)
        if self._is_popular:
            return Conversation(session, -1, _POPULAR_CHUNKS * CHUNK, _OWN_LEN)
        return Conversation(session, 0, 0, _OWN_LEN)

    def turn(self, conversation: Conversation) -> tuple[SimulatedKey, int]:
        """The prompt of the conversation's next turn, and the length of its answer."""
        one = conversation
        prior_len, turn = one.length, one.turn
        one.length += int(self._random.lognormvariate(4.6, 0.8)) + 20
        one.turn += 1
        prompt_len = one.length
        answer_len = int(self._random.lognormvariate(5.2, 0.6)) + 10
        chunks = one.chunks_of(prompt_len)
        is_popular = one.shared == -1
        first = hash((_POPULAR, 0) if is_popular else (_FIRST, one.session))
        key = SimulatedKey(
            first & _U64,
            hash((_SECOND, one.session)) & _U64 if turn else None,
            min(2, turn),
            prompt_len,
            prior_len if turn else 0,
            np.array(chunks, np.int64),
            _LENGTHS[: len(chunks)],
            one.session,
            chunks,
        )
        one.length += answer_len
        return key, answer_len

    def pause_s(self, conversation: Conversation) -> float | None:
        """Seconds until the user's next turn; None if there is none."""
        if conversation.length >= _MAX_LEN or self._random.random() >= _GOES_ON:
            return None
        return self._random.expovariate(1 / _PAUSE_S)

    def time_to_next_s(self, per_s: float) -> float:
        """Seconds until the next conversation, of `per_s` a second."""
        return self._random.expovariate(per_s)

    def pick(self, num: int) -> int:
        """One of `num`, all alike."""
        return self._random.randrange(num)
