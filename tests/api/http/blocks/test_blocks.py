"""Blocks of an answer, and the numbers of their events: the same for every division."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.answer_units import AnswerUnit, answer_units
from tests.helpers.message_events import content_of, content_of_units

from slipstream.http.anthropic.message_printer import MessagePrinter
from slipstream.http.blocks.block_printer import (
    NOTHING,
    AnswerHead,
    BlockWriter,
    NumberedEvent,
    blocks_of,
)
from slipstream.http.blocks.blocks import Block, BlockKind, BlockReader
from slipstream.http.openai.usage import Usage
from slipstream_ipc.messages import AnswerEvent, End, EventKind

HEAD = AnswerHead("msg_1", "m", 0)
USAGE = Usage(3, 4, 7)
TYPES = {
    BlockKind.CONTENT: "text",
    BlockKind.REASONING: "thinking",
    BlockKind.CALL: "tool_use",
}


@st.composite
def divisions(draw: st.DrawFn) -> tuple[list[AnswerUnit], list[list[AnswerEvent]]]:
    """An answer, and its events in parts: consecutive ones, their texts cut as well."""
    units = draw(answer_units())
    pieces: list[AnswerEvent] = []
    for event in [event for unit in units for event in unit.events]:
        cut = draw(st.integers(0, len(event.text)))
        if event.kind == EventKind.CALL_BEGINS or cut in (0, len(event.text)):
            pieces.append(event)
        else:
            pieces += [
                AnswerEvent(event.kind, event.text[:cut], event.call),
                AnswerEvent(event.kind, event.text[cut:], event.call),
            ]
    places = draw(st.lists(st.integers(0, len(pieces)), max_size=6))
    bounds = [0, *sorted(places), len(pieces)]
    return units, [pieces[begin:end] for begin, end in pairwise(bounds)]


def printed(parts: list[list[AnswerEvent]], after: int = NOTHING) -> list[NumberedEvent]:
    """The events of an answer that comes in these parts, after a number."""
    writer = BlockWriter(MessagePrinter(HEAD), after)
    found = writer.begin(USAGE)
    for part in parts:
        found += writer.write(part)
    return found + writer.finish(End("stop", 4), USAGE)


def data_of(event: NumberedEvent) -> Any:
    """An event's data."""
    return json.loads(event.data.partition(b"data: ")[2])


def places_of(events: list[NumberedEvent]) -> dict[int, Any]:
    """What has each number: a character of a text, or another event."""
    found: dict[int, Any] = {}
    for event in events:
        data = data_of(event)
        if data["type"] != "content_block_delta":
            pieces: list[Any] = [event.data]
        else:
            kind, text = (value for value in data["delta"].values())
            pieces = [(data["index"], kind, char) for char in text]
        for at, piece in enumerate(pieces):
            found[event.number - len(pieces) + 1 + at] = piece
    return found


@given(divisions())
def test_every_character_and_every_other_event_has_a_number(
    divided: tuple[list[AnswerUnit], list[list[AnswerEvent]]],
) -> None:
    units, parts = divided
    whole = printed([[event for unit in units for event in unit.events]])
    places = places_of(whole)
    assert list(places) == list(range(whole[-1].number + 1))
    assert places_of(printed(parts)) == places


@given(divisions(), st.data())
def test_what_follows_a_number_is_the_rest(
    divided: tuple[list[AnswerUnit], list[list[AnswerEvent]]], data: st.DataObject
) -> None:
    _, parts = divided
    whole = printed(parts)
    places = places_of(whole)
    after = data.draw(st.integers(NOTHING, whole[-1].number + 2))
    rest = printed(parts, after)
    assert places_of(rest) == {number: each for number, each in places.items() if number > after}
    numbers = [event.number for event in rest]
    assert numbers == sorted(set(numbers))
    # no more is cut than the text in which the number is
    assert rest[1:] == [event for event in whole if event.number > after][1:]


@given(divisions())
def test_blocks_are_those_of_the_events(
    divided: tuple[list[AnswerUnit], list[list[AnswerEvent]]],
) -> None:
    units, parts = divided
    reader = BlockReader()
    for part in parts:
        reader.read(part)
    reader.close(is_complete=True)
    whole = blocks_of([event for part in parts for event in part], End("stop", 1))
    assert shown(reader.blocks) == shown(whole)
    found = [(TYPES[block.kind], block.text, block.name) for block in whole]
    expected = content_of_units(units, b"")
    assert found == [(kind, text, name) for kind, text, _, name in expected]
    content, _ = content_of([("", data_of(event)) for event in printed(parts)])
    assert [(kind, text, name) for kind, text, _, name in content] == found


def shown(blocks: list[Block]) -> list[tuple[Any, ...]]:
    """Blocks by what they hold."""
    return [
        (each.index, each.kind, each.call, each.call_id, each.name, each.text, each.is_complete)
        for each in blocks
    ]


def test_a_block_is_complete_unless_it_was_cut_off() -> None:
    begin = [AnswerEvent(EventKind.CALL_BEGINS, "f"), AnswerEvent(EventKind.CALL_ARGUMENTS, "{")]
    ends = AnswerEvent(EventKind.CALL_ENDS)
    text = AnswerEvent(EventKind.CONTENT, "x")
    for events, reason, expected in (
        ([text], "stop", [True]),
        ([text], "length", [False]),
        ([text, *begin], "stop", [True, False]),
        ([*begin, text], "stop", [False, True]),
        ([*begin, ends, text], "length", [True, False]),
    ):
        end = End(reason, 1)  # type: ignore[arg-type]
        assert [block.is_complete for block in blocks_of(events, end)] == expected
