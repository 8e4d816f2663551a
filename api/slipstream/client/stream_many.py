"""Many requests read as one stream of deltas, in threads (`Streams`) and tasks (`AsyncStreams`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate, islice

from slipstream.client.stream import ClientConnection
from slipstream.client.streams.stream_group import Items, StreamGroup
from slipstream.client.streams.stream_state import StreamState
from slipstream.client.streams.wakeup import TaskWakeup, ThreadWakeup
from slipstream.errors import ClosedError, RequestError
from slipstream.outputs import Delta
from slipstream.prompt_logprobs import PromptTokenLogprobs, prompt_logprobs_of
from slipstream_ipc.messages import Fault

MAX_IN_FLIGHT = 4096  # submitted requests of one call at a time


class _Many:
    """The base of `Streams` and `AsyncStreams`."""

    def __init__(
        self, io: ClientConnection, states: Sequence[StreamState], nums_answers: Sequence[int]
    ) -> None:
        self._io = io
        self._nums_answers = nums_answers
        self._group = StreamGroup(states)
        self._waiting = iter(states)
        self._num_submitted = 0
        self._is_read = False
        self._is_cut = False  # closed before they were read to their ends
        self._submit()

    @property
    def ids(self) -> list[str]:
        """The streams' ids; `Client.resume` takes each of them."""
        return [state.stream_id.hex() for state in self._group.states]

    def left_out(self, index: int) -> tuple[str, ...]:
        """See `RequestOutput.left_out`, for answer `index`; empty before its first delta."""
        return self._group.states[index].left_out

    def prompt_logprobs(self, index: int) -> PromptTokenLogprobs | None:
        """The prompt log-probabilities of answer `index`, as `RequestOutput.prompt_logprobs`.

        They arrive before the first delta of the answer, or of the first answer where a prompt has
        several. None until then, or where they were not requested.
        """
        return prompt_logprobs_of(self._group.states[self._firsts[index]].prompt_logprobs)

    @cached_property
    def _firsts(self) -> list[int]:
        """The index of the first answer to the same prompt, for each answer."""
        begins = accumulate(self._nums_answers, initial=0)
        return [
            begin
            for begin, num in zip(begins, self._nums_answers, strict=False)
            for _ in range(num)
        ]

    def close(self) -> None:
        """End all streams that still run, and drop unread deltas. Idempotent."""
        group = self._group
        has_more = not group.is_over or bool(group.unread)
        self._is_cut = self._is_cut or (has_more and group.error is None)
        self._waiting = iter(())
        self._group.close()
        for state in self._group.states:
            if not state.is_over:
                self._io.abandon(state)

    def __del__(self) -> None:
        for state in self._group.states:
            if not state.is_over:
                self._io.release(state)

    def _check_open(self) -> None:
        """Raises ClosedError for streams that were closed before they were read to their ends."""
        if self._is_cut:
            why = "these streams are closed: read them before close(), or within their `with` block"
            raise ClosedError(Fault("bad_request", why))

    def _submit(self) -> None:
        running = self._num_submitted - self._group.num_over
        for state in islice(self._waiting, MAX_IN_FLIGHT - running):
            self._num_submitted += 1
            self._io.submit(state)

    def _take(self) -> Items | None:
        """The next unread deltas; None if there are none, and with `_is_read` set, no more follow.

        Raises: the first error that a request ended with, once everything before it was read.
        """
        group = self._group
        is_over, error = group.is_over, group.error  # read before `unread`, which is filled first
        try:
            return group.unread.popleft()
        except IndexError:
            if error is not None:
                self.close()
                raise error from None
            self._is_read = is_over
            return None

    def _has_news(self) -> bool:
        group = self._group
        return bool(group.unread or group.is_over or group.error is not None)

    def _check_alone(self) -> None:
        if self._group.wake is not None:
            raise RequestError(Fault("bad_request", "these streams are being read already"))


class Streams(_Many, Iterable[tuple[int, Delta]]):
    """Running requests; iterating yields (answer index, delta). Made by `Client.stream_many`.

    The requests are aborted when the `with` block exits, by `close`, and on garbage collection. One
    thread may read at a time, else RequestError is raised.
    """

    def __init__(
        self,
        client: object,
        io: ClientConnection,
        states: Sequence[StreamState],
        nums_answers: Sequence[int],
    ) -> None:
        """client: kept referenced, as it closes when garbage collected. states: of all answers.
        nums_answers: the number of answers to each prompt.
        """
        super().__init__(io, states, nums_answers)
        self._client = client
        self._wakeup: ThreadWakeup[None] = ThreadWakeup()

    def __iter__(self) -> Iterator[tuple[int, Delta]]:
        self._check_open()
        while True:
            items = self._take()
            if items is not None:
                yield from items
            elif self._is_read:
                return
            else:
                self._submit()
                self._wait()

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self) -> None:
        self._check_alone()
        group = self._group
        group.wake = partial(self._wakeup.ring, None)
        try:
            if not self._has_news():
                self._wakeup.wait()
        finally:
            group.wake = None


class AsyncStreams(_Many):
    """Running requests for asyncio: `async for index, delta in ...`. Made by
    `AsyncClient.stream_many`; see `Streams`. One task may read at a time.
    """

    def __init__(
        self,
        client: object,
        io: ClientConnection,
        states: Sequence[StreamState],
        nums_answers: Sequence[int],
    ) -> None:
        """See `Streams`."""
        super().__init__(io, states, nums_answers)
        self._client = client

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        self._check_open()
        while True:
            items = self._take()
            if items is not None:
                for item in items:
                    yield item
            elif self._is_read:
                return
            else:
                self._submit()
                await self._wait()

    async def __aenter__(self) -> AsyncStreams:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def _wait(self) -> None:
        self._check_alone()
        if self._has_news():
            return
        group, wakeup = self._group, TaskWakeup()
        group.wake = wakeup.ring
        try:
            await wakeup.next_ring(asyncio.get_running_loop())
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            group.wake = None
