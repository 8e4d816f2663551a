"""One end of a hop within one attach: sequence numbers, acknowledgements, credit, heartbeat.

`Link` adds the heartbeat to the numbers of a link (`link_numbers`). It does no I/O and has no
clock: the time is an argument.

- A peer that is alive but acknowledges nothing of what it was sent for `stalled_after_s` has
  stalled: what is kept for it must not grow without bound.
- A silent peer is pinged once; only an unanswered ping means that it is dead. An overdue answer is
  given one more beat: it may already have arrived and lie unread if this process was busy.
"""

from __future__ import annotations

from enum import Enum
from math import inf
from typing import TypeVar

from slipstream_ipc.transport.link_numbers import LinkNumbers, LinkVerdict

__all__ = ["MAY_OWE", "WINDOW", "Beat", "Link", "LinkVerdict"]

Receipt = TypeVar("Receipt")

WINDOW = 16
PING_AFTER_S = 2.0  # of silence
DEAD_AFTER_S = 8.0  # without an answer to the ping
# numbered messages that a receiver may leave unacknowledged until its next message or beat; what
# merges messages for a slow receiver has to allow for them
MAY_OWE = 3


class Beat(Enum):
    """The action that the heartbeat requires."""

    NOTHING = "nothing"
    PING = "ping"
    DEAD = "dead"
    STALLED = "stalled"  # alive, but acknowledges nothing


class Link(LinkNumbers[Receipt]):
    """One end of one attach.

    The peer is pinged after `ping_after_s` of silence and dead after `dead_after_s` more.
    """

    def __init__(
        self,
        epoch: int,
        now: float,
        *,
        window: int = WINDOW,
        ping_after_s: float = PING_AFTER_S,
        dead_after_s: float = DEAD_AFTER_S,
        stalled_after_s: float = inf,
    ) -> None:
        super().__init__(epoch, now, window)
        self._ping_after_s = ping_after_s
        self._dead_after_s = dead_after_s
        self._stalled_after_s = stalled_after_s
        self._acked_at_beat = 0
        self._progress_at = (
            now  # the last beat at which all was acknowledged, or more than at the beat before
        )
        self._is_stall_overdue = False
        self._last_ping = 0.0, -1  # when, and `num_heard` then
        self._is_overdue = False

    def beat(self, now: float) -> Beat:
        """The action that the heartbeat requires now; PING once per silence.

        The caller has to read what has arrived between two calls.
        """
        if self._has_stalled(now):
            return Beat.STALLED
        pinged_at = self._pinged_at
        if pinged_at is None:
            if now - self.heard_at < self._ping_after_s:
                return Beat.NOTHING
            self._last_ping = now, self.num_heard
            self._is_overdue = False
            return Beat.PING
        if now - pinged_at < self._dead_after_s:
            return Beat.NOTHING
        if not self._is_overdue:
            self._is_overdue = True
            return Beat.NOTHING
        return Beat.DEAD

    @property
    def _pinged_at(self) -> float | None:
        """The time at which the peer was pinged; None if it has been heard since."""
        pinged_at, num_heard = self._last_ping
        return pinged_at if num_heard == self.num_heard else None

    def _has_stalled(self, now: float) -> bool:
        """True if acknowledgements have been overdue at two consecutive beats."""
        if not self.num_unacked or self.num_acked != self._acked_at_beat:
            self._acked_at_beat = self.num_acked
            self._progress_at = now
            self._is_stall_overdue = False
        elif now - self._progress_at >= self._stalled_after_s:
            has_stalled, self._is_stall_overdue = self._is_stall_overdue, True
            return has_stalled
        return False
