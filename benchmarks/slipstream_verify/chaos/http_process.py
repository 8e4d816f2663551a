"""A client process for requests over HTTP, which may be killed at any moment.

`python -m slipstream_verify.chaos.http_process`, with a config as `client_process` has. A stream
whose connection breaks is requested again with the id of the last event in the journal, and
continues after it; without one it is requested from its beginning. Every other request resumes by a
GET, and by the same POST if the GET finds that the stream is gone; the others by the POST alone. An
answer that is not streamed is requested again as a whole.

- A request is repeated only if the front could not be reached, closed the connection or was not
  ready; any other incomplete answer is a failure.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Raw, Struct, structs

from slipstream.answers.tool_calls import call_id
from slipstream_bench.common.load.http_client import EventSplitter, HttpClient, RequestFailedError
from slipstream_ipc.messages import AnswerEvent, EventKind
from slipstream_verify.chaos.client_process import (
    Allowance,
    ClientConfig,
    ReadSoFar,
    read_before,
    read_config,
)
from slipstream_verify.chaos.journal import AskedAgain, Failed, JournalWriter, ReceivedDelta
from slipstream_verify.chaos.workload.chaos_workload import ChaosRequest

_NOT_THERE = ("connect", "disconnected", "http_503")
_PAUSE_S = 0.1  # before a request is repeated
_FIELDS = (  # of the parameters, in a request's body
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids"),
    *("include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens"),
    *("stream_interval", "structured_outputs"),
)


class _HttpFunction(Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _HttpCall(Struct, gc=False):
    """A part of a call. index: None in an answer that is not streamed."""

    function: _HttpFunction
    index: int | None = None
    id: str | None = None


class _HttpMessage(Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_HttpCall] = []


class _HttpChoice(Struct, gc=False):
    text: str | None = None
    delta: _HttpMessage | None = None
    message: _HttpMessage | None = None
    finish_reason: str | None = None


class _HttpTokenDetails(Struct, gc=False):
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class _HttpUsage(Struct, gc=False):
    prompt_tokens: int
    completion_tokens: int
    completion_tokens_details: _HttpTokenDetails


class _HttpAnswer(Struct, gc=False):
    """The data of an event, or an answer that is not streamed."""

    id: str = ""
    choices: list[_HttpChoice] = []
    usage: _HttpUsage | None = None
    error: Raw = Raw()


class HttpReader:
    """One answer as it arrives. An end that has usage is complete with it."""

    def __init__(self, request: ChaosRequest, read: ReadSoFar, journal: JournalWriter) -> None:
        self._request = request
        self._journal = journal
        self._events = EventSplitter()
        self._events.last_id = read.event_id.encode()
        self._body = b""  # of an answer that is not streamed
        self._end: ReceivedDelta | None = None  # its usage is still to come
        self.num_chars = len(read.text)
        self.is_over = read.is_over

    @property
    def last_id(self) -> str:
        """The id of the last event received; empty if there was none."""
        return self._events.last_id.decode()

    def reconnect(self) -> None:
        """Prepare for another connection: the last one may have ended within an event."""
        events, self._events = self._events, EventSplitter()
        self._events.last_id = events.last_id
        self._body = b""

    def feed(self, piece: bytes) -> None:
        """Raises: RequestFailedError."""
        if not self._request.is_streamed:
            self._body += piece
            return
        for event_id, data in self._events.feed_with_ids(piece):
            if data != b"[DONE]":
                self._read(data, event_id.decode())

    def finish(self) -> None:
        """The exchange is complete. Raises: RequestFailedError if the answer is not."""
        if self._body:
            self._read(self._body, "")
        if not self.is_over:
            raise RequestFailedError("incomplete")

    def _read(self, data: bytes, event_id: str) -> None:
        chunk = msgspec.json.decode(data, type=_HttpAnswer)
        if bytes(chunk.error):
            raise RequestFailedError("error_event", bytes(chunk.error).decode())
        for choice in chunk.choices:
            self._take(choice, bytes.fromhex(chunk.id.rpartition("-")[2]), event_id)
        usage = chunk.usage
        if self._end is not None and usage is not None:
            details = structs.astuple(usage.completion_tokens_details)
            counted = (usage.prompt_tokens, usage.completion_tokens, *details)
            self._write(structs.replace(self._end, usage=counted, event_id=event_id))

    def _take(self, choice: _HttpChoice, stream_id: bytes, event_id: str) -> None:
        message = choice.delta or choice.message or _HttpMessage(choice.text)
        text = message.content or ""
        events = tuple(_events_of(message, stream_id)) if self._request.chat is not None else ()
        if not (text or events) and choice.finish_reason is None:
            return
        piece = ReceivedDelta(
            self._request.index,
            time.monotonic(),
            self.num_chars,
            0,
            text,
            finish_reason=choice.finish_reason,
            event_id=event_id,
            events=events,
        )
        if choice.finish_reason is not None and self._request.has_usage:
            self._end = piece
        else:
            self._write(piece)

    def _write(self, piece: ReceivedDelta) -> None:
        self._journal.write(piece)
        self.num_chars += len(piece.text)
        self.is_over = piece.finish_reason is not None


def _events_of(message: _HttpMessage, stream_id: bytes) -> Iterator[AnswerEvent]:
    if message.reasoning_content:
        yield AnswerEvent(EventKind.REASONING, message.reasoning_content)
    if message.content:
        yield AnswerEvent(EventKind.CONTENT, message.content)
    for at, call in enumerate(message.tool_calls):
        index = at if call.index is None else call.index
        if call.id is not None:
            # the front draws the stream's id
            written = "" if call.id == call_id(stream_id, index) else call.id
            yield AnswerEvent(EventKind.CALL_BEGINS, call.function.name or "", index, written)
        if call.function.arguments:
            yield AnswerEvent(EventKind.CALL_ARGUMENTS, call.function.arguments, index)


def body_of(request: ChaosRequest) -> tuple[str, bytes]:
    """Path and body of a request, equivalent to the same request in Python."""
    given = structs.asdict(request.params)
    body: dict[str, Any] = {name: given[name] for name in _FIELDS}
    body["stream"] = request.is_streamed
    if request.chat is not None:
        body |= structs.asdict(request.chat)
    if request.prediction:
        body["prediction"] = {"type": "content", "content": request.prediction}
    if request.has_usage and request.is_streamed:
        body["stream_options"] = {"include_usage": True}
    if request.messages:
        body["messages"] = [structs.asdict(message) for message in request.messages]
        return "/v1/chat/completions", msgspec.json.encode(body)
    body["prompt"] = request.text if request.text is not None else request.token_ids
    return "/v1/completions", msgspec.json.encode(body)


def _is_unknown(error: RequestFailedError) -> bool:
    """Whether the stream is gone, found at once or while it was read."""
    return error.reason == "http_404" or (
        error.reason == "error_event" and '"code":"unknown_stream"' in str(error)
    )


async def _follow(
    http: HttpClient, request: ChaosRequest, read: ReadSoFar, journal: JournalWriter
) -> None:
    path, body = body_of(request)
    is_away = False  # nothing has arrived since the request was repeated
    reader = HttpReader(request, read, journal)
    gets = bool(request.index % 2)  # resume by GET, with a POST if the stream is gone
    is_unknown = False
    while True:
        num_chars = reader.num_chars
        reader.reconnect()
        last_id = reader.last_id
        last = {"Last-Event-ID": last_id} if last_id else {}
        try:
            if gets and last_id and not is_unknown:
                stream = f"/v1/streams/{last_id.partition('/')[0]}"
                await http.exchange("GET", stream, None, reader.feed, last)
            else:
                await http.exchange("POST", path, body, reader.feed, last)
            reader.finish()
            return
        except RequestFailedError as error:
            if reader.is_over:
                return  # the connection broke after the end of the stream
            is_unknown = gets and not is_unknown and _is_unknown(error)
            if not is_unknown and error.reason not in _NOT_THERE:
                journal.write(Failed(request.index, time.monotonic(), str(error)))
                return
            is_away = is_away and reader.num_chars == num_chars
            if not is_away:
                is_afresh = not reader.last_id
                now = time.monotonic()
                journal.write(AskedAgain(request.index, now, str(error), is_afresh=is_afresh))
            is_away = True
        if not is_unknown:
            await asyncio.sleep(_PAUSE_S)


async def _follow_all(config: ClientConfig, allowance: Allowance) -> None:
    places = asyncio.Semaphore(config.concurrency)
    before = read_before(config.earlier)
    journal = JournalWriter(config.journal)
    http = HttpClient(urlsplit(config.address), {"Accept": "text/event-stream"})

    async def one(request: ChaosRequest, read: ReadSoFar) -> None:
        async with places:
            await _follow(http, request, read, journal)

    asked = [
        (place, request, before.get(request.index, ReadSoFar()))
        for place, request in enumerate(config.requests)
    ]
    asked.sort(key=lambda each: each[1].index not in before)  # running streams first
    async with asyncio.TaskGroup() as tasks:
        for place, request, read in asked:
            if not read.is_over:
                await asyncio.to_thread(allowance.wait, place)
                tasks.create_task(one(request, read))
    http.close()


def main() -> int:
    """Read all streams to their ends; exit code 0."""
    asyncio.run(_follow_all(*read_config()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
