"""The blocking client.

Owns: waiting as threads do. Does not know: the protocol (`client_io`), the kinds of prompts
(`requests`).

    with Client() as client:
        for delta in client.stream("Once upon a time", max_tokens=100):
            print(delta.text, end="", flush=True)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from types import TracebackType
from typing import Any

from slipstream.bells import ThreadBell
from slipstream.client_io import ClientIO
from slipstream.endpoints import default_address
from slipstream.errors import RequestError, bad_request
from slipstream.outputs import Completion, Delta
from slipstream.reading import OutputKind, Reading, new_state, new_states, params_for_each
from slipstream.requests import Prompt, checked_params
from slipstream.stream_table import StreamState
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import Fault, ModelCard, SamplingParams
from slipstream_ipc.sockets import check_address

DEFAULT_TIMEOUT_S = 10.0
MAX_IN_FLIGHT = 4096  # requests of one generate_many that the server has at a time


class Stream(Reading, Iterator[Delta]):
    """A running request: iterate over it for its deltas. Made by `Client.stream`.

    The stream is aborted when its `with` block is left, when it is closed, and when nobody holds it
    any more, so also when a `for` loop over it is left early. One thread may read it; `abort` and
    `close` may be called from any.
    """

    def __init__(self, client: Client, io: ClientIO, state: StreamState, kind: OutputKind) -> None:
        super().__init__(io, state, kind)
        self._client = client  # which is closed when nobody holds it
        self._bell: ThreadBell[StreamState] = ThreadBell()

    def __next__(self) -> Delta:
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

    address: `ipc://` and the path of the server's socket; default: $SLIPSTREAM_ADDRESS, else where
    `slipstream serve` listens by default. timeout_s: how long to wait for a server, at the start
    and whenever it is away; what waits then fails.

    Deltas that nobody reads are held in memory, without bound.

    Raises: BadRequestError for an address that is none; ConnectionLostError where nobody answers;
    SlipstreamError where the server speaks another version of the protocol.
    """

    def __init__(self, address: str | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._io = open_io(address, timeout_s)
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
        output_kind: OutputKind = "delta",
        **options: Any,
    ) -> Stream:
        """Run one request and read it as it comes. Returns at once.

        prompt: text, token ids, or chat messages with `role` and `content`. params, or its fields
        as keyword options (`max_tokens=100`). label: a name of your own for it. priority: lower
        runs first. output_kind: each delta as it comes, all of the answer so far each time
        ("cumulative"), or one delta at the end ("final").

        Raises: BadRequestError here. While it is read: BadRequestError and OverloadedError where
        the server does not take it, EngineError where it fails, ConnectionLostError, ClosedError.
        """
        return self._open(prompt, params, output_kind, label, priority, options)

    def _open(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        kind: OutputKind,
        label: str | None,
        priority: int,
        options: dict[str, Any],
    ) -> Stream:
        checked = checked_params(params, options)
        state = new_state(self._io, prompt, checked, kind=kind, label=label, priority=priority)
        self._io.submit(state)
        return Stream(self, self._io, state, kind)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        label: str | None = None,
        priority: int = 0,
        **options: Any,
    ) -> Completion:
        """Run one request to its end. Arguments and errors are those of `stream`."""
        with self._open(prompt, params, "final", label, priority, options) as stream:
            while not stream._state.is_over:
                stream._wait()
            return stream._completion()

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        on_done: Callable[[Completion], None] | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Run many requests to their ends; completions in the order of the prompts.

        params: one for all, or one for each; or fields as keyword options, for all.
        on_done: called with each completion as it comes, in the calling thread.

        Raises: as `stream`; the first error aborts the others.
        """
        every = params_for_each(len(prompts), params, options)
        bell: ThreadBell[StreamState] = ThreadBell()
        indices: dict[StreamState, int] = {}
        for state in new_states(self._io, prompts, every, priority):
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
        return [completions[index] for index in range(len(completions))]

    def close(self) -> None:
        """End every stream of this client and leave. Idempotent; waits half a second at most."""
        self._finalizer.detach()
        self._io.close()


def open_io(address: str | None, timeout_s: float) -> ClientIO:
    """The engine of a new client.

    Raises: BadRequestError.
    """
    try:
        found = check_address(default_address() if address is None else address)
    except BadRequest as error:
        raise bad_request(error) from None
    if not timeout_s > 0:
        raise bad_request(BadRequest("timeout_s", timeout_s, "a number of seconds > 0"))
    return ClientIO(found, timeout_s)


def close_with(client: object, io: ClientIO) -> weakref.finalize[..., object]:
    """Close the engine when nobody holds the client; at exit it closes itself."""
    finalizer = weakref.finalize(client, io.close, wait=False)
    finalizer.atexit = False
    return finalizer
