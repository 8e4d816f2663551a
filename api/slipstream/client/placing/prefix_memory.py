"""Remembers which beginnings of prompts were sent to which member, in a table of fixed size.

An entry is the hash of a beginning and a member, and the time at which it was sent there last. A
full set of the table forgets the entry that was sent longest ago. Lookups and updates are loops
over entries; they are C where it compiles (`prefix_memory.c`), and held to `ReferenceTable` by a
test. Pure; times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt

from slipstream.client.placing.member_load import MemberLoad
from slipstream.client.placing.prompt_keys import PromptKey
from slipstream.client.placing.rendezvous import mix64
from slipstream_ipc.native.extension import load_extension

Int64s = npt.NDArray[np.int64]
Uint64s = npt.NDArray[np.uint64]
Float64s = npt.NDArray[np.float64]

CAPACITY = 2**20  # entries of 16 bytes
SET_SIZE = 8
_SOURCE = Path(__file__).with_name("prefix_memory.c")


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
        self._table = load_native() or ReferenceTable

    def known(self, key: PromptKey, members: Sequence[MemberLoad]) -> list[int]:
        """The tokens of the longest beginning that was sent to each member and that its cache has
        not evicted since; 0 for none.
        """
        salts = [member.salt for member in members]
        since = [member.kept_since for member in members]
        depths = self._table.known(self._tags, self._times, key.chain, salts, since)
        return [int(key.lengths[depth - 1]) if depth else 0 for depth in depths]

    def remember(self, key: PromptKey, member: MemberLoad, now: float) -> None:
        """The prompt was sent to `member`."""
        self._table.remember(self._tags, self._times, key.chain, member.salt, now)


class ReferenceTable:
    """The loops over the table, in Python.

    tags: uint64 [sets, SET_SIZE]. times: float64 of the same shape, -inf where there is no entry.
    chain: int64 [n], hashes of ever longer beginnings.
    """

    @staticmethod
    def known(
        tags: Uint64s,
        times: Float64s,
        chain: Int64s,
        salts: Sequence[int],
        since: Sequence[float],
    ) -> list[int]:
        """The number of hashes of the longest beginning that was sent after its `since`, for each
        salt.
        """
        found: list[int] = []
        for salt, time in zip(salts, since, strict=True):
            wanted = _tags_of(chain, salt)
            sets = wanted & np.uint64(len(tags) - 1)
            matches = (tags[sets] == wanted[:, None]) & (times[sets] > time)
            hits = np.flatnonzero(matches.any(axis=1))
            found.append(int(hits[-1]) + 1 if len(hits) else 0)
        return found

    @staticmethod
    def remember(tags: Uint64s, times: Float64s, chain: Int64s, salt: int, now: float) -> None:
        """Put the hashes into their sets; the shortest beginning is the last one there."""
        for tag in _tags_of(chain, salt)[::-1]:
            at = int(tag) & (len(tags) - 1)
            row, row_times = tags[at], times[at]
            places = np.flatnonzero(row == tag)
            place = int(places[0]) if len(places) else SET_SIZE - 1
            row[1 : place + 1] = row[:place].copy()
            row_times[1 : place + 1] = row_times[:place].copy()
            row[0], row_times[0] = tag, now


def _tags_of(chain: Int64s, salt: int) -> Uint64s:
    return mix64(chain.view(np.uint64) ^ np.uint64(salt))


def load_native() -> ModuleType | None:
    """The loops in C, which have the functions of `ReferenceTable`; None without a compiler."""
    return load_extension("prefix_memory", _SOURCE)
