"""The members of a fleet as one client knows them, and its connection to each.

Those that serve the same model, by its name, are a pool. A member that refuses the client, breaks
the protocol, or is a known replica at a second address is closed, named in a warning, and tried
again later.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf

from msgspec.structs import replace

from slipstream.client.connection.queries import PendingQuery
from slipstream.client.connection.server_presence import why_absent
from slipstream.client.connection.stack_session import StackSession
from slipstream.client.placing.discovery import MemberSource
from slipstream.client.placing.member_load import MemberLoad
from slipstream.client.placing.moves import Hold, Moves
from slipstream.client.placing.replica_status import ReplicaStatus
from slipstream.client.streams.stream_state import StreamState
from slipstream.errors import ConnectionLostError, EngineError, SlipstreamError
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import ANSWERS_INSPECT, Fault, Load, ModelCard, Welcome
from slipstream_ipc.telemetry.recent_warnings import RecentWarnings
from slipstream_ipc.transport.addresses import IPC

_SHUT_S = 10.0  # until a closed member is tried again
_AWAY_S = 10.0  # for which it is said of a member that it may be back soon
_DOUBT_S = 0.5  # for which a member whose connection broke is looked at again and again

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class FleetMember:
    """A replica as this client knows it. session: None while it is closed. why_unopened: the error
    of the last attempt to open it; empty: it was opened. name: of the replica; empty: it has none.
    said: the last load that it told.
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
    why_unopened: str = ""
    warnings: RecentWarnings = field(default_factory=lambda: RecentWarnings(logger))
    opens_at: float = inf
    can_locate: bool = False
    can_inspect: bool = False
    said: Load | None = None

    @property
    def is_gone(self) -> bool:
        """True if the machine reports that nothing can answer at the address."""
        return self.address.startswith(IPC) and why_absent(self.address) is not None

    @property
    def why_away(self) -> str:
        """The reason why the member is not attached; empty if it is not known."""
        return self.why_unopened if self.session is None else self.session.trouble

    @property
    def model(self) -> str:
        """The name of the model that it serves; empty: it has not told it yet."""
        return "" if self.card is None else self.card.name

    def is_of(self, model: str) -> bool:
        """True if the member serves a model, as far as is known. model: empty for any."""
        return not model or self.model == model

    @property
    def status(self) -> ReplicaStatus:
        """The member's status as far as it is known, for tools that monitor the fleet."""
        name, model = self.name.decode(errors="replace"), self.model
        if self.shut_because is not None:
            why = self.why_unopened or str(self.shut_because())
            return ReplicaStatus(self.address, "refused", name, why, model=model)
        if not self.is_attached:
            return ReplicaStatus(self.address, "away", name, self.why_away, model=model)
        condition = "serving" if self.said is None else self.said.state
        return ReplicaStatus(self.address, condition, name, load=self.said, model=model)


Connect = Callable[[FleetMember, float], StackSession]


class FleetMembers:
    """The members that are listed, and those that still have streams. Tells `Moves` of them.

    models: those that are served, each as the attached member told it that was first; empty before
    any was attached. A model whose members are all away is still one of them.
    """

    def __init__(
        self, address: str, source: MemberSource, connect: Connect, moves: Moves[StreamState]
    ) -> None:
        """address: of the fleet, for messages. connect: opens a connection to a member, and may
        raise BadRequest or OSError.
        """
        self.models: tuple[ModelCard, ...] = ()
        self._address = address
        self._source = source
        self._connect = connect
        self._moves = moves
        self._members: dict[int, FleetMember] = {}
        self._numbers = count()
        self._unasked: list[tuple[str, PendingQuery]] = []  # each with the model it is about
        self._in_doubt: dict[int, float] = {}  # members that may be gone, and until when

    def __iter__(self) -> Iterator[FleetMember]:
        return iter(list(self._members.values()))

    def __getitem__(self, number: int) -> FleetMember:
        return self._members[number]

    def __len__(self) -> int:
        return len(self._members)

    def is_there(self, number: int) -> bool:
        """True if there is a member of this number and it is attached."""
        member = self._members.get(number)
        return member is not None and member.is_attached

    @property
    def listed(self) -> list[FleetMember]:
        """The members that the list names."""
        return [each for each in self._members.values() if each.is_listed]

    @property
    def attached(self) -> list[FleetMember]:
        """The members that are attached, as far as is known."""
        return self.attached_of("")

    def attached_of(self, model: str) -> list[FleetMember]:
        """The members that are attached and serve a model; empty: any."""
        return [each for each in self._members.values() if each.is_attached and each.is_of(model)]

    def that_may_serve(self, model: str) -> list[FleetMember]:
        """The members that serve a model or have not reported which one they serve; empty: any."""
        return [each for each in self._members.values() if each.card is None or each.is_of(model)]

    def statuses(self) -> list[ReplicaStatus]:
        """The status of each listed member, as far as it is known."""
        found = [each.status for each in self.listed]
        nums = Counter([each.name for each in found])
        return [
            replace(each, is_namesake=bool(each.name) and nums[each.name] > 1) for each in found
        ]

    def that_may_answer(self, now: float) -> list[FleetMember]:
        """The members that are attached or were until recently; all of them if there is none."""
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
        return self.sessions_of("")

    def sessions_of(self, model: str) -> list[StackSession]:
        """The connections that are not closed, to those that serve a model; empty: any."""
        return [
            each.session
            for each in self._members.values()
            if each.session is not None and each.is_of(model)
        ]

    def take_unasked(self) -> list[tuple[str, PendingQuery]]:
        """The queries of connections that were closed, and of those that are not attached while
        another one of the same model is, to be asked elsewhere: each with the name of that model.
        The latter keep those that another cannot answer.
        """
        taken, self._unasked = self._unasked, []
        there = {each.model for each in self.attached}
        for member in self._members.values():
            is_other_there = member.model in there or (member.card is None and bool(there))
            if not member.is_attached and member.session is not None and is_other_there:
                taken += _about(member.model, member.session.take_queries(but_of_streams=True))
        return taken

    def gone_error(self, model: str = "") -> SlipstreamError:
        """Says that none of them answers. model: of those that serve it; empty: of all."""
        trouble = "; ".join([each.trouble for each in self.sessions if each.trouble])
        of_pool = f" that serves {model!r}" if model and len(self.models) > 1 else ""
        why = f"no replica of the fleet {self._address}{of_pool} answers"
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
            member.why_unopened = str(error)
            member.warnings.warn("the replica at %s cannot be used: %s", member.address, error)
            member.opens_at = now + _SHUT_S
        else:
            member.why_unopened = ""
            member.shut_because, member.away_since = None, now

    def _drop(self, member: FleetMember, now: float) -> None:
        if member.session is not None:
            member.session.say_goodbye(now)
            self._close(member, member.session)
        del self._members[member.number]
        self._moves.forget(member.number)
        self._note_models()

    def _close(self, member: FleetMember, session: StackSession) -> None:
        member.session = None
        member.is_attached = False
        self._note_models()
        self._unasked += _about(member.model, session.take_queries())
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
        """The reason why all members are closed; None if one is not."""
        if self.sessions:
            return None
        errors = [each.shut_because for each in self._members.values() if each.shut_because]
        return errors[-1] if errors else None

    # ---- what becomes of a connection --------------------------------------------------------

    @property
    def is_any_in_doubt(self) -> bool:
        """True if a connection has just been lost and it is not known yet if its member is gone."""
        return bool(self._in_doubt)

    def look_again(self, now: float) -> bool:
        """Look whether members in doubt are gone; return True if one is. The processes of a replica
        end one after another, and the one that listens need not be the first.
        """
        is_any_gone = False
        for number, until in list(self._in_doubt.items()):
            member = self._members.get(number)
            if member is not None and not member.is_attached and now < until:
                if not member.is_gone:
                    continue
                self._moves.gone(number, now)
                is_any_gone = True
            del self._in_doubt[number]
        return is_any_gone

    def watch(self, member: FleetMember, now: float, *, is_tick: bool) -> bool:
        """Note the state of the connection to a member; return True if it has changed."""
        session = member.session
        assert session is not None
        is_attached = session.is_attached
        if not is_attached:
            if session.trouble and member.shut_because is None:
                member.warnings.warn(
                    "the replica at %s does not answer: %s", member.address, session.trouble
                )
            self._moves.detached(member.number, now)
            self._moves.starting(member.number, session.is_starting)
            if (is_tick or member.is_attached) and member.has_attached:
                if member.is_gone:
                    self._moves.gone(member.number, now)
                elif member.is_attached:
                    self._in_doubt[member.number] = now + _DOUBT_S
        if member.is_attached == is_attached:
            return False
        member.is_attached, member.away_since = is_attached, now
        self._note_models()
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
        member.warnings.forget()
        is_other_model = member.card is not None and member.model != welcome.model.name
        if member.session is not None and is_other_model:
            taken = member.session.take_queries(but_of_streams=True)
            self._unasked += _about(member.model, taken)
        member.card = welcome.model
        self._note_models()
        return self._moves.attached(
            member.number,
            welcome.model.fingerprint,
            now,
            incarnation=welcome.incarnation,
            model=welcome.model.name,
        )

    def _note_models(self) -> None:
        """Go by the card of an attached member of each model, by the same one as long as that is
        there. In the order of the members.
        """
        cards: dict[str, list[ModelCard]] = {}
        for each in sorted(self._members.values(), key=_is_away):
            if each.card is not None:
                there = cards.setdefault(each.model, [])
                if each.is_attached or not there:
                    there.append(each.card)
        order = dict.fromkeys([each.model for each in self._members.values() if each.card])
        before = {card.name: card for card in self.models}
        found = [
            before[name] if before.get(name) in cards[name] else cards[name][0] for name in order
        ]
        self.models = tuple(found) or self.models

    def _why_refused(self, member: FleetMember, welcome: Welcome) -> str:
        """The reason to refuse a member: it is known at another address. Else empty."""
        for other in self.attached_of(welcome.model.name):
            if other is not member and welcome.replica != b"" and other.name == welcome.replica:
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
            member.warnings.warn("the replica at %s is left alone: %s", member.address, error())
            member.shut_because = error
        self._moves.shut(member.number, now)


def _about(model: str, queries: list[PendingQuery]) -> list[tuple[str, PendingQuery]]:
    return [(model, each) for each in queries]


def _is_away(member: FleetMember) -> bool:
    return not member.is_attached
