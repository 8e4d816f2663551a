"""One end of a hop within one attach: sequence numbers, acknowledgements, credit, heartbeat.

`Link` fills in and judges the numbers of a `Frame`. It does no I/O and has no clock: the time is an
argument.

- Every attach has a new epoch; a frame of another epoch is stale.
- Frames with a body for the streams are numbered 1, 2, 3 …; at most `window` of them are
  unacknowledged, which is the sender's credit. All others (acknowledgements, pings, the handshake)
  need no credit and repeat the last number sent, so that a lost tail shows as a gap too.
- Acknowledgements are cumulative. The receipt of a numbered frame is kept until it is acknowledged.
- A gap ends the link: the attaching end attaches anew and resends from positions, not from a queue.
- A peer that is alive but acknowledges nothing of what it was sent for `stalled_after_s` has
  stalled: what is kept for it must not grow without bound.
- A silent peer is pinged once; only an unanswered ping means that it is dead. An overdue answer is
  given one more beat: it may already have arrived and lie unread if this process was busy.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from math import inf
from typing import Any, Generic, TypeVar

from slipstream_ipc.messages import Control, Frame

Body = TypeVar("Body")
Receipt = TypeVar("Receipt")

WINDOW = 16
PING_AFTER_S = 2.0  # of silence
DEAD_AFTER_S = 8.0  # without an answer to the ping
# numbered messages that a receiver may leave unacknowledged until its next message or beat; what
# merges messages for a slow receiver has to allow for them
MAY_OWE = 3


class LinkVerdict(Enum):
    """What to do with a frame."""

    DELIVER = "deliver"
    IGNORE = "ignore"  # stale or a duplicate
    GAP = "gap"  # a frame was lost: attach anew


class Beat(Enum):
    """What the heartbeat requires."""

    NOTHING = "nothing"
    PING = "ping"
    DEAD = "dead"
    STALLED = "stalled"  # alive, but acknowledges nothing


class Link(Generic[Receipt]):
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
        self.epoch = epoch
        self._window = window
        self._ping_after_s = ping_after_s
        self._dead_after_s = dead_after_s
        self._stalled_after_s = stalled_after_s
        self._sent = 0
        self._acked = 0
        self._acked_at_beat = 0
        self._progress_at = (
            now  # the last beat at which all was acknowledged, or more than at the beat before
        )
        self._is_stall_overdue = False
        self._received = 0
        self._last_ack_sent = 0  # the last number acknowledged to the peer
        self._receipts: deque[Receipt] = deque()  # of frames _acked+1 .. _sent, and untaken ones
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
        """Whether numbered frames have been received and not yet acknowledged to the peer."""
        return self._last_ack_sent < self._received

    @property
    def num_owed_acks(self) -> int:
        """Numbered frames received and not yet acknowledged to the peer."""
        return self._received - self._last_ack_sent

    def numbered(self, body: Body) -> Frame[Body]:
        """The next numbered frame, which needs credit; call `sent` once it has left."""
        return Frame(self.epoch, self._sent + 1, self._received, body)

    def sent(self, receipt: Receipt) -> None:
        """The frame of `numbered` has left; its acknowledgement releases `receipt`."""
        self._sent += 1
        self._receipts.append(receipt)
        self._last_ack_sent = self._received

    def control(self, body: Control | None) -> Frame[Control]:
        """An unnumbered frame; call `ack_sent` once it has left."""
        return Frame(self.epoch, self._sent, self._received, body)

    def ack_sent(self) -> None:
        """The frame of `control` has left, and with it the acknowledgement."""
        self._last_ack_sent = self._received

    def receive(self, frame: Frame[Any], is_numbered: bool, now: float) -> LinkVerdict:
        """Judge a frame; a numbered one that is to be delivered counts as received."""
        seq, ack, received = frame.seq, frame.ack, self._received
        if frame.epoch != self.epoch or ack > self._sent:
            return LinkVerdict.IGNORE
        self._heard_at = now
        self._pinged_at = None
        self._is_overdue = False
        if ack > self._acked:
            self._acked = ack
        if not is_numbered:
            return LinkVerdict.DELIVER if seq <= received else LinkVerdict.GAP
        if seq <= received:
            return LinkVerdict.IGNORE
        if seq > received + 1:
            return LinkVerdict.GAP
        self._received = seq
        return LinkVerdict.DELIVER

    def take_receipts(self) -> list[Receipt]:
        """Receipts of the frames acknowledged since the last call, oldest first."""
        due = len(self._receipts) - (self._sent - self._acked)
        if not due:
            return []
        return [self._receipts.popleft() for _ in range(due)]

    def end(self) -> None:
        """End the link: unacknowledged frames never will be, and their receipts are dropped."""
        for _ in range(self._sent - self._acked):
            self._receipts.pop()
        self._sent = self._acked

    def beat(self, now: float) -> Beat:
        """What the heartbeat requires now; PING once per silence.

        The caller has to read what has arrived between two calls.
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
        """Whether acknowledgements have been overdue at two consecutive beats."""
        if not self.num_unacked or self._acked != self._acked_at_beat:
            self._acked_at_beat = self._acked
            self._progress_at = now
            self._is_stall_overdue = False
        elif now - self._progress_at >= self._stalled_after_s:
            has_stalled, self._is_stall_overdue = self._is_stall_overdue, True
            return has_stalled
        return False
