"""The history of a stream that is read as events: a text log whose units carry their events.

- Positions are those of the raw text and its tokens, as in every text log.
- A unit's events are its text as one event of a kind, or events of their own, which may be none.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise

from msgspec.structs import replace

from slipstream_ipc.history.text_log import START, TextCursor, TextLog
from slipstream_ipc.messages import TEXT_KINDS, AnswerEvent, EventKind

__all__ = ["EventLog", "UnitEvents", "joined_entries", "joined_events", "kind_of"]

_EVENT_CHARS = 12  # what an event takes in a message beside its text, a generous estimate

# the kind of a text that is one event (and from bit 8 on its call), or events of its own
UnitEvents = int | tuple[AnswerEvent, ...]


def kind_of(text: str, events: tuple[AnswerEvent, ...], num_tokens: int) -> UnitEvents:
    """The events of a unit: their kind, if they are its text and all its tokens as one event; 0 if
    it has neither text, nor events, nor tokens.
    """
    if not events:
        return () if text or num_tokens else 0
    event = events[0]
    if len(events) > 1 or event.kind not in TEXT_KINDS:
        return events
    is_all = event.text == text and event.num_tokens == num_tokens
    return event.kind | event.call << 8 if is_all else events


def joined_events(
    events: Iterable[AnswerEvent], *, with_tokens: bool = False
) -> tuple[AnswerEvent, ...]:
    """The same events, with adjacent texts of one kind and call joined; empty texts are left out.

    with_tokens: their numbers of tokens are kept, and texts with other tokens between them stay
    apart. Without, the numbers are 0, and the events of a stream are the same however it was
    divided.
    """
    joined: list[AnswerEvent] = []
    texts: list[str] = []  # of the last event, if it is a text
    num_tokens = 0  # of the last event, if it is a text
    num_left_out = 0  # tokens of empty texts

    def close() -> None:
        if len(texts) > 1:
            joined[-1] = replace(joined[-1], text="".join(texts), num_tokens=num_tokens)
        texts.clear()

    for event in events:
        if not with_tokens and (event.num_tokens or event.num_before):
            event = replace(event, num_tokens=0, num_before=0)
        is_text = event.kind in TEXT_KINDS
        if is_text and not event.text:
            num_left_out += event.num_before + event.num_tokens
            continue
        if num_left_out:
            event = replace(event, num_before=event.num_before + num_left_out)
            num_left_out = 0
        follows = bool(texts) and not event.num_before
        if follows and (joined[-1].kind, joined[-1].call) == (event.kind, event.call):
            texts.append(event.text)
            num_tokens += event.num_tokens
            continue
        close()
        joined.append(event)
        if is_text:
            texts.append(event.text)
            num_tokens = event.num_tokens
    close()
    return tuple(joined)


def joined_entries(entries: Iterable[tuple[str, UnitEvents, int]]) -> tuple[AnswerEvent, ...]:
    """The joined events of consecutive units or entries of a stream, with their tokens. entries:
    of each its text, its events and its number of tokens.
    """
    events: list[AnswerEvent] = []
    num_before = 0  # tokens after the last event
    for text, of_entry, num_tokens in entries:
        if not isinstance(of_entry, int):
            own = of_entry
        elif of_entry:
            kind, call = EventKind(of_entry & 0xFF), of_entry >> 8
            own = (AnswerEvent(kind, text, call, num_tokens=num_tokens),)
        else:
            own = ()
        num_left = num_tokens
        for event in own:
            num_left -= event.num_before + event.num_tokens
            if num_before:
                event = replace(event, num_before=event.num_before + num_before)
                num_before = 0
            events.append(event)
        num_before += max(num_left, 0)
    return joined_events(events, with_tokens=True)


class EventLog(TextLog):
    """Append-only units of one stream with their events, from the position `start` on."""

    __slots__ = ("_sizes", "_unit_events")

    def __init__(self, start: TextCursor = START) -> None:
        super().__init__(start)
        self._unit_events: list[UnitEvents] = []
        self._sizes: list[int] = []  # characters of the texts and events up to each unit's end

    def append(self, text: str, num_tokens: int) -> None:
        """Release `text` without events together with all tokens up to the `num_tokens`-th."""
        self.append_unit(text, num_tokens, ())

    def append_unit(self, text: str, num_tokens: int, events: tuple[AnswerEvent, ...]) -> None:
        """Release `text` and its events together with all tokens up to the `num_tokens`-th."""
        kind = kind_of(text, events, num_tokens - self.num_tokens)
        super().append(text, num_tokens)
        self._unit_events.append(kind)
        size = len(text)
        if not isinstance(kind, int):
            size += sum(len(event.text) + len(event.call_id) + _EVENT_CHARS for event in events)
        self._sizes.append(size + (self._sizes[-1] if self._sizes else 0))

    def append_each(self, texts: Sequence[str], before: int, kind: int = 0) -> None:
        """Release each of `texts` together with one token, after the first `before` tokens; each
        is one event of this kind.
        """
        super().append_each(texts, before)
        size = self._sizes[-1] if self._sizes else 0
        for text in texts:
            size += len(text)
            self._sizes.append(size)
            self._unit_events.append(kind if text or not kind else ())

    def advance(
        self, cursor: TextCursor, max_chars: int, max_tokens: int = sys.maxsize
    ) -> TextCursor:
        """Advance as any text log does; the characters of events count, too."""
        stop = super().advance(cursor, max_chars, max_tokens)
        if stop.unit - cursor.unit <= 1:
            return stop
        before = self._sizes[cursor.unit - 1] if cursor.unit else 0
        unit = bisect_right(self._sizes, before + max_chars, cursor.unit, stop.unit)
        unit = max(unit, cursor.unit + 1)
        if unit >= stop.unit:
            return stop
        num_chars = cursor.num_chars + sum(map(len, self._texts[cursor.unit : unit]))
        return TextCursor(unit, num_chars, self._token_ends[unit - 1])

    def events_between(self, start: TextCursor, stop: TextCursor) -> UnitEvents:
        """The events released between two cursors, joined: the kind of the text between them, if
        it is one event with all tokens; 0 if there is nothing.
        """
        of_units = self._unit_events[start.unit : stop.unit]
        if not of_units:
            return 0
        first = of_units[0]
        if len(of_units) == 1 or (
            isinstance(first, int) and of_units.count(first) == len(of_units)
        ):
            return first
        entries = []
        at, num_before = start.unit, start.num_tokens
        for kind, same in groupby(of_units):
            begin, at = at, at + sum(1 for _ in same)
            units = [(begin, at)] if isinstance(kind, int) else pairwise(range(begin, at + 1))
            for first_unit, end in units:
                num_tokens = self._token_ends[end - 1] - num_before
                entries.append(("".join(self._texts[first_unit:end]), kind, num_tokens))
                num_before += num_tokens
        num_tokens = stop.num_tokens - start.num_tokens
        return kind_of(self.text_between(start, stop), joined_entries(entries), num_tokens)

    def num_chars_between(self, start: TextCursor, stop: TextCursor) -> int:
        """The size in a message of the texts and events between two cursors, in characters."""
        if stop.unit == start.unit:
            return 0
        return self._sizes[stop.unit - 1] - (self._sizes[start.unit - 1] if start.unit else 0)
