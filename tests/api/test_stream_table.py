"""Deltas to streams: whatever a worker repeats, cuts or loses, a reader gets its text once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.api.conftest import Entry, deltas, end_of

from slipstream.requests import new_submit
from slipstream.stream_table import StreamState, StreamTable
from slipstream_ipc.messages import SamplingParams


def new_state(table: StreamTable) -> StreamState:
    state = StreamState(new_submit("x", SamplingParams()), wants_whole=False)
    table.add(state)
    return state


def text_of(state: StreamState) -> str:
    return "".join(delta.text for delta in state.deltas)


def ids_of(state: StreamState) -> list[int]:
    return [token_id for delta in state.deltas for token_id in delta.token_ids]


@given(
    st.lists(st.text(max_size=8), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 8), st.integers(0, 8)), max_size=40),
)
def test_any_slices_make_the_prefix_they_cover(
    texts: list[str], slices: list[tuple[int, int, int]]
) -> None:
    table = StreamTable()
    states = [new_state(table) for _ in texts]
    covered = [0] * len(texts)
    for which, begin, end in slices:
        index = which % len(texts)
        begin, end = sorted((min(begin, len(texts[index])), min(end, len(texts[index]))))
        table.deliver(deltas(Entry(states[index].handle, texts[index][begin:end], begin)))
        if begin <= covered[index] and not states[index].is_over:
            covered[index] = max(covered[index], end)
        assert text_of(states[index]) == texts[index][: covered[index]]
        assert ids_of(states[index]) == [ord(char) for char in texts[index][: covered[index]]]


@given(st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=5), st.data())
def test_tokens_without_text_and_text_without_tokens(
    parts: list[list[int]], data: st.DataObject
) -> None:
    """Characters and tokens are cut apart: one may be known where the other is not."""
    table = StreamTable()
    state = new_state(table)
    text, ids = "", []
    for part in parts:
        piece = data.draw(st.text(max_size=4))
        back_chars = data.draw(st.integers(0, len(text)))
        back_tokens = data.draw(st.integers(0, len(ids)))
        entry = Entry(
            state.handle,
            text[len(text) - back_chars :] + piece,
            len(text) - back_chars,
            len(ids) - back_tokens,
            ids[len(ids) - back_tokens :] + part,
        )
        assert table.deliver(deltas(entry))
        text, ids = text + piece, ids + part
        assert (text_of(state), ids_of(state)) == (text, ids)


def test_gap_takes_nothing_and_ends_nothing() -> None:
    table = StreamTable()
    state, other = new_state(table), new_state(table)
    late = Entry(state.handle, "b", 1, end=end_of("ab"))
    assert not table.deliver(deltas(late, Entry(other.handle, "x", end=end_of("x"))))
    assert (text_of(state), state.is_over) == ("", False)
    assert (text_of(other), other.is_over) == ("x", True)


def test_missing_tokens_are_a_gap_where_no_text_is_missing() -> None:
    table = StreamTable()
    state = new_state(table)
    assert not table.deliver(deltas(Entry(state.handle, "a", chars=0, tokens=1)))
    assert not table.deliver(deltas(Entry(state.handle, "", chars=0, tokens=2, ids=[5])))
    assert (text_of(state), ids_of(state)) == ("", [])


def test_gaps_count_at_one_position_only() -> None:
    table = StreamTable()
    state = new_state(table)
    for position in range(10):
        table.deliver(deltas(Entry(state.handle, "y", position + 1)))
        table.deliver(deltas(Entry(state.handle, "y", position + 1)))
        assert table.deliver(deltas(Entry(state.handle, "x", position)))
    assert text_of(state) == "x" * 10
    assert not state.is_over


def test_handles_are_free_again_only_when_the_server_knows() -> None:
    table = StreamTable()
    first, second = new_state(table), new_state(table)
    first.was_sent = True
    table.give_up(first, None)
    table.give_up(second, None)
    table._next_handle = 0
    assert new_state(table).handle == second.handle
    table.forget(first)
    table._next_handle = 0
    assert new_state(table).handle == first.handle


def test_handles_wrap() -> None:
    table = StreamTable()
    table._next_handle = 2**32 - 1
    assert [new_state(table).handle for _ in range(2)] == [2**32 - 1, 0]


def test_late_deltas_of_ended_streams_are_no_news() -> None:
    table = StreamTable()
    state = new_state(table)
    table.deliver(deltas(Entry(state.handle, "a", end=end_of("a"))))
    assert table.deliver(deltas(Entry(state.handle, "b", 1, end=end_of("ab"))))
    assert text_of(state) == "a"
