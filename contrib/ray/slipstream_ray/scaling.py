"""The number of replicas that a fleet wants for its requests. Pure; the caller has the clock."""

from __future__ import annotations

from collections import deque

from msgspec import Struct

FILL = 0.75  # of the requests that a replica runs at a time; the rest is room for more
CALM_S = 300.0  # for so long fewer replicas must do before there are fewer


class ReplicaBounds(Struct, frozen=True):
    """The fewest and the most replicas; equal where the number is fixed."""

    least: int
    most: int


def replicas_for(num_requests: int, max_num_seqs: int) -> int:
    """Replicas for so many requests, running and waiting ones together, at `FILL` of what each of
    them runs at a time. max_num_seqs: of one replica, at least 1.
    """
    return -int(-num_requests // (FILL * max_num_seqs))


class Autoscaler:
    """Follows the requests up at once, and down to the most that the last `CALM_S` asked for."""

    def __init__(self, now: float) -> None:
        self._began_at = now
        self._asked: deque[tuple[float, int]] = deque()  # when, and for how many

    def wanted(
        self, num_requests: int, max_num_seqs: int, current: int, bounds: ReplicaBounds, now: float
    ) -> int:
        """Replicas wanted at `now`, which never goes back. current: those wanted before."""
        self._asked.append((now, replicas_for(num_requests, max_num_seqs)))
        while self._asked[0][0] < now - CALM_S:
            self._asked.popleft()
        highest = max(number for _, number in self._asked)
        if highest < current and now - self._began_at < CALM_S:
            highest = current  # what was asked for before is not known
        return min(max(highest, bounds.least), bounds.most)
