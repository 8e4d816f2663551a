"""Cooperative time slices: long work done in parts between the event loop's other callbacks.

- A turn of the loop runs parts until `SLICE_S` is used up, so other callbacks are delayed by at
  most that and one part.
- Scheduling is round-robin, one part at a time: short work does not wait for long work to finish.
- Work handles its own exceptions and raises none.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import TypeVar

SLICE_S = 0.002  # of a turn

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

    def __init__(self) -> None:
        self._work: deque[Callable[[], bool]] = deque()
        self._is_due = False  # `_turn` is scheduled

    def add(self, work: Callable[[], bool]) -> None:
        """Queue `work`: each call runs one part and returns whether any is left."""
        self._work.append(work)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        deadline = time.perf_counter() + SLICE_S
        while self._work:
            work = self._work.popleft()
            if work():
                self._work.append(work)
            if time.perf_counter() >= deadline:
                break
        self._is_due = bool(self._work)
        if self._is_due:
            asyncio.get_running_loop().call_soon(self._turn)
