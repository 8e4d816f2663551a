"""Deltas to streams: whatever a worker repeats, cuts or loses, a reader gets its text once."""

from __future__ import annotations

from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from tests.helpers.fake_worker import Entry, deltas, end_of

from slipstream.client.streams.stream_state import StreamState
from slipstream.client.streams.stream_table import ClientStreamTable
from slipstream.errors import StreamLostError, SupersededError, UnknownStreamError
from slipstream.request.requests import new_submit
from slipstream_ipc.columns import u32
from slipstream_ipc.errors import ProtocolError
from slipstream_ipc.messages import (
    Accepted,
    Deltas,
    Resume,
    SamplingParams,
    Superseded,
    UnknownStreams,
)


def new_state(table: ClientStreamTable) -> StreamState:
    state = StreamState(new_submit("x", SamplingParams()), wants_whole=False)
    table.add(state)
    return state


def resumed(table: ClientStreamTable, num_chars: int = 0, num_tokens: int = 0) -> StreamState:
    state = StreamState(Resume(0, bytes(16), num_chars, num_tokens), wants_whole=False)
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
    table = ClientStreamTable()
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
    table = ClientStreamTable()
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
    table = ClientStreamTable()
    state, other = new_state(table), new_state(table)
    late = Entry(state.handle, "b", 1, end=end_of("ab"))
    assert not table.deliver(deltas(late, Entry(other.handle, "x", end=end_of("x"))))
    assert (text_of(state), state.is_over) == ("", False)
    assert (text_of(other), other.is_over) == ("x", True)


def test_missing_tokens_are_a_gap_where_no_text_is_missing() -> None:
    table = ClientStreamTable()
    state = new_state(table)
    assert not table.deliver(deltas(Entry(state.handle, "a", chars=0, tokens=1)))
    assert not table.deliver(deltas(Entry(state.handle, "", chars=0, tokens=2, ids=[5])))
    assert (text_of(state), ids_of(state)) == ("", [])


def test_gaps_count_at_one_position_only() -> None:
    table = ClientStreamTable()
    state = new_state(table)
    for position in range(10):
        table.deliver(deltas(Entry(state.handle, "y", position + 1)))
        table.deliver(deltas(Entry(state.handle, "y", position + 1)))
        assert table.deliver(deltas(Entry(state.handle, "x", position)))
    assert text_of(state) == "x" * 10
    assert not state.is_over


def test_handles_are_free_again_only_when_the_server_knows() -> None:
    table = ClientStreamTable()
    first, second = new_state(table), new_state(table)
    first.was_sent = True
    abort = table.give_up(first, None)
    assert abort is not None
    assert table.give_up(second, None) is None
    table._next_handle = 0
    assert new_state(table).handle == second.handle
    table.forget(abort)
    table._next_handle = 0
    assert new_state(table).handle == first.handle


def test_handles_wrap() -> None:
    table = ClientStreamTable()
    table._next_handle = 2**32 - 1
    assert [new_state(table).handle for _ in range(2)] == [2**32 - 1, 0]


def test_late_deltas_of_ended_streams_are_no_news() -> None:
    table = ClientStreamTable()
    state = new_state(table)
    table.deliver(deltas(Entry(state.handle, "a", end=end_of("a"))))
    assert table.deliver(deltas(Entry(state.handle, "b", 1, end=end_of("ab"))))
    assert text_of(state) == "a"


# ---- what is kept for a resubmission, against an oracle ------------------------------------------


@dataclass
class Told:
    """What the server has of a stream, and what its reader has taken."""

    state: StreamState
    text: str
    counts: list[int]  # ids to a character
    is_ended: bool = False
    read: list[str] = field(default_factory=list)
    read_ids: list[int] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        """All of them, each naming its character."""
        return self.ids_to(len(self.text))

    def ids_to(self, num_chars: int) -> list[int]:
        """Those of the first characters."""
        return [at for at in range(num_chars) for _ in range(self.counts[at])]

    def entry(self, begin: int, end: int, *, is_last: bool) -> Entry:
        """These characters, and the stream's end."""
        ids = self.ids_to(end)[len(self.ids_to(begin)) :]
        last = end_of(self.ids, "length") if is_last else None
        return Entry(
            self.state.handle, self.text[begin:end], begin, len(self.ids_to(begin)), ids, last
        )

    def take(self, num: int) -> None:
        """Read some of what lies there."""
        for _ in range(min(num, len(self.state.deltas))):
            delta = self.state.deltas.popleft()
            self.read.append(delta.text)
            self.read_ids += delta.token_ids


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=6),
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 5), st.integers(-3, 1), st.integers(0, 4), st.booleans()),
            max_size=6,
        ),
        max_size=25,
    ),
    st.integers(1, 4),
    st.integers(1, 5),
    st.data(),
)
def test_whatever_comes_the_copy_is_exact_and_can_be_asked_for_again(
    counts: list[list[int]],
    messages: list[list[tuple[int, int, int, bool]]],
    most_unread: int,
    many: int,
    data: st.DataObject,
) -> None:
    """Entries begin before, at or behind the reader's position; several may be of one stream."""
    table = ClientStreamTable()
    streams = [
        Told(new_state(table), "".join(chr(97 + at) for at in range(len(each))), each)
        for each in counts
    ]
    with patch.multiple(
        "slipstream.client.streams.stream_table",
        MOST_UNREAD=most_unread,
        LOOK_EVERY=1,
        MANY=many,
        _MAX_GAPS=10**6,
    ):
        for message in messages:
            entries = []
            has = [len(each.text) if each.is_ended else None for each in streams]
            expected_gap = False
            for which, offset, size, has_end in message:
                told = streams[which % len(streams)]
                if told.is_ended:
                    num_chars = len(told.text)
                else:
                    num_chars, num_tokens = table.position(told.state)
                    assert num_tokens == len(told.ids_to(num_chars))
                begin = min(max(0, num_chars + offset), len(told.text))
                end = min(begin + size, len(told.text))
                entries.append((told, begin, end, has_end and end == len(told.text)))
            # what the reader has after each entry, by the rule and nothing else
            reach = [0 if each.is_ended else table.position(each.state)[0] for each in streams]
            for told, begin, end, is_last in entries:
                at = streams.index(told)
                if told.is_ended or has[at] is not None:
                    continue
                if begin > reach[at]:
                    expected_gap = True
                    continue
                reach[at] = max(reach[at], end)
                if is_last:
                    has[at] = end
            is_whole = table.deliver(
                deltas(*[told.entry(b, e, is_last=last) for told, b, e, last in entries])
            )
            assert is_whole != expected_gap
            for at, told in enumerate(streams):
                if told.is_ended:
                    continue
                assert told.state.is_over == (has[at] is not None)
                told.is_ended = told.state.is_over
                if not told.is_ended:
                    assert table.position(told.state) == (reach[at], len(told.ids_to(reach[at])))
                    kept = table.token_ids(told.state)
                    assert kept is not None
                    assert u32(kept).tolist() == told.ids_to(reach[at])
                told.take(data.draw(st.integers(0, 3)))
                so_far = told.read_ids + ids_of(told.state)
                num_chars = len(told.text) if told.is_ended else reach[at]
                assert "".join(told.read) + text_of(told.state) == told.text[:num_chars]
                assert so_far == told.ids_to(num_chars)
                assert (told.state.end is not None) == told.is_ended


@pytest.mark.parametrize("num", [1, 100])
def test_columns_that_do_not_fit_are_refused(num: int) -> None:
    table = ClientStreamTable()
    states = [new_state(table) for _ in range(num)]
    good = deltas(*[Entry(state.handle, "a") for state in states])
    bad = [
        Deltas(good.handles, good.chars, good.tokens, good.texts, good.token_ids[4:]),
        Deltas(good.handles, good.chars[4:], good.tokens, good.texts, good.token_ids),
        Deltas(good.handles, good.chars, good.tokens + b"x", good.texts, good.token_ids),
        Deltas(good.handles, good.chars, good.tokens, [*good.texts, "b"], good.token_ids),
        Deltas(good.handles, good.chars, good.tokens, good.texts, good.token_ids, b"1234" * 2),
        Deltas(*[getattr(good, f) for f in good.__struct_fields__[:6]], ended=b"\0" * 4),
    ]
    for message in bad:
        with pytest.raises(ProtocolError):
            table.deliver(message)
    assert table.deliver(good)
    assert [text_of(state) for state in states] == ["a"] * num


# ---- streams that are lost, taken over, or never were ------------------------------------------


def test_what_is_unknown_is_asked_for_again_once_over_an_attach() -> None:
    table = ClientStreamTable()
    ours, theirs, aborted = new_state(table), resumed(table), new_state(table)
    for state in (ours, theirs, aborted):
        table.accept(Accepted(state.handle, b""))
    aborted.is_abort_wanted = True
    unknown = UnknownStreams((ours.handle, theirs.handle, aborted.handle, 999))
    assert table.lose(unknown) == [ours]
    assert isinstance(theirs.error, StreamLostError)  # it ran, and nobody can ask for it again
    assert (aborted.is_over, aborted.error) == (True, None)
    assert table.lose(unknown) == []
    assert isinstance(ours.error, StreamLostError)
    assert table.abandoned == []


def test_what_never_was_is_unknown() -> None:
    table = ClientStreamTable()
    state = resumed(table)
    assert table.lose(UnknownStreams((state.handle,))) == []
    assert isinstance(state.error, UnknownStreamError)


def test_who_is_superseded_keeps_what_came_and_is_told() -> None:
    table = ClientStreamTable()
    state, other = new_state(table), new_state(table)
    state.was_sent = True
    table.deliver(deltas(Entry(state.handle, "abc")))
    table.supersede(Superseded(state.handle))
    table.supersede(Superseded(state.handle))
    table.deliver(deltas(Entry(state.handle, "d", 3), Entry(other.handle, "x")))
    assert (text_of(state), text_of(other)) == ("abc", "x")
    assert isinstance(state.error, SupersededError)
    assert table.abandoned == []  # it is not ours to end


def test_to_who_wants_the_end_being_superseded_is_the_end() -> None:
    table = ClientStreamTable()
    state = new_state(table)
    state.is_abort_wanted = True
    table.supersede(Superseded(state.handle))
    assert (state.is_over, state.error) == (True, None)


def test_a_stream_resumed_in_its_middle_goes_on_there() -> None:
    table = ClientStreamTable()
    state = resumed(table, num_chars=7, num_tokens=3)
    assert table.position(state) == (7, 3)
    assert table.token_ids(state) is None
    assert table.deliver(deltas(Entry(state.handle, "xhi", 6, 2, ids=[1, 2, 3])))
    assert (text_of(state), ids_of(state)) == ("hi", [2, 3])
    assert not table.deliver(deltas(Entry(state.handle, "!", 10, 6)))
    table.give_up(state, None)
    assert (state.num_chars, state.num_tokens) == (9, 5)


def test_a_stream_resumed_at_its_beginning_has_all_its_ids() -> None:
    table = ClientStreamTable()
    state = resumed(table)
    table.deliver(deltas(Entry(state.handle, "ab")))
    assert table.token_ids(state) == b"a\0\0\0b\0\0\0"


def test_a_stream_is_sent_again_with_the_adapter_that_it_began_with() -> None:
    """A replica may have other files under the name than the one whose card its client has."""
    table = ClientStreamTable()
    submit = structs.replace(new_submit("x", SamplingParams()), adapter="a", adapter_digest=b"card")
    for said, expected in ((b"", b"card"), (b"card", b"card"), (b"its", b"its")):
        state = StreamState(submit, wants_whole=False)
        table.add(state)
        table.accept(Accepted(state.handle, b"", adapter_digest=said))
        assert state.resubmittable == structs.replace(submit, adapter_digest=expected)
