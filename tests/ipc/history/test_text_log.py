"""TextLog against the list of its units."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from slipstream_ipc.history.text_log import START, TextCursor, TextLog

# of each unit: its text, and its tokens (none where it is text alone)
Units = list[tuple[str, int]]
units_strategy = st.lists(st.tuples(st.text("ab", max_size=4), st.integers(0, 3)), max_size=12)


def filled(units: Units) -> tuple[TextLog, list[TextCursor]]:
    """The log, and the cursors behind each of its units and before the first."""
    log = TextLog()
    cursors = [START]
    for text, num_tokens in units:
        last = cursors[-1]
        log.append(text, last.num_tokens + num_tokens)
        cursors.append(
            TextCursor(last.unit + 1, last.num_chars + len(text), last.num_tokens + num_tokens)
        )
    return log, cursors


@given(units_strategy)
def test_end_and_text(units: Units) -> None:
    log, cursors = filled(units)
    assert log.end == cursors[-1]
    assert (log.num_units, log.num_tokens) == (len(units), cursors[-1].num_tokens)
    for i, start in enumerate(cursors):
        for j, stop in enumerate(cursors[i:], start=i):
            assert log.text_between(start, stop) == "".join(text for text, _ in units[i:j])


@given(units_strategy, st.integers(0, 40), st.integers(0, 40))
def test_find_knows_the_positions_between_units_and_no_others(
    units: Units, num_chars: int, num_tokens: int
) -> None:
    log, cursors = filled(units)
    here = [c for c in cursors if (c.num_chars, c.num_tokens) == (num_chars, num_tokens)]
    assert log.find(num_chars, num_tokens) == (here[0] if here else None)
    for cursor in cursors:
        found = log.find(cursor.num_chars, cursor.num_tokens)
        assert found is not None
        assert found[1:] == cursor[1:]


def test_find_before_any_token() -> None:
    log = TextLog()
    assert log.find(0, 0) == START
    assert log.find(1, 0) is None
    assert log.find(0, 1) is None
    assert log.find(-1, 0) is None
    assert log.find(0, -1) is None
    log.append("text before its token", 0)
    log.append("x", 1)
    assert log.find(0, 0) == START
    assert log.find(21, 0) == TextCursor(1, 21, 0)
    assert log.find(0, -1) is None
    assert log.find(22, 1) == TextCursor(2, 22, 1)
    assert log.find(21, 1) is None


def test_find_tells_text_alone_apart() -> None:
    log, _ = filled([("a", 1), ("b", 0), ("", 0), ("c", 0), ("d", 2)])
    assert [log.find(chars, 1) for chars in (0, 1, 2, 3, 4)] == [
        None, TextCursor(1, 1, 1), TextCursor(2, 2, 1), TextCursor(4, 3, 1), None,
    ]  # fmt: skip
    assert log.find(4, 2) is None
    assert log.find(4, 3) == TextCursor(5, 4, 3)


@given(units_strategy, st.integers(0, 12), st.integers(0, 10), st.integers(0, 10))
def test_advance_keeps_to_its_budget_and_gets_there(
    units: Units, begin: int, max_chars: int, max_tokens: int
) -> None:
    log, cursors = filled(units)
    way = [cursors[min(begin, len(units))]]
    while way[-1] != log.end:
        way.append(log.advance(way[-1], max_chars, max_tokens))
        assert way[-1] in cursors
        assert way[-1].unit > way[-2].unit
    assert log.advance(log.end, max_chars, max_tokens) == log.end
    for start, stop in pairwise(way):
        fits = stop.num_chars - start.num_chars <= max_chars
        fits &= stop.num_tokens - start.num_tokens <= max_tokens
        assert fits or stop.unit == start.unit + 1
        if stop != log.end:  # one unit more would have been too much
            more = cursors[stop.unit + 1]
            too_long = more.num_chars - start.num_chars > max_chars
            assert too_long or more.num_tokens - start.num_tokens > max_tokens


def test_advance_without_text_is_bounded_by_tokens() -> None:
    """Streams that are not detokenised have tokens, and logprobs, but never a character."""
    log, _ = filled([("", 1)] * 1000)
    assert log.advance(START, 10) == log.end
    assert log.advance(START, 10, 300) == TextCursor(300, 0, 300)
