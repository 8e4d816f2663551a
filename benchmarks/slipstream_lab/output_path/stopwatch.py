"""CPU time by stage, and the containers that each stage leaves for the garbage collector. The cost
of reading the thread's clock is subtracted.
"""

from __future__ import annotations

import time
from collections import Counter

from slipstream_lab.common.collection_watch import CollectionWatch

BETWEEN = "between"  # work before a `start`, which is not timed

_NUM_TRIALS = 20_000


class Stopwatch:
    """Adds up the CPU time of this thread: `start`, then `lap` at the end of each stage.

    num_tracked: containers allocated minus freed by each stage, while collections are watched.
    """

    def __init__(self, collections: CollectionWatch, *, lap_ns: float = 0.0) -> None:
        """lap_ns: the cost of one `lap`; see `measured_lap_ns`."""
        self.num_tracked: Counter[str] = Counter()
        self._collections = collections
        self._lap_ns = lap_ns
        self._ns: Counter[str] = Counter()
        self._num_laps: Counter[str] = Counter()
        self._last = 0
        self._last_tracked = collections.tracked_so_far()

    def start(self) -> None:
        """Start timing; the work until now is not timed."""
        self._count_tracked(BETWEEN)
        self._last = time.thread_time_ns()

    def lap(self, stage: str) -> None:
        """Attribute the work since the last call to `stage`."""
        now = time.thread_time_ns()
        self._ns[stage] += now - self._last
        self._num_laps[stage] += 1
        self._count_tracked(stage)
        self._last = now

    def clear(self) -> None:
        """Reset all stages to zero."""
        for counter in (self.num_tracked, self._ns, self._num_laps):
            counter.clear()
        self._last_tracked = self._collections.tracked_so_far()

    def us(self, stage: str) -> float:
        """Microseconds of `stage`, over all of its laps."""
        return max(0.0, self._ns[stage] - self._lap_ns * self._num_laps[stage]) / 1e3

    def _count_tracked(self, stage: str) -> None:
        tracked = self._collections.tracked_so_far()
        self.num_tracked[stage] += tracked - self._last_tracked
        self._last_tracked = tracked


def measured_lap_ns() -> float:
    """The cost of a lap in nanoseconds: at batch 1 it would be a tenth of the measured time."""
    watch = Stopwatch(CollectionWatch())
    watch.start()
    for _ in range(_NUM_TRIALS):
        watch.lap("nothing")
    return 1e3 * watch.us("nothing") / _NUM_TRIALS
