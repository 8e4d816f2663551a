"""The client for asyncio.

Owns: waiting as tasks do. Does not know: the protocol (`client_session`), which event loop runs
(any will do, uvloop's too).

    async with AsyncClient() as client:
        async for delta in client.stream("Once upon a time", max_tokens=100):
            print(delta.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from slipstream.asking import (
    DEFAULT_TIMEOUT_S,
    Asking,
    new_states,
    params_for_each,
    refuse_for_several,
    with_others,
)
from slipstream.bells import LoopBell
from slipstream.client_io import ClientIO
from slipstream.errors import ConnectionLostError, RequestError
from slipstream.many import MAX_IN_FLIGHT, AsyncStreams
from slipstream.outputs import Completion, Delta
from slipstream.questions import checked_template, ids_of, new_detokenize, new_tokenize
from slipstream.reading import OutputKind, Reading
from slipstream.requests import Prompt, checked_params
from slipstream.stream_state import StreamState
from slipstream_ipc.messages import ChatMessage, Fault, ModelCard, SamplingOptions, SamplingParams


class AsyncStream(Reading, AsyncIterator[Delta]):
    """A running request: iterate over it for its deltas. Made by `AsyncClient.stream` and
    `resume`.

    The stream is aborted when the task that waits for it is cancelled, when its `async with` block
    is left, when it is closed, and when nobody holds it any more. One task may read it.
    """

    def __init__(
        self, client: AsyncClient, io: ClientIO, state: StreamState, kind: OutputKind
    ) -> None:
        super().__init__(io, state, kind)
        self._client = client  # which is closed when nobody holds it
        self._bell: LoopBell | None = None

    async def __anext__(self) -> Delta:
        while (delta := self._take()) is None:
            if self._is_finished:
                raise StopAsyncIteration
            await self._wait()
        return delta

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the stream at once; what is unread is dropped. Idempotent."""
        self._abandon()

    async def _wait(self) -> None:
        state = self._state
        if self._bell is None:
            self._bell = LoopBell()
        if state.bell is not None:
            raise RequestError(Fault("bad_request", "another task reads this stream already"))
        rung = self._bell.prepare()
        state.bell = self._bell
        try:
            if not (state.is_over or (self._unread and not state.wants_whole)):
                await rung
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            state.bell = None


class AsyncClient(Asking):
    """A connection to a running server, for any number of tasks and streams at once.

    Connects on entering `async with`, or by `connect`; streams may be asked for before. Arguments
    and errors are those of `Client`, but for the connection errors, which `connect` raises.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        trace: str | None = None,
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
    ) -> None:
        super().__init__(address, timeout_s, trace, keys, insecure)

    async def __aenter__(self) -> AsyncClient:
        try:
            await self.connect()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def connect(self) -> ModelCard:
        """Wait until the server is there.

        Raises: ConnectionLostError where nobody answers; SlipstreamError where the server speaks
        another version of the protocol.
        """
        return await asyncio.wrap_future(self._io.connect())

    @property
    def model(self) -> ModelCard:
        """What the server serves; ConnectionLostError before the client is connected."""
        if self._io.model is None:
            why = "not connected yet: enter `async with client`, or await client.connect()"
            raise ConnectionLostError(Fault("engine", why))
        return self._io.model

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        label: str | None = None,
        priority: int = 0,
        stream_id: str | None = None,
        cache_salt: str | None = None,
        output_kind: OutputKind = "delta",
        **options: Unpack[SamplingOptions],
    ) -> AsyncStream:
        """Run one request and read it as it comes. Arguments and errors: see `Client.stream`."""
        state = self._ask(
            prompt,
            checked_params(params, options),
            output_kind,
            label=label,
            priority=priority,
            stream_id=stream_id,
            cache_salt=cache_salt,
        )
        return AsyncStream(self, self._io, state, output_kind)

    def resume(
        self,
        stream_id: str,
        *,
        num_chars: int = 0,
        num_tokens: int = 0,
        output_kind: OutputKind = "delta",
    ) -> AsyncStream:
        """Go on with a stream. Arguments and errors: see `Client.resume`."""
        state = self._ask_again(stream_id, num_chars, num_tokens, output_kind)
        return AsyncStream(self, self._io, state, output_kind)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        label: str | None = None,
        priority: int = 0,
        stream_id: str | None = None,
        cache_salt: str | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Completion:
        """Run one request to its end. Arguments and errors: see `Client.generate`."""
        checked = checked_params(params, options)
        if checked.n > 1:
            refuse_for_several(label, stream_id)
            [found] = await self.generate_many(
                [prompt], checked, priority=priority, cache_salt=cache_salt
            )
            return found
        state = self._ask(
            prompt,
            checked,
            "final",
            label=label,
            priority=priority,
            stream_id=stream_id,
            cache_salt=cache_salt,
        )
        async with AsyncStream(self, self._io, state, "final") as stream:
            return await _completion(stream)

    async def generate_many(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        on_done: Callable[[Completion], object] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> list[Completion]:
        """Run many requests to their ends; see `Client.generate_many`."""
        every = params_for_each(prompts, params, options)
        states = new_states(self._io, prompts, every, priority, cache_salt=cache_salt)
        room = asyncio.Semaphore(MAX_IN_FLIGHT)

        async def run(state: StreamState) -> Completion:
            async with room:
                self._io.submit(state)
                async with AsyncStream(self, self._io, state, "final") as stream:
                    completion = await _completion(stream)
            if on_done is not None:
                on_done(completion)
            return completion

        tasks = [asyncio.ensure_future(run(state)) for state in states]
        try:
            return with_others(await asyncio.gather(*tasks), every)
        finally:
            for task in tasks:
                task.cancel()

    def stream_many(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        **options: Unpack[SamplingOptions],
    ) -> AsyncStreams:
        """Run many requests and read them together; see `Client.stream_many`."""
        every = params_for_each(prompts, params, options)
        states = new_states(self._io, prompts, every, priority, kind="delta", cache_salt=cache_salt)
        return AsyncStreams(self, self._io, states, [each.n for each in every])

    async def tokenize(
        self,
        prompt: str | Sequence[ChatMessage | Mapping[str, Any]],
        *,
        add_special_tokens: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """The token ids that a prompt becomes; see `Client.tokenize`."""
        template = checked_template(
            tools, chat_template_kwargs, add_generation_prompt, continue_final_message
        )
        asked = new_tokenize(prompt, template, add_special_tokens=add_special_tokens)
        return ids_of(await asyncio.wrap_future(self._io.ask(asked)))

    async def detokenize(
        self,
        token_ids: Sequence[int] | npt.NDArray[np.integer[Any]],
        *,
        skip_special_tokens: bool = False,
    ) -> str:
        """The text of token ids; see `Client.detokenize`."""
        model = self._io.model or await self.connect()
        asked = new_detokenize(token_ids, model, skip_special_tokens=skip_special_tokens)
        text: str = (await asyncio.wrap_future(self._io.ask(asked))).text
        return text

    async def close(self) -> None:
        """End every stream of this client and leave. Idempotent; waits half a second at most."""
        self._finalizer.detach()
        await asyncio.to_thread(self._io.close)


async def _completion(stream: AsyncStream) -> Completion:
    while not stream._state.is_over:
        await stream._wait()
    return stream._completion()
