"""EventLog against the list of its units and their events."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from slipstream_ipc.history.event_log import EventLog, UnitEvents, joined_events
from slipstream_ipc.history.text_log import START, TextCursor
from slipstream_ipc.messages import AnswerEvent, EventKind

TEXTS = (EventKind.CONTENT, EventKind.REASONING, EventKind.CALL_ARGUMENTS)
texts = st.text("ab", max_size=4)
text_events = st.builds(AnswerEvent, st.sampled_from(TEXTS), texts, st.integers(0, 2))
call_events = st.builds(
    AnswerEvent, st.sampled_from([EventKind.CALL_BEGINS, EventKind.CALL_ENDS]), texts
)
own_events = st.lists(st.one_of(text_events, call_events), max_size=3).map(joined_events)
# of each unit: its text and events, or the kind of a text that is one event
units_strategy = st.lists(
    st.tuples(texts, st.one_of(own_events, st.sampled_from([int(kind) for kind in TEXTS]))),
    max_size=12,
)
Units = list[tuple[str, UnitEvents]]


def filled(units: Units) -> tuple[EventLog, list[TextCursor], list[tuple[AnswerEvent, ...]]]:
    """The log, the cursors around its units, and the events of each."""
    log, cursors, events = EventLog(), [START], []
    for num_tokens, (text, of_unit) in enumerate(units, 1):
        if isinstance(of_unit, int):
            log.append_each([text], num_tokens - 1, of_unit)
            events.append((AnswerEvent(EventKind(of_unit), text),) if text else ())
        else:
            log.append_unit(text, num_tokens, of_unit)
            events.append(of_unit)
        cursors.append(log.end)
    return log, cursors, events


def listed(of_units: UnitEvents, text: str) -> tuple[AnswerEvent, ...]:
    if isinstance(of_units, tuple):
        return joined_events(of_units)
    assert bool(of_units) == bool(text), "a kind is of a text"
    return (AnswerEvent(EventKind(of_units & 0xFF), text, of_units >> 8),) if of_units else ()


@given(units_strategy)
def test_events_between_any_two_cursors_are_joined(units: Units) -> None:
    log, cursors, events = filled(units)
    for i, start in enumerate(cursors):
        for j, stop in enumerate(cursors[i:], start=i):
            found = listed(log.events_between(start, stop), log.text_between(start, stop))
            assert found == joined_events(event for some in events[i:j] for event in some)


@given(st.lists(st.one_of(text_events, call_events)))
def test_joined_events_say_the_same(events: list[AnswerEvent]) -> None:
    joined = joined_events(events)
    letters = [
        [(e.kind, e.call, letter) for e in some for letter in (e.text if e.kind in TEXTS else "!")]
        for some in (events, joined)
    ]
    assert letters[0] == letters[1]
    assert joined_events(joined) == joined
    for one, other in pairwise(joined):
        assert one.kind not in TEXTS or (one.kind, one.call) != (other.kind, other.call)


@given(units_strategy, st.integers(0, 40), st.integers(0, 8))
def test_the_characters_of_events_count_for_the_budget(
    units: Units, max_chars: int, max_tokens: int
) -> None:
    log, cursors, _ = filled(units)
    for at, cursor in enumerate(cursors):
        stop = log.advance(cursor, max_chars, max_tokens)
        assert stop in cursors
        if stop.unit > cursor.unit + 1:
            assert log.num_chars_between(cursor, stop) <= max_chars
            assert stop.num_tokens <= cursor.num_tokens + max_tokens
        elif at < len(units):
            assert stop.unit == cursor.unit + 1
        if at + 1 < stop.unit < len(units):  # not one unit less than fits
            further = cursors[stop.unit + 1]
            assert (
                log.num_chars_between(cursor, further) > max_chars
                or further.num_tokens > cursor.num_tokens + max_tokens
            )


def test_a_log_that_begins_later_counts_from_there() -> None:
    log = EventLog(TextCursor(0, 10, 4))
    log.append_each(["ab", "c"], 4, EventKind.REASONING)
    assert log.end == TextCursor(2, 13, 6)
    assert log.events_between(log.find(10, 4) or START, log.end) == EventKind.REASONING
    assert log.num_chars_between(TextCursor(0, 10, 4), log.end) == 3
