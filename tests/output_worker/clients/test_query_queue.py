"""Whose question is next, against a list of all that wait."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream_ipc.messages import Render
from slipstream_worker.clients.query_queue import MAX_WAITING, QueryQueue, QueuedQuery

CLIENTS = [b"a", b"b", b"c"]
MAX_ASKED = 10
RENDER = Render(0, "x")

KEYS = {b"a": b"", b"b": b"key", b"c": b"key"}
acts = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from(CLIENTS), st.integers(0, 20)),
        st.tuples(st.just("leave"), st.sampled_from(CLIENTS), st.just(0)),
        st.tuples(st.just("answer"), st.just(b""), st.integers(0, 99)),
    ),
    max_size=100,
)


@given(acts)
def test_every_question_is_asked_once_unless_it_is_withdrawn(
    acts: list[tuple[str, bytes, int]],
) -> None:
    lane = QueryQueue(MAX_ASKED)
    waiting: list[QueuedQuery] = []
    asked: list[QueuedQuery] = []

    def ask_more() -> None:
        while (query := lane.next()) is not None:
            assert sum(each.size for each in asked) < MAX_ASKED
            waiting.remove(query)
            asked.append(query)
        assert not waiting or sum(each.size for each in asked) >= MAX_ASKED
        assert set(lane.clients) == {each.client for each in waiting + asked}

    for number, (act, client, size) in enumerate(acts):
        if act == "ask":
            query = QueuedQuery(client, number, RENDER, size, KEYS[client] or client)
            lane.add(query)
            waiting.append(query)
        elif act == "leave":
            lane.withdraw(client)
            waiting = [each for each in waiting if each.client != client]
        elif asked:
            lane.done(asked.pop(size % len(asked)))
        ask_more()
    while asked:
        lane.done(asked.pop())
        ask_more()
    assert not lane.clients
    assert not waiting


def test_a_client_waits_for_one_question_of_each_other() -> None:
    lane = QueryQueue(1)
    for number in range(50):
        for client in (b"a", b"b"):
            lane.add(QueuedQuery(client, number, RENDER, 1, client))
    first = lane.next()
    lane.add(QueuedQuery(b"c", 0, RENDER, 1000, b"c"))
    turns = []
    while first is not None:
        turns.append(first.client)
        lane.done(first)
        first = lane.next()
    assert turns[:6] == [b"a", b"b", b"a", b"c", b"b", b"a"]
    assert len(turns) == 101


def test_clients_with_one_key_are_one_tenant() -> None:
    lane = QueryQueue(1)
    for number in range(20):  # as many clients
        lane.add(QueuedQuery(b"%d" % number, 0, RENDER, 1, b"key"))
    lane.add(QueuedQuery(b"a", 0, RENDER, 1, b"a"))
    first = lane.next()
    turns = []
    while first is not None:
        turns.append(first.tenant)
        lane.done(first)
        first = lane.next()
    assert turns[:3] == [b"key", b"a", b"key"]
    assert len(turns) == 21
    num = 0
    while not lane.why_full(query := QueuedQuery(b"%d" % num, 0, RENDER, 1, b"key")):
        lane.add(query)
        num += 1
    assert num == MAX_WAITING // 2
    assert not lane.why_full(QueuedQuery(b"a", 0, RENDER, 1, b"a"))
    lane.withdraw(b"3")  # that client's alone
    assert not lane.why_full(query)
    lane.add(query)
    assert lane.why_full(query)


def test_there_is_always_room_for_somebody_new() -> None:
    lane = QueryQueue(1)
    for number in range(6):
        query = QueuedQuery(b"%d" % number, 0, RENDER, 100_000, b"%d" % number)
        assert not lane.why_full(query)
        while not lane.why_full(query):
            lane.add(query)
