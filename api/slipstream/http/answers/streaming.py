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
from collections.abc import Sequence
from functools import partial

from msgspec import UNSET, Raw, structs

from slipstream.client.streams.stream_state import StreamState
from slipstream.delta_batch import TokenLogprobs
from slipstream.errors import SlipstreamError
from slipstream.http.answers.answer_plan import AnswerPlan, ChoiceContent
from slipstream.http.answers.event_ids import StreamCursor
from slipstream.http.answers.live_answer import (
    AnswerContext,
    LiveAnswer,
    is_whole,
    raise_failure,
)
from slipstream.http.answers.unary import UnaryAnswer
from slipstream.http.errors import ApiError
from slipstream.http.exchange import Exchange
from slipstream.http.openai.logprob_bodies import TextPosition
from slipstream.http.openai.response_bodies import NULL, Answer, Choice, Usage
from slipstream.http.response_encoding import DONE_EVENT, event, json_part
from slipstream.http.time_slice import run_all
from slipstream.outputs import Delta, begin_of, end_of, id_column_of
from slipstream_ipc.history.token_log import history_checksum
from slipstream_ipc.telemetry.logs import of_requests

_logger = logging.getLogger(__name__)
_HOLE = b"\0"  # where the text goes in an encoded chunk; never raw in JSON
_CANDIDATE_BYTES = 64  # of one candidate's log-probability as JSON, estimated
_PORTION_BYTES = 2**16  # of a backlog, per chunk


def start_answer(plan: AnswerPlan, exchange: Exchange, context: AnswerContext) -> None:
    """Submit the streams of a request and answer the exchange; nothing if its client has left."""
    if not exchange.is_open:
        return
    live = LiveAnswer(plan, exchange, context)
    try:
        if plan.is_stream:
            choices = [StreamedChoice(live, index) for index in range(len(plan.states))]
            exchange.on_writable = partial(_flush, choices)
        else:
            UnaryAnswer(live)
        for state in plan.states:
            context.engine.submit(state)
    except Exception:
        live.handle_exception()


def _flush(choices: Sequence[StreamedChoice]) -> None:
    for choice in choices:
        choice.ring(choice.state)


class StreamedChoice:
    """The wakeup of one stream, and one choice of a streamed answer."""

    def __init__(self, live: LiveAnswer, index: int) -> None:
        plan = live.plan
        cursor = live.cursor(index)
        self.state = plan.states[index]
        self._live = live
        self._exchange = live.exchange
        self._index = index
        self._is_first = True  # `_write` has not been called yet
        self._with_logprobs = plan.num_logprobs is not None
        self._has_ids = plan.shape.has_ids
        self._may_be_plain = not (self._has_ids or plan.with_usage_so_far)
        # its chunks contain nothing but a delta's text and log-probabilities
        self._is_plain = plan.echo is None and self._may_be_plain
        logprobs = Raw(_HOLE) if self._with_logprobs and self._is_plain else NULL
        chunk = event(
            self._body(plan.shape.chunk(ChoiceContent(index, Raw(_HOLE), logprobs, None)))
        )
        before, *between, after = chunk.split(_HOLE)
        self._before = before + b'"'
        self._between = b'"' + between[0] if between else b""
        self._after = after if between else b'"' + after
        num_candidates = 0 if plan.num_logprobs is None else 1 + plan.num_logprobs
        self._token_bytes = 4 + _CANDIDATE_BYTES * num_candidates
        # where the next token's text begins
        self._position = TextPosition(cursor.text_offset, cursor.pending)
        self._event_ids = live.event_ids
        self._num_chars, self._num_tokens = cursor.num_chars, cursor.num_tokens  # sent so far
        self._checksum = cursor.checksum  # of the tokens, if events have ids
        self._was_end_sent = cursor.has_ended  # sent before the client resumed
        self._has_ended = False  # the end has been handled
        self._stream = stream = live.context.broadcast.join(
            self.state, self, live.exchange, live.handle_exception
        )
        stream.before, stream.after = self._before, self._after + b"\r\n"
        stream.num_framed = len(self._before) + len(self._after)
        self._choose_writer()

    def _choose_writer(self) -> None:
        """Choose what writes most chunks from now on: the broadcast itself, `write_delta`, or
        `_write`.
        """
        is_text_only = self._is_plain and not self._with_logprobs and self._event_ids is None
        self._stream.is_text_only = is_text_only
        self._stream.chunk_writer = self if self._is_plain and not is_text_only else None

    def ring(self, state: StreamState) -> None:
        """There are new deltas, the stream has ended, or backpressure has ended."""
        exchange = self._exchange
        if self._has_ended or not exchange.is_open:
            return
        try:
            if exchange.is_paused:
                if self._held_bytes() > self._live.context.limits.held_bytes:
                    _logger.warning(
                        "dropped: its client does not read the stream",
                        extra=of_requests(exchange.request.id),
                    )
                    exchange.drop()
            elif self._is_plain and not state.is_over and len(state.deltas) == 1:
                delta = state.deltas.popleft()
                self.write_delta(delta, json_part(delta.text))
            else:
                self._flush()
        except (ApiError, SlipstreamError) as error:
            self._live.fail(error)
        except Exception:
            self._live.handle_exception()

    def write_delta(self, delta: Delta, part: bytes) -> None:
        """Write a delta that is not the stream's last. part: its text as JSON, without quotes."""
        text = delta.text
        if self._event_ids is not None:
            self._num_tokens += delta.num_tokens
            self._checksum = history_checksum(id_column_of(delta), self._checksum)
        if not self._with_logprobs:
            if text:
                self._write_plain(text, part)
            return
        live = self._live
        found = None
        if text:
            found = live.plan.shape.logprobs_json(delta, live.texts, self._position)
        if found is not None:
            self._write_plain(text, part, self._between + found)
        elif text or delta.logprobs:
            self._write(text, delta.logprobs or [], [], None)

    def _write_plain(self, text: str, part: bytes, middle: bytes = b"") -> None:
        """Write a chunk from the encoded constant parts. middle: JSON between text and end."""
        exchange, after = self._exchange, self._after
        if not exchange.has_begun:
            self._begin()
        id_line = b"" if self._event_ids is None else self._advance(text)
        if exchange.is_ready:  # as `Exchange.write`, with a single format
            size = self._stream.num_framed + len(id_line) + len(part) + len(middle)
            data = (size, id_line, self._before, part, middle, after)
            exchange.send(b"%x\r\n%b%b%b%b%b\r\n" % data)
            exchange.counters.num_chunks += 1
        else:
            exchange.write(b"%b%b%b%b%b" % (id_line, self._before, part, middle, after))

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
            text, entries, ids = self._take_deltas()
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
        live = self._live
        live.num_unwritten -= 1
        if not self._was_end_sent:
            self._write(text, entries, ids, state.end.reason)
        if not live.num_unwritten:
            self._finish()

    def _take_deltas(self) -> tuple[str, list[TokenLogprobs], list[int]]:
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
            self._write_plain(text, json_part(text))
            return
        plan = self._live.plan
        parts = self._live.choice_parts(
            self._index, self._position, text, [entries], reason, is_first=self._is_first
        )
        text, logprobs, reason = run_all(parts)
        is_first, self._is_first = self._is_first, False
        self._is_plain = self._may_be_plain and (plan.echo is None or not self._with_logprobs)
        self._choose_writer()
        if not self._exchange.has_begun:
            self._begin()
        end = self.state.end if reason is not None else None
        stop_reason = None if end is None else end.stop_reason
        content = ChoiceContent(self._index, text, logprobs, reason, ids, stop_reason)
        if self._has_ids:
            content.token_ids = self._live.with_prompt_ids(self._index, ids, is_first=is_first)
            if is_first and plan.shape.has_many_prompts:
                content.prompt_ids = self._live.prompt_ids(self._index)
        choice = plan.shape.chunk(content)
        id_line = self._advance(text, has_ended=reason is not None)
        usage = self._live.usage_so_far(self._index, self._num_tokens)
        self._exchange.write(id_line + event(self._body(choice, usage)))

    def _finish(self) -> None:
        """Write usage and [DONE], after the end of the last stream."""
        live, exchange = self._live, self._exchange
        if not exchange.has_begun:
            self._begin()
        last = b""
        if live.plan.with_usage and not live.plan.is_usage_sent:
            if self._event_ids is not None:
                self._event_ids.set_usage_sent()
            last = self._id_line() + event(self._body(None, live.usage()))
        exchange.write(last + self._id_line() + DONE_EVENT)
        exchange.finish()

    def _begin(self) -> None:
        """Write the head of the answer, and the chunks that precede each choice's first text."""
        plan = self._live.plan
        self._exchange.begin_stream()
        events: list[bytes] = []
        usage = self._live.usage_so_far(self._index, 0)  # shapes with a first chunk: one prompt
        for index in range(len(plan.states)):
            first = plan.shape.first_chunk(index)
            if first is not None and not self._live.cursor(index).has_begun:
                if self._event_ids is not None:
                    self._event_ids.set_cursor(index, StreamCursor())
                body = self._body(first, usage)
                if self._has_ids and not events:
                    body = structs.replace(body, prompt_token_ids=self._live.prompt_ids())
                events += [self._id_line(), event(body)]
        if events:
            self._exchange.write(b"".join(events))

    def _advance(self, text: str, *, has_ended: bool = False) -> bytes:
        """Advance the client's cursor past `text`; returns the `id:` line of the event."""
        self._num_chars += len(text)
        if self._event_ids is None:
            return b""
        here = self._num_chars, self._num_tokens, self._checksum, self._position.offset
        pending = self._position.pending
        if not has_ended:
            return self._event_ids.advance(self._index, *here, pending)
        self._event_ids.set_cursor(self._index, StreamCursor(*here, pending, has_ended))
        return self._event_ids.line()

    def _id_line(self) -> bytes:
        """The `id:` line for the client's current cursor; b"" without event ids."""
        return b"" if self._event_ids is None else self._event_ids.line()

    def _body(self, choice: Choice | None, usage: Usage | None = None) -> Answer:
        live, plan = self._live, self._live.plan
        choices: list[Choice | Raw] = [] if choice is None else [choice]
        shown = usage if plan.with_usage else UNSET
        return Answer(live.id, plan.shape.chunk_object, plan.created, plan.model, choices, shown)
