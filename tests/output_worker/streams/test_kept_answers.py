"""The store of kept answers, against a model that looks at everything."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream_ipc.messages import (
    KEPT_ENTRY_BYTES,
    MAX_CALLS,
    MAX_KEPT_BYTES,
    AnswerEvent,
    End,
    EventKind,
    KeepOptions,
    KeptAnswer,
    KeptEntry,
)
from slipstream_worker.streams import kept_answers as module
from slipstream_worker.streams.kept_answers import KeptAnswers

MAX_BYTES = 16 * KEPT_ENTRY_BYTES
SCOPES = (b"", b"a", b"b")

IDS = st.integers(0, 15).map(lambda number: bytes([number]) * 16)
OPERATIONS = st.one_of(
    st.tuples(st.just("put"), IDS, st.sampled_from(SCOPES), st.integers(0, 17 * KEPT_ENTRY_BYTES)),
    st.tuples(st.just("get"), IDS, st.sampled_from(SCOPES), st.just(0)),
    st.tuples(st.just("remove"), IDS, st.just(b""), st.just(0)),
)


class Model:
    """The same in lists: (id, scope, answer), used last at the end."""

    def __init__(self) -> None:
        self.all: list[tuple[bytes, bytes, bytes]] = []

    def size(self, scope: bytes | None = None) -> int:
        return sum(
            len(answer) + KEPT_ENTRY_BYTES
            for _, its, answer in self.all
            if scope is None or its == scope
        )

    def put(self, stream_id: bytes, scope: bytes, answer: bytes) -> list[bytes]:
        if any(id_ == stream_id and its != scope for id_, its, _ in self.all):
            return []
        self.remove(stream_id)
        size = len(answer) + KEPT_ENTRY_BYTES
        if size > MAX_BYTES:
            return [stream_id]
        dropped = []
        while self.size() + size > MAX_BYTES:
            largest = min(SCOPES, key=lambda each: (-self.size(each), each))
            victim = next(id_ for id_, its, _ in self.all if its == largest)
            self.remove(victim)
            dropped.append(victim)
        self.all.append((stream_id, scope, answer))
        return dropped

    def get(self, stream_id: bytes, scope: bytes) -> bytes | None:
        for entry in self.all:
            if entry[:2] == (stream_id, scope):
                self.all.remove(entry)
                self.all.append(entry)
                return entry[2]
        return None

    def remove(self, stream_id: bytes) -> bool:
        before = len(self.all)
        self.all = [entry for entry in self.all if entry[0] != stream_id]
        return len(self.all) < before


@given(st.lists(OPERATIONS, max_size=120))
def test_it_does_what_the_model_does(operations: list[tuple[str, bytes, bytes, int]]) -> None:
    store, model = KeptAnswers(MAX_BYTES), Model()
    held: dict[bytes, KeptEntry] = {}  # by the core
    for number, (what, stream_id, scope, size) in enumerate(operations):
        if what == "put":
            answer = number.to_bytes(2, "little") + bytes(size)
            dropped = store.put(stream_id, scope, answer)
            assert dropped == model.put(stream_id, scope, answer)
            for each in dropped:
                held.pop(each, None)
        elif what == "get":
            assert store.get(stream_id, scope) == model.get(stream_id, scope)
        else:
            assert store.remove(stream_id) == model.remove(stream_id)
            held.pop(stream_id, None)
        assert store.num_bytes == model.size() <= MAX_BYTES
        assert set(store.stream_ids) == {id_ for id_, _, _ in model.all}
        assert len(store) == len(model.all)
        if number % 3 == 0:
            entries = store.unsent(KEPT_ENTRY_BYTES)
            held.update({entry.stream_id: entry for entry in entries})
            store.mark_sent(entries)
    while store.has_unsent:
        entries = store.unsent(1)
        assert entries
        held.update({entry.stream_id: entry for entry in entries})
        store.mark_sent(entries)
    assert {(it.stream_id, it.scope, it.answer) for it in held.values()} == set(model.all)


def test_a_scope_that_holds_less_than_others_loses_nothing() -> None:
    store = KeptAnswers(MAX_BYTES)
    modest = [bytes([number]) * 16 for number in range(3)]
    for stream_id in modest:
        assert store.put(stream_id, b"modest", b"") == []
    for number in range(100, 200):
        store.put(bytes([number]) * 16, b"greedy", bytes(number))
    assert all(store.get(stream_id, b"modest") == b"" for stream_id in modest)


def test_what_the_core_lacks_is_sent_again_if_it_is_still_kept() -> None:
    store = KeptAnswers(MAX_BYTES)
    first, second = bytes(16), bytes([1]) * 16
    store.put(first, b"", b"1")
    store.put(second, b"", b"2")
    store.mark_all_sent()
    assert not store.has_unsent
    store.remove(first)
    store.mark_unsent((first, second))
    assert [entry.answer for entry in store.unsent(2**20)] == [b"2"]
    store.clear()
    assert not store.has_unsent
    assert (len(store), store.num_bytes) == (0, 0)


@pytest.mark.parametrize("max_bytes", [0, KEPT_ENTRY_BYTES - 1])
def test_a_store_without_room_keeps_nothing(max_bytes: int) -> None:
    assert KeptAnswers(max_bytes).put(bytes(16), b"", b"") == [bytes(16)]


def test_an_answer_has_a_size_of_its_own() -> None:
    store = KeptAnswers(64 * MAX_KEPT_BYTES)
    assert store.max_answer_bytes == MAX_KEPT_BYTES
    most = 2 * MAX_KEPT_BYTES + 2**18 - KEPT_ENTRY_BYTES
    assert store.put(bytes(16), b"", bytes(most)) == []
    assert store.put(bytes(16), b"", bytes(most + 1)) == [bytes(16)]
    assert len(store) == 0


def test_a_small_store_has_room_for_many_calls() -> None:
    """Their text is little, and what they take beside it is not counted."""
    store = KeptAnswers(2**17)
    events: list[AnswerEvent] = []
    for call in range(MAX_CALLS):
        events += (
            AnswerEvent(EventKind.CALL_BEGINS, "f", call, "chatcmpl-tool-" + "0" * 32, 1, 3),
            AnswerEvent(EventKind.CALL_ARGUMENTS, "{}", call, num_tokens=2),
            AnswerEvent(EventKind.CALL_ENDS, "", call, num_before=3),
        )
    answer = KeptAnswer(KeepOptions(bytes(2**14)), 9, End("stop", 9216), events=tuple(events))
    encoded = msgspec.msgpack.encode(answer)
    assert len(encoded) > 2 * store.max_answer_bytes
    assert store.put(bytes(16), b"", encoded) == []


def test_there_are_no_more_than_a_message_can_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ANSWERS", 3)
    answers = KeptAnswers(2**20)
    ids = [bytes([n]) * 16 for n in range(5)]
    dropped = [answers.put(each, b"scope", b"answer") for each in ids]
    assert dropped == [[], [], [], ids[:1], ids[1:2]]
    assert answers.put(ids[4], b"scope", b"another") == []
    assert answers.stream_ids == tuple(ids[2:])


def test_another_scopes_answer_of_the_same_id_is_left_alone() -> None:
    """It was thrown away: whoever chose an id took what was kept under it from its owner."""
    kept, stream_id = KeptAnswers(2**26), b"i" * 16
    kept.put(stream_id, b"ana", b"answer of ana")
    assert kept.put(stream_id, b"bob", b"x") == []
    assert kept.get(stream_id, b"ana") == b"answer of ana"
    assert kept.get(stream_id, b"bob") is None
    assert kept.is_of_another(stream_id, b"bob")
    assert not kept.is_of_another(stream_id, b"ana")
    assert not kept.is_of_another(b"j" * 16, b"bob")
