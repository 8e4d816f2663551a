"""Work that can wait, done in a share of the event loop's turns.

Owns: whose work is done next, how much of a turn it takes. Does not know: what the work is.

Rules:
- A turn takes up work until its share is over, then everybody else has a turn: what takes seconds
  in all keeps nobody waiting for longer than the share, and one part.
- Of work in several parts one is done, and it queues again: who has little does not wait for who
  has much.
- Work raises nothing: its faults are its own.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import TypeVar

SHARE_S = 0.002  # of a turn

Result = TypeVar("Result")
Parts = Generator[None, None, Result]  # yields where others may have their turn


def at_once(parts: Parts[Result]) -> Result:
    """All parts, one after the other."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            result: Result = end.value
            return result


class Share:
    """Of the turns of the running event loop."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], bool]] = deque()
        self._is_due = False  # some of it will be done

    def add(self, work: Callable[[], bool]) -> None:
        """`work` does a part of itself, and says whether there is more."""
        self._work.append(work)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        deadline = time.perf_counter() + SHARE_S
        while self._work:
            work = self._work.popleft()
            if work():
                self._work.append(work)
            if time.perf_counter() >= deadline:
                break
        self._is_due = bool(self._work)
        if self._is_due:
            asyncio.get_running_loop().call_soon(self._turn)
