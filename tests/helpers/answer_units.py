"""Answers as a worker's units: raw text, its tokens and the events that were made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st
from tests.helpers.fake_worker import Entry

from slipstream_ipc.messages import AnswerEvent, End, EventKind

PIECES = st.text("ab{}", max_size=3)


@dataclass(frozen=True)
class AnswerUnit:
    """What is released at once: it is never divided."""

    text: str
    num_tokens: int
    events: tuple[AnswerEvent, ...]


@st.composite
def answer_units(draw: st.DrawFn) -> list[AnswerUnit]:
    """An answer of reasoning, content and calls, with delimiters between."""
    units: list[AnswerUnit] = []
    call = 0

    def add(text: str, *events: AnswerEvent, least: int = 1) -> None:
        units.append(AnswerUnit(text, draw(st.integers(least, 2)), events))

    for part in draw(st.lists(st.sampled_from(["content", "reasoning", "call"]), max_size=5)):
        if part == "call":
            name, written = (
                draw(st.sampled_from(["f", "g"])),
                draw(st.sampled_from(["", f"id-{call}"])),
            )
            add("<call>")
            begin = AnswerEvent(EventKind.CALL_BEGINS, name, call, written)
            first = AnswerEvent(EventKind.CALL_ARGUMENTS, "{", call)
            if draw(st.booleans()):
                add(f"{name}:{{", begin, first)
            else:
                add(f"{name}:", begin)
                add("{", first)
            for piece in draw(st.lists(PIECES, max_size=3)):
                add(piece, AnswerEvent(EventKind.CALL_ARGUMENTS, piece, call), least=0)
            if draw(st.booleans()):
                add("</call>", AnswerEvent(EventKind.CALL_ENDS, "", call))
            call += 1
            continue
        kind = EventKind.CONTENT if part == "content" else EventKind.REASONING
        if kind == EventKind.REASONING:
            add("<think>")
        for piece in draw(st.lists(PIECES, max_size=4)):
            add(piece, AnswerEvent(kind, piece))
        if kind == EventKind.REASONING:
            add(draw(st.sampled_from(["</think>", ""])))
    return units


def entry_of(
    handle: int,
    units: Sequence[AnswerUnit],
    begin: int,
    end: int,
    *,
    lists_events: bool,
    is_last: bool = False,
) -> Entry:
    """Units `begin` to `end` as one entry of a message; all of its events listed, or a kind where
    that says the same.
    """
    before, these = units[:begin], units[begin:end]
    text = "".join(unit.text for unit in these)
    num_tokens = sum(unit.num_tokens for unit in before)
    ids = range(num_tokens, num_tokens + sum(unit.num_tokens for unit in these))
    events = tuple(event for unit in these for event in unit.events)
    last = End("stop", sum(unit.num_tokens for unit in units)) if is_last else None
    entry = Entry(handle, text, sum(len(unit.text) for unit in before), num_tokens, ids, last)
    kinds = {event.kind | event.call << 8 for event in events}
    is_one = len(kinds) == 1 and "".join(event.text for event in events) == text != ""
    if is_one and not lists_events and {event.kind for event in events} <= {1, 2, 4}:
        return replace(entry, kind=kinds.pop())
    return replace(entry, events=events)


def whole_events(units: Sequence[AnswerUnit]) -> list[tuple[EventKind, str, int]]:
    """Kind, text and call of an answer's events, adjacent pieces joined: simple, and quadratic."""
    joined: list[tuple[EventKind, str, int]] = []
    for event in [event for unit in units for event in unit.events]:
        in_pieces = event.kind not in (EventKind.CALL_BEGINS, EventKind.CALL_ENDS)
        if in_pieces and not event.text:
            continue
        if in_pieces and joined and (joined[-1][0], joined[-1][2]) == (event.kind, event.call):
            joined[-1] = (event.kind, joined[-1][1] + event.text, event.call)
        else:
            joined.append((event.kind, event.text, event.call))
    return joined
