"""Answers of several replicas to one query, of which some have older copies of a stream."""

from __future__ import annotations

from concurrent.futures import Future
from itertools import permutations
from typing import Any

import pytest

from slipstream.client.connection.combined_answer import AnswerOfAll
from slipstream.client.connection.queries import Query
from slipstream.errors import OverloadedError
from slipstream_ipc.messages import (
    Cancel,
    Cancelled,
    End,
    Fault,
    KeepOptions,
    KeptAnswer,
    Locate,
    Located,
    Recall,
    Recalled,
)


def answer_of(query: Query, parts: list[Any]) -> Any:
    future: Future[Any] = Future()
    answer = AnswerOfAll(query, future, len(parts))
    for index, found in enumerate(parts):
        part: Future[Any] = Future()
        part.set_result(found)
        answer.add(index, part)
    return future.result()


def kept(end: End | None) -> Recalled:
    return Recalled(0, KeptAnswer(KeepOptions(), 3, end))


def test_the_answer_of_the_replica_that_completed_a_stream_is_recalled() -> None:
    copies = [kept(End("abort", 5)), kept(None), kept(End("stop", 9)), Recalled(0)]
    for parts in permutations(copies):
        found = answer_of(Recall(0, b"1" * 16), list(parts))
        assert found.answer.end == End("stop", 9)


def test_a_stream_that_still_runs_is_recalled_before_a_copy_that_was_left() -> None:
    for parts in permutations([kept(End("abort", 5)), kept(None), Recalled(0)]):
        assert answer_of(Recall(0, b"1" * 16), list(parts)).answer.end is None


def test_an_aborted_answer_is_recalled_where_there_is_no_other() -> None:
    for parts in permutations([kept(End("abort", 5)), kept(End("abort", 2)), Recalled(0)]):
        found = answer_of(Recall(0, b"1" * 16), list(parts))
        assert found.answer.end == End("abort", 5)


def test_a_replica_that_fails_may_have_known_the_stream() -> None:
    future: Future[Any] = Future()
    answer = AnswerOfAll(Recall(0, b"1" * 16), future, 2)
    known, failed = Future[Any](), Future[Any]()
    known.set_result(Recalled(0))
    failed.set_exception(OverloadedError(Fault("overloaded", "answers are being restored")))
    answer.add(1, failed)
    answer.add(0, known)
    with pytest.raises(OverloadedError):
        future.result()


def test_a_stream_runs_where_any_replica_runs_it() -> None:
    states = [("ended", "unknown"), ("running", "ended"), ("unknown", "unknown")]
    for parts in permutations([Cancelled(0, each) for each in states]):  # type: ignore[arg-type]
        found = answer_of(Cancel(0, (b"1" * 16, b"2" * 16)), list(parts))
        assert found.found == ("running", "ended")


def divided(parts: list[Any]) -> Future[Any]:
    """The answers of two workers about three streams; the first worker has the middle one."""
    future: Future[Any] = Future()
    query = Locate(0, (b"1" * 16, b"2" * 16, b"3" * 16))
    answer = AnswerOfAll(query, future, 2, places=[[1], [0, 2]])
    for index, found in enumerate(parts):
        part: Future[Any] = Future()
        if isinstance(found, Exception):
            part.set_exception(found)
        else:
            part.set_result(found)
        answer.add(index, part)
    return future


def test_answers_about_divided_streams_are_put_in_the_order_of_the_query() -> None:
    assert divided([Located(0, (5,)), Located(0, (4, 6))]).result().moves == (4, 5, 6)
    assert divided([Located(0, ()), Located(0, (4, 6))]).result().moves == (4, 0, 6)


def test_streams_of_a_worker_that_fails_are_not_called_unknown() -> None:
    error = OverloadedError(Fault("overloaded", "it is full"))
    with pytest.raises(OverloadedError):
        divided([error, Located(0, (4, 6))]).result()
