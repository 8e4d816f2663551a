"""Sends a load to any OpenAI-compatible server, in the request form that the server accepts, and
reads the answers for timings and token counts.

- A request is encoded before its clock starts.
- Prompts of /v1/completions are sent as token ids, and usage is requested. If the server refuses
  token ids, prompts are sent as words (`has_words`); if it refuses usage, usage is not requested.
- Content is text, of an answer or of its reasoning; a chunk without any (a role, a usage, half a
  character) does not count as a chunk between tokens. The answer ends with its last chunk that has
  choices.
- An answer is complete if it has a finish reason or [DONE]; otherwise it failed as `incomplete`.
- Tokens are counted by the server's usage. Without usage: the requested length, if the answer
  reached that limit or was asked to ignore the end of sequence; otherwise each chunk counts as one
  token.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from itertools import product
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct

from slipstream.errors import BadRequestError, SlipstreamError
from slipstream_bench.common.load.datasets import DatasetRequest
from slipstream_bench.common.load.http_client import EventSplitter, HttpClient, RequestFailedError
from slipstream_bench.common.load.run_load import SendRequest
from slipstream_bench.common.measures import RequestTimeline
from slipstream_ipc.messages import Fault

_FAULTY_ENDS = ("abort", "error")
Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_REFUSALS = ("http_400", "http_422")  # refusals of the request's form


class StreamMessage(Struct, gc=False):
    """The new part of a chat message."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class StreamChoice(Struct, gc=False):
    """One answer's part of an event."""

    text: str | None = None
    delta: StreamMessage | None = None
    finish_reason: str | None = None


class _PromptDetails(Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(Struct, gc=False):
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class StreamEvent(Struct, gc=False):
    """The data of an event, or the body of an answer in one piece."""

    choices: list[StreamChoice] = []  # msgspec copies the default
    usage: _Usage | None = None
    error: Raw = Raw()
    message: str | None = None


_decoder = msgspec.json.Decoder(StreamEvent)


class OpenAIAnswer:
    """One answer as it arrives: an event stream, or one JSON object.

    Create it when the request is sent. max_tokens and ignore_eos: as requested.
    """

    __slots__ = (
        "_events",
        "_ignore_eos",
        "_is_done",
        "_max_tokens",
        "_reason",
        "_usage",
        "timeline",
    )

    def __init__(self, *, max_tokens: int, prompt_len: int | None, ignore_eos: bool) -> None:
        self.timeline = RequestTimeline(time.perf_counter(), prompt_len)
        self._events = EventSplitter()
        self._max_tokens = max_tokens
        self._ignore_eos = ignore_eos
        self._is_done = False
        self._reason: str | None = None
        self._usage: _Usage | None = None

    def take_piece(self, piece: bytes) -> None:
        """A piece of an event stream. Raises: RequestFailedError."""
        now = time.perf_counter()
        for data in self._events.feed(piece):
            if data == b"[DONE]":
                self._is_done = True
            elif self._read(data, now):
                self.timeline.times_s.append(now)

    def take_whole(self, body: bytes) -> None:
        """The body of a non-streaming answer. Raises: RequestFailedError."""
        self._read(body, time.perf_counter())

    def finish(self) -> RequestTimeline:
        """End of the answer. Raises: RequestFailedError if it is incomplete."""
        if self._reason is None and not self._is_done:
            raise RequestFailedError("incomplete", "neither a finish_reason nor [DONE]")
        timeline = self.timeline
        timeline.ended_s = timeline.ended_s or time.perf_counter()
        usage = self._usage or _Usage()
        timeline.prompt_len = usage.prompt_tokens or timeline.prompt_len
        if usage.completion_tokens is not None:
            timeline.num_tokens = usage.completion_tokens
            timeline.counting = "usage"
        elif self._reason == "length" or (self._ignore_eos and self._reason is None):
            timeline.num_tokens = self._max_tokens
            timeline.counting = "requested"
        else:
            timeline.num_tokens = len(timeline.times_s)
            timeline.counting = "chunks"
        return timeline

    def _read(self, data: bytes, now: float) -> bool:
        """Read one event; returns whether it has content."""
        try:
            event = _decoder.decode(data)
        except msgspec.DecodeError as error:
            shown = data[:100].decode(errors="replace")
            raise RequestFailedError("malformed", f"{error}: {shown}") from error
        if event.usage is not None:
            self._usage = event.usage
        if not event.choices:
            if event.message is not None or bytes(event.error) not in (b"", b"null"):
                message = event.message or bytes(event.error).decode(errors="replace")
                raise RequestFailedError("error_event", message)
            return False
        choice = event.choices[0]
        self.timeline.ended_s = now
        if choice.finish_reason is not None:
            if choice.finish_reason in _FAULTY_ENDS:
                raise RequestFailedError(f"finish_{choice.finish_reason}")
            self._reason = choice.finish_reason
        if choice.delta is None:
            return bool(choice.text)
        delta = choice.delta
        return bool(delta.content or delta.reasoning_content or delta.reasoning)


class LoadRequestOptions(Struct, frozen=True):
    """How every request of a load is sent. timeout_s: for the whole answer. stream_interval: a
    Slipstream extension; None leaves it to the server.
    """

    endpoint: Endpoint
    is_streamed: bool
    temperature: float
    logprobs: int | None
    ignore_eos: bool
    timeout_s: float
    stream_interval: int | None = None
    stop: str | None = None


class _Model(Struct):
    id: str


class _Models(Struct):
    data: list[_Model]


async def first_model(http: HttpClient) -> str:
    """The first model of /v1/models. Raises: SlipstreamError."""
    body = bytearray()
    try:
        await http.exchange("GET", "/v1/models", None, body.extend)
        return msgspec.json.decode(body, type=_Models).data[0].id
    except (RequestFailedError, msgspec.DecodeError, IndexError) as error:
        why = f"no model's name from /v1/models ({error}); is the server there? else give --model"
        raise _failed(why) from error


class OpenAITarget:
    """One server and one of its models."""

    def __init__(
        self,
        http: HttpClient,
        model: str,
        request_options: LoadRequestOptions,
        problems: dict[str, str],
    ) -> None:
        """problems: receives the message of the first failure of each kind."""
        self.model = model
        self._http = http
        self._request_options = request_options
        self.problems = problems
        self.vocab_size: int | None = None  # unknown
        self.has_words = request_options.endpoint == "chat"  # instead of token ids
        self._asks_usage = request_options.is_streamed

    async def probe(self, sample: DatasetRequest) -> None:
        """Find the form that the server accepts, by requesting one token.

        Raises: BadRequestError if it refuses every form, SlipstreamError if it fails.
        """
        sample = DatasetRequest(sample.prompt, 1)
        words = (False, True) if not self.has_words and not sample.is_text else (self.has_words,)
        usages = (True, False) if self._asks_usage else (False,)
        first_error: RequestFailedError | None = None
        for self._asks_usage, self.has_words in product(usages, words):
            try:
                await self._answer(self._body(sample), self._new_answer(sample))
                return
            except RequestFailedError as error:
                if error.reason not in _REFUSALS:
                    raise _failed(f"the server does not answer as it should: {error}") from error
                first_error = first_error or error
        assert first_error is not None
        why = f"the server refuses this request in every form: {first_error}"
        raise BadRequestError(Fault("bad_request", why))

    def prepared(self, request: DatasetRequest) -> SendRequest:
        """The request, ready to be sent."""
        return partial(self._send, request, self._body(request))

    async def _send(self, request: DatasetRequest, body: bytes) -> RequestTimeline:
        answer = self._new_answer(request)
        try:
            return await self._answer(body, answer)
        except RequestFailedError as error:
            self.problems.setdefault(error.reason, error.detail)
            answer.timeline.failure = error.reason
            return answer.timeline

    def _new_answer(self, request: DatasetRequest) -> OpenAIAnswer:
        is_known = not self.has_words and not request.is_text
        return OpenAIAnswer(
            max_tokens=request.max_tokens,
            prompt_len=len(request.prompt) if is_known else None,
            ignore_eos=self._request_options.ignore_eos,
        )

    async def _answer(self, body: bytes, answer: OpenAIAnswer) -> RequestTimeline:
        path = PATHS[self._request_options.endpoint]
        whole = bytearray()
        sink = answer.take_piece if self._request_options.is_streamed else whole.extend
        try:
            async with asyncio.timeout(self._request_options.timeout_s):
                await self._http.exchange("POST", path, body, sink)
        except TimeoutError:
            raise RequestFailedError(
                "timeout", f"no end in {self._request_options.timeout_s} s"
            ) from None
        if not self._request_options.is_streamed:
            answer.take_whole(bytes(whole))
        return answer.finish()

    def _body(self, request: DatasetRequest) -> bytes:
        request_options = self._request_options
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "temperature": request_options.temperature,
            "stream": request_options.is_streamed,
        }
        if request_options.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": request.text}]
            if request_options.logprobs is not None:
                body |= {"logprobs": True, "top_logprobs": request_options.logprobs}
        else:
            body["prompt"] = request.text if self.has_words else request.prompt
            if request_options.logprobs is not None:
                body["logprobs"] = request_options.logprobs
        if request_options.ignore_eos:
            body["ignore_eos"] = True
        if request_options.stop is not None:
            body["stop"] = request_options.stop
        if request_options.stream_interval is not None:
            body["stream_interval"] = request_options.stream_interval
        if self._asks_usage:
            body["stream_options"] = {"include_usage": True}
        return msgspec.json.encode(body)


def _failed(message: str) -> SlipstreamError:
    return SlipstreamError(Fault("engine", message))
