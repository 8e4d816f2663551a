"""Streams that one reader reads together, with their deltas in order of arrival.

- A message whose entries all belong to one group is a single entry of the reader's queue, and its
  deltas are made when they are read. The streams have no queues of their own.
- Only the connection adds deltas. It adds a stream's last delta before it marks the stream as over,
  so a reader that finds all streams over finds every delta in the queue.
- The group is set as the wakeup of each of its streams from the start.
- Where no stream ends, `DeltaRelay` does in C what `add_batch` and `ring` do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from slipstream.client.streams.stream_state import StreamState
from slipstream.delta_batch import DeltaBatch
from slipstream.delta_objects import items_of
from slipstream.errors import SlipstreamError
from slipstream.outputs import Delta

Items = Iterator[tuple[int, Delta]]  # the index of the stream, and its delta


class StreamGroup:
    """Streams by index, in the order of submission."""

    def __init__(self, states: Sequence[StreamState]) -> None:
        """states: not submitted yet."""
        self.states = states
        self.unread: deque[Items] = deque()
        self.num_over = 0
        self.group_id = 0  # set by the stream table
        self.error: SlipstreamError | None = None  # the first error that a stream ended with
        self.wake: Callable[[], None] | None = None  # set while the reader waits
        self._items_of = items_of(Delta)
        self._is_over = [False] * len(states)
        for index, state in enumerate(states):
            assert state.handle < 0, "a group is made before its streams are asked for"
            state.group, state.index, state.wakeup = self, index, self
            state.push = partial(self.add, index)

    @property
    def is_over(self) -> bool:
        """True if every stream is over. Read this before `unread`."""
        return self.num_over == len(self.states)

    def close(self) -> None:
        """Drop unread deltas, and those that arrive from now on. From the reader's thread."""
        self.unread = deque(maxlen=0)

    def add_batch(self, indices: list[int], batch: DeltaBatch) -> None:
        """Add a message whose entries belong to the streams at `indices`."""
        self.unread.append(self._items_of(indices, batch.message.texts, batch))

    def divide(self) -> None:
        """Do nothing: the streams have no queues of their own, so the order is kept."""

    def release(self, state: StreamState) -> None:
        """Do nothing: unread deltas of a stream that is over stay in order."""

    def add(self, index: int, delta: Delta) -> None:
        """Add one delta of one stream."""
        self.unread.append(iter([(index, delta)]))

    def ring(self, state: StreamState) -> None:
        """Note an update of a stream, and perhaps of others. From the connection's thread."""
        if state.is_over and not self._is_over[state.index]:
            self._is_over[state.index] = True
            if self.error is None:
                self.error = state.error
            self.num_over += 1  # written last, as the reader reads it first
        wake = self.wake
        if wake is not None:
            wake()
