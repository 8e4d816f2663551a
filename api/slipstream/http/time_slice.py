"""Cooperative time slices: long work done in parts between the event loop's other callbacks.

- A turn of the loop runs parts until `SLICE_S` is used up, so other callbacks are delayed by at
  most that and one part.
- Work waits in lanes, one for each party that asks for work. The next part is of the lane that has
  used the least time: a lane with much work, or with long parts, delays another by one part.
- Within a lane, scheduling is round-robin, one part at a time: short work does not wait for long
  work to finish.
- Work handles its own exceptions and raises none.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable
from typing import TypeVar

SLICE_S = 0.002  # of a turn; all streams of the front wait for it (decision 023)
_MAX_IDLE_LANES = 1024  # whose used time is remembered

Result = TypeVar("Result")
Parts = Generator[None, None, Result]  # yields between parts


def run_all(parts: Parts[Result]) -> Result:
    """Run all parts without a break; returns the generator's result."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            result: Result = end.value
            return result


class TimeSlicedQueue:
    """A queue of work that takes up to `SLICE_S` seconds of each turn of the running event loop."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """clock: seconds."""
        self._clock = clock
        self._lanes: dict[Hashable, deque[Callable[[], bool]]] = {}  # those with work
        self._next: list[tuple[float, int, Hashable]] = []  # a heap: used time, tie-break, lane
        self._used: dict[Hashable, float] = {}  # seconds, by lane; see `_start`
        self._now_used = 0.0  # by the lane that was picked last
        self._num_picked = 0
        self._is_due = False  # `_turn` is scheduled

    @property
    def is_busy(self) -> bool:
        """True if there is work left."""
        return bool(self._lanes)

    def add(self, work: Callable[[], bool], lane: Hashable = None) -> None:
        """Queue `work`: each call runs one part and returns whether any is left."""
        waiting = self._lanes.get(lane)
        if waiting is None:
            self._lanes[lane] = waiting = deque()
            self._push(lane, max(self._now_used, self._used.get(lane, 0.0)))
        waiting.append(work)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        begin = self._clock()
        deadline = begin + SLICE_S
        while self._next:
            used, _, lane = heapq.heappop(self._next)
            self._now_used = used
            waiting = self._lanes[lane]
            work = waiting.popleft()
            if work():
                waiting.append(work)
            end = self._clock()
            used += end - begin
            begin = end
            if waiting:
                self._push(lane, used)
            else:
                del self._lanes[lane]
                if not self._lanes:  # none was kept waiting, so none has a claim
                    self._now_used = max(self._now_used, used)
                self._remember(lane, used)
            if end >= deadline:
                break
        self._is_due = bool(self._next)
        if self._is_due:
            asyncio.get_running_loop().call_soon(self._turn)

    def _push(self, lane: Hashable, used: float) -> None:
        self._num_picked += 1
        heapq.heappush(self._next, (used, self._num_picked, lane))

    def _remember(self, lane: Hashable, used: float) -> None:
        """An idle lane keeps what it has used more than the others, and gains nothing by idling."""
        self._used[lane] = used
        if len(self._used) > _MAX_IDLE_LANES:
            self._used = {each: at for each, at in self._used.items() if at > self._now_used}
