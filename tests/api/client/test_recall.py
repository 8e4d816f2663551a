"""Recalls of kept answers, from a client's side."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from slipstream.answers.tool_calls import call_id
from slipstream.client.connection.queries import PendingQueries, Query, new_recall
from slipstream.errors import OverloadedError
from slipstream_ipc.errors import ProtocolError
from slipstream_ipc.messages import (
    AnswerEvent,
    Cancelled,
    End,
    EventKind,
    Fault,
    KeepOptions,
    KeptAnswer,
    Recalled,
)

STREAM_ID = "0123456789abcdef" * 2
EVENTS = (
    AnswerEvent(EventKind.CALL_BEGINS, "f"),
    AnswerEvent(EventKind.CALL_ENDS),
    AnswerEvent(EventKind.CALL_BEGINS, "g", 1, "its own"),
)


class Asked:
    """Queries of a client, and what it has sent."""

    def __init__(self) -> None:
        self.queries = PendingQueries()
        self.sent: list[Query] = []

    def recall(self, stream_id: str = STREAM_ID) -> Future[Any]:
        future: Future[Any] = Future()
        recall = new_recall(stream_id, b"scope", forget=True)
        self.queries.ask(recall, future, 0.0, lambda command: command())
        self.flush()
        return future

    def flush(self) -> None:
        self.queries.flush(lambda query: self.sent.append(query) is None)


def test_an_answer_comes_with_ids_for_its_calls() -> None:
    asked = Asked()
    future = asked.recall()
    answer = KeptAnswer(KeepOptions(b"record"), 3, End("stop", 9), events=EVENTS)
    asked.queries.answer(Recalled(0, answer))
    ids = [event.call_id for event in future.result(0).answer.events]
    assert ids == [call_id(bytes.fromhex(STREAM_ID), 0), "", "its own"]


@pytest.mark.parametrize("answer", [None, KeptAnswer(KeepOptions()), KeptAnswer(KeepOptions(), 1)])
def test_what_is_unknown_or_runs_is_passed_on(answer: KeptAnswer | None) -> None:
    asked = Asked()
    future = asked.recall()
    asked.queries.answer(Recalled(0, answer))
    assert future.result(0) == Recalled(0, answer)


def test_it_is_asked_again_after_an_attach_until_it_is_answered_or_given_up() -> None:
    asked = Asked()
    answered, cancelled, _ = [asked.recall() for _ in range(3)]
    asked.queries.answer(Recalled(0))
    cancelled.cancel()
    assert answered.done()
    asked.queries.refill()
    asked.flush()
    assert [query.number for query in asked.sent] == [0, 1, 2, 2]
    assert asked.sent[2] == asked.sent[3]


def test_it_is_asked_again_where_its_stream_was_lost_and_comes_back() -> None:
    """What the server says of the first one is that there is no such stream."""
    asked = Asked()
    future, other = asked.recall(), asked.recall("f" * 32)
    given_up = asked.recall()
    asked.queries.ask_again(frozenset([bytes.fromhex(STREAM_ID)]))
    given_up.cancel()
    asked.queries.answer(Recalled(0))
    asked.queries.answer(Recalled(1))
    assert (future.done(), other.done()) == (False, True)
    asked.flush()
    assert [query.number for query in asked.sent] == [0, 1, 2, 3]
    answer = KeptAnswer(KeepOptions(), 1)
    asked.queries.answer(Recalled(3, answer))
    assert future.result(0).answer == answer


def test_faults_and_foreign_answers() -> None:
    asked = Asked()
    future = asked.recall()
    with pytest.raises(ProtocolError):
        asked.queries.answer(Cancelled(0, ("unknown",)))
    asked.queries.answer(Recalled(0, fault=Fault("overloaded", "much is unread")))
    with pytest.raises(OverloadedError):
        future.result(0)
