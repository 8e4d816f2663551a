"""The time that cached blocks stay: the age of the block evicted last, from the pool's stamps.

The pool stamps blocks in the order in which they become free. Notes of the stamp at some times tell
when a block was free at the latest, to about a second.
"""

from __future__ import annotations

from collections import deque

from slipstream_core.kvcache.block_pool import BlockPool

_RESOLUTION_S = 1.0
_MAX_NOTES = 4096  # the oldest is dropped: an age is then told too small


class EvictionAge:
    """Call `age` regularly."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        # the stamp that comes next, and when that was so; both ascending
        self._notes: deque[tuple[int, float]] = deque(maxlen=_MAX_NOTES)

    def age(self, now: float) -> float | None:
        """Seconds since the last use of the block that was evicted last, never overestimated; None
        if none was evicted.
        """
        notes, pool = self._notes, self._pool
        if not notes or (pool.next_stamp > notes[-1][0] and now - notes[-1][1] >= _RESOLUTION_S):
            notes.append((pool.next_stamp, now))
        # one number for a cache: blocks leave in the order of their last use (decision 038)
        evicted = pool.last_evicted
        if evicted is None:
            return None
        while notes and notes[0][0] <= evicted:
            notes.popleft()
        return now - notes[0][1] if notes else 0.0
