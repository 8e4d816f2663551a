"""From what streams say to what a client gets: at once, or as it comes.

Owns: one request's streams from submission to their ends, and every byte of its answer's body. Does
not know: sockets, HTTP's framing, what was asked for beyond `Ask`.

Rules:
- A stream's chunk is written in the very call in which its delta arrives: no task, no queue. What
  never changes in a chunk was encoded beforehand.
- Nothing is answered before the first text is there: until then a failure still has its status
  code. After it, a failure is the last event, and no [DONE] follows it.
- For a reader that does not keep up texts are held and go out as one chunk; one that never reads is
  dropped when it holds too much.
- When the client leaves, or one stream fails, all of the request's streams are abandoned.
"""

from __future__ import annotations

import logging
from typing import Protocol

from msgspec import Raw

from slipstream.batch import TokenLogprobs
from slipstream.errors import SlipstreamError
from slipstream.http.ask import Ask
from slipstream.http.connection import Exchange
from slipstream.http.errors import ApiError, error_of
from slipstream.http.logprobs import TextPlace
from slipstream.http.responses import NULL, Answer, Choice, Logprobs, Usage
from slipstream.http.token_texts import TokenTexts
from slipstream.http.wire import DONE_EVENT, event, json_response, json_text
from slipstream.outputs import join
from slipstream.stream_table import StreamState

_logger = logging.getLogger(__name__)
_HOLE = b"\0"  # where the text goes in an encoded chunk; JSON never has it raw
_CANDIDATE_BYTES = 64  # of a held log-probability, as a guess


class Engine(Protocol):
    """Runs streams."""

    def submit(self, state: StreamState) -> None:
        """Ask for the stream."""

    def abandon(self, state: StreamState) -> None:
        """End it: nobody reads it any more."""


def start(ask: Ask, exchange: Exchange, engine: Engine, texts: TokenTexts, held_bytes: int) -> None:
    """Run what is asked for; the exchange gets its answer. Nothing runs for who has left."""
    if not exchange.is_open:
        return
    running = _Running(ask, exchange, engine, texts)
    if ask.is_stream:
        choices = [_Streamed(running, index, held_bytes) for index in range(len(ask.states))]

        def flush() -> None:
            for choice in choices:
                choice.ring(choice.state)

        exchange.on_writable = flush
        for choice in choices:
            choice.state.bell = choice
    else:
        whole = _Whole(running)
        for state in ask.states:
            state.bell = whole
    for state in ask.states:
        engine.submit(state)


class _Running:
    """What both kinds of answers share: the streams, their failure, their usage."""

    def __init__(self, ask: Ask, exchange: Exchange, engine: Engine, texts: TokenTexts) -> None:
        self.ask = ask
        self.exchange = exchange
        self.texts = texts
        self.num_left = len(ask.states)
        self._engine = engine
        exchange.on_gone = self.abandon

    def abandon(self) -> None:
        """End every stream that is not over."""
        for state in self.ask.states:
            if not state.is_over:
                self._engine.abandon(state)

    def fail(self, failure: BaseException) -> None:
        """The request ends here, with an error."""
        error = error_of(failure, self.ask.param_names)
        if error.status >= 500:
            _logger.warning("%s: %s", self.ask.id, error)
        exchange = self.exchange
        if exchange.has_begun:
            exchange.write(event(error.body))
            exchange.finish()
        else:
            exchange.respond(error.response())
        self.abandon()

    def fault(self) -> None:
        """The same, where the fault is here: to be called while the exception is handled."""
        _logger.exception("%s: the answer failed", self.ask.id)
        if self.exchange.is_open:
            self.fail(RuntimeError())

    def usage(self) -> Usage:
        """Of all streams; they have ended."""
        states = self.ask.states
        num_prompt = sum(len(state.prompt_ids or b"") // 4 for state in states)
        num_output = sum(state.end.num_tokens for state in states if state.end is not None)
        return Usage(num_prompt, num_output, num_prompt + num_output)


class _Whole:
    """The bell of all streams of a request that is answered at once."""

    def __init__(self, running: _Running) -> None:
        self._running = running

    def ring(self, state: StreamState) -> None:
        """A stream has ended."""
        running = self._running
        if not (state.is_over and running.exchange.is_open):
            return
        try:
            _raise_failure(state)
            running.num_left -= 1
            if not running.num_left:
                self._respond()
        except (ApiError, SlipstreamError) as error:
            running.fail(error)
        except Exception:
            running.fault()

    def _respond(self) -> None:
        running, ask = self._running, self._running.ask
        choices: list[Choice] = []
        for index, state in enumerate(ask.states):
            assert state.end is not None
            whole = join(state.deltas, state.end)
            logprobs = None
            if ask.num_logprobs is not None:
                entries = whole.logprobs or []
                logprobs = ask.shape.logprobs(entries, ask.num_logprobs, running.texts, TextPlace())
            choices.append(ask.shape.whole(index, whole.text, logprobs, state.end.reason))
        answer = Answer(
            ask.id, ask.shape.whole_object, ask.created, ask.model, choices, running.usage()
        )
        running.exchange.respond(json_response(200, answer))


class _Streamed:
    """The bell of one stream, and one choice of a streamed answer."""

    def __init__(self, running: _Running, index: int, held_bytes: int) -> None:
        ask = running.ask
        self.state = ask.states[index]
        self._running = running
        self._exchange = running.exchange
        self._index = index
        self._most_held_bytes = held_bytes
        self._is_plain = ask.num_logprobs is None
        chunk = self._event(ask.shape.chunk(index, Raw(_HOLE), NULL, None))
        self._before, self._after = chunk.split(_HOLE)
        self._held: list[str] = []
        self._held_entries: list[TokenLogprobs] = []
        self._held_bytes = 0
        self._place = TextPlace()  # where the next token begins
        self._has_ended = False  # and the client has been told

    def ring(self, state: StreamState) -> None:
        """There are new deltas, or the end, or room for what is held."""
        exchange = self._exchange
        if self._has_ended or not exchange.is_open:
            return
        try:
            deltas = state.deltas
            is_paused = exchange.is_paused
            if self._is_plain and not (is_paused or state.is_over or self._held):
                if len(deltas) == 1:
                    text = deltas.popleft().text
                else:
                    text = "".join([delta.text for delta in deltas])
                    deltas.clear()
                if text:
                    if not exchange.has_begun:
                        self._begin()
                    exchange.write(self._before + json_text(text) + self._after)
                return
            self._hold()
            if not is_paused:
                self._flush()
            elif self._held_bytes > self._most_held_bytes:
                _logger.warning("%s: dropped, its reader does not read", self._running.ask.id)
                exchange.drop()
        except (ApiError, SlipstreamError) as error:
            self._running.fail(error)
        except Exception:
            self._running.fault()

    def _hold(self) -> None:
        """Take the deltas out of the columns they came in, which hold other streams' too."""
        deltas = self.state.deltas
        while deltas:
            delta = deltas.popleft()
            if delta.text:
                self._held.append(delta.text)
                self._held_bytes += len(delta.text)
            if not self._is_plain:
                entries = delta.logprobs or []
                self._held_entries += entries
                self._held_bytes += sum(map(len, entries)) * _CANDIDATE_BYTES

    def _flush(self) -> None:
        """Write what is held, and the end."""
        state = self.state
        is_over = state.is_over
        text = "".join(self._held)
        if not is_over or state.error is not None or state.end is None:
            if text or self._held_entries:
                self._write(text, None)
            if is_over:
                _raise_failure(state)
            return
        _raise_failure(state)
        self._has_ended = True
        running = self._running
        running.num_left -= 1
        self._write(text, state.end.reason)
        if not running.num_left:
            last = DONE_EVENT
            if running.ask.with_usage:
                last = self._event(None, running.usage()) + last
            self._exchange.write(last)
            self._exchange.finish()

    def _write(self, text: str, reason: str | None) -> None:
        ask = self._running.ask
        logprobs: Logprobs | None = None
        if ask.num_logprobs is not None:
            logprobs = ask.shape.logprobs(
                self._held_entries, ask.num_logprobs, self._running.texts, self._place
            )
        self._held = []
        self._held_entries = []
        self._held_bytes = 0
        if not self._exchange.has_begun:
            self._begin()
        self._exchange.write(self._event(ask.shape.chunk(self._index, text, logprobs, reason)))

    def _begin(self) -> None:
        """The head of the stream, and what precedes each choice's first text."""
        ask = self._running.ask
        self._exchange.begin_stream()
        firsts = [ask.shape.first(index) for index in range(len(ask.states))]
        events = b"".join([self._event(first) for first in firsts if first is not None])
        if events:
            self._exchange.write(events)

    def _event(self, choice: Choice | None, usage: Usage | None = None) -> bytes:
        ask = self._running.ask
        choices = [] if choice is None else [choice]
        answer = Answer(ask.id, ask.shape.chunk_object, ask.created, ask.model, choices)
        if ask.with_usage:
            answer = Answer(ask.id, ask.shape.chunk_object, ask.created, ask.model, choices, usage)
        return event(answer)


def _raise_failure(state: StreamState) -> None:
    """Of a stream that is over. Raises: its error, or ApiError, where it has no proper end."""
    if state.error is not None:
        raise state.error
    if state.end is None or state.end.reason not in ("stop", "length"):
        why = "the request was aborted before its answer was complete"
        raise ApiError(500, why, code="aborted")
