"""Answers that are printed by blocks, streamed or as one response.

- A delta is one write: all events that it gives, each with its `id:` line if the client may resume.
  What continues the open block is written from constant parts, and where events have no ids by the
  broadcast itself.
- Log-probabilities are held in columns, and encoded as they are sent, in time slices and while the
  client reads. Of a streamed answer, several of the last events have all of them.
- A streamed answer begins once its request is accepted, with the events that precede its text: a
  client knows its id while it waits for a place.
- A resumed answer is read from its beginning and printed from the client's number on
  (`block_printer`). Nothing leaves before the tokens up to the client's have been compared with the
  checksum in its event id: the answer may have been computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slipstream.client.streams.stream_state import StreamState
from slipstream.errors import SlipstreamError
from slipstream.http.answers.broadcast import ChunkFrame
from slipstream.http.answers.held_deltas import HeldDeltas
from slipstream.http.answers.live_answer import LiveAnswer
from slipstream.http.answers.stream_queue import StreamQueue
from slipstream.http.api_errors import ApiError
from slipstream.http.blocks.block_logprobs import LoggedDeltas, Made
from slipstream.http.blocks.block_printer import (
    NOTHING,
    AnswerHead,
    BlockPrinter,
    BlockShape,
    BlockWriter,
    NumberedEvent,
)
from slipstream.http.blocks.blocks import Block, BlockKind, BlockReader
from slipstream.http.openai.usage import Usage
from slipstream.http.response_encoding import encoded, has_holes
from slipstream.http.time_slice import Parts, run_all
from slipstream.outputs import Delta, events_of, id_column_of, kind_of
from slipstream_ipc.history.event_log import joined_events
from slipstream_ipc.history.token_log import history_checksum
from slipstream_ipc.messages import AnswerEvent, End, EventKind

_TOKEN_BYTES = 4
_MAX_WITHHELD_BYTES = 2**22
_KINDS = {
    BlockKind.CONTENT: EventKind.CONTENT,
    BlockKind.REASONING: EventKind.REASONING,
    BlockKind.CALL: EventKind.CALL_ARGUMENTS,
}


class StreamedBlocks:
    """A streamed answer. queue: of its stream."""

    def __init__(self, live: LiveAnswer, shape: BlockShape) -> None:
        cursor = live.cursor(0)
        self._live = live
        self._exchange = live.exchange
        self._state = live.plan.states[0]
        self._event_ids = live.event_ids
        self._printer = _printer(live, shape)
        self._cursor = cursor
        self._writer = BlockWriter(
            self._printer, NOTHING if cursor.number is None else cursor.number
        )
        self._num_tokens = 0  # taken so far
        self._checksum = 0  # of them, if events have ids
        self._logged = _logged(live, self._writer.write, lambda: self._writer.open_block)
        self._withheld: list[NumberedEvent] = []  # until the client's tokens are compared
        self._num_withheld_bytes = 0
        self._grows = False  # `write_delta` may continue the open block
        # of the open block, once `write_delta` may continue it
        self._framed: Block | None = None
        self._kind = 0  # of its text (see `Deltas.kinds`)
        self._frame = ChunkFrame(b"", b"", 0)
        live.failure_event, live.forget = self._writer.fail, self._writer.forget_logprobs
        self.writes_deltas = True
        self._state.awaits_acceptance = True
        self.queue = StreamQueue(live, self._state, self, _TOKEN_BYTES)
        self.queue.stream.chunk_writer = self
        self.queue.stream.numbers = self._writer if self._printer.has_numbers else None

    def write_delta(self, delta: Delta, part: bytes) -> None:
        """Write a delta that is not the stream's last. part: its text as JSON, without quotes."""
        if not self._grows or kind_of(delta) not in (self._kind, 0):
            self.write_deltas((delta,))
            return
        text = delta.text
        if self._event_ids is not None:  # as `_count`
            self._num_tokens += delta.num_tokens
            self._checksum = history_checksum(id_column_of(delta), self._checksum)
        if text:
            self._write_text(text, part)
        if self._logged is not None:
            self._logged.take_tokens(delta)

    def _write_text(self, text: str, part: bytes) -> None:
        """Continue the open block."""
        event_ids = self._event_ids
        number = self._writer.grow(text)
        id_line = b""
        if event_ids is not None:
            id_line = event_ids.advance_to(number, self._num_tokens, self._checksum)
        frame, exchange = self._frame, self._exchange
        middle = b"%d%b" % (number, frame.after_number) if self._printer.has_numbers else b""
        if exchange.is_ready:  # as `Exchange.write`, with a single format
            size = frame.num_framed + len(id_line) + len(middle) + len(part)
            data = (size, id_line, frame.before, middle, part, frame.after)
            exchange.send(b"%x\r\n%b%b%b%b%b" % data)
            exchange.counters.num_chunks += 1
        else:
            exchange.write(b"%b%b%b%b%b" % (id_line, frame.before, middle, part, frame.after[:-2]))

    def write_deltas(self, deltas: Sequence[Delta]) -> None:
        """See `DeltaWriter`. Without deltas, the request is accepted."""
        self._send(self._take(deltas))
        self._choose_writer()

    def write_end(self, deltas: Sequence[Delta]) -> None:
        """See `DeltaWriter`."""
        found = self._take(deltas)
        if self._is_behind:
            raise _diverged()
        found += self._begin()
        end = self._state.end
        assert end is not None
        if self._logged is None:
            found += self._writer.finish(end, self._live.usage())
        if not self._exchange.has_begun:  # the client has all of it
            self._live.begin_stream()
        if self._logged is None:
            self._send(found)
            self._exchange.finish()
        else:
            self._live.run(self._finish(found, end))

    def _finish(self, found: Sequence[NumberedEvent], end: End) -> Parts[None]:
        """Write these events, then those that end the answer."""
        yield from self._written(found)
        for event in self._writer.finish_in_parts(end, self._live.usage()):
            yield from self._written((event,))
        self._exchange.finish()

    def _take(self, deltas: Sequence[Delta]) -> list[NumberedEvent]:
        """The events to be written of consecutive deltas."""
        for delta in deltas:
            self._count(delta)
        events = [event for delta in deltas for event in events_of(delta)]
        is_accepted = not (deltas or self._state.is_over)
        found = self._begin() if events or is_accepted else []
        if self._logged is not None:
            for delta in deltas:
                found += self._logged.take(delta)
        elif events:
            found += self._writer.write(events)
        if not (self._is_behind or self._withheld):
            return found
        self._withheld += found
        self._num_withheld_bytes += sum(len(event.data) for event in found)
        # what follows the client's number but not its tokens was written with its event: little
        if self._num_withheld_bytes > _MAX_WITHHELD_BYTES:
            raise _diverged()
        if self._is_behind:
            return []
        found, self._withheld = self._withheld, []
        return found

    def _begin(self) -> list[NumberedEvent]:
        if self._writer.has_begun:
            return []
        num_prompt = self._state.prompt_len
        return self._writer.begin(Usage(num_prompt, 0, num_prompt))

    def _send(self, events: Sequence[NumberedEvent]) -> None:
        if not events:
            return
        if not self._exchange.has_begun:
            self._live.begin_stream()
        if self._logged is not None and any(has_holes(event.data) for event in events):
            self._live.run(self._written(events))
        else:
            self._exchange.write(b"".join(map(self._with_id, events)))

    def _written(self, events: Sequence[NumberedEvent]) -> Parts[None]:
        """Write events piece by piece: some have many log-probabilities."""
        assert self._logged is not None
        blocks = self._writer.blocks
        for event in events:
            for piece in self._logged.filled(self._with_id(event), blocks, is_line=True):
                self._exchange.write(piece)
                yield

    def _with_id(self, event: NumberedEvent) -> bytes:
        if self._event_ids is None:
            return event.data
        position = event.number, self._num_tokens, self._checksum
        return self._event_ids.advance_to(*position) + event.data

    @property
    def _is_behind(self) -> bool:
        """True if not all tokens that the client had have been taken."""
        return self._num_tokens < self._cursor.num_tokens

    def _count(self, delta: Delta) -> None:
        """Count a delta's tokens. Raises: ApiError if they are not those that the client had."""
        if self._event_ids is None:
            return
        column, num_left = id_column_of(delta), self._cursor.num_tokens - self._num_tokens
        self._num_tokens += delta.num_tokens
        if num_left > 0 and not self._is_behind:
            found = history_checksum(column[: 4 * num_left], self._checksum)
            if found != self._cursor.checksum:
                raise _diverged()
        self._checksum = history_checksum(column, self._checksum)

    def _choose_writer(self) -> None:
        """Choose what writes the next delta if it continues the open block."""
        block, stream = self._writer.open_block, self.queue.stream
        self._grows = (
            block is not None
            and block.input is None
            and self._writer.is_past
            and not self._is_behind
            and self._exchange.has_begun
        )
        is_plain = self._event_ids is None and self._logged is None
        stream.is_text_only = self._grows and is_plain
        if block is None or block is self._framed or not self._grows:
            return
        parts = self._writer.frame(block)
        num_framed = len(parts.before) + len(parts.after)
        after_number = parts.between or b""
        self._frame = frame = ChunkFrame(
            parts.before, parts.after + b"\r\n", num_framed, after_number=after_number
        )
        self._framed, self._kind = block, _kind_of(block)
        stream.before, stream.after, stream.num_framed = frame.before, frame.after, num_framed
        stream.after_number = after_number
        stream.frames = {self._kind: frame}


class UnaryBlocks:
    """An answer that is sent as one response; the wakeup of its stream."""

    def __init__(self, live: LiveAnswer, shape: BlockShape) -> None:
        self._live = live
        self._printer = _printer(live, shape)
        [state] = live.plan.states
        self._held = HeldDeltas(state, has_logprobs=live.plan.num_logprobs is not None)
        live.context.broadcast.join(state, self, live.exchange, live.handle_exception)

    def ring(self, state: StreamState) -> None:
        """The stream has ended."""
        live = self._live
        if not live.is_to_be_written(state):
            return
        parts = self._write(state)
        if live.plan.has_logprobs:
            live.run(parts)
        else:
            run_all(parts)

    def _write(self, state: StreamState) -> Parts[None]:
        live, end = self._live, state.end
        assert end is not None
        try:
            reader = BlockReader(self._printer.custom_tools)
            logged = _logged(live, reader.read, lambda: reader.open_block)
            whole, tokens = self._held.take(end)
            if logged is None:
                reader.read(joined_events(events_of(whole)))
            else:
                logged.take(whole, tokens)
                del whole, tokens
                yield
            reader.close(is_complete=end.reason == "stop")
            live.num_unwritten -= 1
            body = encoded(self._printer.whole(reader.blocks, end, live.usage()))
            if logged is None:
                live.respond(body)
            else:
                pieces = logged.filled(body, reader.blocks, is_line=False)
                yield from live.respond_in_pieces(pieces)
        except (ApiError, SlipstreamError) as error:
            live.fail(error)
        except Exception:
            live.handle_exception()


def _logged(
    live: LiveAnswer,
    hand_on: Callable[[Sequence[AnswerEvent]], list[Made]],
    open_block: Callable[[], Block | None],
) -> LoggedDeltas[Made] | None:
    """The deltas that add log-probabilities to blocks; None if none are asked for."""
    num_logprobs = live.plan.num_logprobs
    if num_logprobs is None:
        return None
    return LoggedDeltas(num_logprobs, live.texts, hand_on, open_block)


def _printer(live: LiveAnswer, shape: BlockShape) -> BlockPrinter:
    plan = live.plan
    return shape.new_printer(AnswerHead(live.id, plan.model, plan.created))


def _kind_of(block: Block) -> int:
    """The kind of a block's text (see `Deltas.kinds`)."""
    return _KINDS[block.kind] | block.call << 8


def _diverged() -> ApiError:
    why = "the answer was computed again and differs from what the event's client has of it"
    return ApiError(409, f"last-event-id: {why}", param="last-event-id", code="diverged")
