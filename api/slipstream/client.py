"""The blocking client.

Owns: waiting as threads do. Does not know: the protocol (`client_io`), the kinds of prompts
(`requests`).

    with Client() as client:
        for delta in client.stream("Once upon a time", max_tokens=100):
            print(delta.text, end="", flush=True)
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from types import TracebackType
from typing import Any

from slipstream.bells import ThreadBell
from slipstream.client_io import ClientIO
from slipstream.endpoints import Endpoint, server_endpoint
from slipstream.errors import RequestError, bad_request
from slipstream.many import MAX_IN_FLIGHT, Streams
from slipstream.outputs import Completion, Delta
from slipstream.reading import (
    OutputKind,
    Reading,
    new_state,
    new_states,
    params_for_each,
    resumed_state,
    with_others,
)
from slipstream.requests import Prompt, checked_params
from slipstream.stream_table import StreamState
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import Fault, ModelCard, SamplingParams
from slipstream_ipc.trace import open_tracer

DEFAULT_TIMEOUT_S = 10.0


class Stream(Reading, Iterator[Delta]):
    """A running request: iterate over it for its deltas. Made by `Client.stream` and `resume`.

    The stream is aborted when its `with` block is left, when it is closed, and when nobody holds it
    any more, so also when a `for` loop over it is left early. One thread may read it; `abort` and
    `close` may be called from any.
    """

    def __init__(self, client: Client, io: ClientIO, state: StreamState, kind: OutputKind) -> None:
        super().__init__(io, state, kind)
        self._client = client  # which is closed when nobody holds it
        self._bell: ThreadBell[StreamState] = ThreadBell()

    def __next__(self) -> Delta:
        try:
            self._last = delta = self._pop()
        except IndexError:
            return self._await_next()
        self._texts.append(delta.text)
        return delta

    def _await_next(self) -> Delta:
        while (delta := self._take()) is None:
            if self._is_finished:
                raise StopIteration
            self._wait()
        return delta

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the stream at once; what is unread is dropped. Idempotent."""
        self._abandon()

    def _wait(self) -> None:
        state = self._state
        if state.bell is not None:
            raise RequestError(Fault("bad_request", "another thread reads this stream already"))
        state.bell = self._bell
        try:
            if not (state.is_over or (self._unread and not state.wants_whole)):
                self._bell.wait()
        finally:
            state.bell = None


class Client:
    """A connection to a running server, for any number of threads and streams at once.

    address: `ipc://` and the path of the server's socket, or `tcp://HOST:PORT`; default:
    $SLIPSTREAM_ADDRESS, else where `slipstream serve` listens by default. keys: for `tcp://`, the
    folder with client.key_secret and server.key, or another secret file beside that; default:
    $SLIPSTREAM_KEYS. insecure: no keys, to a server on this machine that has none. timeout_s: how
    long to wait for a server, at the start and whenever it is away; what waits then fails. One that
    loads its model is there, and waited for. trace:
    the stack's own `trace`, for a client that is to have a track in it and is closed before the
    stack ends.

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
        self._finalizer = close_with(self, self._io)
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
        **options: Any,
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
        return self._open(
            prompt, params, output_kind, label, priority, stream_id, cache_salt, options
        )

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
        state = resumed_state(stream_id, num_chars, num_tokens, output_kind)
        self._io.submit(state)
        return Stream(self, self._io, state, output_kind)

    def _open(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        kind: OutputKind,
        label: str | None,
        priority: int,
        stream_id: str | None,
        cache_salt: str | None,
        options: dict[str, Any],
    ) -> Stream:
        state = new_state(
            self._io,
            prompt,
            checked_params(params, options),
            kind=kind,
            label=label,
            priority=priority,
            stream_id=stream_id,
            cache_salt=cache_salt,
        )
        self._io.submit(state)
        return Stream(self, self._io, state, kind)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        label: str | None = None,
        priority: int = 0,
        stream_id: str | None = None,
        cache_salt: str | None = None,
        **options: Any,
    ) -> Completion:
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
        opened = self._open(prompt, checked, "final", label, priority, stream_id, cache_salt, {})
        with opened as stream:
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
        on_done: Callable[[Completion], None] | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Run many requests to their ends; completions in the order of the prompts, one to each:
        where `n` are asked for, they are its `choices`.

        params: one for all, or one for each; or fields as keyword options, for all.
        on_done: called with each answer as it comes, in the calling thread.

        Raises: as `stream`; the first error aborts the others.
        """
        every = params_for_each(len(prompts), params, options)
        bell: ThreadBell[StreamState] = ThreadBell()
        indices: dict[StreamState, int] = {}
        for state in new_states(self._io, prompts, every, priority, cache_salt=cache_salt):
            state.bell = bell
            indices[state] = len(indices)
        waiting = iter(indices)
        running: dict[StreamState, Stream] = {}
        completions: dict[int, Completion] = {}
        try:
            while len(completions) < len(indices):
                for state in islice(waiting, MAX_IN_FLIGHT - len(running)):
                    self._io.submit(state)
                    running[state] = Stream(self, self._io, state, "final")
                completion = running.pop(over := bell.wait())._completion()
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
        **options: Any,
    ) -> Streams:
        """Run many requests and read them together: iterate for (index of the answer, delta).

        The answers are counted prompt by prompt, and are as many as `n` says to each.

        Deltas come in the order they arrive in, each stream's own in theirs; the last one of a
        stream has a finish_reason. This costs a third of what a `Stream` to each request does.
        What nobody reads is held in memory as it came. params: as for `generate_many`.

        Raises: BadRequestError here. While they are read: as `stream`; the first error aborts the
        others.
        """
        every = params_for_each(len(prompts), params, options)
        states = new_states(self._io, prompts, every, priority, kind="delta", cache_salt=cache_salt)
        return Streams(self, self._io, states)

    def close(self) -> None:
        """End every stream of this client and leave. Idempotent; waits half a second at most."""
        self._finalizer.detach()
        self._io.close()


def open_io(endpoint: Endpoint, timeout_s: float, trace: str | None = None) -> ClientIO:
    """The engine of a new client.

    Raises: BadRequestError.
    """
    if not timeout_s > 0:
        raise bad_request(BadRequest("timeout_s", timeout_s, "a number of seconds > 0"))
    tracer = open_tracer(trace, "client")
    return ClientIO(endpoint.address, timeout_s, tracer, access=endpoint.access)


def refuse_for_several(label: str | None, stream_id: str | None) -> None:
    """BadRequestError for what names one stream, where there are several."""
    for field, value in (("label", label), ("stream_id", stream_id)):
        if value is not None:
            raise bad_request(BadRequest(field, value, "None where n is more than 1"))


def close_with(client: object, io: ClientIO) -> weakref.finalize[..., object]:
    """Close the engine when nobody holds the client; at exit it closes itself."""
    finalizer = weakref.finalize(client, io.close, wait=False)
    finalizer.atexit = False
    return finalizer
