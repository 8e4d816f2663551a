"""The blocking client.

with Client() as client:
    for delta in client.stream("Once upon a time", max_tokens=100):
        print(delta.text, end="", flush=True)
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from slipstream.client.base import (
    by_prompt,
    check_option_names,
    classify_call,
    embedding_call,
    new_states,
    open_io,
    rerank_plan,
    resume_stream,
    scoring_call,
    submit_request,
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
from slipstream.client.connection.embedding_call import EmbeddingCall, Part
from slipstream.client.connection.queries import (
    check_changed,
    checked_template,
    ids_of,
    new_change,
    new_detokenize,
    new_tokenize,
)
from slipstream.client.connection.thread_io import ThreadIO
from slipstream.client.endpoints import server_endpoint
from slipstream.client.stream import BaseStream, OutputKind
from slipstream.client.stream_many import MAX_IN_FLIGHT, Streams
from slipstream.client.streams.stream_state import StreamState
from slipstream.client.streams.wakeup import ThreadWakeup
from slipstream.errors import RequestError
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


class Stream(BaseStream, Iterator[Delta]):
    """A running request; iterating over it yields its deltas. Made by `Client.stream` and
    `Client.resume`.

    The stream is aborted when its `with` block exits, when it is closed, and when it is garbage
    collected, which includes leaving a `for` loop over it early. Only one thread may read a stream
    at a time, else RequestError is raised; `abort` and `close` may be called from any thread.
    """

    def __init__(self, client: Client, io: ThreadIO, state: StreamState, kind: OutputKind) -> None:
        super().__init__(io, state, kind)
        self._client = client  # keeps the client open: it closes when garbage collected
        self._wakeup: ThreadWakeup[StreamState] = ThreadWakeup()

    def __iter__(self) -> Stream:
        """Raises: ClosedError for a stream that was closed before it was read to its end."""
        self._check_open()
        return self

    def __next__(self) -> Delta:
        while True:
            try:
                delta = self._unread.popleft()
            except IndexError:  # empty, or the I/O thread is merging the deltas right now
                if self._is_at_end():
                    raise StopIteration from None
                self._wait()
            else:
                self._last = delta  # as `_note`
                self._texts.append(delta.text)
                if delta._batch.has_events:
                    self._note_events(delta)
                return self._so_far_with(delta) if self._is_cumulative else delta

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def accepted(self, timeout_s: float | None = None) -> None:
        """Wait until the server has accepted the request. The stream's output stays unread.

        Raises: TimeoutError after `timeout_s`, with the stream going on; ClosedError where the
        stream was aborted or closed before; the error of a request that the server rejects, as
        reading the stream does.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._state.awaits_acceptance = True
        while not self._is_accepted():
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._wait_until(self._is_decided, left_s):
                raise TimeoutError(f"the server has not accepted the request in {timeout_s:g} s")

    def _wait(self) -> None:
        self._wait_until(self._has_news)

    def _wait_until(self, is_ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait for a ring, unless the stream is ready; False after `timeout_s`."""
        state = self._state
        if state.wakeup is not None:
            raise RequestError(Fault("bad_request", "another thread reads this stream already"))
        state.wakeup = self._wakeup
        try:
            return is_ready() or self._wakeup.wait(timeout_s) is not None
        finally:
            state.wakeup = None


class Client:
    """A connection to a running server, shared by any number of threads and streams.

    address: `ipc://PATH` of the server's socket, or `tcp://HOST:PORT`; for several replicas, such
        addresses separated by commas, `file:PATH` with an address to a line, `dns://NAME:PORT`, or
        `ray://NAME` of a fleet that `slipstream ray up` has started.
        Default: $SLIPSTREAM_ADDRESS, else the address where `slipstream serve` listens by default.
    keys: for `tcp://`, the folder that holds client.key_secret and server.key, or another client's
        secret file in that folder. Default: $SLIPSTREAM_KEYS.
    insecure: connect without keys, to a server on this machine that runs without them.
    timeout_s: how long to wait for the server in seconds, at the start and whenever the connection
        is lost. Waiting calls and streams fail after that, streams that the server had accepted
        after six times as long. The time in which the server loads its model does not count.
        Default: 10; at the start 1 where nothing listens on the socket and no stack is starting
        there.
    trace: the stack's own `trace`, to add a track for this client to it; the client must be closed
        before the stack ends.

    Unread deltas of a stream are held in memory, merged into fewer deltas.

    Raises: BadRequestError for an invalid address, timeout or keys, or a socket in a folder that is
    open to other users; ConnectionLostError where no server answers; SlipstreamError where the
    server rejects the keys or speaks another version of the protocol.
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
        self._io = open_io(server_endpoint(address, keys, insecure=insecure), timeout_s, trace)
        self._finalizer = weakref.finalize(self, self._io.close, wait=False)
        self._finalizer.atexit = False  # the connection has its own atexit hook
        try:
            self._io.connect().result()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """The server's address."""
        return self._io.address

    @property
    def model(self) -> ModelCard:
        """The model that the server serves. Raises: BadRequestError where there are several."""
        return checked_model(self._io.models, None)

    @property
    def models(self) -> tuple[ModelCard, ...]:
        """The models that are served: one, or those of the replicas."""
        return self._io.models

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        output_kind: OutputKind = "delta",
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """Submit a request and return its stream at once.

        prompt: text, token ids, or chat messages with `role` and `content`. Content is text, or a
            list of `{"type": "text", "text": …}` and `{"type": "image", "image": …}`, the bytes of
            a PNG, JPEG, WebP or GIF file, its path or a picture of PIL's; or images in OpenAI's
            form with a data: URL.
        sampling_params: the sampling parameters; or give their fields as keyword options
            (`max_tokens=100`).
        output_kind: what iterating yields: "delta", each delta as it arrives; "cumulative", the
            whole output so far with each delta; "final", one delta at the end.

        Further keyword options:

        model: the name of one of `models`, or of an adapter of one. Default: the only one.
        lora_request: an adapter by vLLM's `LoRARequest`, in place of its name as `model`.
        label: a name of your own for the request.
        priority: a 32-bit integer; lower values are scheduled first.
        stream_id: 32 random hexadecimal digits (`secrets.token_hex(16)`), which make a retry
            idempotent: the same request under the same id runs once, and its latest reader
            receives it. Anyone with the id can read the stream and end it. None draws an id.
        cache_salt: restricts prefix caching to requests with the same salt, so that response times
            do not reveal other users' prompts. At most 1,024 characters. Requests without a salt
            share the cache with each other.
        prediction: what the answer will probably say, as of an edit the text before it. The answer
            is the same, and takes fewer steps where the server has `speculative_config`.
        prompt_cache_key: of several replicas, requests with the same key prefer the same one, as
            their prompts are probably cached there. Without one, the prompt's beginning decides.
        trace_headers: the W3C headers `traceparent` and `tracestate` of the trace that the request
            belongs to, for a server that exports traces. Invalid ones are ignored.
        tools, chat_template_kwargs, add_generation_prompt, continue_final_message: for chat
            messages, as in transformers' `apply_chat_template`. A tool is a definition in OpenAI's
            form, or a Python function with types and a docstring.
        tool_choice: "auto" (the default), or "none": the model is shown no tools, and what looks
            like a call is content; "required": the answer is nothing but calls; or a tool, as
            `{"type": "function", "function": {"name": …}}`: the answer is one call of it.
        parallel_tool_calls: False: "required" is one call.
        stop_scope: where stop strings are looked for: "content" (the default), or "all", which
            includes reasoning and tool calls.
        parse_answer: False leaves the answer to chat messages as text alone, without reasoning and
            tool calls.

        The stream survives the death of any process of the server.

        Raises: BadRequestError from this call. Reading the stream raises BadRequestError,
        ConflictError (the id belongs to a different request), UnknownStreamError (the stream of
        this id has ended and is no longer kept) or OverloadedError where the server rejects the
        request, EngineError where it fails, SupersededError where another reader has taken the
        stream over, ConnectionLostError, and ClosedError.
        """
        checked = options_for_one(sampling_params, options)
        state = submit_request(self._io, prompt, checked, output_kind)
        return Stream(self, self._io, state, output_kind)

    def resume(
        self,
        stream_id: str,
        *,
        num_chars: int = 0,
        num_tokens: int = 0,
        output_kind: OutputKind = "delta",
    ) -> Stream:
        """Continue a stream that another client or another `Stream` has partly read.

        stream_id: the stream's `id`.
        num_chars, num_tokens: the stream's `position` up to which it has been read; output
            continues exactly after it. Default: from the beginning.
        output_kind: as in `stream`.

        The previous reader is superseded. A stream whose client has vanished keeps running, and can
        be resumed, for the server's `grace_s`.

        Raises: BadRequestError from this call. Reading the stream raises UnknownStreamError where
        the server knows no such stream, StreamLostError where the stream has no such position or
        is lost later, and the errors of `stream`.
        """
        state = resume_stream(self._io, stream_id, num_chars, num_tokens, output_kind)
        return Stream(self, self._io, state, output_kind)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Run one request to its end. Arguments and errors are those of `stream`.

        With `n` > 1, the answers are the `outputs` of the result; `label` and `stream_id` then
        have to be None.
        """
        checked = options_for_one(sampling_params, options)
        if checked.has_several_answers:
            [output] = self._run_all([prompt], checked)
            return output
        state = submit_request(self._io, prompt, checked, "final")
        with Stream(self, self._io, state, "final") as stream:
            while not stream._state.is_over:
                stream._wait()
            return stream._completion()

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_done: Callable[[RequestOutput], object] | None = None,
        **options: Unpack[CallOptions],
    ) -> list[RequestOutput]:
        """Run many requests to their ends.

        Returns one result for each prompt, in the order of the prompts; with `n` > 1, its
        `outputs` are the answers.

        sampling_params: one for all prompts or one for each; or give fields as keyword options,
            for all.
        on_done: called in the calling thread with each answer as it completes.

        Raises: the errors of `stream`; the first one aborts the other requests.
        """
        checked = options_for_many(prompts, sampling_params, options)
        return self._run_all(prompts, checked, on_done)

    def _run_all(
        self,
        prompts: Sequence[Prompt],
        options: CheckedOptions,
        on_done: Callable[[RequestOutput], object] | None = None,
    ) -> list[RequestOutput]:
        wakeup: ThreadWakeup[StreamState] = ThreadWakeup()
        indices: dict[StreamState, int] = {}
        for state in new_states(self._io, prompts, options):
            state.wakeup = wakeup
            indices[state] = len(indices)
        waiting = iter(indices)
        running: dict[StreamState, Stream] = {}
        completions: dict[int, RequestOutput] = {}
        try:
            while len(completions) < len(indices):
                for state in islice(waiting, MAX_IN_FLIGHT - len(running)):
                    self._io.submit(state)
                    running[state] = Stream(self, self._io, state, "final")
                over = wakeup.wait()
                assert over is not None  # without a timeout
                completion = running.pop(over)._completion()
                completions[indices[over]] = completion
                if on_done is not None:
                    on_done(completion)
        finally:
            for stream in running.values():
                stream.close()
        answers = [completions[index] for index in range(len(completions))]
        return by_prompt(answers, options.params)

    def stream_many(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[CallOptions],
    ) -> Streams:
        """Run many requests and read them together, as pairs of (answer index, delta).

        Answers are numbered prompt by prompt, `n` to each prompt. Deltas arrive in any order across
        streams and in order within a stream; the last delta of a stream has a `finish_reason`.
        Unread deltas are held in memory without being merged. This costs a quarter of what one
        `Stream` for each request costs.

        sampling_params: as in `generate_many`.

        Raises: BadRequestError from this call. Reading raises the errors of `stream`; the first one
        aborts the other requests.
        """
        checked = options_for_many(prompts, sampling_params, options)
        states = new_states(self._io, prompts, checked, kind="delta")
        return Streams(self, self._io, states, [each.n for each in checked.params])

    def tokenize(
        self,
        prompt: str | Sequence[ChatMessage | Mapping[str, Any]],
        *,
        add_special_tokens: bool | None = None,
        model: str | None = None,
        **template: Unpack[ChatTemplateOptions],
    ) -> list[int]:
        """Tokenize a prompt as the server would.

        prompt: text or chat messages.
        add_special_tokens: whether the tokenizer adds its special tokens. None adds them to text
            and not to chat messages, whose template has its own.
        model: as in `stream`.

        The other arguments go to the chat template, as in transformers' `apply_chat_template`.

        Raises: BadRequestError, OverloadedError, EngineError, ConnectionLostError, ClosedError.
        """
        name = base_of(checked_model(self._io.models, model))
        checked = checked_template(**template)
        asked = new_tokenize(prompt, checked, add_special_tokens=add_special_tokens)
        return ids_of(self._io.ask(asked, name).result())

    def detokenize(
        self,
        token_ids: Sequence[int] | npt.NDArray[np.integer[Any]],
        *,
        skip_special_tokens: bool = False,
        model: str | None = None,
    ) -> str:
        """Decode token ids with the model's tokenizer. Otherwise as `tokenize`."""
        card = checked_model(self._io.models, model)
        asked = new_detokenize(token_ids, card, skip_special_tokens=skip_special_tokens)
        text: str = self._io.ask(asked, base_of(card)).result().text
        return text

    def embed(
        self,
        inputs: EmbeddingInput | Sequence[EmbeddingInput],
        *,
        model: str | None = None,
        **options: Unpack[EmbeddingOptions],
    ) -> Embeddings:
        """The vectors of texts, or of token ids, by a model that is served for embeddings.

        inputs: a text, token ids, or a list of several of either.
        model: as in `stream`.

        For the options see `EmbeddingOptions`.

        Raises: BadRequestError, which names the input; OverloadedError, EngineError,
        ConnectionLostError, ClosedError.
        """
        card = checked_model(self._io.models, model)
        call = embedding_call(self._io, inputs, card, options)
        return Embeddings(*self._pooled(call))

    def classify(
        self,
        inputs: EmbeddingInput | Sequence[EmbeddingInput],
        *,
        model: str | None = None,
        **options: Unpack[ClassifyOptions],
    ) -> Classes:
        """The classes of texts, or of token ids: a number for each label, by a model that is served
        for classes. Otherwise as `embed`; for the options see `ClassifyOptions`.
        """
        card = checked_model(self._io.models, model)
        call = classify_call(self._io, inputs, card, options)
        probs, nums = self._pooled(call)
        assert card.pooling is not None
        return Classes(probs, card.pooling.labels, nums)

    def score(
        self,
        text_1: ScoreInput | Sequence[ScoreInput],
        text_2: ScoreInput | Sequence[ScoreInput],
        *,
        model: str | None = None,
        **options: Unpack[ScoringOptions],
    ) -> Scores:
        """The scores of pairs of texts: one with each of several, or as many of both, pair by pair.
        A cross-encoder reads both at once; an embedder's score is the cosine of two vectors.

        For the options see `ScoringOptions`.

        Raises: as `embed`.
        """
        card = checked_model(self._io.models, model)
        check_option_names(options, ScoringOptions)
        plan = plan_scores(text_1, text_2, card, options)
        call = scoring_call(self._io, plan, card)
        return plan.scores(*self._pooled(call))

    def rerank(
        self,
        query: ScoreInput,
        documents: Sequence[ScoreInput],
        *,
        top_n: int | None = None,
        model: str | None = None,
        **options: Unpack[ScoringOptions],
    ) -> list[RankedDocument]:
        """The documents that fit a query best, by falling score; otherwise as `score`. top_n: how
        many; None: all.
        """
        card = checked_model(self._io.models, model)
        plan, texts, most = rerank_plan(query, documents, card, top_n, options)
        if plan is None:
            return []
        call = scoring_call(self._io, plan, card)
        return ranked(plan.scores(*self._pooled(call)), texts, most)

    def _pooled(self, call: EmbeddingCall) -> Part:
        """Wait for a call; one that is given up asks no more."""
        try:
            return call.future.result()
        except BaseException:
            call.future.cancel()
            raise

    def load_lora_adapter(
        self, lora_name: str, lora_path: str | os.PathLike[str], *, load_inplace: bool = False
    ) -> None:
        """Load an adapter from a folder of the server's; requests name it as their model.

        load_inplace: a name that is loaded already gets what lies at `lora_path`; requests that
            run go on with what they began with.

        The server has to allow it (`allow_runtime_lora_updating`), for folders below its
        `lora_root`.

        Raises: BadRequestError, OverloadedError where there is no room for it, ConnectionLostError,
        ClosedError.
        """
        change = new_change(lora_name, os.fspath(lora_path), load_inplace=load_inplace)
        check_changed(self._io.ask(change).result())

    def unload_lora_adapter(self, lora_name: str) -> None:
        """Let requests find an adapter no longer; those that run go on to their ends.

        Raises: as `load_lora_adapter`.
        """
        check_changed(self._io.ask(new_change(lora_name)).result())

    def close(self) -> None:
        """End all streams and close the connection. Idempotent.

        Waits at most half a second for the server to acknowledge.
        """
        self._finalizer.detach()
        self._io.close()
