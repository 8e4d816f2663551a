"""The blocking client.

with Client() as client:
    for delta in client.stream("Once upon a time", max_tokens=100):
        print(delta.text, end="", flush=True)
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from types import TracebackType
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from slipstream.client.base import (
    DEFAULT_TIMEOUT_S,
    ask,
    ask_again,
    new_states,
    open_io,
    params_for_each,
    refuse_for_several,
    with_others,
)
from slipstream.client.connection.queries import (
    checked_template,
    ids_of,
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
from slipstream.outputs import Delta, RequestOutput
from slipstream.requests import Prompt, checked_params
from slipstream_ipc.messages import ChatMessage, Fault, ModelCard, SamplingOptions, SamplingParams


class Stream(BaseStream, Iterator[Delta]):
    """A running request: iterate over it for its deltas. Made by `Client.stream` and `resume`.

    The stream is aborted when its `with` block is left, when it is closed, and when nobody holds it
    any more, so also when a `for` loop over it is left early. One thread may read it; `abort` and
    `close` may be called from any.
    """

    def __init__(self, client: Client, io: ThreadIO, state: StreamState, kind: OutputKind) -> None:
        super().__init__(io, state, kind)
        self._client = client  # held here: a client that is not held any more is closed
        self._wakeup: ThreadWakeup[StreamState] = ThreadWakeup()

    def __next__(self) -> Delta:
        while True:
            try:
                delta = self._unread.popleft()
            except IndexError:  # nothing, or being merged at this moment
                if self._is_at_end():
                    raise StopIteration from None
                self._wait()
            else:
                self._last = delta
                self._texts.append(delta.text)
                return self._so_far_with(delta) if self._is_cumulative else delta

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _wait(self) -> None:
        state = self._state
        if state.wakeup is not None:
            raise RequestError(Fault("bad_request", "another thread reads this stream already"))
        state.wakeup = self._wakeup
        try:
            if not self._has_news():
                self._wakeup.wait()
        finally:
            state.wakeup = None


class Client:
    """A connection to a running server, for any number of threads and streams at once.

    address: `ipc://` and the path of the server's socket, or `tcp://HOST:PORT`; default:
    $SLIPSTREAM_ADDRESS, else where `slipstream serve` listens by default. keys: for `tcp://`, the
    folder with client.key_secret and server.key, or another secret file beside that; default:
    $SLIPSTREAM_KEYS. insecure: no keys, to a server on this machine that has none. timeout_s: how
    long to wait for a server, at the start and whenever it is away; what waits then fails, a stream
    that the server has accepted after six times as long. One that loads its model is there, and
    waited for. trace: the stack's own `trace`, for a client that is to have a track in it and is
    closed before the stack ends.

    What a stream says while nobody reads it is held in memory, and merged into fewer deltas.

    Raises: BadRequestError for an address or keys that are none, or a socket that others could have
    put there; ConnectionLostError where nobody answers; SlipstreamError where the server does not
    let in the keys, or speaks another version of the protocol.
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
        self._io = open_io(server_endpoint(address, keys, insecure=insecure), timeout_s, trace)
        self._finalizer = weakref.finalize(self, self._io.close, wait=False)
        self._finalizer.atexit = False  # then the connection closes itself
        try:
            self._io.connect().result()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Where the server is."""
        return self._io.address

    @property
    def model(self) -> ModelCard:
        """What the server serves."""
        assert self._io.model is not None
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
    ) -> Stream:
        """Run one request and read it as it comes. Returns at once.

        prompt: text, token ids, or chat messages with `role` and `content`. params, or its fields
        as keyword options (`max_tokens=100`). label: a name of your own for it. priority: lower
        runs first. output_kind: each delta as it comes, all of the answer so far each time
        ("cumulative"), or one delta at the end ("final").

        stream_id: 32 random hexadecimal digits (`secrets.token_hex(16)`), which make asking again
        harmless: the same request under the same id is run once, and read by whoever asked last.
        None draws them. Who knows them can read the stream, and end it.

        cache_salt: requests share what the server has computed of equal beginnings only with those
        of the same salt, so that nobody learns from the time that an answer takes what others have
        asked. At most 1,024 characters; None: shared among all who give none.

        The stream goes on over the death of any process of the server.

        Raises: BadRequestError here. While it is read: BadRequestError, ConflictError (the id is
        another request's), UnknownStreamError (the id's stream ended, and is not kept) and
        OverloadedError where the server does not take it, EngineError where it fails,
        SupersededError where somebody else has taken it over, ConnectionLostError, ClosedError.
        """
        state = ask(
            self._io,
            prompt,
            checked_params(params, options),
            output_kind,
            label=label,
            priority=priority,
            stream_id=stream_id,
            cache_salt=cache_salt,
        )
        return Stream(self, self._io, state, output_kind)

    def resume(
        self,
        stream_id: str,
        *,
        num_chars: int = 0,
        num_tokens: int = 0,
        output_kind: OutputKind = "delta",
    ) -> Stream:
        """Go on with a stream that another client, or another `Stream`, has read a part of.

        stream_id: its `id`. num_chars, num_tokens: its `position` there, behind which the rest
        follows exactly; the beginning by default. Whoever read it before is superseded. A stream
        whose client is gone goes on, and can be resumed, within the server's grace time.

        Raises: BadRequestError here. While it is read: UnknownStreamError where no such stream is
        known, StreamLostError where it has no such position or is lost on the way, and what
        `stream` raises.
        """
        state = ask_again(self._io, stream_id, num_chars, num_tokens, output_kind)
        return Stream(self, self._io, state, output_kind)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        label: str | None = None,
        priority: int = 0,
        stream_id: str | None = None,
        cache_salt: str | None = None,
        **options: Unpack[SamplingOptions],
    ) -> RequestOutput:
        """Run one request to its end. Arguments and errors are those of `stream`.

        n: several answers, which are the `choices` of the completion.
        """
        checked = checked_params(params, options)
        if checked.n > 1:
            refuse_for_several(label, stream_id)
            [found] = self.generate_many(
                [prompt], checked, priority=priority, cache_salt=cache_salt
            )
            return found
        state = ask(
            self._io,
            prompt,
            checked,
            "final",
            label=label,
            priority=priority,
            stream_id=stream_id,
            cache_salt=cache_salt,
        )
        with Stream(self, self._io, state, "final") as stream:
            while not stream._state.is_over:
                stream._wait()
            return stream._completion()

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        on_done: Callable[[RequestOutput], object] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> list[RequestOutput]:
        """Run many requests to their ends; completions in the order of the prompts, one to each:
        where `n` are asked for, they are its `choices`.

        params: one for all, or one for each; or fields as keyword options, for all.
        on_done: called with each answer as it comes, in the calling thread.

        Raises: as `stream`; the first error aborts the others.
        """
        every = params_for_each(prompts, params, options)
        wakeup: ThreadWakeup[StreamState] = ThreadWakeup()
        indices: dict[StreamState, int] = {}
        for state in new_states(self._io, prompts, every, priority, cache_salt=cache_salt):
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
                completion = running.pop(over := wakeup.wait())._completion()
                completions[indices[over]] = completion
                if on_done is not None:
                    on_done(completion)
        finally:
            for stream in running.values():
                stream.close()
        answers = [completions[index] for index in range(len(completions))]
        return with_others(answers, every)

    def stream_many(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Streams:
        """Run many requests and read them together: iterate for (index of the answer, delta).

        The answers are counted prompt by prompt, and are as many as `n` says to each.

        Deltas come in the order they arrive in, each stream's own in theirs; the last one of a
        stream has a finish_reason. This costs a third of what a `Stream` to each request does.
        What nobody reads is held in memory as it came. params: as for `generate_many`.

        Raises: BadRequestError here. While they are read: as `stream`; the first error aborts the
        others.
        """
        every = params_for_each(prompts, params, options)
        states = new_states(self._io, prompts, every, priority, kind="delta", cache_salt=cache_salt)
        return Streams(self, self._io, states, [each.n for each in every])

    def tokenize(
        self,
        prompt: str | Sequence[ChatMessage | Mapping[str, Any]],
        *,
        add_special_tokens: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """The token ids that a prompt becomes.

        prompt: text or chat messages. add_special_tokens: those that the tokenizer puts around a
        text; None: to a text, not to messages, whose template has its own. The others are what the
        template is given, as in transformers' `apply_chat_template`.

        Raises: BadRequestError, OverloadedError, EngineError, ConnectionLostError, ClosedError.
        """
        template = checked_template(
            tools, chat_template_kwargs, add_generation_prompt, continue_final_message
        )
        asked = new_tokenize(prompt, template, add_special_tokens=add_special_tokens)
        return ids_of(self._io.ask(asked).result())

    def detokenize(
        self,
        token_ids: Sequence[int] | npt.NDArray[np.integer[Any]],
        *,
        skip_special_tokens: bool = False,
    ) -> str:
        """The text of token ids, as the model's tokenizer decodes them. Errors: as `tokenize`."""
        asked = new_detokenize(token_ids, self.model, skip_special_tokens=skip_special_tokens)
        text: str = self._io.ask(asked).result().text
        return text

    def close(self) -> None:
        """End every stream of this client and leave. Idempotent; waits half a second at most."""
        self._finalizer.detach()
        self._io.close()
