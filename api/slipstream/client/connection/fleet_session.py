"""A client's sessions with the replicas of a fleet, behind the face of a single session.

- Each member of the fleet has a `StackSession`. A stream is at one member, or held: in a table of
  this session's own, until a member takes it. `Moves` decides which, `Placement` among several.
- A stream that moves is submitted with the tokens received, so the next replica goes on where the
  reader stands. The replica it has left is told to end its copy, as soon as that can be reached.
- A member that refuses the client, breaks the protocol, serves another model, or is a known replica
  at a second address is closed, named in a warning, and tried again later.
- It has the methods of `ClientSession`, and the same rules for calling them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf
from typing import Any

import zmq

from slipstream.client.connection.fleet_queries import AnswerOfAll
from slipstream.client.connection.queries import PendingQuery, Post, Query
from slipstream.client.connection.server_presence import why_absent
from slipstream.client.connection.session import TICK_S, LinkOptions
from slipstream.client.connection.stack_session import StackSession
from slipstream.client.endpoints import check_member
from slipstream.client.streams.stream_state import StreamState
from slipstream.client.streams.stream_table import ClientStreamTable
from slipstream.errors import (
    ConnectionLostError,
    EngineError,
    SlipstreamError,
    StreamLostError,
)
from slipstream.fleet.member_load import MemberLoad, SentRequest
from slipstream.fleet.members import MemberSource, member_source, names_fleet
from slipstream.fleet.moves import (
    Fail,
    Failure,
    Hold,
    Moves,
    MoveSettings,
    ReaderProgress,
    Start,
)
from slipstream.fleet.placement import Placement
from slipstream.fleet.prompt_keys import PromptKey, prompt_key
from slipstream.fleet.replica_status import ReplicaStatus
from slipstream.fleet.router_counters import MovedWhy, PlacedWhy, RouterCounters
from slipstream.request.parallel_sampling import can_join
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import (
    WANTS_LOAD,
    Cancel,
    Fault,
    Load,
    Locate,
    Located,
    ModelCard,
    Recall,
    Submit,
    Welcome,
)
from slipstream_ipc.transport.addresses import IPC, TCP
from slipstream_ipc.transport.curve import Access

_SHUT_S = 10.0  # until a closed member is tried again
_ABSENT_S = 1.0  # as in `ClientSession`
_LOCATE_S = 2.0  # for replicas to say whether they have a stream
_MOST_MOVES = 2**31  # that a replica's word is taken for
# a machine that is lost says nothing: its streams move after three seconds of silence
_TCP_LINK: LinkOptions = {"wants": WANTS_LOAD, "ping_after_s": 1.0, "dead_after_s": 2.0}
_LOCAL_LINK: LinkOptions = {"wants": WANTS_LOAD}
_HELD = -1  # the `member` of a stream that is at none
_ACCEPTED_WAIT = 6  # times `timeout_s`, as in `ClientSession`

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Replica:
    """A replica as this client knows it. session: None while it is closed."""

    number: int
    address: str
    session: StackSession | None
    load: MemberLoad
    name: bytes = b""  # of the replica; empty: it has none
    incarnation: int = 0
    card: ModelCard | None = None
    has_attached: bool = False
    is_attached: bool = False
    is_listed: bool = True
    shut_because: Callable[[], SlipstreamError] | None = None
    opens_at: float = inf
    can_locate: bool = False
    said: Load | None = None


@dataclass(eq=False, slots=True)
class _Search:
    """A stream of another client's that is looked for. answers: of the members, once asked."""

    since: float
    answers: AnswerOfAll | None = None
    answers_until: float = inf


@dataclass(eq=False, slots=True)
class _Route:
    """How a stream is placed. sent: where it is counted now. left_because: it left a replica."""

    key: PromptKey
    sent: SentRequest | None = None
    left_because: MovedWhy | None = None


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
    ) -> None:
        """address: see `member_source`. access: for the tcp:// members. The rest: see
        `ClientSession`. source: in place of the one that `address` names.

        Raises: BadRequest.
        """
        self.address = address
        self.timeout_s = timeout_s
        self.model: ModelCard | None = None  # of the attached member that reported it first
        self._fails_early = fails_early
        self._context = context
        self._poller = poller
        self._access = access
        self._group_ids = count(1)
        self._now = self._began_at = now
        self._all_due_at = now
        self._source = source or member_source(address, partial(check_member, access=access))
        self._members: dict[int, _Replica] = {}
        self._numbers = count()
        self._callers: dict[Future[ModelCard], float] = {}  # since when each waits
        self._held = ClientStreamTable(self._group_ids, self._over)
        self._searches: dict[StreamState, _Search] = {}
        self._routes: dict[StreamState, _Route] = {}
        self._last: StreamState | None = None  # the last one placed in this turn
        self._placement = Placement()
        self._placed_why: PlacedWhy = "waited"  # of the last stream placed in this turn
        self.counters = RouterCounters()
        self._settings = settings or MoveSettings(
            wait_s=timeout_s, accepted_wait_s=_ACCEPTED_WAIT * timeout_s
        )
        self._moves: Moves[StreamState] = Moves(self._settings, self._read, self._choose)
        self._list(now)

    @property
    def members(self) -> list[str]:
        """The addresses of the members that are listed."""
        return [member.address for member in self._members.values() if member.is_listed]

    @property
    def is_attached(self) -> bool:
        """Whether a member is attached, as far as is known."""
        return any(member.is_attached for member in self._members.values())

    @property
    def is_serving(self) -> bool:
        """Whether a member takes requests, as far as is known."""
        return bool(self._moves.open_members())

    def statuses(self) -> list[ReplicaStatus]:
        """What is known of each member that is listed."""
        return [_status(each) for each in self._members.values() if each.is_listed]

    # ---- what may be asked for ---------------------------------------------------------------

    def connect(self, future: Future[ModelCard], now: float) -> None:
        """Fulfil `future` when a member answers; ConnectionLostError after `timeout_s`."""
        if self.is_attached and self.model is not None:
            future.set_result(self.model)
        else:
            self._callers[future] = now

    def submit(self, state: StreamState, now: float) -> None:
        """Submit a new stream at the best member, or one to be resumed where it is."""
        state.submitted_at = now
        if isinstance(state.request, Submit):
            number = self._best_for_new(state, state.request, now)
            if number is not None:
                self.counters.note_placed(self._placed_why)
            self._place(state, number, now)
        else:
            self._seek(state, now)

    def ask(self, query: Query, future: Future[Any], now: float, post: Post) -> None:
        """Fulfil `future` with the answer of a member, or of all that may know it."""
        attached = [each for each in self._members.values() if each.is_attached]
        if isinstance(query, Cancel | Recall) and len(attached) > 1:
            self._ask_all(query, attached, future, now, post)
            return
        sessions = [each.session for each in self._members.values() if each.session is not None]
        session = attached[0].session if attached else sessions[0] if sessions else None
        if session is None:
            future.set_exception(self._gone_error(now))
        else:
            session.ask(query, future, now, post)

    def abort(self, state: StreamState) -> None:
        """Ask the stream's member to end it; it then still receives its End."""
        if not state.is_over:
            session = self._session_of(state)
            if session is None:
                self._held.give_up(state, None)
            else:
                session.abort(state)

    def abandon(self, state: StreamState) -> None:
        """End the stream at once, without waiting for its member."""
        if not state.is_over:
            session = self._session_of(state)
            if session is None:
                self._held.give_up(state, None)
            else:
                session.abandon(state)

    def end_all(self, error: Callable[[], SlipstreamError]) -> None:
        """Fail all waiting calls and all streams, each with a new error."""
        self._fail_callers(error)
        for member in self._members.values():
            if member.session is not None:
                member.session.end_all(error)
        self._held.give_up_all(error)
        self._held.wake()

    # ---- what is done with it ----------------------------------------------------------------

    def turn(self, now: float, arrived: Container[object] | None = None) -> bool:
        """Receive, send what is due, and wake readers. Returns whether deltas arrived.

        arrived: see `StackSession.turn`.
        """
        self._now = now
        self._last = None
        is_tick = now >= self._all_due_at
        if is_tick:
            self._all_due_at = now + TICK_S
            self._list(now)
            self._check_callers(now)
        has_deltas = False
        for member in list(self._members.values()):
            session = member.session
            if session is None:
                continue
            if arrived is None or is_tick or session.is_among(arrived):
                has_deltas |= session.turn(now, None if is_tick else arrived)
                self._watch(member, is_tick, now)
        if self._searches:
            self._search(now)
        if now >= self._moves.next_at:
            self._decide(now)
        self._held.wake()
        return has_deltas

    def say_goodbye(self, now: float) -> bool:
        """Say goodbye to all members; True once each has acknowledged it, or is not attached."""
        done = [each.session.say_goodbye(now) for each in self._members.values() if each.session]
        return all(done)

    def close(self) -> None:
        """Close the sockets, without a goodbye."""
        for member in self._members.values():
            if member.session is not None:
                member.session.close()
        self._source.close()

    # ---- members -----------------------------------------------------------------------------

    def _list(self, now: float) -> None:
        """Open members that were added, and let those go that were removed and have no streams."""
        listed = self._source.addresses(now)
        known = {member.address: member for member in self._members.values()}
        for address in listed:
            member = known.get(address)
            if member is None:
                number = next(self._numbers)
                member = _Replica(number, address, None, MemberLoad(address.encode()), opens_at=now)
                self._members[number] = member
            if member.number not in self._moves or not member.is_listed:
                member.is_listed = True
                self._moves.add(member.number, now)
            if member.session is None and now >= member.opens_at:
                self._open(member, now)
        for address, member in known.items():
            if address in listed:
                continue
            if member.is_listed:
                member.is_listed = False
                self._moves.remove(member.number, now)
            if not self._moves.num_streams(member.number):
                self._drop(member, now)

    def _open(self, member: _Replica, now: float) -> None:
        try:
            member.session = StackSession(
                self._context,
                member.address,
                self.timeout_s,
                self._poller,
                now,
                access=self._access if member.address.startswith(TCP) else None,
                group_ids=self._group_ids,
                observer=_Watch(self, member),
                **(_TCP_LINK if member.address.startswith(TCP) else _LOCAL_LINK),
            )
        except (BadRequest, PermissionError) as error:
            logger.warning("the replica at %s cannot be used: %s", member.address, error)
            member.opens_at = now + _SHUT_S
        else:
            member.shut_because = None
            self._route_queries(now)

    def _drop(self, member: _Replica, now: float) -> None:
        if member.session is not None:
            member.session.say_goodbye(now)
            self._close_session(member, member.session, now)
        del self._members[member.number]
        self._moves.forget(member.number)

    def _close_session(self, member: _Replica, session: StackSession, now: float) -> None:
        member.session = None
        member.is_attached = False
        self._note_model(member)
        self._ask_elsewhere(session.take_queries(), now)
        session.close()

    def _watch(self, member: _Replica, is_tick: bool, now: float) -> None:
        """Note what has become of the connection to a member."""
        session = member.session
        assert session is not None
        is_attached = session.is_attached
        if not is_attached:
            self._moves.detached(member.number, now)
            self._moves.starting(member.number, session.is_starting)
            if (is_tick or member.is_attached) and member.has_attached and self._is_gone(member):
                self._moves.gone(member.number, now)
        if member.is_attached != is_attached:
            member.is_attached = is_attached
            self._note_model(member)
            self._route_queries(now)

    def _is_gone(self, member: _Replica) -> bool:
        """Whether the machine says that nothing can answer there."""
        return member.address.startswith(IPC) and why_absent(member.address) is not None

    def welcomed(self, member: _Replica, welcome: Welcome) -> None:
        """A member has answered, and nothing was said to it yet."""
        if self._is_other_model(member, welcome) or self._is_known(member, welcome):
            return
        name = welcome.replica or member.address.encode()
        if name != member.load.name:
            member.load = MemberLoad(name)
        elif member.has_attached and welcome.incarnation != member.incarnation:
            member.load.note_restarted(self._now)
        member.name, member.incarnation = welcome.replica, welcome.incarnation
        member.can_locate = bool(welcome.model.fingerprint)
        member.has_attached = True
        member.card = welcome.model
        self._note_model(member)
        fingerprint, incarnation = welcome.model.fingerprint, welcome.incarnation
        for hold in self._moves.attached(
            member.number, fingerprint, self._now, incarnation=incarnation
        ):
            self._hold(hold)
        callers, self._callers = self._callers, {}
        for caller in callers:
            caller.set_result(self.model or welcome.model)

    def _note_model(self, newest: _Replica) -> None:
        """Go by the card of an attached member, by the same one as long as that is there."""
        there = [each.card for each in self._members.values() if each.is_attached and each.card]
        if self.model is None or self.model not in there:
            self.model = there[0] if there else newest.card or self.model

    def _is_other_model(self, member: _Replica, welcome: Welcome) -> bool:
        if self.model is None or welcome.model.name == self.model.name:
            return False
        if not any(each.is_attached for each in self._members.values() if each is not member):
            return False
        why = f"it serves {welcome.model.name!r}, the others {self.model.name!r}"
        self.refused(member, partial(EngineError, Fault("engine", why)))
        return True

    def _is_known(self, member: _Replica, welcome: Welcome) -> bool:
        """Whether the replica is a member already, at another address."""
        for other in self._members.values():
            is_same = welcome.replica != b"" and other.name == welcome.replica
            if other is not member and other.is_attached and is_same:
                why = f"it is the replica at {other.address}"
                self.refused(member, partial(EngineError, Fault("engine", why)))
                return True
        return False

    def loaded(self, member: _Replica, load: Load) -> None:
        """A member has told its load."""
        now = self._now
        member.said = load
        self._moves.load(
            member.number,
            load.state,
            now,
            is_within=load.within,
            within_s=load.within_s,
        )
        member.load.note_load(
            now,
            running=load.running + load.waiting,
            queued_tokens=load.queued_tokens,
            kept_since_s=load.kept_since_s,
        )

    def refused(self, member: _Replica, error: Callable[[], SlipstreamError]) -> None:
        """A member will not do: its streams leave it, and it is closed."""
        if member.shut_because is None:
            logger.warning("the replica at %s is left alone: %s", member.address, error())
            member.shut_because = error
        self._moves.shut(member.number, self._now)

    def _shut(self, now: float) -> None:
        """Close members that will not do."""
        for member in self._members.values():
            session = member.session
            has_streams = self._moves.num_streams(member.number) > 0  # until the next decision
            if member.shut_because is not None and session is not None and not has_streams:
                self._close_session(member, session, now)
                member.opens_at = now + _SHUT_S
        if self._members and all(each.session is None for each in self._members.values()):
            errors = [each.shut_because for each in self._members.values() if each.shut_because]
            if errors:
                self._fail_callers(errors[-1])

    # ---- streams -----------------------------------------------------------------------------

    def _session_of(self, state: StreamState) -> StackSession | None:
        return None if state.member == _HELD else self._members[state.member].session

    def _read(self, state: StreamState) -> ReaderProgress:
        session = self._session_of(state)
        table = self._held if session is None else session
        _, num_tokens = table.position(state)
        is_accepted = state.prompt_ids is not None or num_tokens > 0
        return ReaderProgress(num_tokens, is_accepted, state.resubmittable is not None)

    def _best_for_new(self, state: StreamState, submit: Submit, now: float) -> int | None:
        """The member for a new stream; None if none is there."""
        numbers = self._moves.open_members() or [
            member.number for member in self._members.values() if member.is_attached
        ]
        last = self._last
        if last is not None and last.member in numbers and _is_together(last, submit):
            self._routes[state] = _Route(self._routes[last].key)
            return last.member
        name = "" if self.model is None else self.model.name
        self._routes[state] = _Route(prompt_key(submit, name, state.prompt_cache_key))
        self._last = state
        return self._choose(state, numbers) if numbers else None

    def _choose(self, state: StreamState, numbers: Sequence[int]) -> int:
        loads = [self._members[number].load for number in numbers]
        route = self._routes.get(state)
        if route is None:
            return min(zip(numbers, loads, strict=True), key=lambda each: each[1].work)[0]
        length = self._prompt_len(state, route)
        begin = time.perf_counter()
        best = self._placement.candidates(route.key, length, loads)[0]
        self.counters.choose_s += time.perf_counter() - begin
        self._placed_why = best.reason
        return numbers[best.member]

    def _prompt_len(self, state: StreamState, route: _Route) -> int:
        """Tokens that the stream's next replica has to have in its cache."""
        prompt_ids = state.prompt_ids
        num_prompt = route.key.prompt_len if prompt_ids is None else len(prompt_ids) // 4
        return num_prompt + (self._read(state).num_tokens if state.handle >= 0 else 0)

    def _place(self, state: StreamState, number: int | None, now: float) -> None:
        """Begin with a stream at a member, or hold it until one is there."""
        if number is None:
            self._held.add(state)
            state.member = _HELD
        else:
            session = self._members[number].session
            assert session is not None
            self._count(state, number, now)
            state.member = number
            session.submit(state, now)
        self._moves.place(state, number, now, moves=state.moves)

    def _count(self, state: StreamState, number: int, now: float) -> None:
        """Count a stream as sent to a member, and no longer where it was."""
        route = self._routes.get(state)
        if route is None:
            return
        is_again = route.sent is not None
        if route.sent is not None:
            self._placement.note_ended(route.sent)
        load = self._members[number].load
        length = self._prompt_len(state, route)
        route.sent = self._placement.note_submitted(route.key, length, load, now, is_again=is_again)

    def _over(self, state: StreamState) -> None:
        self._moves.ended(state)
        self._searches.pop(state, None)
        if self._last is state:
            self._last = None
        route = self._routes.pop(state, None)
        if route is not None and route.sent is not None:
            self._placement.note_ended(route.sent)

    def turned_away(self, state: StreamState) -> None:
        """The stream's member leaves, and has not accepted it."""
        hold = self._moves.turned_away(state, self._now)
        if hold is not None:
            self._hold(hold, "leaving")

    def overloaded(self, state: StreamState) -> bool:
        """The stream's member has no room for it: whether another one is asked."""
        hold = self._moves.overloaded(state, self._now)
        if hold is not None:
            state.was_sent = False  # it is not known there
            self._hold(hold, "overloaded")
        return hold is not None

    def _decide(self, now: float) -> None:
        touched: dict[int, None] = {}
        for decision in self._moves.due(now):
            match decision:
                case Hold():
                    self._hold(decision)
                    touched[decision.member] = None
                case Start():
                    self._start(decision, now)
                    touched[decision.member] = None
                    if decision.source is not None:
                        touched[decision.source] = None
                case Fail():
                    self._fail(decision)
        for number in touched:
            session = self._members[number].session
            if session is not None:
                session.turn(now)
        self._shut(now)

    def _hold(self, decision: Hold[StreamState], why: MovedWhy | None = None) -> None:
        state = decision.stream
        route = self._routes.get(state)
        if route is not None:
            route.left_because = why or self._why_left(decision.member)
        session = self._session_of(state)
        assert session is not None
        carried = session.leave(state)
        state.member = _HELD
        self._held.add(state, carried)

    def _start(self, decision: Start[StreamState], now: float) -> None:
        state = decision.stream
        source, target = self._session_of(state), self._members[decision.member].session
        assert target is not None
        route = self._routes.get(state)
        if decision.source is not None:
            self.counters.note_moved(self._why_left(decision.source))
        elif route is not None and route.left_because is not None:
            self.counters.note_moved(route.left_because)
        else:
            self.counters.note_placed("waited")
        self._count(state, decision.member, now)
        carried = self._held.take(state) if source is None else source.leave(state)
        state.moves, state.strikes = decision.moves, decision.strikes
        state.member = decision.member
        target.carry_on(carried)

    def _why_left(self, number: int) -> MovedWhy:
        """What has become of a member that a stream leaves."""
        member = self._members[number]
        if member.shut_because is not None:
            return "refused"
        if not member.is_attached:
            return "lost"
        state = "serving" if member.said is None else member.said.state
        return "other" if state == "serving" else state

    def _fail(self, decision: Fail[StreamState]) -> None:
        state = decision.stream
        session = self._session_of(state)
        if session is not None:
            self._held.add(state, session.leave(state))
            state.member = _HELD
        self._held.give_up(state, self._error_of(decision))

    def _error_of(self, decision: Fail[StreamState]) -> SlipstreamError:
        shut = decision.why is Failure.SHUT and decision.member is not None
        because = self._members[decision.member].shut_because if shut else None  # type: ignore[index]
        if because is not None:
            return because()
        fault = Fault("engine", f"the stream has ended: {decision.why.value}")
        if decision.why is not Failure.NO_MEMBER:
            return EngineError(fault)
        is_accepted = decision.stream.prompt_ids is not None
        return StreamLostError(fault) if is_accepted and self.is_attached else self._gone_error()

    # ---- a stream of another client ----------------------------------------------------------

    def _seek(self, state: StreamState, now: float) -> None:
        """Find out which of the members has a stream, and resume it there."""
        self._held.add(state)
        state.member = _HELD
        self._searches[state] = _Search(now)
        self._search(now)

    def _search(self, now: float) -> None:
        """Go on with the searches. A member that may attach within moments is waited for."""
        is_whole = not any(
            each.is_listed and each.session and not each.is_attached and not self._is_gone(each)
            for each in self._members.values()
        )
        able = [each for each in self._members.values() if each.is_attached]
        for state, search in list(self._searches.items()):
            if search.answers is not None:
                if now >= search.answers_until:
                    search.answers.give_up()
            elif able and (is_whole or now >= search.since + self._settings.patience_s):
                self._ask_where(state, search, able, now)
            elif not able and now >= search.since + self._settings.wait_s:
                self._held.give_up(state, self._gone_error())

    def _ask_where(
        self, state: StreamState, search: _Search, able: Sequence[_Replica], now: float
    ) -> None:
        if len(able) < 2 or not all(each.can_locate for each in able):
            self._resume_at(state, able[0].number, 0, now)
            return
        answers: Future[Any] = Future()
        search.answers_until = now + _LOCATE_S
        locate = Locate(0, (state.stream_id,), state.request.scope)
        search.answers = self._ask_all(locate, able, answers, now, _call)
        answers.add_done_callback(partial(self._found, state, [each.number for each in able]))

    def _found(self, state: StreamState, numbers: Sequence[int], answers: Future[Any]) -> None:
        search = self._searches.get(state)
        if search is None:
            return
        located: list[Located | None] = answers.result()
        found = [each.moves[0] if each is not None and each.moves else 0 for each in located]
        best = max(range(len(found)), key=found.__getitem__)
        moves = min(found[best], _MOST_MOVES)
        there = [number for number in numbers if self._is_there(number)]
        if not there:
            self._searches[state] = _Search(search.since)
        elif moves and numbers[best] in there:
            self._resume_at(state, numbers[best], moves - 1, self._now)
        else:  # a copy elsewhere has more `moves` than the one that was found and is lost
            self._resume_at(state, there[0], moves, self._now)

    def _resume_at(self, state: StreamState, number: int, moves: int, now: float) -> None:
        del self._searches[state]
        self._held.take(state)
        state.moves = moves
        self._place(state, number, now)

    def _is_there(self, number: int) -> bool:
        member = self._members.get(number)
        return member is not None and member.is_attached

    # ---- queries and callers -----------------------------------------------------------------

    def _ask_all(
        self,
        query: Query,
        members: Sequence[_Replica],
        future: Future[Any],
        now: float,
        post: Post,
    ) -> AnswerOfAll:
        answer = AnswerOfAll(query, future, len(members))
        for index, member in enumerate(members):
            assert member.session is not None
            part: Future[Any] = Future()
            part.add_done_callback(partial(answer.add, index))
            member.session.ask(query, part, now, post)
        return answer

    def _route_queries(self, now: float) -> None:
        """Ask elsewhere what was asked of members that are not attached."""
        if self.is_attached:
            for member in self._members.values():
                if not member.is_attached and member.session is not None:
                    self._ask_elsewhere(member.session.take_queries(), now)

    def _ask_elsewhere(self, queries: Sequence[PendingQuery], now: float) -> None:
        for each in queries:
            if isinstance(each.query, Locate):
                each.future.set_result(None)
            else:
                self.ask(each.query, each.future, each.since, each.post)

    def _check_callers(self, now: float) -> None:
        """Fail callers that have waited for `timeout_s`, or for less where nothing can answer."""
        members = self._members.values()
        is_starting = any(each.session and each.session.is_starting for each in members)
        if is_starting or self._source.is_beginning:
            self._callers = dict.fromkeys(self._callers, now)
            return
        is_early = self._fails_early and now >= self._began_at + _ABSENT_S
        if is_early and members and all(self._is_gone(each) for each in members):
            self._fail_callers(partial(self._gone_error, now))
        late = [each for each, since in self._callers.items() if now >= since + self.timeout_s]
        for future in late:
            del self._callers[future]
            future.set_exception(self._gone_error(now))

    def _fail_callers(self, error: Callable[[], SlipstreamError]) -> None:
        callers, self._callers = self._callers, {}
        for future in callers:
            future.set_exception(error())

    def _gone_error(self, now: float | None = None) -> SlipstreamError:
        sessions = [each.session for each in self._members.values() if each.session is not None]
        trouble = "; ".join([session.trouble for session in sessions if session.trouble])
        why = f"no replica of the fleet {self.address} answers"
        return ConnectionLostError(Fault("engine", f"{why}: {trouble}" if trouble else why))


def _status(member: _Replica) -> ReplicaStatus:
    name = member.name.decode(errors="replace")
    if member.shut_because is not None:
        return ReplicaStatus(member.address, "refused", name, str(member.shut_because()))
    if not member.is_attached:
        return ReplicaStatus(member.address, "away", name)
    condition = "serving" if member.said is None else member.said.state
    return ReplicaStatus(member.address, condition, name, load=member.said)


class _Watch:
    """Tells a fleet's session about one of its members."""

    def __init__(self, fleet: FleetSession, member: _Replica) -> None:
        self._fleet = fleet
        self._member = member
        self.turned_away = fleet.turned_away
        self.overloaded = fleet.overloaded
        self.over = fleet._over

    def welcomed(self, welcome: Welcome) -> None:
        self._fleet.welcomed(self._member, welcome)

    def loaded(self, load: Load) -> None:
        self._fleet.loaded(self._member, load)

    def refused(self, error: Callable[[], SlipstreamError]) -> bool:
        self._fleet.refused(self._member, error)
        return True


def open_session(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    timeout_s: float,
    poller: zmq.Poller,
    now: float,
    *,
    access: Access | None = None,
    outlives_server: bool = True,
    fails_early: bool = False,
) -> StackSession | FleetSession:
    """A session with the stack at this address, or with the fleet that it names."""
    if names_fleet(address):
        return FleetSession(
            context, address, timeout_s, poller, now, access=access, fails_early=fails_early
        )
    return StackSession(
        context,
        address,
        timeout_s,
        poller,
        now,
        access=access,
        outlives_server=outlives_server,
        fails_early=fails_early,
    )


def _is_together(state: StreamState, submit: Submit) -> bool:
    """Whether both are answers to one prompt."""
    return isinstance(state.request, Submit) and can_join(state.request, submit)


def _call(command: Callable[[], None]) -> None:
    command()
