"""The members of a cluster as one client knows them, and its links to the workers of each.

- A member is a stack: a replica of a fleet, or the only one. A stream belongs to the worker of it
  that its id is dealt to (`worker_of`), and so do queries about it. Other queries go to the first
  worker, which speaks for the stack.
- The first worker's Welcome says how many there are. What was asked for before is dealt then. A
  stack that follows at the same address may have another number: its first Welcome deals all
  streams anew, each with what was received of it.
- The death of one worker touches its own link alone.

Members of a fleet that serve the same model, by its name, are a pool. One that refuses the client,
breaks the protocol, or is a known replica at a second address is closed, named in a warning, and
tried again later.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from typing import Any

from msgspec.structs import replace

from slipstream.client.connection.combined_answer import AnswerOfAll
from slipstream.client.connection.link_session import ClientSession
from slipstream.client.connection.queries import PendingQuery, Post, Query
from slipstream.client.placing.discovery import MemberSource
from slipstream.client.placing.member_load import MemberLoad
from slipstream.client.placing.moves import Hold, Moves
from slipstream.client.placing.replica_status import ReplicaStatus
from slipstream.client.server_presence import why_absent
from slipstream.client.streams.stream_state import StreamState
from slipstream.client.streams.stream_table import CarriedStream
from slipstream.errors import ConnectionLostError, EngineError, SlipstreamError
from slipstream_ipc.adapter_records import RecordTable
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import (
    ANSWERS_INSPECT,
    ANSWERS_STAGES,
    AdapterRecords,
    AdapterRef,
    Cancel,
    Embed,
    Fault,
    Load,
    Locate,
    ModelCard,
    Recall,
    Welcome,
)
from slipstream_ipc.telemetry.recent_warnings import RecentWarnings
from slipstream_ipc.transport.addresses import IPC
from slipstream_ipc.worker_deal import worker_of

_SHUT_S = 10.0  # until a closed member is tried again
_AWAY_S = 10.0  # for which it is said of a member that it may be back soon
_DOUBT_S = 0.5  # for which a member whose connection broke is looked at again and again

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Member:
    """A stack as this client knows it. links: to its workers, in their order; none while it is
    closed. why_unopened: the error of the last attempt to open it; empty: it was opened. name: of
    the replica; empty: it has none. is_attached: all links are, as of the last turn. said: the last
    load that it told.
    """

    number: int
    address: str
    load: MemberLoad
    links: list[ClientSession] = field(default_factory=list)
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
    takes_stages: bool = False  # of changes of adapters
    records: RecordTable = field(default_factory=RecordTable)  # of such, that it has made
    # names and digests of adapters that it has served: its streams may go on with those
    versions: set[tuple[str, bytes]] = field(default_factory=set)
    said: Load | None = None

    @property
    def is_gone(self) -> bool:
        """True if the machine reports that nothing can answer at the address."""
        return self.address.startswith(IPC) and why_absent(self.address) is not None

    @property
    def why_away(self) -> str:
        """The reason why the member is not attached; empty if it is not known."""
        return self.trouble if self.links else self.why_unopened

    @property
    def trouble(self) -> str:
        """The failure of handshakes with the first worker since the last attach; empty if there was
        none.
        """
        return self.links[0].trouble if self.links else ""

    @property
    def are_links_attached(self) -> bool:
        """True if it is open and all links are attached now, as far as is known."""
        return bool(self.links) and all(each.is_attached for each in self.links)

    @property
    def is_starting(self) -> bool:
        """True if the stack has answered that it cannot serve yet."""
        return any(each.is_starting for each in self.links)

    def is_among(self, arrived: Container[object]) -> bool:
        """True if a poller's result includes something for this stack."""
        return any(each.is_among(arrived) for each in self.links)

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

    def serve(self, card: ModelCard) -> None:
        """It serves this from now on."""
        self.card = card
        self.versions.update([(each.name, each.digest) for each in card.adapters])

    # ---- its workers -------------------------------------------------------------------------

    def link_of(self, state: StreamState) -> ClientSession | None:
        """The link to the worker of one of the member's streams; None if it is closed."""
        return self.links[state.worker] if self.links else None

    def submit(self, state: StreamState, now: float) -> None:
        """Submit a new stream, or one to be resumed."""
        self._deal(state).submit(state, now)

    def carry_on(self, carried: CarriedStream) -> None:
        """Go on with a stream of another member."""
        self._deal(carried.state).carry_on(carried)

    def _deal(self, state: StreamState) -> ClientSession:
        state.worker = worker_of(state.stream_id, len(self.links))
        return self.links[state.worker]

    def ask(self, query: Query, future: Future[Any], now: float, post: Post) -> None:
        """Fulfil `future` with the answer of the worker, or the workers, that can give it."""
        links = self.links
        match query:
            case Recall():
                links[worker_of(query.stream_id, len(links))].ask(query, future, now, post)
            case Embed():
                links[worker_of(query.call, len(links))].ask(query, future, now, post)
            case Cancel() | Locate() if len(links) > 1:
                self._ask_each(query, future, now, post)
            case _:
                links[0].ask(query, future, now, post)

    def _ask_each(
        self, query: Cancel | Locate, future: Future[Any], now: float, post: Post
    ) -> None:
        """Ask each worker about its own streams, and put the answers together."""
        places: dict[int, list[int]] = {}  # by worker: of its streams in the query
        for at, stream_id in enumerate(query.stream_ids):
            places.setdefault(worker_of(stream_id, len(self.links)), []).append(at)
        answer = AnswerOfAll(query, future, len(places), places=list(places.values()))
        for index, (worker, own) in enumerate(places.items()):
            part: Future[Any] = Future()
            part.add_done_callback(partial(answer.add, index))
            ids = tuple([query.stream_ids[at] for at in own])
            self.links[worker].ask(replace(query, stream_ids=ids), part, now, post)

    def take_queries(self, *, but_of_streams: bool = False) -> list[PendingQuery]:
        """Give unanswered queries away, to be asked elsewhere: see `PendingQueries.take_all`."""
        return [
            asked
            for link in self.links
            for asked in link.take_queries(but_of_streams=but_of_streams)
        ]

    def turn(self, now: float, arrived: Container[object] | None = None) -> bool:
        """Let the links turn, those with news alone where `arrived` tells them; return True if
        deltas arrived.
        """
        has_deltas = False
        for link in list(self.links):
            if arrived is None or link.is_among(arrived):
                has_deltas |= link.turn(now)
        return has_deltas

    def deal_anew(self, welcome: Welcome, open_link: Callable[[int], ClientSession]) -> None:
        """Deal all streams anew where the first worker names another number of workers. Nothing was
        said to it yet. open_link: to the worker of this index.
        """
        # at the address of another worker than the first, the others' addresses are not known
        num = welcome.num_workers if welcome.worker == 0 else 1
        before = list(self.links)
        if num == len(before):
            return
        self.links[num:] = []
        for worker in range(len(before), num):
            self.links.append(open_link(worker))
        for link in before:
            for state in link.streams:
                if self._deal(state) is not link:
                    self.links[state.worker].carry_on(link.take(state))
            for asked in link.take_queries():
                self.ask(asked.query, asked.future, asked.since, asked.post)
        for link in before[num:]:
            link.close()


Connect = Callable[[Member, int, float], ClientSession]


class Members:
    """The members that are listed, and those that still have streams. Tells `Moves` of them, but
    for one that is alone.

    models: those that are served, each as the attached member told it that was first; empty before
    any was attached. A model whose members are all away is still one of them.
    """

    def __init__(
        self, address: str, source: MemberSource, connect: Connect, moves: Moves[StreamState]
    ) -> None:
        """address: of the fleet, for messages. connect: opens the link to a worker of a
        member, by its index, and may raise BadRequest or OSError.
        """
        self.models: tuple[ModelCard, ...] = ()
        self._cards: dict[str, ModelCard] = {}  # by name, each one member's
        self._records: dict[str, RecordTable] = {}  # by model: all that any member has told
        self._address = address
        self._source = source
        self._connect = connect
        self._moves = moves
        self._members: dict[int, Member] = {}
        self._numbers = count()
        self._unasked: list[tuple[str, PendingQuery]] = []  # each with the model it is about
        self._in_doubt: dict[int, float] = {}  # members that may be gone, and until when

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def __getitem__(self, number: int) -> Member:
        return self._members[number]

    def __len__(self) -> int:
        return len(self._members)

    def is_there(self, number: int) -> bool:
        """True if there is a member of this number and it is attached."""
        member = self._members.get(number)
        return member is not None and member.is_attached

    @property
    def listed(self) -> list[Member]:
        """The members that the list names."""
        return [each for each in self._members.values() if each.is_listed]

    @property
    def attached(self) -> list[Member]:
        """The members that are attached, as far as is known."""
        return self.attached_of("")

    def attached_of(self, model: str) -> list[Member]:
        """The members that are attached and serve a model; empty: any."""
        return [each for each in self._members.values() if each.is_attached and each.is_of(model)]

    def that_may_serve(self, model: str) -> list[Member]:
        """The members that serve a model or have not reported which one they serve; empty: any."""
        return [each for each in self._members.values() if each.card is None or each.is_of(model)]

    def statuses(self) -> list[ReplicaStatus]:
        """The status of each listed member, as far as it is known."""
        found = [each.status for each in self.listed]
        nums = Counter([each.name for each in found])
        return [
            replace(each, is_namesake=bool(each.name) and nums[each.name] > 1) for each in found
        ]

    def that_may_answer(self, now: float) -> list[Member]:
        """The members that are attached or were until recently; all of them if there is none."""
        since = now - _AWAY_S
        able = [
            each
            for each in self._members.values()
            if each.is_attached
            or (each.links and each.is_listed and each.away_since > since and not each.is_gone)
        ]
        return able or self.opened

    @property
    def opened(self) -> list[Member]:
        """The members that are not closed."""
        return self.opened_of("")

    def opened_of(self, model: str) -> list[Member]:
        """The members that are not closed and serve a model; empty: any."""
        return [each for each in self._members.values() if each.links and each.is_of(model)]

    @property
    def links(self) -> list[ClientSession]:
        """The links to all workers of all members."""
        return [link for each in self._members.values() for link in each.links]

    def records_of(self, model: str) -> RecordTable:
        """The last changes of a model's adapters, of all that any member has told."""
        return self._records.setdefault(model, RecordTable())

    def take_unasked(self) -> list[tuple[str, PendingQuery]]:
        """The queries of connections that were closed, and of those that are not attached while
        another one of the same model is, to be asked elsewhere: each with the name of that model.
        The latter keep those that another cannot answer.
        """
        taken, self._unasked = self._unasked, []
        there = {each.model for each in self.attached}
        for member in self._members.values():
            is_other_there = member.model in there or (member.card is None and bool(there))
            if not member.is_attached and is_other_there:
                taken += _about(member.model, member.take_queries(but_of_streams=True))
        return taken

    def gone_error(self, model: str = "") -> SlipstreamError:
        """Says that none of them answers. model: of those that serve it; empty: of all."""
        trouble = "; ".join([each.trouble for each in self.opened if each.trouble])
        of_pool = f" that serves {model!r}" if model and len(self.models) > 1 else ""
        why = f"no replica of the fleet {self._address}{of_pool} answers"
        return ConnectionLostError(Fault("engine", f"{why}: {trouble}" if trouble else why))

    # ---- the list ----------------------------------------------------------------------------

    def open_alone(self, address: str, now: float) -> Member:
        """Open the only member, which is never moved from, until `clear`. Raises: BadRequest,
        OSError.
        """
        member = self._add(address, now)
        member.links = [self._connect(member, 0, now)]
        return member

    def clear(self, now: float) -> None:
        """Leave all members, whose streams have been taken."""
        for link in self.links:
            link.say_goodbye(now)
            link.close()
        self._members.clear()
        self._numbers = count()

    def _add(self, address: str, now: float) -> Member:
        member = Member(next(self._numbers), address, MemberLoad(address.encode()), opens_at=now)
        self._members[member.number] = member
        return member

    def refresh(self, now: float) -> None:
        """Open members that were added, and let those go that were removed and have no streams."""
        listed = self._source.addresses(now)
        known = {member.address: member for member in self._members.values()}
        for address in listed:
            member = known.get(address)
            if member is None:
                member = self._add(address, now)
            if member.number not in self._moves or not member.is_listed:
                member.is_listed = True
                self._moves.add(member.number, now)
            if not member.links and now >= member.opens_at:
                self._open(member, now)
        for address, member in known.items():
            if address in listed:
                continue
            if member.is_listed:
                member.is_listed = False
                self._moves.remove(member.number, now)
            if not self._moves.num_streams(member.number):
                self._drop(member, now)

    def _open(self, member: Member, now: float) -> None:
        try:
            member.links = [self._connect(member, 0, now)]
        except (BadRequest, OSError) as error:
            member.why_unopened = str(error)
            member.warnings.warn("the replica at %s cannot be used: %s", member.address, error)
            member.opens_at = now + _SHUT_S
        else:
            member.why_unopened = ""
            member.shut_because, member.away_since = None, now

    def _drop(self, member: Member, now: float) -> None:
        for link in member.links:
            link.say_goodbye(now)
        self._close(member)
        del self._members[member.number]
        self._moves.forget(member.number)
        self._note_models()

    def _close(self, member: Member) -> None:
        self._unasked += _about(member.model, member.take_queries())
        for link in member.links:
            link.close()
        member.links = []
        member.is_attached = False
        self._note_models()

    def close_refused(self, now: float) -> None:
        """Close members that will not do and have no streams any more."""
        for member in self._members.values():
            has_streams = self._moves.num_streams(member.number) > 0  # until the next decision
            if member.shut_because is not None and member.links and not has_streams:
                self._close(member)
                member.opens_at = now + _SHUT_S

    @property
    def why_none(self) -> Callable[[], SlipstreamError] | None:
        """The reason why all members are closed; None if one is not."""
        if self.opened:
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

    def watch(self, member: Member, now: float, *, is_tick: bool) -> bool:
        """Note the state of the connection to a member; return True if it has changed."""
        is_attached = member.are_links_attached
        if not is_attached:
            if member.trouble and member.shut_because is None:
                member.warnings.warn(
                    "the replica at %s does not answer: %s", member.address, member.trouble
                )
            self._moves.detached(member.number, now)
            self._moves.starting(member.number, member.is_starting)
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
        self, member: Member, welcome: Welcome, now: float
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
            member.versions.clear()
        member.name, member.incarnation = welcome.replica, welcome.incarnation
        member.can_locate = bool(welcome.model.fingerprint)
        member.can_inspect = bool(welcome.answers & ANSWERS_INSPECT)
        member.takes_stages = bool(welcome.answers & ANSWERS_STAGES)
        member.records = RecordTable()
        member.has_attached = True
        member.warnings.forget()
        is_other_model = member.card is not None and member.model != welcome.model.name
        if is_other_model:
            taken = member.take_queries(but_of_streams=True)
            self._unasked += _about(member.model, taken)
        member.serve(welcome.model)
        self._note_models()
        return self._moves.attached(
            member.number,
            welcome.model.fingerprint,
            now,
            incarnation=welcome.incarnation,
            model=welcome.model.name,
        )

    def note_adapters(self, member: Member, model: ModelCard, records: AdapterRecords) -> None:
        """A member's model has other adapters than before, by these changes."""
        member.records = RecordTable(records)
        member.serve(model)
        known = self.records_of(model.name)
        for each in records:
            known.take(each)
        self._note_models()

    def _note_models(self) -> None:
        """Go by the card of an attached member of each model, by the same one as long as that is
        there, with the adapters of all of them. In the order of the members.
        """
        cards: dict[str, list[ModelCard]] = {}
        for each in sorted(self._members.values(), key=_is_away):
            if each.card is not None:
                there = cards.setdefault(each.model, [])
                if each.is_attached or not there:
                    there.append(each.card)
        order = dict.fromkeys([each.model for each in self._members.values() if each.card])
        before = self._cards
        found = {
            name: before[name] if before.get(name) in cards[name] else cards[name][0]
            for name in order
        }
        if found:
            self._cards = found
            self.models = tuple(
                _with_adapters(found[name], cards[name], self.records_of(name)) for name in found
            )

    def _why_refused(self, member: Member, welcome: Welcome) -> str:
        """The reason to refuse a member: it is known at another address. Else empty."""
        for other in self.attached_of(welcome.model.name):
            if other is not member and welcome.replica != b"" and other.name == welcome.replica:
                return f"it is the replica at {other.address}"
        return ""

    def loaded(
        self, member: Member, load: Load, suspects: list[StreamState] | None, now: float
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

    def refuse(self, member: Member, error: Callable[[], SlipstreamError], now: float) -> None:
        """A member will not do: its streams leave it, and it is closed then."""
        if member.shut_because is None:
            member.warnings.warn("the replica at %s is left alone: %s", member.address, error())
            member.shut_because = error
        self._moves.shut(member.number, now)


def _about(model: str, queries: list[PendingQuery]) -> list[tuple[str, PendingQuery]]:
    return [(model, each) for each in queries]


def _with_adapters(card: ModelCard, cards: Sequence[ModelCard], records: RecordTable) -> ModelCard:
    """The card with the adapters of all, but for those that are served no longer; each as its last
    change has made it.
    """
    found = {each.name: each for each in card.adapters}
    for other in cards:
        for each in other.adapters:
            found.setdefault(each.name, each)
    for name in list(found):
        record = records.get(name)
        if record is not None and record.path:
            found[name] = AdapterRef(name, record.path, record.digest)
        elif record is not None:
            del found[name]
    adapters = tuple(found.values())
    return card if adapters == card.adapters else replace(card, adapters=adapters)


def _is_away(member: Member) -> bool:
    return not member.is_attached
