"""The asyncio client. It runs in the caller's event loop and starts no thread.

async with AsyncClient() as client:
    async for delta in client.stream("Once upon a time", max_tokens=100):
        print(delta.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from slipstream.client.base import (
    by_prompt,
    check_option_names,
    classify_call,
    embedding_call,
    new_states,
    rerank_plan,
    resume_stream,
    scoring_call,
    submit_request,
    timeout_or_default,
)
from slipstream.client.call_options import (
    CallOptions,
    ChatTemplateOptions,
    CheckedOptions,
    RequestOptions,
    options_for_many,
    options_for_one,
    suggesting_keywords,
)
from slipstream.client.connection.loop_io import LoopIO
from slipstream.client.connection.queries import (
    check_changed,
    checked_template,
    ids_of,
    new_change,
    new_detokenize,
    new_tokenize,
)
from slipstream.client.endpoints import server_endpoint
from slipstream.client.stream import BaseStream, ClientConnection, OutputKind
from slipstream.client.stream_many import MAX_IN_FLIGHT, AsyncStreams
from slipstream.client.streams.stream_state import StreamState
from slipstream.client.streams.wakeup import TaskWakeup
from slipstream.errors import ConnectionLostError, RequestError
from slipstream.outputs import (
    Classes,
    Delta,
    Embeddings,
    RequestOutput,
)
from slipstream.request.embedding_inputs import (
    ClassifyOptions,
    EmbeddingInput,
    EmbeddingOptions,
)
from slipstream.request.prompts import Prompt
from slipstream.request.scoring_inputs import (
    RankedDocument,
    ScoreInput,
    Scores,
    ScoringOptions,
    plan_scores,
    ranked,
)
from slipstream.request.served_models import base_of, checked_model
from slipstream_ipc.messages import ChatMessage, Fault, ModelCard, SamplingParams
from slipstream_ipc.telemetry.trace import open_tracer


class AsyncStream(BaseStream, AsyncIterator[Delta]):
    """A running request; `async for` over it yields its deltas. Made by `AsyncClient.stream` and
    `AsyncClient.resume`.

    The stream is aborted when the task that waits for it is cancelled, when its `async with` block
    exits, when it is closed, and when it is garbage collected. Only one task may read a stream at a
    time, else RequestError is raised.
    """

    def __init__(
        self, client: AsyncClient, io: ClientConnection, state: StreamState, kind: OutputKind
    ) -> None:
        super().__init__(io, state, kind)
        self._client = client  # keeps the client open: it closes when garbage collected
        self._wakeup = TaskWakeup()
        self._loop = asyncio.get_running_loop()
        state.wakeup = self._wakeup

    def __aiter__(self) -> AsyncStream:
        """Raises: ClosedError for a stream that was closed before it was read to its end."""
        self._check_open()
        return self

    async def __anext__(self) -> Delta:
        while not self._unread:
            if self._is_at_end():
                raise StopAsyncIteration
            if not self._unread:
                await self._wait()
        self._last = delta = self._unread.popleft()  # as `_note`
        self._texts.append(delta.text)
        if delta._batch.has_events:
            self._note_events(delta)
        return self._so_far_with(delta) if self._is_cumulative else delta

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def accepted(self) -> None:
        """Wait until the server has accepted the request. The stream's output stays unread.

        A proxy awaits this before it sends a status.

        Raises: ClosedError where the stream was aborted or closed before; the error of a request
        that the server rejects, as reading the stream does.
        """
        self._state.awaits_acceptance = True
        while not self._is_accepted():
            await self._wait()

    async def _wait(self) -> None:
        """Wait for the next news of the stream."""
        if self._wakeup.is_awaited:
            raise RequestError(Fault("bad_request", "another task reads this stream already"))
        try:
            await self._wakeup.next_ring(self._loop)
        except asyncio.CancelledError:
            self.close()
            raise


class AsyncClient:
    """A connection to a running server, shared by any number of tasks and streams.

    Entering `async with`, or `connect`, waits for the server; requests may be submitted before
    that. Arguments and errors are those of `Client`, except that `connect` raises the connection
    errors.

    A client belongs to the event loop in which it is first used. Its methods raise RequestError in
    another loop or outside of one; make one client for each loop.
    """

    @suggesting_keywords
    def __init__(
        self,
        address: str | None = None,
        *,
        timeout_s: float | None = None,
        trace: str | None = None,
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
    ) -> None:
        self._timeout_s = timeout_or_default(timeout_s)
        self._fails_early = timeout_s is None
        self._endpoint = server_endpoint(address, keys, insecure=insecure)
        self._trace = trace
        self._started: LoopIO | None = None

    @property
    def address(self) -> str:
        """The server's address."""
        return self._endpoint.address

    @property
    def _io(self) -> LoopIO:
        """The connection, started on first use. Raises: RequestError outside of its event loop."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            why = "an AsyncClient is used inside an event loop, and none runs here; see Client"
            raise RequestError(Fault("bad_request", why)) from None
        if self._started is None:
            self._started = LoopIO(
                self._endpoint.address,
                self._timeout_s,
                open_tracer(self._trace, "client"),
                access=self._endpoint.access,
                fails_early=self._fails_early,
            )
            weakref.finalize(self, self._started.close_from_anywhere)
        elif self._started.loop is not loop:
            why = "this AsyncClient belongs to another event loop: make one for each loop"
            raise RequestError(Fault("bad_request", why))
        return self._started

    async def __aenter__(self) -> AsyncClient:
        try:
            await self.connect()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def connect(self) -> ModelCard:
        """Wait until the server answers. Returns its model, of several the first one.

        Raises: ConnectionLostError where no server answers in time; SlipstreamError where the
        server rejects the keys or speaks another version of the protocol.
        """
        return await self._io.connect()

    @property
    def model(self) -> ModelCard:
        """The model that the server serves. Raises: ConnectionLostError before `connect`;
        BadRequestError where there are several.
        """
        return checked_model(self.models, None)

    @property
    def models(self) -> tuple[ModelCard, ...]:
        """The models that are served. Raises: ConnectionLostError before `connect`."""
        if self._started is None or not self._started.models:
            why = "not connected yet: enter `async with client`, or await client.connect()"
            raise ConnectionLostError(Fault("engine", why))
        return self._started.models

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        output_kind: OutputKind = "delta",
        **options: Unpack[RequestOptions],
    ) -> AsyncStream:
        """Submit a request and return its stream at once. See `Client.stream`.

        Raises: ConnectionLostError for a `model` before `connect`.
        """
        checked = options_for_one(sampling_params, options)
        state = submit_request(self._io, prompt, checked, output_kind)
        return AsyncStream(self, self._io, state, output_kind)

    def resume(
        self,
        stream_id: str,
        *,
        num_chars: int = 0,
        num_tokens: int = 0,
        output_kind: OutputKind = "delta",
    ) -> AsyncStream:
        """Continue a partly read stream. See `Client.resume`."""
        state = resume_stream(self._io, stream_id, num_chars, num_tokens, output_kind)
        return AsyncStream(self, self._io, state, output_kind)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Run one request to its end. See `Client.generate`."""
        checked = options_for_one(sampling_params, options)
        if checked.model is not None:
            await self._model(checked.model)
        if checked.has_several_answers:
            [output] = await self._run_all([prompt], checked)
            return output
        state = submit_request(self._io, prompt, checked, "final")
        async with AsyncStream(self, self._io, state, "final") as stream:
            return await _completion(stream)

    async def generate_many(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_done: Callable[[RequestOutput], object] | None = None,
        **options: Unpack[CallOptions],
    ) -> list[RequestOutput]:
        """Run many requests to their ends. See `Client.generate_many`."""
        checked = options_for_many(prompts, sampling_params, options)
        if checked.model is not None:
            await self._model(checked.model)
        return await self._run_all(prompts, checked, on_done)

    async def _run_all(
        self,
        prompts: Sequence[Prompt],
        options: CheckedOptions,
        on_done: Callable[[RequestOutput], object] | None = None,
    ) -> list[RequestOutput]:
        states = new_states(self._io, prompts, options)
        room = asyncio.Semaphore(MAX_IN_FLIGHT)

        async def run(state: StreamState) -> RequestOutput:
            async with room:
                self._io.submit(state)
                async with AsyncStream(self, self._io, state, "final") as stream:
                    completion = await _completion(stream)
            if on_done is not None:
                on_done(completion)
            return completion

        tasks = [asyncio.ensure_future(run(state)) for state in states]
        try:
            return by_prompt(await asyncio.gather(*tasks), options.params)
        finally:
            for task in tasks:
                task.cancel()

    def stream_many(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[CallOptions],
    ) -> AsyncStreams:
        """Run many requests and read them together. See `Client.stream_many`."""
        checked = options_for_many(prompts, sampling_params, options)
        states = new_states(self._io, prompts, checked, kind="delta")
        return AsyncStreams(self, self._io, states, [each.n for each in checked.params])

    async def tokenize(
        self,
        prompt: str | Sequence[ChatMessage | Mapping[str, Any]],
        *,
        add_special_tokens: bool | None = None,
        model: str | None = None,
        **template: Unpack[ChatTemplateOptions],
    ) -> list[int]:
        """Tokenize a prompt as the server would. See `Client.tokenize`."""
        checked = checked_template(**template)
        asked = new_tokenize(prompt, checked, add_special_tokens=add_special_tokens)
        name = base_of(await self._model(model))
        return ids_of(await asyncio.wrap_future(self._io.ask(asked, name)))

    async def detokenize(
        self,
        token_ids: Sequence[int] | npt.NDArray[np.integer[Any]],
        *,
        skip_special_tokens: bool = False,
        model: str | None = None,
    ) -> str:
        """Decode token ids with the model's tokenizer. See `Client.detokenize`."""
        card = await self._model(model)
        asked = new_detokenize(token_ids, card, skip_special_tokens=skip_special_tokens)
        text: str = (await asyncio.wrap_future(self._io.ask(asked, base_of(card)))).text
        return text

    async def embed(
        self,
        inputs: EmbeddingInput | Sequence[EmbeddingInput],
        *,
        model: str | None = None,
        **options: Unpack[EmbeddingOptions],
    ) -> Embeddings:
        """The vectors of texts, or of token ids. See `Client.embed`."""
        card = await self._model(model)
        call = embedding_call(self._io, inputs, card, options)
        return Embeddings(*await asyncio.wrap_future(call.future))

    async def classify(
        self,
        inputs: EmbeddingInput | Sequence[EmbeddingInput],
        *,
        model: str | None = None,
        **options: Unpack[ClassifyOptions],
    ) -> Classes:
        """The classes of inputs. See `Client.classify`."""
        card = await self._model(model)
        call = classify_call(self._io, inputs, card, options)
        probs, nums = await asyncio.wrap_future(call.future)
        assert card.pooling is not None
        return Classes(probs, card.pooling.labels, nums)

    async def score(
        self,
        text_1: ScoreInput | Sequence[ScoreInput],
        text_2: ScoreInput | Sequence[ScoreInput],
        *,
        model: str | None = None,
        **options: Unpack[ScoringOptions],
    ) -> Scores:
        """The scores of pairs of texts. See `Client.score`."""
        card = await self._model(model)
        check_option_names(options, ScoringOptions)
        plan = plan_scores(text_1, text_2, card, options)
        call = scoring_call(self._io, plan, card)
        return plan.scores(*await asyncio.wrap_future(call.future))

    async def rerank(
        self,
        query: ScoreInput,
        documents: Sequence[ScoreInput],
        *,
        top_n: int | None = None,
        model: str | None = None,
        **options: Unpack[ScoringOptions],
    ) -> list[RankedDocument]:
        """The documents that fit a query best. See `Client.rerank`."""
        card = await self._model(model)
        plan, texts, most = rerank_plan(query, documents, card, top_n, options)
        if plan is None:
            return []
        call = scoring_call(self._io, plan, card)
        return ranked(plan.scores(*await asyncio.wrap_future(call.future)), texts, most)

    async def load_lora_adapter(
        self, lora_name: str, lora_path: str | os.PathLike[str], *, load_inplace: bool = False
    ) -> None:
        """Load an adapter from a folder of the server's. See `Client.load_lora_adapter`."""
        change = new_change(lora_name, os.fspath(lora_path), load_inplace=load_inplace)
        check_changed(await asyncio.wrap_future(self._io.ask(change)))

    async def unload_lora_adapter(self, lora_name: str) -> None:
        """Let requests find an adapter no longer. See `Client.unload_lora_adapter`."""
        check_changed(await asyncio.wrap_future(self._io.ask(new_change(lora_name))))

    async def _model(self, name: str | None) -> ModelCard:
        """The model of a call, once it is known what is served."""
        if not self._io.models:
            await self.connect()
        return checked_model(self._io.models, name)

    async def close(self) -> None:
        """End all streams and close the connection. Idempotent.

        Waits at most half a second for the server to acknowledge.
        """
        await self._io.close()


async def _completion(stream: AsyncStream) -> RequestOutput:
    while not stream._state.is_over:
        await stream._wait()
    return stream._completion()
