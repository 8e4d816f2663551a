"""Reads the answers of an OpenAI-compatible server for timings and token counts.

- Content is text, of an answer or of its reasoning; a chunk without any (a role, a usage, half a
  character) does not count as a chunk between tokens. The answer ends with its last chunk that has
  choices.
- An answer is complete if it has a finish reason or [DONE]; otherwise it failed as `incomplete`.
- Tokens are counted by the server's usage. Without usage: the requested length, if the answer
  reached that limit or was asked to ignore the end of sequence; otherwise each chunk counts as one
  token.
"""

from __future__ import annotations

import time

import msgspec
from msgspec import Raw, Struct

from slipstream_bench.common.load.event_splitter import EventSplitter
from slipstream_bench.common.load.failures import RequestFailedError
from slipstream_bench.common.measures import RequestTimeline

_FAULTY_ENDS = ("abort", "error")


class _Message(Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(Struct, gc=False):
    text: str | None = None
    delta: _Message | None = None
    finish_reason: str | None = None


class _Usage(Struct, gc=False):
    completion_tokens: int | None = None
    prompt_tokens: int | None = None


class _Event(Struct, gc=False):
    choices: list[_Choice] = []  # msgspec copies the default
    usage: _Usage | None = None
    error: Raw = Raw()
    message: str | None = None


_decoder = msgspec.json.Decoder(_Event)


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
                said = event.message or bytes(event.error).decode(errors="replace")
                raise RequestFailedError("error_event", said)
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
