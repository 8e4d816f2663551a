"""Whose question is next, against a list of all that wait."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream_ipc.messages import Render
from slipstream_worker.clients.query_queue import Query, QueryQueue

CLIENTS = [b"a", b"b", b"c"]
MAX_ASKED = 10
RENDER = Render(0, "x")

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
    waiting: list[Query] = []
    asked: list[Query] = []

    def ask_more() -> None:
        while (question := lane.next()) is not None:
            assert sum(each.size for each in asked) < MAX_ASKED
            waiting.remove(question)
            asked.append(question)
        assert not waiting or sum(each.size for each in asked) >= MAX_ASKED
        assert set(lane.clients) == {each.client for each in waiting + asked}

    for number, (act, client, size) in enumerate(acts):
        if act == "ask":
            question = Query(client, number, RENDER, size)
            lane.add(question)
            waiting.append(question)
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
            lane.add(Query(client, number, RENDER, 1))
    first = lane.next()
    lane.add(Query(b"c", 0, RENDER, 1000))
    turns = []
    while first is not None:
        turns.append(first.client)
        lane.done(first)
        first = lane.next()
    assert turns[:6] == [b"a", b"b", b"a", b"c", b"b", b"a"]
    assert len(turns) == 101


def test_there_is_always_room_for_somebody_new() -> None:
    lane = QueryQueue(1)
    for number in range(6):
        question = Query(b"%d" % number, 0, RENDER, 100_000)
        assert not lane.why_full(question)
        while not lane.why_full(question):
            lane.add(question)
