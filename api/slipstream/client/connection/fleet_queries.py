"""Asks the members of a fleet what is no stream, and puts the answers of several together."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from slipstream.client.connection.fleet_members import FleetMember, FleetMembers
from slipstream.client.connection.queries import Post, Query
from slipstream_ipc.messages import (
    Cancel,
    Cancelled,
    CancelledState,
    Inspect,
    Locate,
    Recall,
    Recalled,
)


class AnswerOfAll:
    """Fulfils a future when every replica has answered, or cannot any more.

    - Cancel: a stream runs if it does at any replica; those that it has left have ended it.
    - Recall: the complete answer, else that of a stream that still runs, else the longest copy that
      a replica has of one that was ended.
    - Locate, Inspect: a list of the answers; None for a replica that did not answer.
    - A replica that fails counts as one that knows nothing, unless all of them fail.
    """

    def __init__(self, query: Query, future: Future[Any], num_parts: int) -> None:
        self._query = query
        self._future = future
        self._found: list[Any] = [None] * num_parts
        self._num_left = num_parts
        self._error: BaseException | None = None

    def add(self, index: int, part: Future[Any]) -> None:
        """The answer of one replica; the last one fulfils the future."""
        error = part.exception()
        if error is None:
            self._found[index] = part.result()
        else:
            self._error = error
        self._num_left -= 1
        if not self._num_left:
            self._fulfil()

    def give_up(self) -> None:
        """Do without the answers that have not come. For a Locate or an Inspect."""
        if self._num_left > 0:
            self._num_left = 0
            self._fulfil()

    def _fulfil(self) -> None:
        if not self._future.set_running_or_notify_cancel():
            return
        if isinstance(self._query, Locate | Inspect):
            self._future.set_result(self._found)
            return
        answers = [each for each in self._found if each is not None]
        if not answers and self._error is not None:
            self._future.set_exception(self._error)
        elif isinstance(self._query, Cancel):
            self._future.set_result(_cancelled(answers, len(self._query.stream_ids)))
        else:
            self._future.set_result(_recalled(answers))


def _cancelled(answers: list[Cancelled], num: int) -> Cancelled:
    found: list[CancelledState] = ["unknown"] * num
    for answer in answers:
        for at, state in enumerate(answer.found):
            if found[at] != "running" and state != "unknown":
                found[at] = state
    return Cancelled(0, tuple(found))


def _recalled(answers: list[Recalled]) -> Recalled:
    return max(answers, key=_worth)


def _worth(recalled: Recalled) -> tuple[int, int]:
    answer = recalled.answer
    if answer is None:
        return 0, 0
    if answer.end is None:
        return 2, 0
    return 1 if answer.end.reason in ("abort", "error") else 3, answer.end.num_tokens


def ask(query: Query, members: FleetMembers, future: Future[Any], now: float, post: Post) -> None:
    """Fulfil `future` with the answer of a member, or of all that may know it. post: see
    `PendingQueries.ask`.
    """
    attached = members.attached
    if isinstance(query, Cancel | Recall) and len(attached) > 1:
        ask_all(query, attached, future, now, post)
        return
    sessions = [each.session for each in attached if each.session is not None] or members.sessions
    if sessions:
        sessions[0].ask(query, future, now, post)
    else:
        future.set_exception(members.gone_error())


def ask_all(
    query: Query, members: Sequence[FleetMember], future: Future[Any], now: float, post: Post
) -> AnswerOfAll:
    """Fulfil `future` with the answers of all these members, put together."""
    answer = AnswerOfAll(query, future, len(members))
    for index, member in enumerate(members):
        assert member.session is not None
        part: Future[Any] = Future()
        part.add_done_callback(partial(answer.add, index))
        member.session.ask(query, part, now, post)
    return answer


def ask_elsewhere(members: FleetMembers, now: float) -> None:
    """Ask another member what was asked of one that is closed, or not attached."""
    for each in members.take_unasked():
        if isinstance(each.query, Locate | Inspect):  # only that member could have told
            each.future.set_result(None)
        else:
            ask(each.query, members, each.future, each.since, each.post)
