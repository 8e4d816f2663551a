"""The ways of reading deltas that the benchmark compares.

- columns: one reader reads all streams together, as `Client.stream_many` does, and inspects nothing
  of the deltas.
- materialised: as columns, and the text, the list of ids, and every candidate of every position
  with its id, logprob and rank become Python objects.
- streams: a `Stream` per request, with `next` for each delta; deltas are not inspected.
- async_for: a task per stream runs `async for`, as callers of the AsyncClient do; deltas are not
  inspected. The measured cost is waking the tasks and taking the deltas, under uvloop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

from slipstream.client.async_client import AsyncStream
from slipstream.client.client import Stream
from slipstream.client.connection.thread_io import ThreadIO
from slipstream.client.streams.stream_group import StreamGroup
from slipstream.client.streams.stream_state import StreamState
from slipstream_bench.common.live_streams import look_at

_MAX_TURNS = 100  # turns of the event loop; two are enough

Read = Literal["columns", "materialised", "streams", "async_for"]
READS: tuple[Read, ...] = get_args(Read)


class TogetherReader:
    """Reads all streams of a group together, in the caller's thread."""

    def __init__(self, group: StreamGroup, *, is_materialised: bool) -> None:
        self._group = group
        self._is_materialised = is_materialised
        self.num_deltas = 0
        self.num_chars = 0

    def read(self) -> None:
        """Read every delta that has arrived."""
        num_deltas, unread = 0, self._group.unread
        while unread:
            if self._is_materialised:
                for _index, delta in unread.popleft():
                    self.num_chars += look_at(delta)
                    num_deltas += 1
            else:
                for _index, _delta in unread.popleft():
                    num_deltas += 1
        self.num_deltas += num_deltas


class StreamsReader:
    """Reads each stream in turn, in the caller's thread."""

    def __init__(self, io: ThreadIO, states: Sequence[StreamState]) -> None:
        self._pairs = [(state, Stream(cast(Any, None), io, state, "delta")) for state in states]
        self.num_deltas = 0

    def read(self) -> None:
        """Read every delta that has arrived."""
        num_deltas = 0
        for state, stream in self._pairs:
            while state.deltas:
                next(stream)
                num_deltas += 1
        self.num_deltas += num_deltas


class TaskReader:
    """Reads each stream in a task. Construct it inside the event loop."""

    def __init__(self, io: ThreadIO, states: Sequence[StreamState]) -> None:
        self.num_deltas = 0
        streams = [AsyncStream(cast(Any, None), io, state, "delta") for state in states]
        self._states = states
        self._tasks = [asyncio.ensure_future(self._consume(stream)) for stream in streams]

    async def read(self) -> None:
        """Run the tasks until they have read everything that has arrived."""
        for _ in range(_MAX_TURNS):  # the first turn wakes the tasks, the second runs them
            await asyncio.sleep(0)
            if not self._states[-1].deltas:
                return

    async def finish(self) -> None:
        """Run the tasks until their streams have ended."""
        await asyncio.gather(*self._tasks)

    async def _consume(self, stream: AsyncStream) -> None:
        async for _delta in stream:
            self.num_deltas += 1
