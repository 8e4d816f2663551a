"""The loops over the table of `PrefixMemory`, in numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.client.placing.prefix_memory import SET_SIZE
from slipstream.client.placing.rendezvous import mix64
from slipstream_ipc.arrays import Float64s, Int64s, UInt64s


class ReferenceTable:
    """The loops over the table, in Python.

    tags: uint64 [sets, SET_SIZE]. times: float64 of the same shape, -inf where there is no entry.
    chain: int64 [n], hashes of ever longer beginnings.
    """

    @staticmethod
    def known_depths(
        tags: UInt64s,
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
    def remember_chain(
        tags: UInt64s, times: Float64s, chain: Int64s, salt: int, now: float
    ) -> None:
        """Put the hashes into their sets; the shortest beginning is the last one there."""
        for tag in _tags_of(chain, salt)[::-1]:
            at = int(tag) & (len(tags) - 1)
            row, row_times = tags[at], times[at]
            places = np.flatnonzero(row == tag)
            place = int(places[0]) if len(places) else SET_SIZE - 1
            row[1 : place + 1] = row[:place].copy()
            row_times[1 : place + 1] = row_times[:place].copy()
            row[0], row_times[0] = tag, now


def _tags_of(chain: Int64s, salt: int) -> UInt64s:
    return mix64(chain.view(np.uint64) ^ np.uint64(salt))
