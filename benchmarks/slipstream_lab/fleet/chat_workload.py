"""Chats to be had: shared system prompts, lengths of turns and answers, pauses between the turns.

Lengths are in tokens. A conversation has a system prompt that it shares with others, some more
popular than others; a quarter of them have a long first turn of their own in its place.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

_NUM_SYSTEM_PROMPTS = 24
_SYSTEM_WEIGHTS = [1 / (rank + 1) for rank in range(_NUM_SYSTEM_PROMPTS)]
_SYSTEM_LEN, _SYSTEM_STEP = 512, 128
_OWN_SHARE = 0.25
_OWN_LEN = 1800
_GOES_ON = 0.86
_MAX_LEN = 16_000
_PAUSE_S = 18.0


@dataclass(slots=True, eq=False)
class Conversation:
    """A conversation and what has been said in it.

    system: its system prompt's number, None where its first turn is its own. length: tokens,
    answers included.
    """

    system: int | None
    length: int


class ChatWorkload:
    """Makes conversations and their turns, the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a workload's

    def conversation(self) -> Conversation:
        """A new one."""
        if self._random.random() < _OWN_SHARE:
            return Conversation(None, _OWN_LEN)
        system = self._random.choices(range(_NUM_SYSTEM_PROMPTS), _SYSTEM_WEIGHTS)[0]
        return Conversation(system, _SYSTEM_LEN + _SYSTEM_STEP * (system % 12))

    def turn(self, conversation: Conversation) -> tuple[int, int]:
        """The lengths of the conversation's next turn and of its answer, which it has then."""
        turn_len = int(self._random.lognormvariate(4.6, 0.8)) + 20
        answer_len = int(self._random.lognormvariate(5.2, 0.6)) + 10
        conversation.length += turn_len + answer_len
        return turn_len, answer_len

    def pause_s(self, conversation: Conversation) -> float | None:
        """Seconds until the user's next turn; None if there is none."""
        if conversation.length >= _MAX_LEN or self._random.random() >= _GOES_ON:
            return None
        return self._random.expovariate(1 / _PAUSE_S)

    def time_to_next_s(self, per_s: float) -> float:
        """Seconds until the next conversation, of `per_s` a second."""
        return self._random.expovariate(per_s)
