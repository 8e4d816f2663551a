"""From what streams say to what a client gets: at once, or as it comes.

Owns: one request's streams from submission to their ends, and every byte of its answer's body. Does
not know: sockets, HTTP's framing, what was asked for beyond `Ask`.

Rules:
- A stream's chunk is written in the very call in which its delta arrives: no task, no queue. What
  never changes in a chunk was encoded beforehand.
- Nothing is answered before the first text is there: until then a failure still has its status
  code. After it, a failure is the last event, and no [DONE] follows it.
- For a reader that does not keep up deltas are left where they are, where they are merged
  (`unread`), and go out in few chunks when there is room; so it costs what its answer costs, and
  holds up nobody. It is dropped when that is too much, or for too long (`connection`).
- When the client leaves, or one stream fails, all of the request's streams are abandoned. Those of
  a client that is told where it is (`event_ids`) run on for a while, unread: it may come back.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from msgspec import UNSET, Raw

from slipstream.batch import TokenLogprobs
from slipstream.errors import SlipstreamError
from slipstream.http.ask import Ask
from slipstream.http.config import Limits
from slipstream.http.connection import Exchange
from slipstream.http.echo import joined, prompt_logprobs
from slipstream.http.errors import ApiError, error_of
from slipstream.http.event_ids import EventIds, Place, Told
from slipstream.http.logprobs import TextPlace, completion_logprobs
from slipstream.http.responses import NULL, Answer, Choice, Logprobs, Usage
from slipstream.http.token_texts import TokenTexts
from slipstream.http.wire import DONE_EVENT, event, json_response, json_text
from slipstream.outputs import begin_of, end_of, join
from slipstream.prompt_pieces import prompt_logprobs_of
from slipstream.stream_table import StreamState
from slipstream_ipc.columns import u32

_logger = logging.getLogger(__name__)
_HOLE = b"\0"  # where the text goes in an encoded chunk; JSON never has it raw
_CANDIDATE_BYTES = 64  # of a log-probability on its way out, as a guess
_PORTION_BYTES = 2**16  # of a backlog, at once


class Engine(Protocol):
    """Runs streams."""

    def submit(self, state: StreamState) -> None:
        """Ask for the stream."""

    def abandon(self, state: StreamState) -> None:
        """End it: nobody reads it any more."""


def start(ask: Ask, exchange: Exchange, engine: Engine, texts: TokenTexts, limits: Limits) -> None:
    """Run what is asked for; the exchange gets its answer. Nothing runs for who has left."""
    if not exchange.is_open:
        return
    running = _Running(ask, exchange, engine, texts, limits)
    if ask.is_stream:
        choices = [_Streamed(running, index) for index in range(len(ask.states))]

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

    def __init__(
        self, ask: Ask, exchange: Exchange, engine: Engine, texts: TokenTexts, limits: Limits
    ) -> None:
        self.ask = ask
        self.id = str(ask.id)
        self.exchange = exchange
        self.texts = texts
        self.limits = limits
        self.num_left = len(ask.states)
        self.event_ids: EventIds | None = None
        if ask.is_resumable:
            places = tuple([self.place(index) for index in range(len(ask.states))])
            self.event_ids = EventIds(
                Told(
                    *(ask.id, ask.created, ask.num_logprobs, ask.with_usage, places),
                    is_usage_told=ask.is_usage_told,
                )
            )
        self._engine = engine
        exchange.on_gone = self._leave

    def place(self, index: int) -> Place:
        """How much of a stream the client had beforehand."""
        if self.ask.places:
            return self.ask.places[index]
        return Place(has_begun=self.ask.shape.first(index) is None)

    def _leave(self) -> None:
        """The client has gone."""
        if self.event_ids is None:
            self.abandon()
        else:
            asyncio.get_running_loop().call_later(self.limits.resume_s, self.abandon)

    def abandon(self) -> None:
        """End every stream that is not over."""
        for state in self.ask.states:
            if not state.is_over:
                self._engine.abandon(state)

    def fail(self, failure: BaseException) -> None:
        """The request ends here, with an error."""
        error = error_of(failure, self.ask.param_names)
        if error.status >= 500:
            _logger.warning("%s: %s", self.ask.log_name, error)
        exchange = self.exchange
        if exchange.has_begun:
            exchange.write(event(error.body))
            exchange.finish()
        else:
            exchange.respond(error.response())
        self.abandon()

    def fault(self) -> None:
        """The same, where the fault is here: to be called while the exception is handled."""
        _logger.exception("%s: the answer failed", self.ask.log_name)
        if self.exchange.is_open:
            self.fail(RuntimeError())

    def shown(
        self,
        index: int,
        place: TextPlace,
        text: str,
        entries: list[TokenLogprobs],
        reason: str | None,
        *,
        is_first: bool,
    ) -> tuple[str, Logprobs | None, str | None]:
        """A choice's text, log-probabilities and finish reason; where it `is_first` said anything
        of that choice, behind the prompt if that is asked for. The text begins at `place`.
        """
        ask, echo = self.ask, self.ask.echo
        if echo is not None and echo.is_all:
            text, entries, reason = "", [], reason and "length"
        if echo is None or not is_first:
            logprobs = None
            if ask.num_logprobs is not None:
                logprobs = ask.shape.logprobs(entries, ask.num_logprobs, self.texts, place)
            return text, logprobs, reason
        state = ask.states[index]
        prompt_ids = u32(state.prompt_ids or b"").tolist()
        prompt = echo.text(index, prompt_ids, self.texts)
        if ask.num_logprobs is None:
            return prompt + text, None, reason
        found = prompt_logprobs_of(state.prompt_logprobs)
        if found is None:
            raise ApiError(500, "the prompt's log-probabilities did not come", code="engine_error")
        place.offset = len(prompt)
        head = prompt_logprobs(prompt_ids, found, ask.num_logprobs, self.texts, prompt)
        tail = completion_logprobs(entries, ask.num_logprobs, self.texts, place)
        return prompt + text, joined(head, tail), reason

    def usage(self) -> Usage:
        """Of all streams; they have ended."""
        states = self.ask.states
        once = states[:: self.ask.id.num_answers]  # of a prompt's answers, the first
        num_prompt = sum(len(state.prompt_ids or b"") // 4 for state in once)
        num_output = sum(state.end.num_tokens for state in states if state.end is not None)
        if self.ask.echo is not None and self.ask.echo.is_all:
            num_output = 0
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
            entries = whole.logprobs or []
            text, logprobs, reason = running.shown(
                index, TextPlace(), whole.text, entries, state.end.reason, is_first=True
            )
            choices.append(ask.shape.whole(index, text, logprobs, reason or ""))
        answer = Answer(
            running.id, ask.shape.whole_object, ask.created, ask.model, choices, running.usage()
        )
        running.exchange.respond(json_response(200, answer))


class _Streamed:
    """The bell of one stream, and one choice of a streamed answer."""

    def __init__(self, running: _Running, index: int) -> None:
        ask = running.ask
        place = running.place(index)
        self.state = ask.states[index]
        self._running = running
        self._exchange = running.exchange
        self._index = index
        self._is_first = True  # nothing was said yet
        self._with_logprobs = ask.num_logprobs is not None
        self._is_plain = not self._with_logprobs and ask.echo is None  # its chunks are texts
        chunk = event(self._answer(ask.shape.chunk(index, Raw(_HOLE), NULL, None)))
        self._before, self._after = chunk.split(_HOLE)
        num_candidates = 0 if ask.num_logprobs is None else 1 + ask.num_logprobs
        self._token_bytes = 4 + _CANDIDATE_BYTES * num_candidates
        self._place = TextPlace(place.text_offset, place.pending)  # where the next token begins
        self._event_ids = running.event_ids
        self._num_chars, self._num_tokens = place.num_chars, place.num_tokens  # told
        self._was_told_end = place.has_ended  # before it came back
        self._has_ended = False  # and the client has been told

    def ring(self, state: StreamState) -> None:
        """There are new deltas, or the end, or room for what waits."""
        exchange = self._exchange
        if self._has_ended or not exchange.is_open:
            return
        try:
            if exchange.is_paused:
                if self._held_bytes() > self._running.limits.held_bytes:
                    name = self._running.ask.log_name
                    _logger.warning("%s: dropped, its reader does not read", name)
                    exchange.drop()
            elif self._is_plain and not state.is_over and len(state.deltas) == 1:
                delta = state.deltas.popleft()
                text = delta.text
                if self._event_ids is not None:
                    self._num_tokens += delta.num_tokens
                if text:
                    if not exchange.has_begun:
                        self._begin()
                    before = self._before
                    if self._event_ids is not None:
                        before = self._move(text) + before
                    exchange.write(before + json_text(text) + self._after)
            else:
                self._flush()
        except (ApiError, SlipstreamError) as error:
            self._running.fail(error)
        except Exception:
            self._running.fault()

    def _held_bytes(self) -> int:
        deltas = self.state.deltas
        if not deltas:
            return 0
        begin, end = begin_of(deltas[0]), end_of(deltas[-1])
        num_tokens = end.num_tokens - begin.num_tokens
        return end.num_chars - begin.num_chars + num_tokens * self._token_bytes

    def _flush(self) -> None:
        """Write what waits, as far as there is room, and the end."""
        state = self.state
        while True:
            text, entries = self._take()
            if state.is_over and not state.deltas:
                break
            if text or entries:
                self._write(text, entries, None)
            if self._exchange.is_paused or not state.deltas:
                return
        if (text or entries) and not _is_whole(state):
            self._write(text, entries, None)
        _raise_failure(state)
        assert state.end is not None
        self._has_ended = True
        running = self._running
        running.num_left -= 1
        if not self._was_told_end:
            self._write(text, entries, state.end.reason)
        if not running.num_left:
            self._finish()

    def _take(self) -> tuple[str, list[TokenLogprobs]]:
        """The text and the log-probabilities of what waits longest."""
        deltas = self.state.deltas
        texts: list[str] = []
        entries: list[TokenLogprobs] = []
        num_bytes = 0
        while deltas and num_bytes < _PORTION_BYTES:
            delta = deltas.popleft()
            texts.append(delta.text)
            self._num_tokens += delta.num_tokens
            num_bytes += len(delta.text)
            if self._with_logprobs:
                more = delta.logprobs or []
                entries += more
                num_bytes += len(more) * self._token_bytes
        return "".join(texts), entries

    def _write(self, text: str, entries: list[TokenLogprobs], reason: str | None) -> None:
        ask = self._running.ask
        text, logprobs, reason = self._running.shown(
            self._index, self._place, text, entries, reason, is_first=self._is_first
        )
        self._is_first = False
        self._is_plain = not self._with_logprobs
        if not self._exchange.has_begun:
            self._begin()
        choice = ask.shape.chunk(self._index, text, logprobs, reason)
        mark = self._move(text, has_ended=reason is not None)
        self._exchange.write(mark + event(self._answer(choice)))

    def _finish(self) -> None:
        """What follows the end of the last stream."""
        running, exchange = self._running, self._exchange
        if not exchange.has_begun:
            self._begin()
        last = b""
        if running.ask.with_usage and not running.ask.is_usage_told:
            if self._event_ids is not None:
                self._event_ids.tell_usage()
            last = self._mark() + event(self._answer(None, running.usage()))
        exchange.write(last + self._mark() + DONE_EVENT)
        exchange.finish()

    def _begin(self) -> None:
        """The head of the stream, and what precedes each choice's first text."""
        ask = self._running.ask
        self._exchange.begin_stream()
        events: list[bytes] = []
        for index in range(len(ask.states)):
            first = ask.shape.first(index)
            if first is not None and not self._running.place(index).has_begun:
                if self._event_ids is not None:
                    self._event_ids.move(index, Place())
                events += [self._mark(), event(self._answer(first))]
        if events:
            self._exchange.write(b"".join(events))

    def _move(self, text: str, *, has_ended: bool = False) -> bytes:
        """The stream has been told so much further; where the client is then, as a line."""
        self._num_chars += len(text)
        if self._event_ids is None:
            return b""
        place = self._place
        told = Place(self._num_chars, self._num_tokens, place.offset, place.pending, has_ended)
        self._event_ids.move(self._index, told)
        return self._event_ids.line()

    def _mark(self) -> bytes:
        """Where the client is now, as a line."""
        return b"" if self._event_ids is None else self._event_ids.line()

    def _answer(self, choice: Choice | None, usage: Usage | None = None) -> Answer:
        running, ask = self._running, self._running.ask
        choices = [] if choice is None else [choice]
        shown = usage if ask.with_usage else UNSET
        return Answer(running.id, ask.shape.chunk_object, ask.created, ask.model, choices, shown)


def _is_whole(state: StreamState) -> bool:
    """Of a stream that is over: whether that is its proper end."""
    return state.error is None and state.end is not None and state.end.reason in ("stop", "length")


def _raise_failure(state: StreamState) -> None:
    """Of a stream that is over. Raises: its error, or ApiError, where it has no proper end."""
    if state.error is not None:
        raise state.error
    if not _is_whole(state):
        why = "the request was aborted before its answer was complete"
        raise ApiError(500, why, code="aborted")
