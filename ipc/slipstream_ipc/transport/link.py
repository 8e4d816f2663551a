"""One end of a hop within one attach: sequence numbers, acknowledgements, credit, heartbeat.

Owns: the numbers of a `Frame` and the clockwork of a link's life. Does not know: sockets, clocks
(the time comes in as an argument), what a body means.

Rules:
- An attach is a new life with a new epoch; a frame of another epoch is stale.
- Frames that carry a body for the streams are numbered 1, 2, 3 …; at most `window` of them are
  unacknowledged, which is the sender's credit. All others (acks, pings, the handshake) need no
  credit and repeat the last number sent, so that a lost tail shows as a gap too.
- Acknowledgements are cumulative. What a numbered frame carried is kept as its receipt until then.
- A gap ends the link's life: the attaching end attaches anew, from positions, never from a queue.
- A peer that gives signs of life, was sent something and acknowledges none of it for
  `stalled_after_s` has stalled: what is kept for it must not grow for ever.
- Silence asks for a sign of life once; only an unanswered ping is a death. What is overdue is
  given one beat more: the answer may lie unread, behind whatever kept us from reading.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from math import inf
from typing import Generic, NamedTuple, TypeVar

Receipt = TypeVar("Receipt")

WINDOW = 16


class LinkVerdict(Enum):
    """What to do with a frame."""

    DELIVER = "deliver"
    IGNORE = "ignore"  # stale or seen before
    GAP = "gap"  # something was lost: attach anew


class Beat(Enum):
    """What the heartbeat asks for."""

    NOTHING = "nothing"
    PING = "ping"
    DEAD = "dead"
    STALLED = "stalled"  # it lives, and takes nothing in


class Header(NamedTuple):
    """The numbers of a frame."""

    epoch: int
    seq: int
    ack: int


class Link(Generic[Receipt]):
    """One end of one attach. `ping_after_s` of silence asks, `dead_after_s` more is a death."""

    def __init__(
        self,
        epoch: int,
        now: float,
        *,
        window: int = WINDOW,
        ping_after_s: float = 2.0,
        dead_after_s: float = 8.0,
        stalled_after_s: float = inf,
    ) -> None:
        self.epoch = epoch
        self._window = window
        self._ping_after_s = ping_after_s
        self._dead_after_s = dead_after_s
        self._stalled_after_s = stalled_after_s
        self._sent = 0
        self._acked = 0
        self._acked_at_beat = 0
        self._progress_at = (
            now  # of the last beat with everything acknowledged, or more than before
        )
        self._is_stall_overdue = False
        self._received = 0
        self._told = 0  # the acknowledgement the peer has of us
        self._receipts: deque[Receipt] = deque()  # of frames _acked+1 .. _sent
        self._heard_at = now
        self._pinged_at: float | None = None
        self._is_overdue = False

    @property
    def has_credit(self) -> bool:
        """Whether a numbered frame may be sent."""
        return self._sent - self._acked < self._window

    @property
    def num_unacked(self) -> int:
        """Numbered frames that the peer has not acknowledged."""
        return self._sent - self._acked

    @property
    def owes_ack(self) -> bool:
        """Whether the peer has sent numbered frames it has no acknowledgement of."""
        return self._told < self._received

    @property
    def num_untold(self) -> int:
        """Numbered frames of the peer that it has no acknowledgement of."""
        return self._received - self._told

    def next_header(self) -> Header:
        """The header of the next numbered frame; `sent` must follow once it is on its way."""
        assert self.has_credit
        return Header(self.epoch, self._sent + 1, self._received)

    def sent(self, receipt: Receipt) -> None:
        """The frame of `next_header` left; `receipt` comes back when it is acknowledged."""
        self._sent += 1
        self._receipts.append(receipt)
        self._told = self._received

    def control_header(self) -> Header:
        """The header of a frame without number; `told` must follow once it is on its way."""
        return Header(self.epoch, self._sent, self._received)

    def ack_sent(self) -> None:
        """The frame of `control_header` left: the peer has our acknowledgement."""
        self._told = self._received

    def receive(self, header: Header, numbered: bool, now: float) -> LinkVerdict:
        """Judge a frame; DELIVER of a numbered one counts it as received."""
        if header.epoch != self.epoch or header.ack > self._sent:
            return LinkVerdict.IGNORE
        self._heard_at = now
        self._pinged_at = None
        self._is_overdue = False
        self._acked = max(self._acked, header.ack)
        if not numbered:
            return LinkVerdict.DELIVER if header.seq <= self._received else LinkVerdict.GAP
        if header.seq <= self._received:
            return LinkVerdict.IGNORE
        if header.seq > self._received + 1:
            return LinkVerdict.GAP
        self._received += 1
        return LinkVerdict.DELIVER

    def take_receipts(self) -> list[Receipt]:
        """What the frames acknowledged since the last call carried, oldest first."""
        due = len(self._receipts) - (self._sent - self._acked)
        if not due:
            return []
        return [self._receipts.popleft() for _ in range(due)]

    def end(self) -> None:
        """The life is over: what is not acknowledged never will be, and its receipts go."""
        for _ in range(self._sent - self._acked):
            self._receipts.pop()
        self._sent = self._acked

    def beat(self, now: float) -> Beat:
        """What the clock asks for; PING is asked for once per silence.

        Between two calls, what has arrived is to be read.
        """
        if self._has_stalled(now):
            return Beat.STALLED
        if self._pinged_at is None:
            if now - self._heard_at < self._ping_after_s:
                return Beat.NOTHING
            self._pinged_at = now
            return Beat.PING
        if now - self._pinged_at < self._dead_after_s:
            return Beat.NOTHING
        if not self._is_overdue:
            self._is_overdue = True
            return Beat.NOTHING
        return Beat.DEAD

    def _has_stalled(self, now: float) -> bool:
        """Whether nothing is acknowledged for too long; as with silence, at the second look."""
        if not self.num_unacked or self._acked != self._acked_at_beat:
            self._acked_at_beat = self._acked
            self._progress_at = now
            self._is_stall_overdue = False
        elif now - self._progress_at >= self._stalled_after_s:
            has_stalled, self._is_stall_overdue = self._is_stall_overdue, True
            return has_stalled
        return False
