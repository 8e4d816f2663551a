"""The requests over HTTP: a client in a process of its own, which is not killed itself.

`python -m slipstream.bench.chaos.http_process`, with a config as `client_process` has. Here a
stream whose connection breaks is asked for again with the id of the last event that came, and goes
on behind it. Where none had come it is asked for from its beginning, and where nobody is left who
knows it: front, worker and core have died together.

Rules:
- Asked again where the front was not there, went away or was not ready yet, and only there; any
  other answer than a whole one is a failure.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, structs

from slipstream.bench.chaos.client_process import ClientConfig, read_config
from slipstream.bench.chaos.journal import AskedAgain, Failed, JournalWriter, Piece
from slipstream.bench.chaos.workload import ChaosRequest
from slipstream.bench.failures import RequestFailedError
from slipstream.bench.http_stream import HttpClient
from slipstream.bench.sse import EventSplitter

_NOT_THERE = ("connect", "disconnected", "http_503")
_PAUSE_S = 0.1  # before it asks again
_OURS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids")
_OURS_TOO = (
    *("include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens"),
    *("stream_interval", "structured_outputs"),
)


class _Message(Struct):
    content: str | None = None


class _Choice(Struct):
    text: str | None = None
    delta: _Message | None = None
    finish_reason: str | None = None


class _Event(Struct):
    choices: list[_Choice] = []  # msgspec gives each event its own
    error: msgspec.Raw = msgspec.Raw()


class _Reading:
    """One answer, as it comes."""

    def __init__(self, index: int, journal: JournalWriter) -> None:
        self._index = index
        self._journal = journal
        self._events = EventSplitter()
        self.num_chars = 0
        self.is_over = False

    @property
    def last_id(self) -> str:
        """Of the last event that came; empty where none has."""
        return self._events.last_id.decode()

    def begin_anew(self) -> None:
        """Over another connection: half an event may have come over the last one."""
        events, self._events = self._events, EventSplitter()
        self._events.last_id = events.last_id

    def take_bytes(self, piece: bytes) -> None:
        """Raises: RequestFailedError."""
        for data in self._events.feed(piece):
            if data == b"[DONE]":
                continue
            event = msgspec.json.decode(data, type=_Event)
            if bytes(event.error):
                raise RequestFailedError("error_event", bytes(event.error).decode())
            for choice in event.choices:
                self._take(choice)

    def _take(self, choice: _Choice) -> None:
        text = choice.text or (choice.delta.content if choice.delta is not None else None) or ""
        if not text and choice.finish_reason is None:
            return
        self._journal.write(
            Piece(
                self._index,
                time.monotonic(),
                self.num_chars,
                0,
                text,
                finish_reason=choice.finish_reason,
            )
        )
        self.num_chars += len(text)
        self.is_over = choice.finish_reason is not None


def body_of(request: ChaosRequest) -> tuple[str, bytes]:
    """Path and body of a request, which says the same as it would in Python."""
    given = structs.asdict(request.params)
    body: dict[str, Any] = {name: given[name] for name in (*_OURS, *_OURS_TOO)}
    body["stream"] = True
    if request.messages:
        body["messages"] = [structs.asdict(message) for message in request.messages]
        return "/v1/chat/completions", msgspec.json.encode(body)
    body["prompt"] = request.text if request.text is not None else request.token_ids
    return "/v1/completions", msgspec.json.encode(body)


async def _follow(http: HttpClient, request: ChaosRequest, journal: JournalWriter) -> None:
    path, body = body_of(request)
    is_away = False  # nothing has come since it was asked for again
    reading = _Reading(request.index, journal)
    while True:
        num_chars = reading.num_chars
        reading.begin_anew()
        last = {"Last-Event-ID": reading.last_id} if reading.last_id else {}
        try:
            await http.exchange("POST", path, body, reading.take_bytes, last)
            if not reading.is_over:
                raise RequestFailedError("incomplete")
            return
        except RequestFailedError as error:
            if error.reason == "http_404" and reading.last_id:
                reading, is_away = _Reading(request.index, journal), False
            elif error.reason not in _NOT_THERE:
                journal.write(Failed(request.index, time.monotonic(), str(error)))
                return
            if reading.is_over:
                return  # the connection broke behind the last word
            is_away = is_away and reading.num_chars == num_chars
            if not is_away:
                is_afresh = not reading.last_id
                now = time.monotonic()
                journal.write(AskedAgain(request.index, now, str(error), is_afresh=is_afresh))
            is_away = True
        await asyncio.sleep(_PAUSE_S)


async def _follow_all(config: ClientConfig) -> None:
    places = asyncio.Semaphore(config.concurrency)
    journal = JournalWriter(config.journal)
    http = HttpClient(urlsplit(config.address), {"Accept": "text/event-stream"})

    async def one(request: ChaosRequest) -> None:
        async with places:
            await _follow(http, request, journal)

    await asyncio.gather(*(one(request) for request in config.requests))
    http.close()


def main() -> int:
    """Read to the ends of all; exit code 0."""
    asyncio.run(_follow_all(read_config()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
