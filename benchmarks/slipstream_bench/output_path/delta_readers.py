"""How deltas are read: not looked at, turned into Python objects, or taken stream by stream.

Owns: what "read" means. Does not know: how deltas come about, what is counted.

- columns: one reader reads all streams together, as `Client.stream_many` does; nothing of its
  deltas is looked at.
- materialised: the same, and of each delta the text, the list of ids, and every candidate of every
  position with its id, its log-probability and its rank are made Python objects.
- streams: a `Stream` to each request, `next` for each of its deltas; they are not looked at.
- async_for: a task to each stream runs `async for`, as callers of the AsyncClient do; deltas are
  not looked at. What is counted is waking the tasks and taking the deltas, under uvloop.
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
from slipstream.outputs import Delta

_MAX_TURNS = 100  # of the event loop; two are enough

Read = Literal["columns", "materialised", "streams", "async_for"]
READS: tuple[Read, ...] = get_args(Read)


class TogetherReader:
    """Takes what is there of all streams, in the caller's thread."""

    def __init__(self, group: StreamGroup, *, is_materialised: bool) -> None:
        self._group = group
        self._is_materialised = is_materialised
        self.num_deltas = 0
        self.num_chars = 0

    def read(self) -> None:
        """Everything that has come."""
        num_deltas, unread = 0, self._group.unread
        while unread:
            if self._is_materialised:
                for _index, delta in unread.popleft():
                    self._look_at(delta)
                    num_deltas += 1
            else:
                for _index, _delta in unread.popleft():
                    num_deltas += 1
        self.num_deltas += num_deltas

    def _look_at(self, delta: Delta) -> None:
        self.num_chars += len(delta.text)
        _ids = delta.token_ids
        positions = delta.logprobs
        if positions is not None:
            for candidates in positions:
                for candidate in candidates.values():
                    _value, _rank = candidate.logprob, candidate.rank


class StreamsReader:
    """Takes what is there from every stream, one after the other, in the caller's thread."""

    def __init__(self, io: ThreadIO, states: Sequence[StreamState]) -> None:
        self._pairs = [(state, Stream(cast(Any, None), io, state, "delta")) for state in states]
        self.num_deltas = 0

    def read(self) -> None:
        """Everything that has come."""
        num_deltas = 0
        for state, stream in self._pairs:
            while state.deltas:
                next(stream)
                num_deltas += 1
        self.num_deltas += num_deltas


class TaskReader:
    """A task to each stream. Made inside the event loop."""

    def __init__(self, io: ThreadIO, states: Sequence[StreamState]) -> None:
        self.num_deltas = 0
        streams = [AsyncStream(cast(Any, None), io, state, "delta") for state in states]
        self._states = states
        self._tasks = [asyncio.ensure_future(self._consume(stream)) for stream in streams]

    async def read(self) -> None:
        """Let the tasks run until they have everything that has come."""
        for _ in range(_MAX_TURNS):  # in the first the bells are rung, in the second tasks run
            await asyncio.sleep(0)
            if not self._states[-1].deltas:
                return

    async def finish(self) -> None:
        """Let the tasks see the ends of their streams."""
        await asyncio.gather(*self._tasks)

    async def _consume(self, stream: AsyncStream) -> None:
        async for _delta in stream:
            self.num_deltas += 1
