"""Decides when a stream leaves its replica, and where it goes on.

Events go in, decisions come out: no I/O, no clock, the time is passed in. A *member* is a replica
as its reader knows it, named by a number. A stream is at a member, or held: then it is at none, and
starts where there is room for it.

- A member that is lost, shut, or without a core for `patience_s` loses all of its streams at once
  (`Hold`), provided another member can take them; otherwise they wait there.
- The streams of a member that drains run on there until each of them is started elsewhere.
- A stream stays among the members of its model, which are a pool.
- A stream that was accepted starts only where the fingerprint is that of the replica that accepted
  it. An empty fingerprint equals no other replica's.
- At most `MAX_STARTS` streams a second start at one member, those with the fewest tokens first.
- Each start of a stream that was at a member before has a higher `moves`, which is the fence
  against its older copies.
- A core that died of its own doing is a strike against what it was computing; MAX_STRIKES in a row,
  without a token in between, end the stream. So do `max_moves` moves without a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Generic, Literal, TypeVar

S = TypeVar("S", bound=Hashable)

MAX_STARTS = 256  # at a member, in any second: each is a prefill there (decision 038)
MAX_STRIKES = 3
_BEFORE_THE_END_S = 2.0  # of a drain, streams move
_SECOND = 1.0
_MAX_ASKED = 3  # members that a stream is asked of before it is overloaded

MemberState = Literal["serving", "core_away", "draining"]


@dataclass(frozen=True, slots=True)
class MoveSettings:
    """patience_s: how long a lost member is waited for. drain_moves: whether streams leave a
    draining member at once. max_moves: without a new token. wait_s, accepted_wait_s: how long a
    held stream waits for a member that can take it, before and after it was accepted.
    """

    patience_s: float = 0.5
    drain_moves: bool = False
    max_moves: int = 8
    wait_s: float = 10.0
    accepted_wait_s: float = 60.0


@dataclass(frozen=True, slots=True)
class ReaderProgress:
    """A reader's position in a stream. is_movable: the stream can be submitted elsewhere."""

    num_tokens: int
    is_accepted: bool
    is_movable: bool = True


class Failure(Enum):
    """The reason why a stream ends without its replica."""

    NO_MEMBER = "no replica could take it in time"
    SHUT = "its replica was shut, and no other could take it"
    MAX_MOVES = "it changed its replica too often without a new token"
    STRIKES = "it crashed the engines of several replicas in a row"


@dataclass(frozen=True, slots=True)
class Hold(Generic[S]):
    """Take the stream from its member, which is to end its copy."""

    stream: S
    member: int


@dataclass(frozen=True, slots=True)
class Start(Generic[S]):
    """Submit the stream at `member`, with these numbers. source: where it runs; None: held."""

    stream: S
    source: int | None
    member: int
    moves: int
    strikes: int


@dataclass(frozen=True, slots=True)
class Fail(Generic[S]):
    """End the stream with an error. member: where it is; None: held."""

    stream: S
    member: int | None
    why: Failure


Decision = Hold[S] | Start[S] | Fail[S]
Read = Callable[[S], ReaderProgress]
Choose = Callable[[S, Sequence[int]], int]


@dataclass(eq=False, slots=True)
class _Stream:
    member: int | None = None
    last_member: int | None = None
    model: str = ""  # by its name; empty: not known yet, so that any will do
    bound: bytes | None = None  # the fingerprint of the replica that accepted it
    moves: int = 0
    strikes: int = 0
    struck_at: int = 0  # tokens at the last strike
    moved_at: int = 0  # tokens at the last move
    idle_moves: int = 0  # since the last token
    waits_since: float | None = None  # for a member that can take it
    full_members: list[int] = field(default_factory=list)  # that did not accept it
    was_turned_away: bool = False  # by its member, which drains, and no other was open


@dataclass(eq=False, slots=True)
class _Member(Generic[S]):
    is_attached: bool = False
    is_gone: bool = False  # as its supervisor says: not worth waiting for
    is_removed: bool = False  # from the list: nothing new goes there
    is_shut: bool = False
    is_starting: bool = False
    away_since: float = 0.0  # while not attached
    model: str = ""  # that it serves, by its name; empty before the first attach
    fingerprint: bytes | None = None  # None before the first attach
    incarnation: int = 0
    state: MemberState = "serving"
    state_since: float = 0.0
    is_within: bool = False  # the core died of its own doing
    suspects: Collection[S] | None = None
    drains_until: float = inf
    streams: dict[S, None] = field(default_factory=dict)
    starts: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_STARTS))

    @property
    def is_open(self) -> bool:
        """True if streams may start at this member."""
        is_there = self.is_attached and not (self.is_removed or self.is_shut)
        return is_there and self.state == "serving"

    @property
    def may_serve_soon(self) -> bool:
        """True if the member has reported that it is loading its model or another core."""
        return self.is_starting or (self.is_attached and self.state == "core_away")

    def room_at(self, now: float) -> float:
        """The earliest time at which one more stream may start."""
        is_full = len(self.starts) == MAX_STARTS
        return max(now, self.starts[0] + _SECOND) if is_full else now


class Moves(Generic[S]):
    """The streams of one reader over the members of a fleet."""

    def __init__(self, settings: MoveSettings, read: Read[S], choose: Choose[S]) -> None:
        """read: what the reader has of a stream. choose: the best of these members for a stream."""
        self._settings = settings
        self._read = read
        self._choose = choose
        self._members: dict[int, _Member[S]] = {}
        self._streams: dict[S, _Stream] = {}
        self._held: dict[S, None] = {}
        self.next_at = inf  # when `due` has to be called again, whatever else happens

    # ---- members -----------------------------------------------------------------------------

    def add(self, member: int, now: float) -> None:
        """A member is in the list, for the first time or again."""
        known = self._members.setdefault(member, _Member(away_since=now))
        known.is_removed = False
        self.next_at = now

    def remove(self, member: int, now: float) -> None:
        """A member is no longer in the list. Its streams run on there."""
        self._members[member].is_removed = True
        self.next_at = now

    def forget(self, member: int) -> None:
        """Drop a member that has no streams."""
        assert not self._members[member].streams
        del self._members[member]

    def attached(
        self,
        member: int,
        fingerprint: bytes,
        now: float,
        *,
        incarnation: int = 0,
        model: str = "",
    ) -> list[Hold[S]]:
        """A member has answered. Returns the streams that may not go on there, as it has another
        model or fingerprint now: to be taken before anything is said to it.
        """
        it = self._members[member]
        before, it.fingerprint, it.model = it.fingerprint, fingerprint, model
        it.is_attached, it.is_gone, it.is_shut, it.is_starting = True, False, False, False
        self.next_at = now
        if incarnation != it.incarnation or not incarnation:
            it.incarnation = incarnation
            it.state, it.drains_until = "serving", inf
        others = [each for each in it.streams if not self._is_of(each, it)]
        if before is not None and before != fingerprint:
            bound = [each for each in it.streams if self._bind(each, before) is not None]
            others = list(dict.fromkeys(others + bound))
        return [self._hold(stream, now) for stream in others]

    def detached(self, member: int, now: float) -> None:
        """The connection to a member broke, or it is silent. Idempotent."""
        it = self._members[member]
        if it.is_attached:
            it.is_attached = False
            it.away_since = now
            if it.state == "core_away":
                it.state, it.is_within = "serving", False
            self.next_at = now

    def gone(self, member: int, now: float) -> None:
        """A member that is not attached has ended, as is known from elsewhere."""
        self._members[member].is_gone = True
        self.next_at = now

    def shut(self, member: int, now: float) -> None:
        """A member refuses its reader or breaks the protocol: nothing is expected of it until it
        attaches anew.
        """
        self.detached(member, now)
        self._members[member].is_shut = True
        self.next_at = now

    def starting(self, member: int, is_starting: bool) -> None:
        """Record the answer of a member that is not attached: is_starting if it is loading its
        model.
        """
        self._members[member].is_starting = is_starting

    def load(
        self,
        member: int,
        state: MemberState,
        now: float,
        *,
        is_within: bool = False,
        within_s: float = inf,
        suspects: Collection[S] | None = None,
    ) -> None:
        """A member told its state. is_within: its core died of its own doing. within_s: the time
        until a drain ends. suspects: streams that the core was computing when it died; None: any
        that it had accepted.
        """
        it = self._members[member]
        if state != it.state:
            if it.is_within:  # the next core is there before its streams have left
                for stream in it.streams:
                    self._strike_suspect(stream, it)
            it.state, it.state_since = state, now
            self.next_at = now
        it.is_within = state == "core_away" and is_within
        it.suspects = suspects
        drains_until = now + within_s if state == "draining" else inf
        if drains_until < it.drains_until or state != "draining":
            it.drains_until = drains_until
            self.next_at = min(self.next_at, drains_until - _BEFORE_THE_END_S)

    # ---- streams -----------------------------------------------------------------------------

    def __contains__(self, member: int) -> bool:
        return member in self._members

    def open_members(self, model: str = "") -> list[int]:
        """The members at which new streams may start. model: of this one alone; empty: of any."""
        return [
            number for number, it in self._members.items() if it.is_open and model in ("", it.model)
        ]

    def num_streams(self, member: int) -> int:
        """The number of streams at a member."""
        return len(self._members[member].streams)

    def member_of(self, stream: S) -> int | None:
        """The member that a stream is at; None: held."""
        return self._streams[stream].member

    def place(
        self, stream: S, member: int | None, now: float, *, moves: int = 0, model: str = ""
    ) -> None:
        """A new stream is at a member, or held until one is open. moves: those of a stream that
        another reader had before. model: of the stream; empty: that of its member.
        """
        it = self._streams[stream] = _Stream(moves=moves, model=model)
        if member is None:
            it.waits_since = now
            self._held[stream] = None
            self.next_at = now
        else:
            self._enter(stream, it, member)

    def succeed(self, stream: S, successor: S) -> None:
        """Another reader has taken a stream over, and goes on with it where it is."""
        it = self._streams[stream]
        if it.member is not None:
            self._bind(stream, self._members[it.member].fingerprint)
        streams = self._held if it.member is None else self._members[it.member].streams
        del self._streams[stream], streams[stream]
        self._streams[successor] = it
        streams[successor] = None

    def turned_away(self, stream: S, now: float) -> Hold[S] | None:
        """A member that leaves has not accepted a stream. None: it waits there."""
        it = self._streams[stream]
        assert it.member is not None
        source = self._members[it.member]
        if source.state == "serving":
            source.state, source.state_since = "draining", now
        self.next_at = now
        if self._targets(stream):
            return self._hold(stream, now)
        it.was_turned_away = True
        return None

    def overloaded(self, stream: S, now: float) -> Hold[S] | None:
        """A member has too much to do to accept a stream. None: so has the whole fleet, as far as
        it was asked.
        """
        it = self._streams[stream]
        assert it.member is not None
        it.full_members.append(it.member)
        if len(it.full_members) >= _MAX_ASKED or not self._targets(stream):
            return None
        self.next_at = now
        return self._hold(stream, now)

    def ended(self, stream: S) -> None:
        """A stream is over. Idempotent."""
        it = self._streams.pop(stream, None)
        if it is None:
            return
        if it.member is None:
            del self._held[stream]
        else:
            del self._members[it.member].streams[stream]

    # ---- decisions ---------------------------------------------------------------------------

    def due(self, now: float) -> list[Decision[S]]:
        """The decisions that are due now, in their order. Failed streams count as ended."""
        self.next_at = inf
        decisions: list[Decision[S]] = []
        for number, it in self._members.items():
            if it.streams and self._is_left(it, now):
                decisions += self._leave(number, it, now)
        ready = [*self._held, *self._draining(now)]
        decisions += self._start(sorted(ready, key=self._num_tokens), now)
        return decisions

    def _is_left(self, it: _Member[S], now: float) -> bool:
        """True if a member's streams leave it at once."""
        if it.is_shut or (it.is_gone and not it.is_attached):
            return True
        if it.is_attached and it.state != "core_away":
            return False
        since = it.state_since if it.is_attached else it.away_since
        return self._is_past(since + self._settings.patience_s, now)

    def _leave(self, number: int, it: _Member[S], now: float) -> Iterator[Decision[S]]:
        for stream in list(it.streams):
            self._streams[stream].full_members.clear()  # they may have room by now
            if not self._targets(stream):
                if it.is_shut:
                    yield self._fail(stream, Failure.SHUT)
                continue
            is_struck = it.is_attached and it.is_within and self._strike_suspect(stream, it)
            if is_struck and self._streams[stream].strikes >= MAX_STRIKES:
                yield self._fail(stream, Failure.STRIKES)
            else:
                yield self._hold(stream, now)

    def _draining(self, now: float) -> Iterator[S]:
        for it in self._members.values():
            if it.is_attached and it.state == "draining" and it.streams:
                begins = it.drains_until - _BEFORE_THE_END_S
                are_all = self._settings.drain_moves or self._is_past(begins, now)
                for each in it.streams:
                    is_due = are_all or self._streams[each].was_turned_away
                    if is_due and self._read(each).is_movable:
                        yield each

    def _start(self, ready: Sequence[S], now: float) -> Iterator[Decision[S]]:
        for stream in ready:
            it = self._streams[stream]
            targets = self._targets(stream)
            if not targets:
                if it.member is None and self._has_waited(it, self._read(stream), now):
                    yield self._fail(stream, Failure.NO_MEMBER)
                continue
            it.waits_since = None
            rooms = {target: self._members[target].room_at(now) for target in targets}
            free = [target for target in targets if rooms[target] <= now]
            if not free:
                self.next_at = min(self.next_at, *rooms.values())
                continue
            yield self._move(stream, it, self._choose(stream, free), now)

    def _move(self, stream: S, it: _Stream, target: int, now: float) -> Decision[S]:
        source = it.member
        num_tokens = self._num_tokens(stream)
        if it.last_member is not None or source is not None:
            it.idle_moves = 0 if num_tokens > it.moved_at else it.idle_moves + 1
            if it.idle_moves > self._settings.max_moves:
                return self._fail(stream, Failure.MAX_MOVES)
            it.moves += 1
        it.moved_at = num_tokens
        if source is not None:
            self._exit(stream, it)
        else:
            del self._held[stream]
        self._enter(stream, it, target)
        self._members[target].starts.append(now)
        return Start(stream, source, target, it.moves, it.strikes)

    def _hold(self, stream: S, now: float) -> Hold[S]:
        it = self._streams[stream]
        assert it.member is not None
        source = it.member
        self._exit(stream, it)
        it.waits_since = now
        self._held[stream] = None
        return Hold(stream, source)

    def _fail(self, stream: S, why: Failure) -> Fail[S]:
        member = self._streams[stream].member
        self.ended(stream)
        return Fail(stream, member, why)

    def _enter(self, stream: S, it: _Stream, member: int) -> None:
        it.member, it.last_member, it.was_turned_away = member, member, False
        it.model = it.model or self._members[member].model
        self._members[member].streams[stream] = None

    def _exit(self, stream: S, it: _Stream) -> None:
        """Take a stream from its member, and note which fingerprint it is bound to."""
        assert it.member is not None
        source = self._members[it.member]
        self._bind(stream, source.fingerprint)
        del source.streams[stream]
        it.member = None

    def _bind(self, stream: S, fingerprint: bytes | None) -> bytes | None:
        it = self._streams[stream]
        if it.bound is None and self._read(stream).is_accepted:
            it.bound = fingerprint
        return it.bound

    def _strike_suspect(self, stream: S, member: _Member[S]) -> bool:
        """Count the death of a member's core against a stream. False: it was not computing it."""
        read = self._read(stream)
        is_suspect = read.is_accepted if member.suspects is None else stream in member.suspects
        if is_suspect:
            it = self._streams[stream]
            it.strikes = 1 if read.num_tokens > it.struck_at else it.strikes + 1
            it.struck_at = read.num_tokens
        return is_suspect

    def _targets(self, stream: S) -> list[int]:
        """The open members other than its own at which a stream may go on."""
        it = self._streams[stream]
        read = self._read(stream)
        if not read.is_movable:
            return []
        bound = it.bound
        if bound is None and read.is_accepted and it.member is not None:
            bound = self._members[it.member].fingerprint
        return [
            number
            for number, member in self._members.items()
            if member.is_open
            and it.model in ("", member.model)
            and number != it.member
            and (read.is_accepted or number not in it.full_members)
            and (bound is None or _may_join(bound, member.fingerprint, number == it.last_member))
        ]

    def _has_waited(self, it: _Stream, read: ReaderProgress, now: float) -> bool:
        """True if a held stream has waited for a member for as long as it may."""
        if it.waits_since is None or any(
            each.may_serve_soon and (not it.model or each.model in ("", it.model))
            for each in self._members.values()
        ):
            it.waits_since = now
        settings = self._settings
        wait_s = settings.accepted_wait_s if read.is_accepted else settings.wait_s
        return self._is_past(it.waits_since + wait_s, now)

    def _is_of(self, stream: S, it: _Member[S]) -> bool:
        """True if a stream is of the model that a member serves, as far as both are known."""
        return self._streams[stream].model in ("", it.model)

    def _is_past(self, time: float, now: float) -> bool:
        if now < time:
            self.next_at = min(self.next_at, time)
        return now >= time

    def _num_tokens(self, stream: S) -> int:
        return self._read(stream).num_tokens


def _may_join(bound: bytes, fingerprint: bytes | None, is_same_member: bool) -> bool:
    """True if a stream that one replica accepted may go on at another."""
    return bound == fingerprint and (bool(bound) or is_same_member)
