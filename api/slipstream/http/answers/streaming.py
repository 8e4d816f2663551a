"""Streamed answers: runs the streams of a request and writes their deltas as server-sent events.

Answers that are not streamed are written by `unary`; what both share is in `live_answer`.

- A chunk is written in the call in which its delta arrives: no task, no queue. The constant parts
  of a chunk are encoded beforehand, for each kind of text.
- Of an answer that is read as events a chunk has all events of its deltas, so its id is always at a
  unit. Deltas without anything to show move the cursor and are not written.
- The answer does not begin before the first text, so that an earlier failure gets a status code. A
  later failure is the last event, with no [DONE] after it.
- Under backpressure, deltas stay in the stream's queue, where they are merged (`unread_deltas`),
  and leave in few chunks once there is room: a slow reader costs no more than its answer and delays
  no other. It is dropped above `held_bytes`, or after `stall_s` (`connection`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec import UNSET, Raw, structs

from slipstream.client.streams.stream_state import StreamState
from slipstream.delta_batch import TokenLogprobs
from slipstream.errors import SlipstreamError
from slipstream.http.answers.answer_plan import AnswerPlan, ChoiceContent
from slipstream.http.answers.broadcast import ChunkFrame
from slipstream.http.answers.content_tokens import content_logprobs
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
from slipstream.http.openai.answer_parts import (
    AnswerParts,
    finish_reason,
    has_ended_call,
    parts_of,
)
from slipstream.http.openai.logprob_bodies import TextPosition
from slipstream.http.openai.response_bodies import NULL, Answer, Choice, Usage
from slipstream.http.response_encoding import DONE_EVENT, event, json_part, json_raw
from slipstream.http.time_slice import run_all
from slipstream.outputs import (
    Delta,
    begin_of,
    end_of,
    events_of,
    id_column_of,
    kind_of,
)
from slipstream_ipc.history.token_log import history_checksum
from slipstream_ipc.messages import EventKind
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


@dataclass(slots=True, eq=False)
class _Portion:
    """What one chunk is to contain of a stream. parts: in place of the text, unless that is all."""

    text: str = ""
    parts: AnswerParts | None = None
    entries: list[TokenLogprobs] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    @property
    def is_shown(self) -> bool:
        return bool(self.text or self.parts or self.entries or self.ids)


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
        self._reads_events = plan.shape.reads_events
        # log-probabilities are those of the content alone
        self._is_content_only = self._reads_events and not plan.has_all_logprobs
        self._may_be_plain = not (self._has_ids or plan.with_usage_so_far)
        # its chunks contain nothing but a delta's text and log-probabilities
        self._is_plain = plan.echo is None and self._may_be_plain
        num_candidates = 0 if plan.num_logprobs is None else 1 + plan.num_logprobs
        self._token_bytes = 4 + _CANDIDATE_BYTES * num_candidates
        # where the next token's text begins
        self._position = TextPosition(cursor.text_offset, cursor.pending)
        self._event_ids = live.event_ids
        self._num_chars, self._num_tokens = cursor.num_chars, cursor.num_tokens  # taken so far
        self._checksum = cursor.checksum  # of the tokens, if events have ids
        self._has_called = cursor.has_called  # a tool call has ended
        self._was_end_sent = cursor.has_ended  # sent before the client resumed
        self._has_ended = False  # the end has been handled
        self._frames: dict[int, ChunkFrame] = {}
        self._text_frame = frame = self.frame(0)
        self._stream = stream = live.context.broadcast.join(
            self.state, self, live.exchange, live.handle_exception
        )
        stream.before, stream.after, stream.num_framed = frame.before, frame.after, frame.num_framed
        stream.frames = self._frames
        self._choose_writer()

    def frame(self, kind: int) -> ChunkFrame:
        """The constant parts of a chunk that contains a text. kind: see `Deltas.kinds`."""
        if not self._reads_events:
            kind = 0
        found = self._frames.get(kind)
        if found is None:
            found = self._frames[kind] = self._new_frame(kind)
        return found

    def _new_frame(self, kind: int) -> ChunkFrame:
        plan = self._live.plan
        is_content = kind in (0, EventKind.CONTENT)
        has_logprobs = self._with_logprobs and self._is_plain
        if not has_logprobs:
            logprobs = NULL
        elif is_content or plan.has_all_logprobs:
            logprobs = Raw(_HOLE)
        else:
            has_logprobs = False
            logprobs = json_raw(plan.shape.logprobs([], 0, self._live.texts, self._position))
        content = ChoiceContent(self._index, Raw(_HOLE), logprobs, None, kind=kind)
        before, *between, after = event(self._body(plan.shape.chunk(content))).split(_HOLE)
        before, after = before + b'"', after + b"\r\n"
        repeat = b""
        if kind & 0xFF == EventKind.REASONING:
            repeat = b'"' + between.pop(0) + b'"'
        if between:
            return ChunkFrame(
                before, after, len(before + after) - 2, b'"' + between[0], True, repeat
            )
        after = b'"' + after
        return ChunkFrame(before, after, len(before + after) - 2, repeat=repeat)

    def _choose_writer(self) -> None:
        """Choose what writes most chunks from now on: the broadcast itself, `write_delta`, or
        `_write`.
        """
        is_text_only = self._is_plain and not self._with_logprobs and self._event_ids is None
        self._stream.is_text_only = is_text_only
        self._stream.chunk_writer = self if self._is_plain else None

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
        text, frame = delta.text, self._text_frame
        if self._event_ids is not None:  # as `_count`
            self._num_tokens += delta.num_tokens
            self._num_chars += len(text)
            self._checksum = history_checksum(id_column_of(delta), self._checksum)
        if self._reads_events:
            kind = kind_of(delta)
            if kind is None:
                portion = self._take([delta])
                if portion.is_shown:
                    self._write(portion, None)
                return
            frame = self.frame(kind)
        if not frame.has_logprobs:
            if text:
                self._write_plain(part, frame)
            return
        live = self._live
        found = None
        if text:
            found = live.plan.shape.logprobs_json(delta, live.texts, self._position)
        if found is not None:
            self._write_plain(part, frame, frame.between + found)
        elif text or delta.logprobs:
            self._write(self._take([delta]), None)

    def _write_plain(self, part: bytes, frame: ChunkFrame, middle: bytes = b"") -> None:
        """Write a chunk from the encoded constant parts. middle: JSON between text and end."""
        exchange = self._exchange
        if not exchange.has_begun:
            self._begin()
        id_line = b"" if self._event_ids is None else self._advance()
        if frame.repeat:
            part = b"%b%b%b" % (part, frame.repeat, part)
        if exchange.is_ready:  # as `Exchange.write`, with a single format
            size = frame.num_framed + len(id_line) + len(part) + len(middle)
            data = (size, id_line, frame.before, part, middle, frame.after)
            exchange.send(b"%x\r\n%b%b%b%b%b" % data)
            exchange.counters.num_chunks += 1
        else:
            exchange.write(b"%b%b%b%b%b" % (id_line, frame.before, part, middle, frame.after[:-2]))

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
            portion = self._take_deltas()
            if state.is_over and not state.deltas:
                break
            if portion.is_shown:
                self._write(portion, None)
            if self._exchange.is_paused or not state.deltas:
                return
        if portion.is_shown and not is_whole(state):
            self._write(portion, None)
        raise_failure(state)
        assert state.end is not None
        self._has_ended = True
        live = self._live
        live.num_unwritten -= 1
        if not self._was_end_sent:
            if portion.parts is not None:  # a call in the last chunk is not noticed by all clients
                self._write(portion, None)
                portion = _Portion()
            names_calls = live.plan.names_calls
            reason = finish_reason(state.end, has_called=self._has_called, names_calls=names_calls)
            self._write(portion, reason)
        if not live.num_unwritten:
            self._finish()

    def _take_deltas(self) -> _Portion:
        """Take the oldest queued deltas, up to `_PORTION_BYTES`."""
        deltas = self.state.deltas
        taken: list[Delta] = []
        num_bytes = 0
        while deltas and num_bytes < _PORTION_BYTES:
            delta = deltas.popleft()
            taken.append(delta)
            self._count(delta)
            num_bytes += len(delta.text)
            if self._with_logprobs:
                num_bytes += delta.num_tokens * self._token_bytes
        return self._take(taken)

    def _count(self, delta: Delta) -> None:
        """Move the client's cursor past a delta; it is sent with the next chunk."""
        self._num_tokens += delta.num_tokens
        if self._event_ids is not None:
            self._num_chars += len(delta.text)
            self._checksum = history_checksum(id_column_of(delta), self._checksum)

    def _take(self, deltas: Sequence[Delta]) -> _Portion:
        """What is to be written of consecutive deltas."""
        portion = _Portion()
        if self._has_ids:
            portion.ids = [token_id for delta in deltas for token_id in delta.token_ids]
        if not self._reads_events or all(kind_of(delta) == 0 for delta in deltas):
            portion.text = "".join([delta.text for delta in deltas])
        else:
            events = [event for delta in deltas for event in events_of(delta)]
            self._has_called = self._has_called or has_ended_call(events)
            parts = parts_of(events)
            if parts.is_content:
                portion.text = parts.content
            else:
                portion.parts = parts
        if self._with_logprobs:
            for delta in deltas:
                is_content_only = self._is_content_only
                portion.entries += (
                    content_logprobs(delta) if is_content_only else delta.logprobs or ()
                )
        return portion

    def _write(self, portion: _Portion, reason: str | None) -> None:
        is_text = portion.parts is None and self._is_plain
        if is_text and not self._with_logprobs and reason is None:
            self._write_plain(json_part(portion.text), self._text_frame)
            return
        plan, ids = self._live.plan, portion.ids
        shown = self._live.choice_parts(
            *(self._index, self._position, portion.text, [portion.entries], reason),
            is_first=self._is_first,
        )
        text, logprobs, reason = run_all(shown)
        is_first, self._is_first = self._is_first, False
        self._is_plain = self._may_be_plain and (plan.echo is None or not self._with_logprobs)
        self._choose_writer()
        if not self._exchange.has_begun:
            self._begin()
        end = self.state.end if reason is not None else None
        stop_reason = None if end is None else end.stop_reason
        content = ChoiceContent(self._index, text, logprobs, reason, ids, stop_reason)
        content.parts = portion.parts
        if self._has_ids:
            content.token_ids = self._live.with_prompt_ids(self._index, ids, is_first=is_first)
            if is_first and plan.shape.has_many_prompts:
                content.prompt_ids = self._live.prompt_ids(self._index)
        choice = plan.shape.chunk(content)
        id_line = self._advance(has_ended=reason is not None)
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

    def _advance(self, *, has_ended: bool = False) -> bytes:
        """Set the client's cursor to what has been taken; returns the `id:` line of the event."""
        if self._event_ids is None:
            return b""
        here = self._num_chars, self._num_tokens, self._checksum, self._position.offset
        pending = self._position.pending
        if not has_ended:
            return self._event_ids.advance(self._index, *here, pending, self._has_called)
        cursor = StreamCursor(*here, pending, has_ended, has_called=self._has_called)
        self._event_ids.set_cursor(self._index, cursor)
        return self._event_ids.line()

    def _id_line(self) -> bytes:
        """The `id:` line for the client's current cursor; b"" without event ids."""
        return b"" if self._event_ids is None else self._event_ids.line()

    def _body(self, choice: Choice | None, usage: Usage | None = None) -> Answer:
        live, plan = self._live, self._live.plan
        choices: list[Choice | Raw] = [] if choice is None else [choice]
        shown = usage if plan.with_usage else UNSET
        return Answer(live.id, plan.shape.chunk_object, plan.created, plan.model, choices, shown)
