"""Carries a client's streams over the members of a cluster: one stack, or the replicas of a fleet.

- It has the methods of `ClientSession`, and the same rules for calling them. `Members` keeps the
  links, each member's to its workers.
- A stack may say which fleet it belongs to. With its first Welcome the client leaves it, and goes
  on with all members.
- In a fleet `StreamRouter` places and moves the streams, `StreamSearch` finds those of other
  clients. A stream has one reader here: one that resumes it takes the place of the one before,
  wherever the stream is, and so is not superseded by that one's move.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import inf
from typing import Any

import zmq

from slipstream.client.connection.fleet_queries import FleetQueries, ask_all
from slipstream.client.connection.link_session import (
    TICK_S,
    Absence,
    ClientSession,
    SessionObserver,
)
from slipstream.client.connection.members import Member, Members
from slipstream.client.connection.moving import StreamRouter
from slipstream.client.connection.queries import PendingQuery, Post, Query
from slipstream.client.connection.stream_search import StreamSearch
from slipstream.client.endpoints import access_to, check_member
from slipstream.client.placing.discovery import LearnedMembers, member_source, names_fleet
from slipstream.client.placing.moves import Moves, MoveSettings, ReaderProgress
from slipstream.client.placing.replica_status import ReplicaStatus
from slipstream.client.placing.router_counters import RouterCounters
from slipstream.client.streams.stream_state import StreamState
from slipstream.client.streams.stream_table import CarriedStream, ClientStreamTable
from slipstream.errors import SlipstreamError
from slipstream_ipc.messages import (
    WANTS_ADAPTERS,
    WANTS_LOAD,
    WANTS_MEMBERS,
    AdapterRecords,
    Inspect,
    Load,
    Locate,
    ModelCard,
    Submit,
    Welcome,
)
from slipstream_ipc.process import BEAT_S
from slipstream_ipc.transport.addresses import TCP
from slipstream_ipc.transport.curve import Access
from slipstream_ipc.transport.dealer import LinkOptions
from slipstream_ipc.worker_deal import worker_address

_ABSENT_S = 1.0  # as in `ClientSession`
# a machine that is lost says nothing: its streams move after three seconds of silence
_TCP_LINK = LinkOptions(WANTS_LOAD | WANTS_ADAPTERS, ping_after_s=1.0, dead_after_s=2.0)
_LOCAL_LINK = LinkOptions(WANTS_LOAD | WANTS_ADAPTERS)
Statements = dict[str, bytes | None]
_LOOK_S = 0.01  # between two looks whether a member is gone whose connection broke
# for the other members, once the first has answered
_GATHER_S = 0.25
_UNTOLD_S = 1.0  # while one of them has never told which model it serves
_ACCEPTED_WAIT = 6  # times `timeout_s`, as in `ClientSession`


@dataclass(frozen=True, slots=True)
class _Left:
    """The state taken from a stack that has named its fleet, to go on there."""

    models: tuple[ModelCard, ...]
    streams: list[CarriedStream]
    queries: list[PendingQuery]


class Cluster:
    """Carries all streams of one client over the members of the server that its address names.
    Attaches to all at once.

    is_fleet: else there is one stack, and its links do what is to be done by themselves.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        timeout_s: float,
        poller: zmq.Poller,
        now: float,
        *,
        access: Access | None = None,
        outlives_server: bool = True,
        fails_early: bool = False,
        is_fleet: bool | None = None,
        settings: MoveSettings | None = None,
    ) -> None:
        """address: of one stack, or see `member_source`. access: for tcp:// members. is_fleet:
        whether the address is a fleet's; None: where it names several members. outlives_server: of
        one stack; that and fails_early: see `Absence`. The rest: see `ClientSession`.

        Raises: BadRequest.
        """
        self.timeout_s = timeout_s
        self.is_fleet = names_fleet(address) if is_fleet is None else is_fleet
        self._fails_early = fails_early
        self._outlives_server = outlives_server
        self._access = access
        self._group_ids = count(1)
        self._open_session = partial(
            ClientSession,
            context,
            timeout_s=timeout_s,
            poller=poller,
            group_ids=self._group_ids,
        )
        self._now = self._began_at = now
        self._all_due_at = now  # when every link turns, for its heartbeats and deadlines
        self._callers: dict[Future[ModelCard], float] = {}  # since when each waits
        self._welcomed_at = inf  # when the first member answered
        check = partial(check_member, access=access)
        self._source = (
            member_source(address, check) if self.is_fleet else LearnedMembers(address, check)
        )
        settings = settings or MoveSettings(
            wait_s=timeout_s, accepted_wait_s=_ACCEPTED_WAIT * timeout_s
        )
        self._moves: Moves[StreamState] = Moves(settings, self._read, self._choose)
        self._members = Members(address, self._source, self._open_link, self._moves)
        self._held = ClientStreamTable(self._group_ids, self.over)
        self._router = StreamRouter(self._members, self._moves, self._held)
        router = self._router
        self._queries = FleetQueries(
            self._members, router.is_on_its_way, router.moves_of, timeout_s
        )
        self._search = StreamSearch(self._members, self._router, self._held, settings)
        self._gathers = True  # new streams wait for the members, to be spread over all
        self._gathered: list[StreamState] = []
        self._left: _Left | None = None
        if self.is_fleet:
            self._members.refresh(now)
        else:
            self._alone = self._members.open_alone(address, now)

    def become_fleet(self, now: float) -> None:
        """Go on with the members that the stack has named, or with the stack alone as a fleet's
        member.
        """
        if self.is_fleet:
            return
        if self._left is None and isinstance(self._source, LearnedMembers):
            self._source.learn([self._alone.address])
        left, self._left = self._left or _Left(self.models, [], []), None
        self._members.models = left.models
        self._members.clear(now)
        self._fails_early = False  # a server is to be expected
        self.is_fleet = True
        self._began_at = self._all_due_at = now
        self._welcomed_at = inf
        self._members.refresh(now)
        for carried in left.streams:
            state = carried.state
            if state.is_abort_wanted:
                self._router.hold(state)
                self._held.give_up(state, None)
            elif isinstance(state.request, Submit):
                self._gather(state)
            else:
                self._resume(state, now)
        for each in left.queries:
            self.ask(each.query, each.future, each.since, each.post)

    def _read(self, state: StreamState) -> ReaderProgress:
        return self._router.read(state)

    def _choose(self, state: StreamState, numbers: Sequence[int]) -> int:
        return self._router.choose(state, numbers)

    def _open_link(self, member: Member, worker: int, now: float) -> ClientSession:
        address, observer = worker_address(member.address, worker), _Watch(self, member, worker)
        if not self.is_fleet:
            return self._open_session(
                address,
                now=now,
                access=self._access,
                absence=Absence(self._outlives_server, self._fails_early and worker == 0),
                observer=observer,
                options=LinkOptions(WANTS_MEMBERS | WANTS_ADAPTERS),
            )
        options = _TCP_LINK if address.startswith(TCP) else _LOCAL_LINK
        if isinstance(self._source, LearnedMembers):
            options = replace(options, wants=options.wants | WANTS_MEMBERS)
        access = access_to(member.address, self._access)
        return self._open_session(
            address, now=now, access=access, observer=observer, options=options
        )

    @property
    def models(self) -> tuple[ModelCard, ...]:
        """The models that the members serve, as far as is known; in the order of the members.
        That of a stack alone is the one that its first worker reported last.
        """
        if self.is_fleet:
            return self._members.models
        model = self._alone.links[0].model
        return () if model is None else (model,)

    @property
    def tick_s(self) -> float:
        """Seconds between turns when nothing arrives: as long as between the other beats of its
        process, and shorter while the stack is away, to find it again. In a fleet also for streams
        that wait for a member.
        """
        if not self.is_fleet:
            return BEAT_S if self.is_attached else TICK_S
        return _LOOK_S if self.is_in_doubt else TICK_S

    @property
    def is_in_doubt(self) -> bool:
        """True if the cluster has to turn sooner than `tick_s` said before: a member may be
        gone.
        """
        return self._members.is_any_in_doubt

    @property
    def members(self) -> list[str]:
        """The addresses of the members that are listed."""
        return [member.address for member in self._members.listed]

    @property
    def is_attached(self) -> bool:
        """True if a member is attached, as far as is known; all links of a stack alone."""
        if self.is_fleet:
            return bool(self._members.attached)
        return self._alone.are_links_attached

    @property
    def models_away(self) -> list[str]:
        """The names of a fleet's models that no member takes requests for, as far as is known."""
        if not self.is_fleet:
            return []
        return [each.name for each in self.models if not self._moves.open_members(each.name)]

    @property
    def is_serving(self) -> bool:
        """True if a member of each model takes requests, as far as is known."""
        return (bool(self.models) and not self.models_away) if self.is_fleet else self.is_attached

    @property
    def is_starting(self) -> bool:
        """True if a member of a fleet that has not reported its model has answered that it cannot
        serve yet.
        """
        listed = self._members.listed if self.is_fleet else []
        return any(each.card is None and each.is_starting for each in listed)

    @property
    def counters(self) -> RouterCounters | None:
        """The counters of the placing of streams; None of a stack alone."""
        return self._router.counters if self.is_fleet else None

    def statuses(self) -> list[ReplicaStatus]:
        """The status of each listed member of a fleet, as far as it is known."""
        return self._members.statuses() if self.is_fleet else []

    # ---- what may be asked for ---------------------------------------------------------------

    def connect(self, future: Future[ModelCard], now: float) -> None:
        """Fulfil `future` when members answer; ConnectionLostError after `timeout_s`."""
        if not self.is_fleet:
            self._alone.links[0].connect(future, now)
        elif self.models and self._are_all_there(now):
            future.set_result(self.models[0])
        else:
            self._callers[future] = now

    def submit(self, state: StreamState, now: float) -> None:
        """Submit a new stream at the best member, or one to be resumed where it is."""
        if not self.is_fleet:
            state.member = self._alone.number
            self._alone.submit(state, now)
            return
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
        `FleetQueries.ask`; a stack alone has one.
        """
        if self.is_fleet:
            self._queries.ask(query, future, now, post, model)
        else:
            self._alone.ask(query, future, now, post)

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

        def fulfil(answers: list[Any]) -> None:
            for member, answer in zip(able, answers, strict=True):
                found[names[member]] = None if answer is None else answer.statistics
            use(found)

        return _ask_able(Inspect(0), able, fulfil, now)

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

        def fulfil(answers: list[Any]) -> None:
            moves = [each.moves[0] if each and each.moves else 0 for each in answers]
            best = max(range(len(moves)), key=moves.__getitem__, default=None)
            use("" if best is None or not moves[best] else able[best].model)

        return _ask_able(Locate(0, (stream_id,), scope), able, fulfil, now)

    def abort(self, state: StreamState) -> None:
        """Ask the stream's member to end it; it then still receives its End."""
        if not state.is_over:
            link = self._router.link_of(state)
            if link is None:
                self._held.give_up(state, None)
            else:
                link.abort(state)

    def abandon(self, state: StreamState) -> None:
        """End the stream at once, without waiting for its member."""
        if not state.is_over:
            link = self._router.link_of(state)
            if link is None:
                self._held.give_up(state, None)
            else:
                link.abandon(state)

    def end_all(self, error: Callable[[], SlipstreamError]) -> None:
        """Fail all waiting calls and all streams, each with a new error."""
        self._fail_callers(error)
        for link in self._members.links:
            link.end_all(error)
        self._held.give_up_all(error)
        self._queries.end_all(error)
        self._held.wake()

    # ---- what is done with it ----------------------------------------------------------------

    def turn(self, now: float, arrived: Container[object] | None = None) -> bool:
        """Receive, send what is due, and wake readers. Returns whether deltas arrived.

        arrived: what a poller has reported, where nothing else was asked for since the last turn:
        only links with news have to turn then.
        """
        self._now = now
        is_tick = now >= self._all_due_at
        if is_tick:
            self._all_due_at = now + TICK_S
        if not self.is_fleet:
            links = self._alone.links
            if len(links) == 1:
                has_deltas = links[0].turn(now)
            else:
                has_deltas = self._alone.turn(now, None if is_tick else arrived)
            if self._left is not None:
                self.become_fleet(now)
            return has_deltas
        self._router.begin_turn(now)
        if is_tick:
            self._members.refresh(now)
            self._check_callers(now)
        has_deltas, has_changed = False, is_tick
        for member in self._members:
            if member.links and (arrived is None or is_tick or member.is_among(arrived)):
                has_deltas |= member.turn(now, None if is_tick else arrived)
                has_changed |= self._members.watch(member, now, is_tick=is_tick)
        if self._members.is_any_in_doubt:
            has_changed |= self._members.look_again(now)
        if self._gathers and (self._are_all_there(now) or now >= self._began_at + _ABSENT_S):
            self._end_gathering(now)
        self._search.go_on(now)
        for member in self._router.take_asked():
            member.turn(now)  # its own turn may be over
        if now >= self._moves.next_at:
            self._router.decide(now)
            self._members.close_refused(now)
            has_changed = True
            why_none = self._members.why_none
            if why_none is not None:
                self._fail_callers(why_none)
        self._queries.ask_of_arrived(now)
        self._queries.adapters.turn(now, _call, is_tick=is_tick)
        if has_changed:
            self._queries.ask_elsewhere(now)
            self._queries.go_on(now)
        if self._callers:
            self._answer_callers(now)
        self._held.wake()
        return has_deltas

    def say_goodbye(self, now: float) -> bool:
        """Say goodbye to all members; True once each has acknowledged it, or is not attached."""
        done = [link.say_goodbye(now) for link in self._members.links]
        return all(done)

    def close(self) -> None:
        """Close the sockets, without a goodbye."""
        for link in self._members.links:
            link.close()
        self._source.close()

    # ---- what members say --------------------------------------------------------------------

    def welcomed(self, member: Member, worker: int, welcome: Welcome) -> None:
        """A worker of a member has answered, and nothing was said to it yet."""
        if not self.is_fleet:
            is_first, self._welcomed_at = self._welcomed_at == inf, self._now
            if is_first and self._names_fleet(welcome):
                [link] = member.links
                carried = [link.take(state) for state in link.streams]
                self._left = _Left((welcome.model,), carried, member.take_queries())
                return
        elif (holds := self._members.welcomed(member, welcome, self._now)) is not None:
            if isinstance(self._source, LearnedMembers) and welcome.members:
                self._source.learn(welcome.members)
            for hold in holds:
                self._router.take(hold)
            self._welcomed_at = min(self._welcomed_at, self._now)
        if worker == 0:
            member.deal_anew(welcome, lambda index: self._open_link(member, index, self._now))

    def _names_fleet(self, welcome: Welcome) -> bool:
        """True if the stack has named a fleet, to which this client then belongs."""
        source = self._source
        if not isinstance(source, LearnedMembers):
            return False
        source.learn(welcome.members)
        return len(source.addresses(0.0)) > 1

    def loaded(self, member: Member, load: Load) -> None:
        """A member of a fleet has told its load."""
        digests = load.suspects
        suspects = None if digests is None else self._router.suspects(member, digests)
        self._members.loaded(member, load, suspects, self._now)

    def adapters_changed(self, member: Member, model: ModelCard, records: AdapterRecords) -> None:
        """The model of a member has other adapters than before."""
        if self.is_fleet:
            self._members.note_adapters(member, model, records)

    def refused(self, member: Member, error: Callable[[], SlipstreamError]) -> bool:
        """A member will not do; return True if its streams go elsewhere."""
        if self.is_fleet:
            self._members.refuse(member, error, self._now)
        return self.is_fleet

    def turned_away(self, state: StreamState) -> None:
        """The stream's member leaves, and has not accepted it."""
        if self.is_fleet:
            self._router.turned_away(state, self._now)

    def overloaded(self, state: StreamState) -> bool:
        """Handle a member that has no room for its stream; return True if another one is asked."""
        return self.is_fleet and self._router.overloaded(state, self._now)

    def over(self, state: StreamState) -> None:
        """A stream is over."""
        if self.is_fleet:
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
            if each.links and not each.is_attached and not each.is_gone
        ]
        if not away or not self.is_attached:
            return self.is_attached
        patience_s = _UNTOLD_S if any(each.card is None for each in away) else _GATHER_S
        return now >= self._welcomed_at + patience_s

    def _check_callers(self, now: float) -> None:
        """Fail callers that have waited for `timeout_s`, or for less where nothing can answer."""
        is_starting = any(each.is_starting for each in self._members.opened)
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


def _ask_able(
    query: Query, able: list[Member], use: Callable[[list[Any]], None], now: float
) -> Callable[[], None]:
    """Ask these members, and call `use` with their answers; with those that have come where the
    function returned is called before.
    """
    answers: Future[Any] = Future()
    answers.add_done_callback(lambda done: use(done.result()))
    if able:
        return ask_all(query, able, answers, now, _call).give_up
    answers.set_result([])
    return _nothing


def _nothing() -> None:
    pass


def _call(command: Callable[[], None]) -> None:
    command()


class _Watch(SessionObserver):
    """Tells a cluster of one of its links."""

    def __init__(self, cluster: Cluster, member: Member, worker: int) -> None:
        self._cluster = cluster
        self._member = member
        self._worker = worker

    def welcomed(self, welcome: Welcome) -> None:
        self._cluster.welcomed(self._member, self._worker, welcome)

    def loaded(self, load: Load) -> None:
        self._cluster.loaded(self._member, load)

    def adapters_changed(self, model: ModelCard, records: AdapterRecords) -> None:
        if self._worker == 0:  # which speaks for the stack
            self._cluster.adapters_changed(self._member, model, records)

    def refused(self, error: Callable[[], SlipstreamError]) -> bool:
        return self._cluster.refused(self._member, error)

    def turned_away(self, state: StreamState) -> None:
        self._cluster.turned_away(state)

    def overloaded(self, state: StreamState) -> bool:
        return self._cluster.overloaded(state)

    def over(self, state: StreamState) -> None:
        self._cluster.over(state)
