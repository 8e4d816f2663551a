"""Streamed answers: runs the streams of a request and writes their deltas as server-sent events.

Answers that are not streamed are written by `unary`; what both share is in `live_answer`.

- A chunk is written in the call in which its delta arrives: no task, no queue. The constant parts
  of a chunk are encoded beforehand.
- The answer does not begin before the first text, so that an earlier failure gets a status code. A
  later failure is the last event, with no [DONE] after it.
- Under backpressure, deltas stay in the stream's queue, where they are merged (`unread_deltas`),
  and leave in few chunks once there is room: a slow reader costs no more than its answer and delays
  no other. It is dropped above `held_bytes`, or after `stall_s` (`connection`).
"""

from __future__ import annotations

import logging
from dataclasses import replace

from msgspec import UNSET, Raw, structs

from slipstream.client.streams.stream_state import StreamState
from slipstream.delta_batch import TokenLogprobs
from slipstream.errors import SlipstreamError
from slipstream.http.config import Limits
from slipstream.http.errors import ApiError
from slipstream.http.exchange import Exchange
from slipstream.http.openai.broadcast import FanOut
from slipstream.http.openai.event_ids import Place
from slipstream.http.openai.live_answer import Running, StreamEngine, is_whole, raise_failure
from slipstream.http.openai.logprobs import TextPlace
from slipstream.http.openai.plan_answer import Ask, Said
from slipstream.http.openai.responses import NULL, Answer, Choice, Usage
from slipstream.http.openai.unary import Whole
from slipstream.http.openai.vocabulary import TokenTexts
from slipstream.http.time_slice import Share, at_once
from slipstream.http.wire import DONE_EVENT, event, json_part
from slipstream.outputs import Delta, begin_of, end_of, id_column_of
from slipstream_ipc.history.token_log import history_checksum

__all__ = ["StreamEngine", "start"]

_logger = logging.getLogger(__name__)
_HOLE = b"\0"  # the place of the text in an encoded chunk; never raw in JSON
_CANDIDATE_BYTES = 64  # of one candidate's log-probability as JSON, estimated
_PORTION_BYTES = 2**16  # of a backlog, per chunk


def start(
    ask: Ask,
    exchange: Exchange,
    engine: StreamEngine,
    texts: TokenTexts,
    limits: Limits,
    fan_out: FanOut,
    share: Share,
) -> None:
    """Submit the streams of a request and answer the exchange; nothing if its client has left.

    fan_out: shared by all answers of the engine. share: the time slices in which long answers are
    written.
    """
    if not exchange.is_open:
        return
    running = Running(ask, exchange, engine, texts, limits)
    try:
        _begin(running, fan_out, share)
        for state in ask.states:
            engine.submit(state)
    except Exception:
        running.fault()


def _begin(running: Running, fan_out: FanOut, share: Share) -> None:
    """Attach a wakeup to each stream of the request."""
    ask, exchange = running.ask, running.exchange
    if ask.is_stream:
        choices = [_Streamed(running, index, fan_out) for index in range(len(ask.states))]

        def flush() -> None:
            for choice in choices:
                choice.ring(choice.state)

        exchange.on_writable = flush
    else:
        Whole(running, fan_out, share)


class _Streamed:
    """The wakeup of one stream, and one choice of a streamed answer."""

    def __init__(self, running: Running, index: int, fan_out: FanOut) -> None:
        ask = running.ask
        place = running.place(index)
        self.state = ask.states[index]
        self._running = running
        self._exchange = running.exchange
        self._index = index
        self._is_first = True  # `_write` has not been called yet
        self._with_logprobs = ask.num_logprobs is not None
        self._has_ids = ask.shape.has_ids
        self._may_be_plain = not (self._has_ids or ask.with_usage_so_far)
        # its chunks contain nothing but a delta's text and log-probabilities
        self._is_plain = ask.echo is None and self._may_be_plain
        logprobs = Raw(_HOLE) if self._with_logprobs and self._is_plain else NULL
        chunk = event(self._answer(ask.shape.chunk(index, Raw(_HOLE), logprobs, None, Said([]))))
        before, *between, after = chunk.split(_HOLE)
        self._before = before + b'"'
        self._between = b'"' + between[0] if between else b""
        self._after = after if between else b'"' + after
        num_candidates = 0 if ask.num_logprobs is None else 1 + ask.num_logprobs
        self._token_bytes = 4 + _CANDIDATE_BYTES * num_candidates
        self._place = TextPlace(place.text_offset, place.pending)  # where the next token begins
        self._event_ids = running.event_ids
        self._num_chars, self._num_tokens = place.num_chars, place.num_tokens  # sent so far
        self._checksum = place.checksum  # of the tokens, if events have ids
        self._was_told_end = place.has_ended  # sent before the client resumed
        self._has_ended = False  # the end has been handled
        self._line = line = fan_out.join(self.state, self, running.exchange, running.fault)
        line.before, line.after = self._before, self._after + b"\r\n"
        line.num_framed = len(self._before) + len(self._after)
        self._set_way()

    def _set_way(self) -> None:
        """Choose how most chunks are written from now on: by the fan-out itself, by `tell`, or by
        `_write`.
        """
        is_bare = self._is_plain and not self._with_logprobs and self._event_ids is None
        self._line.is_bare = is_bare
        self._line.teller = self if self._is_plain and not is_bare else None

    def ring(self, state: StreamState) -> None:
        """There are new deltas, the stream has ended, or backpressure has ended."""
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
                self.tell(delta, json_part(delta.text))
            else:
                self._flush()
        except (ApiError, SlipstreamError) as error:
            self._running.fail(error)
        except Exception:
            self._running.fault()

    def tell(self, delta: Delta, part: bytes) -> None:
        """Write a delta that is not the stream's last. part: its text as JSON, without quotes."""
        text = delta.text
        if self._event_ids is not None:
            self._num_tokens += delta.num_tokens
            self._checksum = history_checksum(id_column_of(delta), self._checksum)
        if not self._with_logprobs:
            if text:
                self._say(text, part)
            return
        running = self._running
        found = None
        if text:
            found = running.ask.shape.logprobs_json(delta, running.texts, self._place)
        if found is not None:
            self._say(text, part, self._between + found)
        elif text or delta.logprobs:
            self._write(text, delta.logprobs or [], [], None)

    def _say(self, text: str, part: bytes, middle: bytes = b"") -> None:
        """Write a chunk from the encoded constant parts. middle: JSON between text and end."""
        exchange, after = self._exchange, self._after
        if not exchange.has_begun:
            self._begin()
        mark = b"" if self._event_ids is None else self._move(text)
        if exchange.is_ready:  # as `Exchange.write`, with a single format
            size = self._line.num_framed + len(mark) + len(part) + len(middle)
            data = (size, mark, self._before, part, middle, after)
            exchange.send(b"%x\r\n%b%b%b%b%b\r\n" % data)
            exchange.counters.num_chunks += 1
        else:
            exchange.write(b"%b%b%b%b%b" % (mark, self._before, part, middle, after))

    def _held_bytes(self) -> int:
        deltas = self.state.deltas
        if not deltas:
            return 0
        begin, end = begin_of(deltas[0]), end_of(deltas[-1])
        num_tokens = end.num_tokens - begin.num_tokens
        return end.num_chars - begin.num_chars + num_tokens * self._token_bytes

    def _flush(self) -> None:
        """Write the queued deltas while there is no backpressure, then the end."""
        state = self.state
        while True:
            text, entries, ids = self._take()
            if state.is_over and not state.deltas:
                break
            if text or entries or ids:
                self._write(text, entries, ids, None)
            if self._exchange.is_paused or not state.deltas:
                return
        if (text or entries or ids) and not is_whole(state):
            self._write(text, entries, ids, None)
        raise_failure(state)
        assert state.end is not None
        self._has_ended = True
        running = self._running
        running.num_left -= 1
        if not self._was_told_end:
            self._write(text, entries, ids, state.end.reason)
        if not running.num_left:
            self._finish()

    def _take(self) -> tuple[str, list[TokenLogprobs], list[int]]:
        """Take text, log-probabilities and token ids of the oldest queued deltas, up to
        `_PORTION_BYTES`.
        """
        deltas = self.state.deltas
        texts: list[str] = []
        entries: list[TokenLogprobs] = []
        ids: list[int] = []
        num_bytes = 0
        while deltas and num_bytes < _PORTION_BYTES:
            delta = deltas.popleft()
            texts.append(delta.text)
            self._num_tokens += delta.num_tokens
            if self._event_ids is not None:
                self._checksum = history_checksum(id_column_of(delta), self._checksum)
            num_bytes += len(delta.text)
            if self._with_logprobs:
                more = delta.logprobs or []
                entries += more
                num_bytes += len(more) * self._token_bytes
            if self._has_ids:
                ids += delta.token_ids
        return "".join(texts), entries, ids

    def _write(
        self, text: str, entries: list[TokenLogprobs], ids: list[int], reason: str | None
    ) -> None:
        if self._is_plain and not self._with_logprobs and reason is None:
            self._say(text, json_part(text))
            return
        ask = self._running.ask
        parts = self._running.shown_in_parts(
            self._index, self._place, text, [entries], reason, is_first=self._is_first
        )
        text, logprobs, reason = at_once(parts)
        is_first, self._is_first = self._is_first, False
        self._is_plain = self._may_be_plain and (ask.echo is None or not self._with_logprobs)
        self._set_way()
        if not self._exchange.has_begun:
            self._begin()
        end = self.state.end if reason is not None else None
        said = Said(ids, None if end is None else end.stop_reason)
        if self._has_ids:
            said = self._with_ids(said, is_first)
        choice = ask.shape.chunk(self._index, text, logprobs, reason, said)
        mark = self._move(text, has_ended=reason is not None)
        usage = self._running.usage_so_far(self._index, self._num_tokens)
        self._exchange.write(mark + event(self._answer(choice, usage)))

    def _with_ids(self, said: Said, is_first: bool) -> Said:
        running = self._running
        ids = running.shown_ids(self._index, said.token_ids, is_first=is_first)
        if is_first and running.ask.shape.has_many_prompts:
            return replace(said, token_ids=ids, prompt_ids=running.prompt_ids(self._index))
        return replace(said, token_ids=ids)

    def _finish(self) -> None:
        """Write usage and [DONE], after the end of the last stream."""
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
        """Write the head of the answer, and the chunks that precede each choice's first text."""
        ask = self._running.ask
        self._exchange.begin_stream()
        events: list[bytes] = []
        usage = self._running.usage_so_far(self._index, 0)  # shapes with a first chunk: one prompt
        for index in range(len(ask.states)):
            first = ask.shape.first(index)
            if first is not None and not self._running.place(index).has_begun:
                if self._event_ids is not None:
                    self._event_ids.move(index, Place())
                told = self._answer(first, usage)
                if self._has_ids and not events:
                    told = structs.replace(told, prompt_token_ids=self._running.prompt_ids())
                events += [self._mark(), event(told)]
        if events:
            self._exchange.write(b"".join(events))

    def _move(self, text: str, *, has_ended: bool = False) -> bytes:
        """Advance the client's cursor past `text`; returns the `id:` line of the event."""
        self._num_chars += len(text)
        if self._event_ids is None:
            return b""
        place, here = self._place, (self._num_chars, self._num_tokens, self._checksum)
        if not has_ended:
            return self._event_ids.move_on(self._index, *here, place.offset, place.pending)
        self._event_ids.move(self._index, Place(*here, place.offset, place.pending, has_ended))
        return self._event_ids.line()

    def _mark(self) -> bytes:
        """The `id:` line for the client's current cursor; b"" without event ids."""
        return b"" if self._event_ids is None else self._event_ids.line()

    def _answer(self, choice: Choice | None, usage: Usage | None = None) -> Answer:
        running, ask = self._running, self._running.ask
        choices: list[Choice | Raw] = [] if choice is None else [choice]
        shown = usage if ask.with_usage else UNSET
        return Answer(running.id, ask.shape.chunk_object, ask.created, ask.model, choices, shown)
