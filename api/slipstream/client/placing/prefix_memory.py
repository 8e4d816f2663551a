"""Remembers which beginnings of prompts were sent to which member, in a table of fixed size.

An entry is the hash of a beginning and a member, and the time at which it was sent there last. A
full set of the table forgets the entry that was sent longest ago. Lookups and updates are loops
over entries, in C (`prefix_memory.c`). Pure; times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.client.placing.member_load import MemberLoad
from slipstream.client.placing.prompt_keys import PromptKey
from slipstream.compiled import known_depths, remember_chain

CAPACITY = 2**20  # entries of 16 bytes
SET_SIZE = 8


class PrefixMemory:
    """The memory of one router.

    capacity: entries, a power of two and at least SET_SIZE.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        num_sets = capacity // SET_SIZE
        if num_sets < 1 or num_sets & (num_sets - 1) or num_sets * SET_SIZE != capacity:
            raise ValueError(
                f"capacity: got {capacity}, allowed: a power of two from {SET_SIZE} on"
            )
        # by set, in order of time, the last one first
        self._tags = np.zeros((num_sets, SET_SIZE), np.uint64)
        self._times = np.full((num_sets, SET_SIZE), -np.inf)

    def known(self, key: PromptKey, members: Sequence[MemberLoad]) -> list[int]:
        """The tokens of the longest beginning that was sent to each member and that its cache has
        not evicted since; 0 for none.
        """
        salts = [member.salt for member in members]
        since = [member.kept_since for member in members]
        depths = known_depths(self._tags, self._times, key.chain, salts, since)
        return [int(key.lengths[depth - 1]) if depth else 0 for depth in depths]

    def remember(self, key: PromptKey, member: MemberLoad, now: float) -> None:
        """The prompt was sent to `member`."""
        remember_chain(self._tags, self._times, key.chain, member.salt, now)
