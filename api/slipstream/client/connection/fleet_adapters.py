"""Changes of adapters in a fleet: of all replicas of a model or none, and told to those that join.

The replicas that are attached take part in a change (`StagedChange`). Each says what the last
change of each name was; one that has missed one, as it was away or starts anew, is told of it, by
every client that sees it. It is asked again later where it cannot do it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from secrets import token_bytes
from typing import Any

from slipstream.client.connection.members import Member, Members
from slipstream.client.connection.queries import PendingQuery, Post, Query
from slipstream.client.placing.staged_change import Ask, StagedChange, commit_of
from slipstream.errors import SlipstreamError, bad_request
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import AdapterChanged, AdapterRecord, AdapterRef, ChangeAdapter

_AGAIN_S = 30.0  # until a replica is asked again for what it could not do

AskPart = Callable[[Member, Query, "Future[Any]", float, Post], None]


class FleetAdapters:
    """The changes that are under way."""

    def __init__(self, members: Members, ask: AskPart) -> None:
        """ask: asks a member; the future is cancelled if it does not come back."""
        self._members = members
        self._ask = ask
        self._asked: dict[StagedChange, tuple[PendingQuery, str]] = {}  # each with its model
        # that all have answered: what they said last, by their numbers
        self._answered: list[tuple[StagedChange, Mapping[int, AdapterChanged | None]]] = []
        self._told: dict[tuple[int, str], Future[Any]] = {}  # by member and name: not answered yet
        # by member and name: what it could not do when it was of this incarnation, and until when
        # it is not asked again
        self._refused: dict[tuple[int, str], tuple[AdapterRecord, int, float]] = {}

    def begin(self, asked: PendingQuery, change: ChangeAdapter, now: float) -> None:
        """Make a change at all replicas of a model. Fulfils the query's future."""
        try:
            model = self._model_of(change)
        except BadRequest as error:
            asked.future.set_exception(bad_request(error))
            return
        able = self._members.attached_of(model)
        if not able:
            asked.future.set_exception(self._members.gone_error(model))
            return
        if not all(each.takes_stages for each in able):
            allowed = "none while a replica is of an older release"
            asked.future.set_exception(bad_request(BadRequest("lora_name", change.name, allowed)))
            return
        listed = [each for each in self._members.listed if each.is_of(model)]
        served = next((it for it in self._members.models if it.name == model), None)
        adapters = () if served is None else served.adapters
        before = next((each for each in adapters if each.name == change.name), None)
        names = {each.number: each.status.shown_name for each in able}
        staged = StagedChange(change, names, len(listed) - len(able), before, token_bytes(16))
        self._asked[staged] = asked, model
        self._ask_all(staged, staged.begin(), now)

    def _model_of(self, change: ChangeAdapter) -> str:
        """The model whose adapter it is. Raises BadRequest where that is not known."""
        models = self._members.models
        having = [it.name for it in models if any(a.name == change.name for a in it.adapters)]
        able = having if not change.path and having else [it.name for it in models]
        if len(able) == 1:
            return able[0]
        allowed = "none where several models are served: ask a replica of its model"
        raise BadRequest("lora_name", change.name, allowed)

    def _ask_all(self, staged: StagedChange, ask: Ask, now: float) -> None:
        asked, _ = self._asked[staged]
        answers: dict[int, AdapterChanged | None] = dict.fromkeys(ask.members)
        left = set(ask.members)

        def add(number: int, part: Future[Any]) -> None:
            if not part.cancelled() and part.exception() is None:
                answers[number] = part.result()
            left.discard(number)
            if not left:
                self._answered.append((staged, answers))

        for number in ask.members:
            part: Future[Any] = Future()
            part.add_done_callback(partial(add, number))
            if self._members.is_there(number):
                self._ask(self._members[number], ask.query, part, now, asked.post)
            else:
                part.cancel()

    def turn(self, now: float, post: Post, *, is_tick: bool) -> None:
        """Go on with what has been answered, and tell those that lack a change. Call it each
        turn.
        """
        while self._answered:
            staged, answers = self._answered.pop()
            if staged not in self._asked:
                continue
            asked, model = self._asked[staged]
            version = self._members.records_of(model).next_version
            following = staged.go_on(answers, version)
            if isinstance(following, Ask):
                self._ask_all(staged, following, now)
                for number in following.members:
                    if self._members.is_there(number):
                        self._members[number].turn(now)  # its own turn may be over
            else:
                del self._asked[staged]
                if asked.future.set_running_or_notify_cancel():
                    asked.future.set_result(following)
        if is_tick:
            for member in self._members.attached:
                self._tell(member, now, post)

    def _tell(self, member: Member, now: float, post: Post) -> None:
        """Tell a member of the changes that it has not made."""
        if not member.takes_stages:
            return
        served: tuple[AdapterRef, ...] = () if member.card is None else member.card.adapters
        records = self._members.records_of(member.model)
        for record in records.not_done(member.records, served):
            key = member.number, record.name
            before, incarnation, until = self._refused.get(key, (None, 0, now))
            is_waiting = before == record and incarnation == member.incarnation and now < until
            if key in self._told or is_waiting:
                continue
            part = self._told[key] = Future[Any]()
            part.add_done_callback(partial(self._has_answered, member, record, now))
            self._ask(member, commit_of(record), part, now, post)

    def _has_answered(
        self, member: Member, record: AdapterRecord, now: float, part: Future[Any]
    ) -> None:
        key = member.number, record.name
        self._told.pop(key, None)
        if part.cancelled() or part.exception() is not None:
            return
        changed: AdapterChanged = part.result()
        if changed.fault is None:
            self._refused.pop(key, None)
            return
        self._refused[key] = record, member.incarnation, now + _AGAIN_S
        if changed.why != "forbidden":  # by its options, or as this client may not
            why = changed.fault.message
            member.warnings.warn(
                "the replica at %s does not have the adapter %r: %s", member.address, key[1], why
            )

    def end_all(self, error: Callable[[], SlipstreamError]) -> None:
        """Fail the changes that are under way, each with a new error."""
        asked, self._asked = self._asked, {}
        for each, _ in asked.values():
            if each.future.set_running_or_notify_cancel():
                each.future.set_exception(error())
