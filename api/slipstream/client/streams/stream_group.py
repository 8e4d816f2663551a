"""Many streams that one reader reads together: deltas of all of them, in the order they came in.

- A message of nothing but one group's streams is one entry of its reader's queue, whatever is in
  it: deltas are made when they are read. So no stream has a queue of its own here.
- The connection alone adds. It adds a stream's last delta before it says that the stream is over,
  and a reader that finds all of them over has found everything that came.
- A group is the wakeup of its streams (`wakeup`), and hangs there from the beginning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat

from slipstream.client.streams.stream_state import StreamState
from slipstream.delta_batch import DeltaBatch
from slipstream.errors import SlipstreamError
from slipstream.outputs import Delta

Items = Iterator[tuple[int, Delta]]  # which of the streams, and what it says


class StreamGroup:
    """Streams by index, in the order in which they were asked for."""

    def __init__(self, states: Sequence[StreamState]) -> None:
        """`states`: not asked for yet."""
        self.states = states
        self.unread: deque[Items] = deque()
        self.num_over = 0
        self.group_id = 0  # the table's number for it
        self.num_open = len(states)  # not over, by the table
        self.error: SlipstreamError | None = None  # the first one that a stream ended with
        self.wake: Callable[[], None] | None = None  # hangs here while the reader waits
        self._is_over = [False] * len(states)
        for index, state in enumerate(states):
            assert state.handle < 0, "a group is made before its streams are asked for"
            state.group, state.index, state.wakeup = self, index, self
            state.push = partial(self.add, index)

    @property
    def is_over(self) -> bool:
        """Whether every stream is: look here before `unread`."""
        return self.num_over == len(self.states)

    def add_batch(self, indices: Sequence[int], batch: DeltaBatch) -> None:
        """A message whose entries are these streams'."""
        texts = batch.message.texts
        deltas = map(Delta, texts, repeat(batch), range(len(texts)))
        self.unread.append(zip(indices, deltas, strict=True))

    def divide(self) -> None:
        """Its streams have no queues of their own: all of it stays in order."""

    def release(self, state: StreamState) -> None:
        """The table has one less of it."""
        self.num_open -= 1

    def add(self, index: int, delta: Delta) -> None:
        """One delta of one stream."""
        self.unread.append(iter([(index, delta)]))

    def ring(self, state: StreamState) -> None:
        """There is news of a stream, and of others perhaps. From the connection's thread."""
        if state.is_over and not self._is_over[state.index]:
            self._is_over[state.index] = True
            if self.error is None:
                self.error = state.error
            self.num_over += 1  # last of all: the reader looks here first
        wake = self.wake
        if wake is not None:
            wake()
