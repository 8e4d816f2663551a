"""The output side of one stream that is read as events.

The way of a token: detokeniser, then the format's reader, then the stop strings, which see content
alone; with stop scope "all" they come before the reader and see the raw text.

- A pure function of the token history, as every output: units, their events, cut and end.
- A unit is whole tokens with all their events. A token leaves once nothing up to its end is held:
  no part of a character, nothing that the reader has not decided, no beginning of a stop string. An
  event that cannot be divided leaves with the token that completes it.
- A delimiter's id ends the characters before it, whatever bytes follow.
- Stop strings never match over the border of content: what they hold is released where it ends.
- A stop string's match is a position in virtual characters (see `LocatedEvent` in
  `formats.answer_reader`); what is cut of the raw text and the tokens follows from where each token
  begins and ends there.
- A fast row's tokens change nothing here but counts, as for every output (see `resume_at`).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Hashable, Iterator, Sequence

from msgspec.structs import replace

from slipstream_ipc.history.event_log import EventLog, joined_events
from slipstream_ipc.history.text_log import TextCursor
from slipstream_ipc.messages import AnswerEvent, End, EventKind, Fault, FinishReason, StopScope
from slipstream_worker.detokenizer.factory import Detokenizer
from slipstream_worker.formats.answer_reader import AnswerReader, LocatedEvent
from slipstream_worker.output.repetition import RepetitionDetector
from slipstream_worker.output.stop_strings import StopStrings
from slipstream_worker.output.stream_output import StopCriteria, StreamOutput

__all__ = ["AnswerOutput"]

_NOT_FED = -1
_DIVISIBLE = (EventKind.CONTENT, EventKind.REASONING)


class _UnreleasedToken:
    """A token that has not been released. Its beginning and end are in virtual characters."""

    __slots__ = ("end", "is_reasoning", "raw_start", "start", "text")

    def __init__(self, text: str, raw_start: int) -> None:
        self.text = text  # raw
        self.raw_start = raw_start
        self.start = self.end = _NOT_FED
        self.is_reasoning = False


class _UnreadPart:
    """A part of the raw text that the reader is still to be given: text, or a delimiter."""

    __slots__ = ("closes", "delimiter", "text", "token")

    def __init__(self, token: _UnreleasedToken, text: str, delimiter: int | None = None) -> None:
        self.token = token
        self.text = text  # raw
        self.delimiter = delimiter
        self.closes: list[_UnreleasedToken] = []  # tokens whose text ends with this part


class AnswerOutput(StreamOutput):
    """The output side of one stream whose text becomes events."""

    __slots__ = (
        "_active_from",
        "_content_end",
        "_delimiter",
        "_delimiter_chars",
        "_events",
        "_num_reasoning",
        "_parts",
        "_reader",
        "_scope",
        "_unreleased",
        "delimiter_ids",
        "event_log",
    )

    reads_events = True

    def __init__(
        self,
        reader: AnswerReader,
        delimiter_ids: frozenset[int],
        stop_scope: StopScope,
        detokenizer: Detokenizer,
        stops: StopStrings | None,
        criteria: StopCriteria,
        unit_tokens: int = sys.maxsize,
        repetition: RepetitionDetector | None = None,
    ) -> None:
        """`delimiter_ids`: those that the reader is given as such. The last five: see
        `StreamOutput`.
        """
        stops = StopStrings.none() if stops is None else stops
        super().__init__(detokenizer, stops, criteria, unit_tokens, repetition)
        self._reader = reader
        self._scope = stop_scope
        self.delimiter_ids = delimiter_ids
        self._delimiter: int | None = None  # the id of the token being pushed, if it is one
        self._delimiter_chars = 0  # of its raw text
        self._parts: deque[_UnreadPart] = deque()  # with scope "all": held by the stop strings
        self._unreleased: deque[_UnreleasedToken] = deque()
        # decided, but not released; first of all, what the prompt leaves to the answer to say
        self._events: deque[LocatedEvent] = deque(reader.feed(""))
        self._content_end = 0  # of the content that stop strings have seen
        # from here on a match of a stop string counts; None: not known yet
        self._active_from: int | None = None if criteria.min_tokens else 0
        self._num_reasoning = 0  # released tokens of reasoning
        self.log = self.event_log = EventLog()

    # ---- what is asked between tokens ------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        if self._unreleased or self._events or self._held or not self._reader.is_settled:
            return False
        assert self._detokenizer is not None
        return bool(self._reader.kind) and self._detokenizer.is_settled

    @property
    def kind(self) -> int:
        """The kind of a harmless text, for a settled output; see `Deltas.kinds`."""
        return self._reader.kind

    @property
    def mode(self) -> tuple[bool, Hashable]:
        """The mode of a settled output: with equal formats, views and stop strings, equal modes
        have equal answers of `is_harmless`.
        """
        return self.is_stopped_here, self._reader.mode

    @property
    def hazard_chars(self) -> frozenset[str]:
        """The characters without which text is harmless to a settled output."""
        hazards = self._reader.hazard_chars
        assert self._stops is not None
        return hazards | self._stops.first_chars if self.is_stopped_here else hazards

    def is_harmless(self, text: str) -> bool:
        assert self._stops is not None
        if self.is_stopped_here and not self._stops.is_harmless(text):
            return False
        return self._reader.is_harmless(text)

    def resume_at(self, cursor: TextCursor) -> None:
        self._skip_to(cursor.num_tokens)
        self._num_chars = self._num_emitted = cursor.num_chars
        self.log = self.event_log = EventLog(cursor)

    def append_whole(self, texts: Sequence[str]) -> None:
        self.event_log.append_each(texts, self.num_tokens, self._reader.kind)
        self._skip_to(self.num_tokens + len(texts))
        self._num_chars = self._num_emitted = self.log.end.num_chars

    @property
    def is_stopped_here(self) -> bool:
        """True if stop strings apply to the text of a settled output's state."""
        return self._scope == "all" or self._reader.kind == EventKind.CONTENT

    def _skip_to(self, num_tokens: int) -> None:
        if self._reader.is_reasoning:
            self._num_reasoning += num_tokens - self.num_tokens
        self.num_tokens = num_tokens
        self._note_active()

    def _note_active(self) -> None:
        """Note where stop strings begin to apply: behind the first `min_tokens` tokens."""
        if self._active_from is None and self.num_tokens >= self._min_tokens:
            self._active_from = self._reader.num_fed

    # ---- ends ------------------------------------------------------------------------------

    def finish(self, reason: FinishReason, fault: Fault | None = None) -> None:
        if self.end is not None:
            return
        assert self._detokenizer is not None
        tail = self._detokenizer.flush()
        if self._unreleased:
            part = _UnreadPart(self._unreleased[-1], tail)
            part.token.text += tail
            part.closes = [token for token in self._unreleased if token.end == _NOT_FED]
            self._parts.append(part)
        pieces = self._feed_parts(sys.maxsize) + self._reader.finish()
        for piece in pieces:  # what is held is released as it is, and can match nothing
            self._release_held()
            self._events.append(piece)
        self._release_held()
        self._end_with(End(reason, self.num_tokens, fault=fault))

    def end_with_error(self, fault: Fault) -> None:
        if self.end is None:
            self.log.append("", self.log.num_tokens)
            num_tokens = self.log.num_tokens
            self.end = End(
                "error", num_tokens, fault=fault, num_reasoning_tokens=self._num_reasoning
            )

    def _end_with(self, end: End, cut: int | None = None, raw_chars: int = sys.maxsize) -> None:
        """Release the kept tokens with all events. cut: where a stop string cuts them, in virtual
        characters; raw_chars: the same in the raw text.
        """
        num_kept = end.num_tokens - self.log.num_tokens
        kept = [self._unreleased.popleft() for _ in range(num_kept)]
        self._num_reasoning += sum(token.is_reasoning for token in kept)
        until = self._reader.num_fed if cut is None else cut
        self._release_unit(kept, until, raw_chars, is_last=True)
        self._unreleased.clear()
        self._events.clear()
        self.end = replace(end, num_reasoning_tokens=self._num_reasoning)

    # ---- a token ---------------------------------------------------------------------------

    def _text_of(self, token_id: int, end: End | None) -> tuple[str, int]:
        if token_id not in self.delimiter_ids:
            return super()._text_of(token_id, end)
        detokenizer = self._detokenizer
        assert detokenizer is not None
        before, text = detokenizer.flush(), ""
        if end is None or end.reason != "stop" or self._include_stop:
            text = detokenizer.step(token_id)
        self._delimiter, self._delimiter_chars = token_id, len(text)
        return before + text, 0

    def _push_text(self, text: str, num_pending: int, end: End | None) -> None:
        self._add_parts(text, num_pending, is_stop=end is not None and end.reason == "stop")
        if self._scope == "all":
            self._push_through_stops(text, end)
        else:
            self._push_to_reader(end)
        self._note_active()

    def _push_to_reader(self, end: End | None) -> None:
        """Give the reader the token, and the stop strings what is content."""
        pieces = self._feed_parts(sys.maxsize)
        if end is not None:
            pieces += self._reader.finish()
        match = self._take(pieces)
        if match is not None:
            at, stop = match
            num_kept = self._num_kept_at(at)
            kept = num_kept - self.log.num_tokens
            raw_chars = self.log.end.num_chars
            if kept:
                last = self._unreleased[kept - 1]
                raw_chars = last.raw_start + min(at - last.start, len(last.text))
            self._end_with(End("stop", num_kept, stop), at, raw_chars)
        elif end is not None:
            self._release_held()
            self._end_with(end)
        else:
            held_from = self._content_end - len(self._held)
            self._release_decided(held_from if self._held else self._reader.num_decided)

    def _push_through_stops(self, text: str, end: End | None) -> None:
        """Pass raw text through the stop strings, and give the reader what they let through."""
        assert self._stops is not None
        active = self.num_tokens > self._min_tokens
        emit, self._held, stop = self._stops.feed(self._held, text, active)
        if end is not None and stop is None:
            emit, self._held = emit + self._held, ""
        self._num_emitted += len(emit)
        pieces = self._feed_parts(len(emit), is_last=stop is not None)
        if end is not None or stop is not None:
            pieces += self._reader.finish()
        self._events += pieces
        if stop is not None:
            num_chars = self._num_emitted
            whole = sum(token.end != _NOT_FED for token in self._unreleased)
            begun = sum(token.raw_start < num_chars for token in self._unreleased)
            num_kept = self.log.num_tokens + max(whole, begun)
            self._end_with(End("stop", num_kept, stop), raw_chars=num_chars)
        elif end is not None:
            self._end_with(end)
        else:
            self._release_decided(self._reader.num_decided)

    def _add_parts(self, text: str, num_pending: int, *, is_stop: bool) -> None:
        """Queue the new token's raw text for the reader."""
        token = _UnreleasedToken(text, self._num_chars)
        token.is_reasoning = not is_stop
        self._unreleased.append(token)
        self._num_chars += len(text)
        part = _UnreadPart(token, text)
        if self._delimiter is not None:
            begin = len(text) - self._delimiter_chars
            if begin:
                part.text = text[:begin]
                self._parts.append(part)
            part = _UnreadPart(token, text[begin:], self._delimiter)
            self._delimiter = None
        self._parts.append(part)
        self._num_unread += 1
        if num_pending < self._num_unread:
            unread = range(-self._num_unread, -num_pending)
            part.closes = [self._unreleased[at] for at in unread]
            self._num_unread = num_pending

    def _feed_parts(self, num_chars: int, *, is_last: bool = False) -> list[LocatedEvent]:
        """Give the reader the next `num_chars` raw characters. `is_last`: no others follow."""
        reader, parts = self._reader, self._parts
        reasoning_end = reader.reasoning_end
        pieces = list[LocatedEvent]()
        while parts:
            part = parts[0]
            token, text = part.token, part.text
            if token.start == _NOT_FED:
                token.start = reader.num_fed
                token.is_reasoning &= reader.is_reasoning
            if len(text) > num_chars:
                if num_chars and (part.delimiter is None or is_last):
                    pieces += reader.feed(text[:num_chars])
                    part.text = text[num_chars:]
                break
            num_chars -= len(text)
            if part.delimiter is not None:
                pieces += reader.feed_delimiter(part.delimiter)
            elif text:
                pieces += reader.feed(text)
            for closed in part.closes:
                closed.end = reader.num_fed
                closed.is_reasoning &= reader.is_reasoning
            parts.popleft()
        if reader.reasoning_end != reasoning_end:
            for token in self._unreleased:  # those of a delimiter of several tokens
                token.is_reasoning &= token.start < reader.reasoning_end
        return pieces

    # ---- stop strings in content -----------------------------------------------------------

    def _take(self, pieces: Sequence[LocatedEvent]) -> tuple[int, str] | None:
        """Take events; content passes the stop strings. Returns where the text is cut, and the
        stop string, if one matched: later events are dropped then.
        """
        for piece in pieces:
            if piece.event.kind != EventKind.CONTENT:
                self._release_held()
                self._events.append(piece)
                continue
            if piece.start != self._content_end:
                self._release_held()
            text, start = piece.event.text, piece.start
            active_from = self._active_from
            if active_from is not None and start < active_from < piece.end:
                num_inactive = active_from - start
                self._take_content(text[:num_inactive], start, active=False)
                text, start = text[num_inactive:], active_from
            active = active_from is not None and start >= active_from
            match = self._take_content(text, start, active=active)
            if match is not None:
                return match
        if self._reader.num_decided > self._content_end:
            self._release_held()  # content has ended, though no event says so yet
        return None

    def _take_content(self, text: str, start: int, *, active: bool) -> tuple[int, str] | None:
        assert self._stops is not None
        held_from = start - len(self._held)
        emit, self._held, stop = self._stops.feed(self._held, text, active)
        self._content_end = start + len(text)
        self._add_content(emit, held_from)
        return None if stop is None else (held_from + len(emit), stop)

    def _release_held(self) -> None:
        """Content has ended, or the stream: what stop strings hold begins none."""
        if self._scope == "content" and self._held:
            self._add_content(self._held, self._content_end - len(self._held))
            self._held = ""

    def _add_content(self, text: str, start: int) -> None:
        if text:
            event = AnswerEvent(EventKind.CONTENT, text)
            self._events.append(LocatedEvent(event, start, start + len(text)))

    def _num_kept_at(self, at: int) -> int:
        """Tokens that contribute to the first `at` virtual characters, or end there without
        text.
        """
        whole = sum(_NOT_FED < token.end <= at for token in self._unreleased)
        begun = sum(token.start < at for token in self._unreleased)
        return self.log.num_tokens + max(whole, begun)

    # ---- release ---------------------------------------------------------------------------

    def _release_decided(self, decided: int) -> None:
        """Release the tokens whose text and events are decided."""
        unreleased, released = self._unreleased, list[_UnreleasedToken]()
        while unreleased and _NOT_FED < unreleased[0].end <= decided:
            token = unreleased.popleft()
            released.append(token)
            self._num_reasoning += token.is_reasoning
        if released:
            self._release_unit(released, released[-1].end)

    def _pieces_up_to(self, end: int) -> list[LocatedEvent]:
        events, up_to_end = self._events, list[LocatedEvent]()
        while events and events[0].end <= end:
            up_to_end.append(events.popleft())
        if events and events[0].start < end and events[0].event.kind in _DIVISIBLE:
            event, start, event_end = events[0]
            if len(event.text) == event_end - start:
                before, after = event.text[: end - start], event.text[end - start :]
                up_to_end.append(LocatedEvent(replace(event, text=before), start, end))
                events[0] = LocatedEvent(replace(event, text=after), end, event_end)
        return up_to_end

    def _release_unit(
        self,
        tokens: Sequence[_UnreleasedToken],
        end: int,
        raw_chars: int = sys.maxsize,
        *,
        is_last: bool = False,
    ) -> None:
        """Release a unit, or several if that many tokens do not fit into a message, each with the
        events of its tokens. end: where the tokens end, in virtual characters; raw_chars: in the
        raw text, where it is cut. is_last: it has all events that are left.
        """
        for at in range(0, max(len(tokens), 1), self._unit_tokens):
            some = tokens[at : at + self._unit_tokens]
            is_whole = at + len(some) == len(tokens)
            ends = [end if token.end == _NOT_FED else min(token.end, end) for token in some]
            pieces = self._pieces_up_to(end if is_whole else ends[-1])
            if is_whole and is_last:
                pieces += self._events
            text = "".join([token.text for token in some])[: raw_chars - self.log.end.num_chars]
            events = joined_events(_counted(pieces, some, ends), with_tokens=True)
            for event in events:
                for written in (event.text, event.call_id):
                    if not written.isascii():
                        written.encode()  # what cannot be written ends this stream, not the worker
            self.event_log.append_unit(text, self.log.num_tokens + len(some), events)


def _counted(
    pieces: Sequence[LocatedEvent], tokens: Sequence[_UnreleasedToken], ends: Sequence[int]
) -> Iterator[AnswerEvent]:
    """The events of these pieces with their numbers of tokens. A token without characters counts
    only between others of its event. ends: of the tokens, ascending.
    """
    at, num = 0, len(tokens)
    for event, start, end in pieces:
        before = at
        while at < num and ends[at] <= start:
            at += 1
        begin = behind = at
        while at < num and ends[at] <= end:
            at += 1
            if tokens[at - 1].start < ends[at - 1]:
                behind = at
        at = behind
        yield replace(event, num_tokens=at - begin, num_before=begin - before)
