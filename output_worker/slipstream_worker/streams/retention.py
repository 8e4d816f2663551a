"""How long streams are kept that nobody reads, and which there have been.

Owns: when each stream is to be given up, how much memory ended ones take together, the ids of
those that were forgotten. Does not know: who reads a stream, how it ended, how it is removed.

Rules:
- A stream is given up at the time that was said last for it; `inf` (`WorkerStream.leaves_at`) is
  never. One that has not ended by then is to be aborted.
- Where ended streams together take too much memory, the oldest of those that nobody waits for go
  at once.
- The id of a forgotten stream is remembered for long: what has ended is not run again. The core
  knows it, too, and tells the next worker. So is the id of one that was aborted before it was
  accepted, by this worker alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from math import inf

from slipstream_ipc.messages import Fault
from slipstream_worker.streams.stream import Stage, WorkerStream, WorkerStreamTable
from slipstream_worker.streams.tombstones import Tombstones

_MAX_ENDED_BYTES = 256 * 2**20  # of ended streams that are kept for readers that come back
_LEAST_TOMBSTONES = 2**16
_LEAST_LEAVING = 1024
LEAST_UNREAD_S = 10.0
_LEAST_ABORTED = 2**12
ABORTED = Fault("bad_request", "aborted before it was accepted")
_FORGOTTEN = Fault("unknown_stream", "this stream has ended, and what it said is forgotten")


class Retention:
    """The streams of one worker that are on their way out. `now` is set by whoever drives us."""

    def __init__(self, streams: WorkerStreamTable, grace_s: float) -> None:
        self._streams = streams
        self._leaving: list[tuple[float, int, bytes]] = []  # heap: when to forget which stream
        self._num_left = 0
        self._ended: dict[WorkerStream, None] = {}  # oldest first
        self._ended_bytes = 0
        self._tombstones = Tombstones(_LEAST_TOMBSTONES)
        self._aborted = Tombstones(_LEAST_ABORTED)  # before their prompts were tokenised
        self.grace_s = grace_s
        self.now = 0.0

    def leave_at(self, stream: WorkerStream, when: float) -> None:
        """Give up a stream then, unless somebody comes to read it."""
        stream.leaves_at = when
        if len(self._leaving) >= 2 * len(self._streams) + _LEAST_LEAVING:
            self._drop_withdrawn()
        self._num_left += 1  # ties in the heap never compare ids
        heapq.heappush(self._leaving, (when, self._num_left, stream.stream_id))

    def leave_after_grace(self, stream: WorkerStream) -> None:
        """Give up a stream when nobody has come to read it for the grace time. One that goes on has
        as long as clients take to attach anew, at least.
        """
        least_s = 0.0 if stream.stage is Stage.ENDED else LEAST_UNREAD_S
        self.leave_at(stream, self.now + max(least_s, self.grace_s))

    def ended(self, stream: WorkerStream, held_bytes: int) -> None:
        """A stream has ended, and takes so much memory until it is forgotten."""
        stream.held_bytes = held_bytes
        self._ended_bytes += held_bytes
        self._ended[stream] = None

    def removed(self, stream: WorkerStream) -> None:
        """A stream takes no memory any more."""
        self._ended_bytes -= stream.held_bytes
        stream.held_bytes = 0
        self._ended.pop(stream, None)

    def take_due(self) -> list[WorkerStream]:
        """The streams whose time has come; from now on they are among those that have been."""
        self._make_room()
        due = []
        while self._leaving and self._leaving[0][0] <= self.now:
            stream = self._streams.get(heapq.heappop(self._leaving)[2])
            if stream is not None and stream.leaves_at <= self.now:
                stream.leaves_at = inf  # it is in the heap once for each time that was said
                self._tombstones.add(stream.stream_id)
                due.append(stream)
        return due

    def bury(self, stream_ids: Iterable[bytes]) -> None:
        """These have been, in a life before this one."""
        for stream_id in stream_ids:
            self._tombstones.add(stream_id)

    def aborted(self, stream_id: bytes) -> None:
        """A stream was aborted before it was accepted; it is not kept."""
        self._aborted.add(stream_id)

    def why_gone(self, stream_id: bytes) -> Fault | None:
        """What to tell whoever asks for a stream that has been; None: there was none."""
        if stream_id in self._aborted:
            return ABORTED
        return _FORGOTTEN if stream_id in self._tombstones else None

    def has_been(self, stream_id: bytes) -> bool:
        """Whether a stream of this id is over and was forgotten."""
        return self.why_gone(stream_id) is not None

    def clear(self) -> None:
        """There are no streams any more."""
        self._ended.clear()
        self._ended_bytes = 0

    def _drop_withdrawn(self) -> None:
        """Drop the times that count no more: a stream may be left and come back to very often."""
        valid = {
            (when, stream_id): number
            for when, number, stream_id in self._leaving
            if (stream := self._streams.get(stream_id)) is not None and stream.leaves_at == when
        }
        self._leaving = [(when, number, stream_id) for (when, stream_id), number in valid.items()]
        heapq.heapify(self._leaving)

    def _make_room(self) -> None:
        """Let go of ended streams, the oldest first, where they take too much memory."""
        if self._ended_bytes <= _MAX_ENDED_BYTES:
            return
        for stream in list(self._ended):
            if self._ended_bytes <= _MAX_ENDED_BYTES:
                break
            if stream.leaves_at != inf:  # else its reader has yet to get all of it
                self.removed(stream)
                self.leave_at(stream, self.now)
