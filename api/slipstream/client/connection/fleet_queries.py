"""Sends queries to the members of a fleet, and combines the answers of several.

Tokenize and Detokenize are asked of one member of their model. Cancel and Recall are asked of all
that may know the stream, also of those that are away for a moment: these answer once they are back.
Where the stream is read here and on its way to a member, they wait until it is there: none would
know it. They are asked again where it has moved meanwhile: its member was asked too early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from slipstream.client.connection.combined_answer import AnswerOfAll
from slipstream.client.connection.fleet_adapters import FleetAdapters
from slipstream.client.connection.members import Member, Members
from slipstream.client.connection.queries import PendingQuery, Post, Query
from slipstream.errors import SlipstreamError
from slipstream_ipc.messages import (
    Cancel,
    ChangeAdapter,
    Embed,
    Inspect,
    Locate,
    Recall,
)

_MISSING_S = 2.0  # for a member that is away to come back, where it may know a stream


@dataclass(eq=False, slots=True)
class _AskedMember:
    """A member that was asked, and its answer. until: how long it is waited for while away."""

    member: Member
    future: Future[Any]
    until: float = inf


class FleetQueries:
    """The queries of one client that are not about a stream of its own."""

    def __init__(
        self,
        members: Members,
        is_on_its_way: Callable[[bytes, bytes], bool],
        moves_of: Callable[[bytes, bytes], int | None],
        timeout_s: float,
    ) -> None:
        """is_on_its_way: whether a stream, by its id and scope, is read here and at no member.
        moves_of: how often one that is read here has moved; None: it is not.
        timeout_s: what is asked about it waits at most so long.
        """
        self._members = members
        self._is_on_its_way = is_on_its_way
        self._moves_of = moves_of
        self._timeout_s = timeout_s
        self._waiting: list[PendingQuery] = []  # about such streams
        self._parts: dict[Future[Any], _AskedMember] = {}  # of those that were asked of several
        self.adapters = FleetAdapters(members, self._ask_part)

    def ask(
        self, query: Query, future: Future[Any], now: float, post: Post, model: str = ""
    ) -> None:
        """Fulfil `future` with the answer of a member, or of all that may know it. post: see
        `PendingQueries.ask`. model: whose members may answer, by its name; empty: any.
        """
        members = self._members
        if self._has_to_wait(query):
            self._waiting.append(PendingQuery(query, future, now, post))
            return
        if isinstance(query, ChangeAdapter):
            self.adapters.begin(PendingQuery(query, future, now, post), query, now)
            return
        if isinstance(query, Cancel | Recall):
            asked_of = members.that_may_answer(now)
            if asked_of:
                asked = PendingQuery(query, future, now, post)
                again = partial(self._ask_again, asked, self._moves(query))
                answer = AnswerOfAll(query, future, len(asked_of), members.gone_error, again)
                for part in _ask_each(answer, query, asked_of, now, post):
                    self._parts[part.future] = part
                return
        able = members.attached_of(model) or members.opened_of(model)
        if able:
            # calls for embeddings are work for a device, and are spread
            place = query.call[0] % len(able) if isinstance(query, Embed) and query.call else 0
            able[place].ask(query, future, now, post)
        elif future.set_running_or_notify_cancel():
            future.set_exception(members.gone_error(model))

    def _ask_part(
        self, member: Member, query: Query, future: Future[Any], now: float, post: Post
    ) -> None:
        self._parts[future] = _AskedMember(member, future)
        member.ask(query, future, now, post)

    def ask_of_arrived(self, now: float) -> None:
        """Ask what has waited for streams that are at a member now, or over. Call it each turn."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                if each.future.cancelled():
                    continue
                if self._has_to_wait(each.query):
                    if now < each.since + self._timeout_s:
                        self._waiting.append(each)
                    elif each.future.set_running_or_notify_cancel():
                        each.future.set_exception(self._members.gone_error())
                else:
                    self.ask(each.query, each.future, now, each.post)

    def _ask_again(self, asked: PendingQuery, moves: list[int | None]) -> bool:
        """Ask again about streams that have moved since. moves: of each, when it was asked."""
        has_moved = self._moves(asked.query) != moves or self._has_to_wait(asked.query)
        if has_moved:
            self._waiting.append(asked)
        return has_moved

    def _moves(self, query: Query) -> list[int | None]:
        match query:
            case Cancel():
                return [self._moves_of(each, query.scope) for each in query.stream_ids]
            case Recall():
                return [self._moves_of(query.stream_id, query.scope)]
            case _:
                return []

    def _has_to_wait(self, query: Query) -> bool:
        if isinstance(query, Cancel):
            return any(self._is_on_its_way(each, query.scope) for each in query.stream_ids)
        if isinstance(query, ChangeAdapter):
            return not self._members.attached
        return isinstance(query, Recall) and self._is_on_its_way(query.stream_id, query.scope)

    def end_all(self, error: Callable[[], SlipstreamError]) -> None:
        """Fail what was not asked yet, each with a new error."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if each.future.set_running_or_notify_cancel():
                each.future.set_exception(error())
        self.adapters.end_all(error)

    def ask_elsewhere(self, now: float) -> None:
        """Ask another member what was asked of one that is closed, or not attached, where another
        can answer it.
        """
        for model, each in self._members.take_unasked():
            if isinstance(each.query, Cancel | Recall | ChangeAdapter):  # of one that was closed
                if each.future.set_running_or_notify_cancel():
                    each.future.set_exception(self._members.gone_error())
            elif isinstance(each.query, Locate | Inspect):  # only that member could have told
                each.future.set_result(None)
            else:
                self.ask(each.query, each.future, each.since, each.post, model)

    def go_on(self, now: float) -> None:
        """Give up the parts of members that do not come back, where others have come."""
        is_any_there = bool(self._members.attached)
        for part in list(self._parts.values()):
            if part.future.done():
                del self._parts[part.future]
            elif part.member.is_attached or not is_any_there:
                part.until = inf
            else:
                part.until = min(part.until, now + _MISSING_S)
                if now >= part.until:
                    part.future.cancel()


def ask_all(
    query: Query, members: Sequence[Member], future: Future[Any], now: float, post: Post
) -> AnswerOfAll:
    """Fulfil `future` with the answers of all these members, put together."""
    answer = AnswerOfAll(query, future, len(members))
    _ask_each(answer, query, members, now, post)
    return answer


def _ask_each(
    answer: AnswerOfAll, query: Query, members: Sequence[Member], now: float, post: Post
) -> list[_AskedMember]:
    parts = [_AskedMember(member, Future()) for member in members]
    for index, part in enumerate(parts):
        part.future.add_done_callback(partial(answer.add, index))
        part.member.ask(query, part.future, now, post)
    return parts
