"""The history of a stream that is read as events: a text log whose units carry their events.

- Positions are those of the raw text and its tokens, as in every text log.
- A unit's events are its text as one event of a kind, or events of their own, which may be none.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from slipstream_ipc.history.text_log import START, TextCursor, TextLog
from slipstream_ipc.messages import AnswerEvent, EventKind

__all__ = ["TEXT_KINDS", "EventLog", "UnitEvents", "joined_events", "kind_of"]

TEXT_KINDS = frozenset({EventKind.CONTENT, EventKind.REASONING, EventKind.CALL_ARGUMENTS})
_EVENT_CHARS = 8  # what an event takes in a message beside its text, a generous estimate

# the kind of a text that is one event (and from bit 8 on its call), or events of its own
UnitEvents = int | tuple[AnswerEvent, ...]


def kind_of(text: str, events: tuple[AnswerEvent, ...]) -> UnitEvents:
    """The events of a unit: their kind, if they are its text as one event."""
    if not events:
        return () if text else 0
    event = events[0]
    if len(events) == 1 and event.kind in TEXT_KINDS and event.text == text:
        return event.kind | event.call << 8
    return events


def joined_events(events: Iterable[AnswerEvent]) -> tuple[AnswerEvent, ...]:
    """The same events, with adjacent texts of one kind and call joined; empty texts are left
    out.
    """
    joined: list[AnswerEvent] = []
    texts: list[str] = []  # of the last event, if it is a text

    def close() -> None:
        if len(texts) > 1:
            last = joined[-1]
            joined[-1] = AnswerEvent(last.kind, "".join(texts), last.call)
        texts.clear()

    for event in events:
        if event.kind not in TEXT_KINDS:
            close()
            joined.append(event)
        elif not event.text:
            continue
        elif texts and (joined[-1].kind, joined[-1].call) == (event.kind, event.call):
            texts.append(event.text)
        else:
            close()
            joined.append(event)
            texts.append(event.text)
    close()
    return tuple(joined)


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
        super().append(text, num_tokens)
        kind = kind_of(text, events)
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
            self._unit_events.append(kind if text else 0)

    def advance(
        self, cursor: TextCursor, max_chars: int, max_tokens: int = sys.maxsize
    ) -> TextCursor:
        """As for any text log; the characters of events count, too."""
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
        it is one event; 0 if there is neither text nor events.
        """
        of_units = self._unit_events[start.unit : stop.unit]
        kinds = {
            kind if isinstance(kind, int) else -1 for kind in of_units if kind != 0
        }  # a unit with kind 0 has no text
        if not kinds:
            return 0
        if len(kinds) == 1:
            [kind] = kinds
            if kind >= 0:
                return kind
        if len(of_units) == 1:
            return of_units[0]
        events = list[AnswerEvent]()
        for unit, kind_or_events in enumerate(of_units, start.unit):
            if not isinstance(kind_or_events, int):
                events += kind_or_events
            elif kind_or_events:
                kind, call = EventKind(kind_or_events & 0xFF), kind_or_events >> 8
                events.append(AnswerEvent(kind, self._texts[unit], call))
        return kind_of(self.text_between(start, stop), joined_events(events))

    def num_chars_between(self, start: TextCursor, stop: TextCursor) -> int:
        """What the texts and events between two cursors take in a message, in characters."""
        if stop.unit == start.unit:
            return 0
        return self._sizes[stop.unit - 1] - (self._sizes[start.unit - 1] if start.unit else 0)
