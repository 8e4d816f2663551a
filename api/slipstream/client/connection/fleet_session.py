"""A client's sessions with the replicas of a fleet, behind the interface of a single session.

It has the methods of `ClientSession`, and the same rules for calling them. `FleetMembers` keeps the
connections, `StreamRouter` places and moves the streams, `StreamSearch` finds those of other
clients. A stream has one reader here: one that resumes it takes the place of the one before,
wherever the stream is, and so is not superseded by that one's move.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from math import inf
from typing import Any

import zmq

from slipstream.client.connection.fleet_queries import FleetQueries, ask_all
from slipstream.client.connection.link_session import TICK_S, LinkOptions
from slipstream.client.connection.members import FleetMember, FleetMembers
from slipstream.client.connection.moving import StreamRouter
from slipstream.client.connection.queries import Post, Query
from slipstream.client.connection.stack_session import Handover, StackSession
from slipstream.client.connection.stream_search import StreamSearch
from slipstream.client.endpoints import access_to, check_member
from slipstream.client.placing.discovery import LearnedMembers, MemberSource, member_source
from slipstream.client.placing.moves import Moves, MoveSettings, ReaderProgress
from slipstream.client.placing.replica_status import ReplicaStatus
from slipstream.client.placing.router_counters import RouterCounters
from slipstream.client.streams.stream_state import StreamState
from slipstream.client.streams.stream_table import ClientStreamTable
from slipstream.errors import SlipstreamError
from slipstream_ipc.messages import (
    WANTS_LOAD,
    WANTS_MEMBERS,
    Inspect,
    Load,
    Locate,
    ModelCard,
    Submit,
    Welcome,
)
from slipstream_ipc.transport.addresses import TCP
from slipstream_ipc.transport.curve import Access

_ABSENT_S = 1.0  # as in `ClientSession`
# a machine that is lost says nothing: its streams move after three seconds of silence
_TCP_LINK: LinkOptions = {"wants": WANTS_LOAD, "ping_after_s": 1.0, "dead_after_s": 2.0}
_LOCAL_LINK: LinkOptions = {"wants": WANTS_LOAD}
Statements = dict[str, bytes | None]
_LOOK_S = 0.01  # between two looks whether a member is gone whose connection broke
# for the other members, once the first has answered
_GATHER_S = 0.25
_UNTOLD_S = 1.0  # while one of them has never told which model it serves
_ACCEPTED_WAIT = 6  # times `timeout_s`, as in `ClientSession`


class FleetSession:
    """Carries all streams of one client over the members of a fleet. Attaches to all at once."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        timeout_s: float,
        poller: zmq.Poller,
        now: float,
        *,
        access: Access | None = None,
        fails_early: bool = False,
        settings: MoveSettings | None = None,
        source: MemberSource | None = None,
        handover: Handover | None = None,
    ) -> None:
        """address: see `member_source`. access: for the tcp:// members. The rest: see
        `ClientSession`. source: in place of the one that `address` names. handover: of the session
        before this one.

        Raises: BadRequest.
        """
        self.address = address
        self.timeout_s = timeout_s
        self._fails_early = fails_early
        self._context = context
        self._poller = poller
        self._access = access
        self._group_ids = count(1)
        self._now = self._began_at = now
        self._all_due_at = now
        self._callers: dict[Future[ModelCard], float] = {}  # since when each waits
        self._welcomed_at = inf  # when the first member answered
        self._source = source or member_source(address, partial(check_member, access=access))
        settings = settings or MoveSettings(
            wait_s=timeout_s, accepted_wait_s=_ACCEPTED_WAIT * timeout_s
        )
        self._moves: Moves[StreamState] = Moves(settings, self._read, self._choose)
        self._members = FleetMembers(address, self._source, self._connect, self._moves)
        self._held = ClientStreamTable(self._group_ids, self.over)
        self._router = StreamRouter(self._members, self._moves, self._held)
        router = self._router
        self._queries = FleetQueries(
            self._members, router.is_on_its_way, router.moves_of, timeout_s
        )
        self._search = StreamSearch(self._members, self._router, self._held, settings)
        self._learned = source if isinstance(source, LearnedMembers) else None
        self._members.refresh(now)
        self._gathers = True  # new streams wait for the members, to be spread over all
        self._gathered: list[StreamState] = []
        if handover is not None:
            self._members.models = (handover.model,)
            self._take_over(handover, now)

    def _take_over(self, handover: Handover, now: float) -> None:
        for carried in handover.streams:
            if carried.state.group is not None:
                carried.state.group.group_id = 0  # it was one of the other session's numbers
        for carried in handover.streams:
            state = carried.state
            if state.is_abort_wanted:
                self._router.hold(state)
                self._held.give_up(state, None)
            elif isinstance(state.request, Submit):
                self._gather(state)
            else:
                self._resume(state, now)
        for each in handover.queries:
            self.ask(each.query, each.future, each.since, each.post)

    def _read(self, state: StreamState) -> ReaderProgress:
        return self._router.read(state)

    def _choose(self, state: StreamState, numbers: Sequence[int]) -> int:
        return self._router.choose(state, numbers)

    def _connect(self, member: FleetMember, now: float) -> StackSession:
        is_tcp = member.address.startswith(TCP)
        link: LinkOptions = {**(_TCP_LINK if is_tcp else _LOCAL_LINK)}
        if self._learned is not None:
            link["wants"] |= WANTS_MEMBERS
        return StackSession(
            self._context,
            member.address,
            self.timeout_s,
            self._poller,
            now,
            access=access_to(member.address, self._access),
            group_ids=self._group_ids,
            observer=_Watch(self, member),
            **link,
        )

    @property
    def models(self) -> tuple[ModelCard, ...]:
        """The models that the members serve, as far as is known; in the order of the members."""
        return self._members.models

    @property
    def tick_s(self) -> float:
        """Seconds between turns, as in `StackSession`; also for streams that wait for a member."""
        return _LOOK_S if self.is_in_doubt else TICK_S

    @property
    def is_in_doubt(self) -> bool:
        """True if the session has to turn sooner than `tick_s` said before: a member may be
        gone.
        """
        return self._members.is_any_in_doubt

    @property
    def members(self) -> list[str]:
        """The addresses of the members that are listed."""
        return [member.address for member in self._members.listed]

    @property
    def is_attached(self) -> bool:
        """True if a member is attached, as far as is known."""
        return bool(self._members.attached)

    @property
    def models_away(self) -> list[str]:
        """The names of models that no member takes requests for, as far as is known."""
        return [each.name for each in self.models if not self._moves.open_members(each.name)]

    @property
    def is_serving(self) -> bool:
        """True if a member of each model takes requests, as far as is known."""
        return bool(self.models) and not self.models_away

    @property
    def is_starting(self) -> bool:
        """True if a member that has not reported its model has answered that it cannot serve
        yet.
        """
        return any(
            each.card is None and each.session is not None and each.session.is_starting
            for each in self._members.listed
        )

    @property
    def counters(self) -> RouterCounters:
        """The counters of the placing of streams."""
        return self._router.counters

    def statuses(self) -> list[ReplicaStatus]:
        """The status of each listed member, as far as it is known."""
        return self._members.statuses()

    # ---- what may be asked for ---------------------------------------------------------------

    def connect(self, future: Future[ModelCard], now: float) -> None:
        """Fulfil `future` when members answer; ConnectionLostError after `timeout_s`."""
        if self.models and self._are_all_there(now):
            future.set_result(self.models[0])
        else:
            self._callers[future] = now

    def submit(self, state: StreamState, now: float) -> None:
        """Submit a new stream at the best member, or one to be resumed where it is."""
        state.submitted_at = now
        if isinstance(state.request, Submit) and self._gathers:
            self._gather(state)
        elif not isinstance(state.request, Submit):
            self._resume(state, now)
        elif (error := self._router.missing_model(state)) is not None:
            self._router.hold(state)
            self._held.give_up(state, error)
        else:
            self._router.submit(state, state.request, now)

    def _gather(self, state: StreamState) -> None:
        self._router.hold(state)
        self._gathered.append(state)

    def _end_gathering(self, now: float) -> None:
        """Submit the new streams that have waited for members."""
        self._gathers, gathered, self._gathered = False, self._gathered, []
        for state in gathered:
            error = self._router.missing_model(state)
            if error is not None:
                self._held.give_up(state, error)
            elif not state.is_over and isinstance(state.request, Submit):
                self._held.take(state)
                self._router.submit(state, state.request, now)

    def _resume(self, state: StreamState, now: float) -> None:
        before = self._router.reader_of(state.stream_id, state.request.scope)
        if before in self._gathered:
            self._end_gathering(now)
            if before is not None and before.is_over:  # it had to name its model
                before = None
        if before is None:
            self._search.begin(state, now)
        elif before in self._search:
            self._search.supersede(before)
            self._search.begin(state, now)
        else:
            self._router.succeed(before, state, now)

    def ask(
        self, query: Query, future: Future[Any], now: float, post: Post, model: str = ""
    ) -> None:
        """Fulfil `future` with the answer of a member, or of all that may know it. model: see
        `FleetQueries.ask`.
        """
        self._queries.ask(query, future, now, post, model)

    def inspect(self, use: Callable[[Statements], None], now: float) -> Callable[[], None]:
        """Ask the replicas for the statistics of their stacks, and call `use` with them by the
        replicas' names: JSON, empty where a replica has none; None where it is not attached, or
        has not answered before the function returned is called.
        """
        listed = self._members.listed
        shown = [each.shown_name for each in self._members.statuses()]
        names = dict(zip(listed, shown, strict=True))
        found: Statements = dict.fromkeys(shown)
        able = [each for each in listed if each.is_attached and each.can_inspect]
        answers: Future[Any] = Future()

        def fulfil(answers: Future[Any]) -> None:
            for member, answer in zip(able, answers.result(), strict=True):
                found[names[member]] = None if answer is None else answer.statistics
            use(found)

        answers.add_done_callback(fulfil)
        if not able:
            answers.set_result([])
            return _nothing
        return ask_all(Inspect(0), able, answers, now, _call).give_up

    def find_model(
        self, stream_id: bytes, scope: bytes, use: Callable[[str], None], now: float
    ) -> Callable[[], None]:
        """Ask the replicas for a stream, and call `use` with the name of the model of the one that
        has it, as far as they answer before the function returned is called; empty: none has.
        """
        reader = self._router.reader_of(stream_id, scope)
        able = [each for each in self._members.attached if each.can_locate]
        if reader is not None and reader.model:
            use(reader.model)
            return _nothing
        answers: Future[Any] = Future()

        def fulfil(answers: Future[Any]) -> None:
            moves = [each.moves[0] if each and each.moves else 0 for each in answers.result()]
            best = max(range(len(moves)), key=moves.__getitem__, default=None)
            use("" if best is None or not moves[best] else able[best].model)

        answers.add_done_callback(fulfil)
        if not able:
            answers.set_result([])
            return _nothing
        return ask_all(Locate(0, (stream_id,), scope), able, answers, now, _call).give_up

    def abort(self, state: StreamState) -> None:
        """Ask the stream's member to end it; it then still receives its End."""
        if not state.is_over:
            session = self._router.session_of(state)
            if session is None:
                self._held.give_up(state, None)
            else:
                session.abort(state)

    def abandon(self, state: StreamState) -> None:
        """End the stream at once, without waiting for its member."""
        if not state.is_over:
            session = self._router.session_of(state)
            if session is None:
                self._held.give_up(state, None)
            else:
                session.abandon(state)

    def end_all(self, error: Callable[[], SlipstreamError]) -> None:
        """Fail all waiting calls and all streams, each with a new error."""
        self._fail_callers(error)
        for session in self._members.sessions:
            session.end_all(error)
        self._held.give_up_all(error)
        self._queries.end_all(error)
        self._held.wake()

    # ---- what is done with it ----------------------------------------------------------------

    def turn(self, now: float, arrived: Container[object] | None = None) -> bool:
        """Receive, send what is due, and wake readers. Returns whether deltas arrived.

        arrived: see `StackSession.turn`.
        """
        self._now = now
        self._router.begin_turn(now)
        is_tick = now >= self._all_due_at
        if is_tick:
            self._all_due_at = now + TICK_S
            self._members.refresh(now)
            self._check_callers(now)
        has_deltas, has_changed = False, is_tick
        for member in self._members:
            session = member.session
            if session is None:
                continue
            if arrived is None or is_tick or session.is_among(arrived):
                has_deltas |= session.turn(now, None if is_tick else arrived)
                has_changed |= self._members.watch(member, now, is_tick=is_tick)
        if self._members.is_any_in_doubt:
            has_changed |= self._members.look_again(now)
        if self._gathers and (self._are_all_there(now) or now >= self._began_at + _ABSENT_S):
            self._end_gathering(now)
        self._search.go_on(now)
        for session in self._router.take_asked():
            session.turn(now)  # its own turn may be over
        if now >= self._moves.next_at:
            self._router.decide(now)
            self._members.close_refused(now)
            has_changed = True
            why_none = self._members.why_none
            if why_none is not None:
                self._fail_callers(why_none)
        self._queries.ask_of_arrived(now)
        if has_changed:
            self._queries.ask_elsewhere(now)
            self._queries.go_on(now)
        if self._callers:
            self._answer_callers(now)
        self._held.wake()
        return has_deltas

    def say_goodbye(self, now: float) -> bool:
        """Say goodbye to all members; True once each has acknowledged it, or is not attached."""
        done = [session.say_goodbye(now) for session in self._members.sessions]
        return all(done)

    def close(self) -> None:
        """Close the sockets, without a goodbye."""
        for session in self._members.sessions:
            session.close()
        self._source.close()

    # ---- what members say --------------------------------------------------------------------

    def welcomed(self, member: FleetMember, welcome: Welcome) -> None:
        """A member has answered, and nothing was said to it yet."""
        holds = self._members.welcomed(member, welcome, self._now)
        if holds is None:
            return
        if self._learned is not None and welcome.members:
            self._learned.learn(welcome.members)
        for hold in holds:
            self._router.take(hold)
        self._welcomed_at = min(self._welcomed_at, self._now)

    def loaded(self, member: FleetMember, load: Load) -> None:
        """A member has told its load."""
        digests = load.suspects
        suspects = None if digests is None else self._router.suspects(member, digests)
        self._members.loaded(member, load, suspects, self._now)

    def refused(self, member: FleetMember, error: Callable[[], SlipstreamError]) -> None:
        """A member will not do."""
        self._members.refuse(member, error, self._now)

    def turned_away(self, state: StreamState) -> None:
        """The stream's member leaves, and has not accepted it."""
        self._router.turned_away(state, self._now)

    def overloaded(self, state: StreamState) -> bool:
        """Handle a member that has no room for its stream; return True if another one is asked."""
        return self._router.overloaded(state, self._now)

    def over(self, state: StreamState) -> None:
        """A stream is over."""
        self._search.over(state)
        self._router.over(state)

    # ---- callers -----------------------------------------------------------------------------

    def _answer_callers(self, now: float) -> None:
        """Answer callers once all members are there, or soon after the first: what they submit at
        once is spread over all.
        """
        if not self.models or not self._are_all_there(now):
            return
        callers, self._callers = self._callers, {}
        for caller in callers:
            caller.set_result(self.models[0])

    def _are_all_there(self, now: float) -> bool:
        """True if a member is attached, and all others are too or are late."""
        away = [
            each
            for each in self._members.listed
            if each.session and not each.is_attached and not each.is_gone
        ]
        if not away or not self.is_attached:
            return self.is_attached
        patience_s = _UNTOLD_S if any(each.card is None for each in away) else _GATHER_S
        return now >= self._welcomed_at + patience_s

    def _check_callers(self, now: float) -> None:
        """Fail callers that have waited for `timeout_s`, or for less where nothing can answer."""
        is_starting = any(session.is_starting for session in self._members.sessions)
        if not self._callers or is_starting or self._source.is_beginning:
            self._callers = dict.fromkeys(self._callers, now)
            return
        is_early = self._fails_early and now >= self._began_at + _ABSENT_S
        if is_early and len(self._members) and all(each.is_gone for each in self._members):
            self._fail_callers(self._members.gone_error)
        late = [each for each, since in self._callers.items() if now >= since + self.timeout_s]
        for future in late:
            del self._callers[future]
            future.set_exception(self._members.gone_error())

    def _fail_callers(self, error: Callable[[], SlipstreamError]) -> None:
        callers, self._callers = self._callers, {}
        for future in callers:
            future.set_exception(error())


def _nothing() -> None:
    pass


def _call(command: Callable[[], None]) -> None:
    command()


class _Watch:
    """Tells a fleet's session about one of its members."""

    def __init__(self, fleet: FleetSession, member: FleetMember) -> None:
        self._fleet = fleet
        self._member = member
        self.turned_away = fleet.turned_away
        self.overloaded = fleet.overloaded
        self.over = fleet.over

    def welcomed(self, welcome: Welcome) -> None:
        self._fleet.welcomed(self._member, welcome)

    def loaded(self, load: Load) -> None:
        self._fleet.loaded(self._member, load)

    def refused(self, error: Callable[[], SlipstreamError]) -> bool:
        self._fleet.refused(self._member, error)
        return True
