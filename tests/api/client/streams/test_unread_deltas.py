"""Deltas that nobody reads: merged, they say the same and hold nobody else's."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.fake_worker import Entry, deltas, end_of
from tests.helpers.patience import PATIENCE_S

from slipstream.client.client import Client, Stream
from slipstream.client.streams.stream_state import StreamState
from slipstream.client.streams.stream_table import ClientStreamTable
from slipstream.client.streams.unread_deltas import merge_unread
from slipstream.delta_batch import DeltaBatch
from slipstream.outputs import Delta, begin_of, is_alone
from slipstream.outputs import end_of as where_it_ends
from slipstream.request.requests import new_submit
from slipstream_ipc.columns import pack_f32, pack_u32
from slipstream_ipc.messages import LogprobColumns, SamplingParams


def one_of_two(text: str, chars: int, tokens: int, ids: list[int], width: int) -> Delta:
    """A delta that lies in a message beside another one."""
    columns = LogprobColumns(
        0,
        pack_f32([0.5] * 3 + [-float(token_id) for token_id in ids for _ in range(width)]),
        pack_u32([9] * 3 + [token_id + k for token_id in ids for k in range(width)]),
        pack_u32([7] * 3 + [token_id + 1 for token_id in ids]),
        pack_u32([1, width]),
    )
    entries = (Entry(9, "abc"), Entry(0, text, chars, tokens, ids))
    return Delta(text, DeltaBatch(deltas(*entries, logprobs=columns if width else None), {}), 1)


@given(
    st.lists(st.tuples(st.text(max_size=3), st.integers(0, 3)), min_size=1, max_size=30),
    st.integers(0, 2),
    st.lists(st.integers(0, 30), max_size=5),
)
def test_merged_deltas_say_the_same(
    parts: list[tuple[str, int]], width: int, merges: list[int]
) -> None:
    unread: deque[Delta] = deque()
    chars, tokens = 11, 5
    expected = []
    for index, (text, count) in enumerate(parts):
        delta = one_of_two(text, chars, tokens, list(range(tokens, tokens + count)), width)
        expected.append(delta)
        unread.append(delta)
        chars, tokens = chars + len(text), tokens + count
        if index in merges:
            merge_unread(unread)
            assert len(unread) == 1
    assert "".join(delta.text for delta in unread) == "".join(text for text, _ in parts)
    assert [i for delta in unread for i in delta.token_ids] == list(range(5, tokens))
    found = [entry for delta in unread for entry in delta.logprobs or []]
    assert found == [entry for delta in expected for entry in delta.logprobs or []]
    assert begin_of(unread[0]) == (11, 5)
    assert where_it_ends(unread[-1]) == (chars, tokens)


def test_full_deltas_are_left_alone() -> None:
    unread: deque[Delta] = deque()
    sizes = []
    for position in range(40):
        ids = [1] * 100
        unread.append(one_of_two("x", position, 100 * position, ids, 0))
        merge_unread(unread)
        sizes = [delta.num_tokens for delta in unread]
    assert sizes == [1100, 1100, 1100, 700]
    assert all(map(is_alone, unread))
    merge_unread(deque())  # the reader was quicker


# ---- in the table ------------------------------------------------------------------------------


@pytest.fixture(params=[1, 40], ids=["few", "many"])
def entries_to_a_message(request: pytest.FixtureRequest) -> int:
    """By which the table takes one way or the other."""
    return cast(int, request.param)


def new_states(
    table: ClientStreamTable, num: int, *, wants_whole: bool = False
) -> list[StreamState]:
    states = [StreamState(new_submit("x", SamplingParams()), wants_whole) for _ in range(num)]
    for state in states:
        table.add(state)
    return states


@pytest.mark.parametrize("wants_whole", [False, True])
def test_who_does_not_read_holds_what_was_said_to_it_alone(
    entries_to_a_message: int, wants_whole: bool
) -> None:
    table = ClientStreamTable()
    states = new_states(table, entries_to_a_message, wants_whole=wants_whole)
    batches: list[weakref.ref[DeltaBatch]] = []
    num = 3000
    for position in range(num):
        ends = end_of("x" * num) if position == num - 1 else None
        table.deliver(deltas(*[Entry(s.handle, "x", position, end=ends) for s in states]))
        newest = states[0].deltas[-1]
        if not is_alone(newest):
            batches.append(weakref.ref(newest._batch))
        for state in states[1:]:
            state.deltas.clear()
        assert len(states[0].deltas) <= 400
    gc.collect()
    alive = sum(batch() is not None for batch in batches)
    assert alive == 0
    assert len(states[0].deltas) < 5
    assert "".join(delta.text for delta in states[0].deltas) == "x" * num
    assert states[0].deltas[-1].finish_reason == "stop"


def test_an_end_that_is_an_error_keeps_what_came_before() -> None:
    table = ClientStreamTable()
    [state] = new_states(table, 1)
    for position in range(100):
        table.deliver(deltas(Entry(state.handle, "x", position)))
    table.deliver(deltas(Entry(state.handle, "", 100, ids=(), end=end_of("x" * 100, "error"))))
    assert "".join(delta.text for delta in state.deltas) == "x" * 100
    assert state.error is not None


class Bell:
    """Counts its rings."""

    def __init__(self) -> None:
        self.num_rings = 0

    def ring(self, state: StreamState) -> None:
        """There is news."""
        self.num_rings += 1


def test_who_looks_while_deltas_are_being_merged_is_rung_for(
    entries_to_a_message: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = ClientStreamTable()
    states = new_states(table, entries_to_a_message)
    state, wakeup = states[0], Bell()

    def merge_while_somebody_looks(unread: deque[Delta]) -> None:
        if unread is state.deltas:
            held = list(unread)
            unread.clear()
            state.wakeup = wakeup  # it found nothing, and waits
            unread.extend(held)

    monkeypatch.setattr(
        "slipstream.client.streams.stream_table.merge_unread", merge_while_somebody_looks
    )
    monkeypatch.setattr("slipstream.client.streams.stream_table.MOST_UNREAD", 2)
    monkeypatch.setattr("slipstream.client.streams.stream_table.LOOK_EVERY", 1)
    for position in range(3):
        assert wakeup.num_rings == 0
        table.deliver(deltas(*[Entry(each.handle, "x", position) for each in states]))
        table.wake()
    assert wakeup.num_rings == 1


class NoIO:
    """A stream's way to the server, of which this test needs nothing."""

    def abandon(self, state: StreamState) -> None:
        """Nobody reads it any more."""


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("trial", range(20))
def test_a_reader_and_merging_get_along(
    hasty_threads: None, entries_to_a_message: int, monkeypatch: pytest.MonkeyPatch, trial: int
) -> None:
    """Nothing is lost, doubled or out of order, and nobody waits for what is there."""
    monkeypatch.setattr("slipstream.client.streams.stream_table.MOST_UNREAD", 1 + trial % 4)
    monkeypatch.setattr("slipstream.client.streams.stream_table.LOOK_EVERY", 2)
    monkeypatch.setattr("slipstream.client.streams.stream_table.MOST_UNREAD_AT_END", trial % 3)
    table = ClientStreamTable()
    states = new_states(table, entries_to_a_message)
    stream = Stream(cast(Client, None), cast(Any, NoIO()), states[0], "delta")
    found: list[Delta] = []
    thread = threading.Thread(target=lambda: found.extend(stream), daemon=True)
    thread.start()
    text = "".join(chr(97 + position % 26) for position in range(200))
    for position, char in enumerate(text):
        end = end_of(text) if position == len(text) - 1 else None
        table.deliver(deltas(*[Entry(s.handle, char, position, end=end) for s in states]))
        table.wake()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert "".join(delta.text for delta in found) == text
    assert [token_id for delta in found for token_id in delta.token_ids] == list(map(ord, text))
    assert stream.position == (len(text), len(text))
