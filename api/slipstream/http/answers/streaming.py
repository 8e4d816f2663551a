"""Streamed answers: runs the streams of a request and writes their deltas as server-sent events.

Answers that are not streamed are written by `unary`; what both share is in `live_answer`.

- A chunk is written in the call in which its delta arrives: no task, no queue. The constant parts
  of a chunk are encoded beforehand, for each kind of text.
- Of an answer that is read as events a chunk has all events of its deltas, so its id is always at a
  unit. Deltas without anything to show move the cursor and are not written.
- The answer does not begin before the first text, so that an earlier failure gets a status code. A
  later failure is the last event, with no [DONE] after it.
- Deltas wait in the stream's queue (`stream_queue`) under backpressure, and while a chunk with many
  log-probabilities, as of an echoed prompt, is written in time slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec import UNSET, Raw, structs

from slipstream.errors import StreamLostError
from slipstream.http.answers.answer_plan import AnswerPlan, AnswerShape, ChoiceContent
from slipstream.http.answers.block_answers import StreamedBlocks, UnaryBlocks
from slipstream.http.answers.broadcast import ChunkFrame
from slipstream.http.answers.event_ids import EventCursor, StreamCursor
from slipstream.http.answers.live_answer import (
    AnswerContext,
    LiveAnswer,
)
from slipstream.http.answers.stream_queue import StreamQueue
from slipstream.http.answers.unary import UnaryAnswer
from slipstream.http.blocks.block_printer import BlockShape
from slipstream.http.exchange import Exchange
from slipstream.http.logprobs.content_tokens import add_content
from slipstream.http.logprobs.held_logprobs import HeldLogprobs
from slipstream.http.logprobs.logprob_bodies import TextPosition
from slipstream.http.logprobs.logprob_pieces import ShownLogprobs, advance
from slipstream.http.openai.answer_parts import (
    AnswerParts,
    finish_reason,
    has_ended_call,
    parts_of,
)
from slipstream.http.openai.custom_tools import CustomCalls
from slipstream.http.openai.response_bodies import NULL, Answer, Choice
from slipstream.http.openai.usage import Usage
from slipstream.http.response_encoding import DONE_EVENT, event, filled, hole, json_part
from slipstream.http.shares import Share
from slipstream.http.time_slice import Parts
from slipstream.outputs import (
    Delta,
    columns_of,
    events_of,
    id_column_of,
    kind_of,
)
from slipstream_ipc.history.token_log import history_checksum
from slipstream_ipc.messages import EventKind, Fault

_HOLE = b"\0"  # where the text goes in an encoded chunk; never raw in JSON
_MOST_AT_ONCE = 2**13  # candidates in a chunk that is made in one piece: 2 ms
_COLUMNS_BYTES = 8  # of one candidate in columns
_FREE_BYTES = 2**16  # of an answer's columns, which need no share
_CANDIDATE_BYTES = 64  # of one candidate's log-probability as JSON, estimated


def start_answer(plan: AnswerPlan, exchange: Exchange, context: AnswerContext) -> None:
    """Submit the streams of a request and answer the exchange; nothing if its client has left.

    It waits for room where it may gather many log-probabilities.
    """
    if not exchange.is_open:
        return
    num_bytes = _COLUMNS_BYTES * plan.num_held
    if num_bytes <= _FREE_BYTES:
        _start(plan, exchange, context)
        return
    tenant = exchange.request.tenant or b""
    start = partial(_start_with, plan, exchange, context)
    share = context.logprob_shares.take(tenant, num_bytes, start)
    exchange.keep_logprob_share(share)


def _start_with(
    plan: AnswerPlan, exchange: Exchange, context: AnswerContext, _share: Share
) -> None:
    _start(plan, exchange, context)


def _start(plan: AnswerPlan, exchange: Exchange, context: AnswerContext) -> None:
    live = LiveAnswer(plan, exchange, context)
    try:
        if plan.is_stream:
            live.resume = partial(_resume, _queues(live))
        elif isinstance(plan.shape, BlockShape):
            UnaryBlocks(live, plan.shape)
        else:
            UnaryAnswer(live, plan.shape)
        for state in plan.states:
            context.engine.submit(state)
    except Exception:
        live.handle_exception()


def _queues(live: LiveAnswer) -> list[StreamQueue]:
    shape = live.plan.shape
    if isinstance(shape, BlockShape):
        return [StreamedBlocks(live, shape).queue]
    return [StreamedChoice(live, shape, index).queue for index in range(len(live.plan.states))]


def _finished(exchange: Exchange) -> Parts[None]:
    yield
    exchange.finish()


def _failed(error: StreamLostError) -> Parts[None]:
    yield from ()
    raise error


def _resume(queues: Sequence[StreamQueue]) -> None:
    for queue in queues:
        queue.resume()


@dataclass(slots=True, eq=False)
class _ChunkContent:
    """The content of one chunk of a stream. parts: in place of the text, unless that is all."""

    text: str = ""
    parts: AnswerParts | None = None
    tokens: HeldLogprobs = field(default_factory=HeldLogprobs)
    ids: list[int] = field(default_factory=list)

    @property
    def is_shown(self) -> bool:
        return bool(self.text or self.parts or self.tokens.num_tokens or self.ids)


class StreamedChoice:
    """One choice of a streamed answer."""

    def __init__(self, live: LiveAnswer, shape: AnswerShape, index: int) -> None:
        plan = live.plan
        cursor = live.cursor(index)
        self._state = plan.states[index]
        self._live = live
        self._shape = shape
        self._exchange = live.exchange
        self._index = index
        self._is_first = True  # `_write` has not been called yet
        self._with_logprobs = plan.num_logprobs is not None
        self._has_ids = self._shape.has_ids
        self._reads_events = self._shape.reads_events
        # log-probabilities are those of the content alone
        self._is_content_only = self._reads_events and not plan.has_all_logprobs
        has_customs = bool(shape.custom_tools)
        self._customs = CustomCalls(shape.custom_tools) if has_customs else None
        self._may_write_deltas = not (self._has_ids or plan.with_usage_so_far or has_customs)
        # its chunks contain nothing but a delta's text and log-probabilities
        self.writes_deltas = plan.echo is None and self._may_write_deltas
        num_candidates = 0 if plan.num_logprobs is None else 1 + plan.num_logprobs
        token_bytes = 4 + _CANDIDATE_BYTES * num_candidates
        # where the next token's text begins
        self._position = TextPosition(cursor.text_offset, cursor.pending)
        self._event_ids = live.event_ids
        self._taken = EventCursor(cursor)  # characters and checksum only if events have ids
        self._has_called = cursor.has_called  # a tool call has ended
        self._was_end_sent = cursor.has_ended  # sent before the client resumed
        self._frames: dict[int, ChunkFrame] = {}
        self._text_frame = frame = self.frame(0)
        self.queue = StreamQueue(live, self._state, self, token_bytes)
        self._stream = stream = self.queue.stream
        stream.before, stream.after, stream.num_framed = frame.before, frame.after, frame.num_framed
        stream.frames, stream.repeat = self._frames, frame.repeat
        if self._event_ids is not None:
            self._taken.prefix = self._event_ids.text_prefix
            stream.cursor = self._taken
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
        has_logprobs = self._with_logprobs and self.writes_deltas
        if not has_logprobs:
            logprobs = NULL
        elif is_content or plan.has_all_logprobs:
            logprobs = Raw(_HOLE)
        else:
            has_logprobs = False
            none = ShownLogprobs(0, self._live.texts)
            logprobs = Raw(b"".join(self._shape.logprobs(none, is_line=True)))
        content = ChoiceContent(self._index, Raw(_HOLE), logprobs, None, kind=kind)
        before, *between, after = event(self._body(self._shape.chunk(content))).split(_HOLE)
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
        has_text_ids = self._event_ids is None or (self._taken.prefix and not self._has_called)
        is_text_only = self.writes_deltas and not self._with_logprobs and bool(has_text_ids)
        stream, frame = self._stream, self._text_frame
        stream.is_text_only = is_text_only
        stream.chunk_writer = self if self.writes_deltas else None
        has_tails = self.writes_deltas and frame.has_logprobs and self._event_ids is None
        has_tails = has_tails and self._live.plan.id.kind in ("cmpl", "chatcmpl")
        is_completion = self._live.plan.id.kind == "cmpl"
        stream.texts = self._live.texts if has_tails else None
        stream.position = self._position if has_tails and is_completion else None
        stream.between = frame.between

    def write_delta(self, delta: Delta, part: bytes) -> None:
        """Write a delta that is not the stream's last. part: its text as JSON, without quotes."""
        text, frame = delta.text, self._text_frame
        if self._event_ids is not None:
            self._count(delta)
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
                self._write_text(part, frame)
            return
        live = self._live
        found = None
        if text:
            found = self._shape.logprobs_json(delta, live.texts, self._position)
        if found is not None:
            self._write_text(part, frame, frame.between + found)
        elif text or columns_of(delta).width:
            self._write(self._take([delta]), None)

    def _write_text(self, part: bytes, frame: ChunkFrame, middle: bytes = b"") -> None:
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

    def write_deltas(self, deltas: Sequence[Delta]) -> None:
        """See `DeltaWriter`."""
        portion = self._counted(deltas)
        if portion.is_shown:
            self._write(portion, None)

    def write_end(self, deltas: Sequence[Delta]) -> None:
        """See `DeltaWriter`."""
        portion = self._counted(deltas, is_last=True)
        end = self._state.end
        assert end is not None
        if not self._was_end_sent:
            if portion.parts is not None:  # a call in the last chunk is not noticed by all clients
                self._write(portion, None)
                portion = _ChunkContent()
            names_calls = self._live.plan.names_calls
            reason = finish_reason(end, has_called=self._has_called, names_calls=names_calls)
            self._write(portion, reason)
        if not self._live.num_unwritten:
            self._finish()

    def _counted(self, deltas: Sequence[Delta], *, is_last: bool = False) -> _ChunkContent:
        """`_take`, and the client's cursor is moved past the deltas."""
        for delta in deltas:
            self._count(delta)
        return self._take(deltas, is_last=is_last)

    def _count(self, delta: Delta) -> None:
        """Move the client's cursor past a delta; it is sent with the next chunk."""
        taken = self._taken
        taken.num_tokens += delta.num_tokens
        if self._event_ids is not None:
            taken.num_chars += len(delta.text)
            taken.checksum = history_checksum(id_column_of(delta), taken.checksum)

    def _take(self, deltas: Sequence[Delta], *, is_last: bool = False) -> _ChunkContent:
        """Return the content of a chunk for consecutive deltas. is_last: no more follow."""
        portion = _ChunkContent()
        if self._has_ids:
            portion.ids = [token_id for delta in deltas for token_id in delta.token_ids]
        is_text = not self._reads_events or all(kind_of(delta) == 0 for delta in deltas)
        if is_text and not (is_last and self._customs):
            portion.text = "".join([delta.text for delta in deltas])
        else:
            events = [event for delta in deltas for event in events_of(delta)]
            if not self._has_called and has_ended_call(events):
                self._has_called = True
                self._choose_writer()
            parts = parts_of(events, self._customs, is_last=is_last)
            if parts.is_content:
                portion.text = parts.content
            else:
                portion.parts = parts
        if self._with_logprobs:
            for delta in deltas:
                if self._is_content_only:
                    add_content(portion.tokens, delta)
                else:
                    portion.tokens.add(columns_of(delta))
        return portion

    def _write(self, portion: _ChunkContent, reason: str | None) -> None:
        is_text = portion.parts is None and self.writes_deltas
        if is_text and not self._with_logprobs and reason is None:
            self._write_text(json_part(portion.text), self._text_frame)
            return
        plan, ids = self._live.plan, portion.ids
        text, shown, reason = self._live.shown(
            *(self._index, self._position, portion.text, portion.tokens, reason),
            is_first=self._is_first,
        )
        logprobs, pieces = self._logprobs(shown)
        is_first, self._is_first = self._is_first, False
        self.writes_deltas = self._may_write_deltas and (
            plan.echo is None or not self._with_logprobs
        )
        self._choose_writer()
        if not self._exchange.has_begun:
            self._begin()
        end = self._state.end if reason is not None else None
        stop_reason = None if end is None else end.stop_reason
        content = ChoiceContent(self._index, text, logprobs, reason, ids, stop_reason)
        content.parts = portion.parts
        if self._has_ids:
            content.token_ids = self._live.with_prompt_ids(self._index, ids, is_first=is_first)
            if is_first and self._shape.has_many_prompts:
                content.prompt_ids = self._live.prompt_ids(self._index)
        choice = self._shape.chunk(content)
        id_line = self._advance(has_ended=reason is not None)
        usage = self._live.usage_so_far(self._index, self._taken.num_tokens)
        data = id_line + event(self._body(choice, usage))
        if pieces is None:
            self._live.write(data)
        else:
            self._live.write_in_pieces(filled(data, lambda _: pieces))

    def _logprobs(self, shown: ShownLogprobs | None) -> tuple[Raw | None, Iterator[bytes] | None]:
        """The log-probabilities of a chunk; where they are many, or a prompt's, a hole for them and
        what fills it in pieces.
        """
        if shown is None:
            return None, None
        if shown.prompt is None and shown.tokens.num_candidates <= _MOST_AT_ONCE:
            return Raw(b"".join(self._shape.logprobs(shown, is_line=True))), None
        shown.position = self._position.copy()
        if self._live.plan.id.kind == "cmpl":  # the chunk's id says where its text ends
            for part in shown.parts():
                advance(self._position, part, shown.texts)
        return hole(0), self._shape.logprobs(shown, is_line=True)

    def _finish(self) -> None:
        """Write usage and [DONE], after the end of the last stream."""
        live, exchange = self._live, self._exchange
        owes_usage = live.plan.with_usage and not live.plan.is_usage_sent
        if owes_usage and live.lacks_prompt:
            error = StreamLostError(Fault("unknown_stream", "its usage is no longer known"))
            if live.is_busy:
                live.run(_failed(error))
            else:
                live.fail(error)
            return
        if not exchange.has_begun:
            self._begin()
        last = b""
        if owes_usage:
            if self._event_ids is not None:
                self._event_ids.set_usage_sent()
            last = self._id_line() + event(self._body(None, live.usage()))
        live.write(last + self._id_line() + DONE_EVENT)
        if live.is_busy:
            live.run(_finished(exchange))
        else:
            exchange.finish()

    def _begin(self) -> None:
        """Write the head of the answer, and the chunks that precede each choice's first text."""
        plan = self._live.plan
        self._live.begin_stream()
        events: list[bytes] = []
        usage = self._live.usage_so_far(self._index, 0)  # shapes with a first chunk: one prompt
        for index in range(len(plan.states)):
            first = self._shape.first_chunk(index)
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
        taken = self._taken
        here = taken.num_chars, taken.num_tokens, taken.checksum, self._position.offset
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
        return Answer(live.id, self._shape.chunk_object, plan.created, plan.model, choices, shown)
