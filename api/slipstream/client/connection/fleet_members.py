"""The members of a fleet as one client knows them, and its connection to each.

A member that refuses the client, breaks the protocol, serves another model, or is a known replica
at a second address is closed, named in a warning, and tried again later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf

from slipstream.client.connection.queries import PendingQuery
from slipstream.client.connection.server_presence import why_absent
from slipstream.client.connection.stack_session import StackSession
from slipstream.client.streams.stream_state import StreamState
from slipstream.errors import ConnectionLostError, EngineError, SlipstreamError
from slipstream.fleet.member_load import MemberLoad
from slipstream.fleet.members import MemberSource
from slipstream.fleet.moves import Hold, Moves
from slipstream.fleet.replica_status import ReplicaStatus
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import ANSWERS_INSPECT, Fault, Load, ModelCard, Welcome
from slipstream_ipc.transport.addresses import IPC

_SHUT_S = 10.0  # until a closed member is tried again
_AWAY_S = 10.0  # for which it is said of a member that it may be back soon

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class FleetMember:
    """A replica as this client knows it. session: None while it is closed. name: of the replica;
    empty: it has none. said: the last load that it told.
    """

    number: int
    address: str
    session: StackSession | None
    load: MemberLoad
    name: bytes = b""
    incarnation: int = 0
    card: ModelCard | None = None
    has_attached: bool = False
    is_attached: bool = False
    is_listed: bool = True
    away_since: float = 0.0  # while it is not attached
    shut_because: Callable[[], SlipstreamError] | None = None
    opens_at: float = inf
    can_locate: bool = False
    can_inspect: bool = False
    said: Load | None = None

    @property
    def is_gone(self) -> bool:
        """Whether the machine says that nothing can answer there."""
        return self.address.startswith(IPC) and why_absent(self.address) is not None

    @property
    def status(self) -> ReplicaStatus:
        """What is known of it, for those who look at the fleet."""
        name = self.name.decode(errors="replace")
        if self.shut_because is not None:
            return ReplicaStatus(self.address, "refused", name, str(self.shut_because()))
        if not self.is_attached:
            return ReplicaStatus(self.address, "away", name)
        condition = "serving" if self.said is None else self.said.state
        return ReplicaStatus(self.address, condition, name, load=self.said)


Connect = Callable[[FleetMember, float], StackSession]


class FleetMembers:
    """The members that are listed, and those that still have streams. Tells `Moves` of them.

    card: the model, as the attached member told it that was first; None before any was attached.
    """

    def __init__(
        self, address: str, source: MemberSource, connect: Connect, moves: Moves[StreamState]
    ) -> None:
        """address: of the fleet, for messages. connect: opens a connection to a member, and may
        raise BadRequest or OSError.
        """
        self.card: ModelCard | None = None
        self._address = address
        self._source = source
        self._connect = connect
        self._moves = moves
        self._members: dict[int, FleetMember] = {}
        self._numbers = count()
        self._unasked: list[PendingQuery] = []

    def __iter__(self) -> Iterator[FleetMember]:
        return iter(list(self._members.values()))

    def __getitem__(self, number: int) -> FleetMember:
        return self._members[number]

    def __len__(self) -> int:
        return len(self._members)

    def is_there(self, number: int) -> bool:
        """Whether there is a member of this number, and it is attached."""
        member = self._members.get(number)
        return member is not None and member.is_attached

    @property
    def listed(self) -> list[FleetMember]:
        """Those that are in the list."""
        return [each for each in self._members.values() if each.is_listed]

    @property
    def attached(self) -> list[FleetMember]:
        """Those that are attached, as far as is known."""
        return [each for each in self._members.values() if each.is_attached]

    def that_may_answer(self, now: float) -> list[FleetMember]:
        """Those that are attached, or were until lately; all, where there is none of these."""
        since = now - _AWAY_S
        able = [
            each
            for each in self._members.values()
            if each.is_attached
            or (each.session and each.is_listed and each.away_since > since and not each.is_gone)
        ]
        return able or [each for each in self._members.values() if each.session]

    @property
    def sessions(self) -> list[StackSession]:
        """The connections that are not closed."""
        return [each.session for each in self._members.values() if each.session is not None]

    def take_unasked(self) -> list[PendingQuery]:
        """The queries of connections that were closed, and of those that are not attached while
        another one is, to be asked elsewhere. The latter keep those that another cannot answer.
        """
        taken, self._unasked = self._unasked, []
        if self.attached:
            for member in self._members.values():
                if not member.is_attached and member.session is not None:
                    taken += member.session.take_queries(but_of_streams=True)
        return taken

    def gone_error(self) -> SlipstreamError:
        """Says that none of them answers."""
        trouble = "; ".join([session.trouble for session in self.sessions if session.trouble])
        why = f"no replica of the fleet {self._address} answers"
        return ConnectionLostError(Fault("engine", f"{why}: {trouble}" if trouble else why))

    # ---- the list ----------------------------------------------------------------------------

    def refresh(self, now: float) -> None:
        """Open members that were added, and let those go that were removed and have no streams."""
        listed = self._source.addresses(now)
        known = {member.address: member for member in self._members.values()}
        for address in listed:
            member = known.get(address)
            if member is None:
                number = next(self._numbers)
                load = MemberLoad(address.encode())
                member = FleetMember(number, address, None, load, opens_at=now)
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

    def _open(self, member: FleetMember, now: float) -> None:
        try:
            member.session = self._connect(member, now)
        except (BadRequest, OSError) as error:
            logger.warning("the replica at %s cannot be used: %s", member.address, error)
            member.opens_at = now + _SHUT_S
        else:
            member.shut_because, member.away_since = None, now

    def _drop(self, member: FleetMember, now: float) -> None:
        if member.session is not None:
            member.session.say_goodbye(now)
            self._close(member, member.session)
        del self._members[member.number]
        self._moves.forget(member.number)

    def _close(self, member: FleetMember, session: StackSession) -> None:
        member.session = None
        member.is_attached = False
        self._note_card(member)
        self._unasked += session.take_queries()
        session.close()

    def close_refused(self, now: float) -> None:
        """Close members that will not do and have no streams any more."""
        for member in self._members.values():
            session = member.session
            has_streams = self._moves.num_streams(member.number) > 0  # until the next decision
            if member.shut_because is not None and session is not None and not has_streams:
                self._close(member, session)
                member.opens_at = now + _SHUT_S

    @property
    def why_none(self) -> Callable[[], SlipstreamError] | None:
        """Why every one of them is closed; None where one is not."""
        if self.sessions:
            return None
        errors = [each.shut_because for each in self._members.values() if each.shut_because]
        return errors[-1] if errors else None

    # ---- what becomes of a connection --------------------------------------------------------

    def watch(self, member: FleetMember, now: float, *, is_tick: bool) -> bool:
        """Note what has become of the connection to a member. Whether that has changed."""
        session = member.session
        assert session is not None
        is_attached = session.is_attached
        if not is_attached:
            self._moves.detached(member.number, now)
            self._moves.starting(member.number, session.is_starting)
            if (is_tick or member.is_attached) and member.has_attached and member.is_gone:
                self._moves.gone(member.number, now)
        if member.is_attached == is_attached:
            return False
        member.is_attached, member.away_since = is_attached, now
        self._note_card(member)
        return True

    def welcomed(
        self, member: FleetMember, welcome: Welcome, now: float
    ) -> list[Hold[StreamState]] | None:
        """A member has answered, and nothing was said to it yet. Returns the streams that have to
        leave it; None where it will not do.
        """
        why = self._why_refused(member, welcome)
        if why:
            self.refuse(member, partial(EngineError, Fault("engine", why)), now)
            return None
        name = welcome.replica or member.address.encode()
        if name != member.load.name:
            member.load = MemberLoad(name)
        elif member.has_attached and welcome.incarnation != member.incarnation:
            member.load.note_restarted(now)
        member.name, member.incarnation = welcome.replica, welcome.incarnation
        member.can_locate = bool(welcome.model.fingerprint)
        member.can_inspect = bool(welcome.answers & ANSWERS_INSPECT)
        member.has_attached = True
        member.card = welcome.model
        self._note_card(member)
        fingerprint, incarnation = welcome.model.fingerprint, welcome.incarnation
        return self._moves.attached(member.number, fingerprint, now, incarnation=incarnation)

    def _note_card(self, newest: FleetMember) -> None:
        """Go by the card of an attached member, by the same one as long as that is there."""
        there = [each.card for each in self.attached if each.card]
        if self.card is None or self.card not in there:
            self.card = there[0] if there else newest.card or self.card

    def _why_refused(self, member: FleetMember, welcome: Welcome) -> str:
        """Why a member will not do: another model's, or known at another address. Else empty."""
        others = [each for each in self.attached if each is not member]
        if self.card is not None and welcome.model.name != self.card.name and others:
            return f"it serves {welcome.model.name!r}, the others {self.card.name!r}"
        for other in others:
            if welcome.replica != b"" and other.name == welcome.replica:
                return f"it is the replica at {other.address}"
        return ""

    def loaded(
        self, member: FleetMember, load: Load, suspects: list[StreamState] | None, now: float
    ) -> None:
        """A member has told its load. suspects: the streams that it names, see `Moves.load`."""
        member.said = load
        self._moves.load(
            member.number,
            load.state,
            now,
            is_within=load.within,
            within_s=load.within_s,
            suspects=suspects,
        )
        member.load.note_load(
            now,
            running=load.running + load.waiting,
            queued_tokens=load.queued_tokens,
            kept_since_s=load.kept_since_s,
        )

    def refuse(self, member: FleetMember, error: Callable[[], SlipstreamError], now: float) -> None:
        """A member will not do: its streams leave it, and it is closed then."""
        if member.shut_because is None:
            logger.warning("the replica at %s is left alone: %s", member.address, error())
            member.shut_because = error
        self._moves.shut(member.number, now)
