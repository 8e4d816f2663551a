"""Streams over replicas that are lost, drain and come back: one reader, one text, one end."""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slipstream.client.placing import moves as moves_module
from slipstream.client.placing.moves import (
    Fail,
    Failure,
    Hold,
    Moves,
    MoveSettings,
    ReaderProgress,
    Start,
)

PATIENCE_S = 0.5
NUM_MEMBERS = 5
MODELS = {b"a": "one", b"b": "two", b"": "one"}  # by the fingerprint of the replica that serves it


def next_token(fingerprint: bytes, stream: int, before: list[int]) -> int:
    """A token that depends on the weights and on every token before it."""
    return zlib.crc32(repr((fingerprint, stream, before)).encode())


def whole_text(fingerprint: bytes, stream: int, length: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < length:
        tokens.append(next_token(fingerprint, stream, tokens))
    return tokens


@dataclass
class Copy:
    """A stream as a replica runs it."""

    handle: int
    moves: int
    tokens: list[int]
    num_sent: int = 0
    is_accepted: bool = False
    is_read: bool = True  # the reader has stated its position over the current link


@dataclass
class Replica:
    fingerprint: bytes
    is_up: bool = True
    has_core: bool = True
    is_linked: bool = False
    incarnation: int = 1
    copies: dict[int, Copy] = field(default_factory=dict)
    fences: dict[int, int] = field(default_factory=dict)
    sent: deque[tuple] = field(default_factory=deque)  # on its way to the reader
    handles: set[int] = field(default_factory=set)  # of the streams it has been asked for
    aborts: set[int] = field(default_factory=set)  # handles that the reader wants ended
    # as the reader knows it
    away_since: float = 0.0
    core_away_since: float = 0.0
    is_within: bool = False
    suspects: set[int] | None = None  # of a core that is away; None: unknown
    is_gone: bool = False
    drains_until: float | None = None
    is_listed: bool = True
    starts: list[float] = field(default_factory=list)


@dataclass
class Reader:
    """What the reader has of a stream."""

    length: int
    model: str = ""  # empty: that of its first member
    tokens: list[int] = field(default_factory=list)
    is_accepted: bool = False
    bound: bytes | None = None
    member: int | None = None
    handle: int = -1
    deaths: int = 0  # of cores from within while it was there, since the last token
    num_at_death: int = 0
    idle_moves: int = 0
    num_at_move: int = 0
    held_at: float = 0.0
    last_member: int | None = None
    num_moves: int = 0
    ends: list[str] = field(default_factory=list)


class Fleet(RuleBasedStateMachine):
    """A reader that does what `Moves` decides, and replicas that do what replicas do."""

    max_starts = 3

    def __init__(self) -> None:
        super().__init__()
        self._max_starts = moves_module.MAX_STARTS
        moves_module.MAX_STARTS = self.max_starts
        self.now = 100.0
        self.settings = MoveSettings(patience_s=PATIENCE_S, max_moves=3, accepted_wait_s=30.0)
        self.moves: Moves[int] = Moves(self.settings, self.read, self.choose)
        self.replicas = [Replica(each) for each in (b"a", b"a", b"a", b"b", b"")]
        self.readers: list[Reader] = []
        self.num_handles = 0
        for member in range(NUM_MEMBERS):
            self.moves.add(member, self.now)
            self.link(member)

    def teardown(self) -> None:
        try:
            self.heal_all()
        finally:
            moves_module.MAX_STARTS = self._max_starts

    # ---- what Moves asks ---------------------------------------------------------------------

    def read(self, stream: int) -> ReaderProgress:
        reader = self.readers[stream]
        return ReaderProgress(len(reader.tokens), reader.is_accepted)

    def choose(self, stream: int, members: list[int]) -> int:
        assert members
        return min(members, key=lambda member: len(self.replicas[member].copies))

    # ---- rules -------------------------------------------------------------------------------

    @rule(
        lengths=st.lists(st.integers(2, 30), min_size=1, max_size=6),
        model=st.sampled_from(["", "one", "two"]),
    )
    @precondition(lambda self: len(self.readers) < 24)
    def submit(self, lengths: list[int], model: str) -> None:
        for length in lengths:
            stream = len(self.readers)
            self.readers.append(Reader(length, model))
            members = self.moves.open_members(model)
            member = self.choose(stream, members) if members else None
            self.moves.place(stream, member, self.now, model=model)
            if member is not None:
                self.begin(stream, member, 0)

    @rule(num=st.integers(0, 2))
    def run_on(self, num: int) -> None:
        self.run(num)

    @rule(num=st.integers(1, 2))
    def run(self, num: int) -> None:
        """Every replica computes, and all that it sends is heard."""
        for member in range(NUM_MEMBERS):
            self.compute(member, num)
            self.deliver(member, 1000)

    @rule(member=st.integers(0, NUM_MEMBERS - 1))
    def lose(self, member: int) -> None:
        """A replica is away for longer than it is waited for."""
        self.unlink(member)
        self.pass_time(2 * PATIENCE_S)

    @rule(member=st.integers(0, NUM_MEMBERS - 1), num=st.integers(1, 4))
    def compute(self, member: int, num: int) -> None:
        replica = self.replicas[member]
        if not (replica.is_up and replica.has_core):
            return
        self.hear_aborts(member)
        for stream, copy in list(replica.copies.items()):
            for _ in range(num):
                if len(copy.tokens) < self.readers[stream].length:
                    copy.tokens.append(next_token(replica.fingerprint, stream, copy.tokens))
        self.publish(member)

    @rule(member=st.integers(0, NUM_MEMBERS - 1), num=st.integers(1, 30))
    def deliver(self, member: int, num: int) -> None:
        sent = self.replicas[member].sent
        for _ in range(min(num, len(sent))):
            self.hear(member, sent.popleft())

    @rule(order=st.lists(st.integers(0, NUM_MEMBERS - 1), min_size=3, max_size=8))
    def storm(self, order: list[int]) -> None:
        """Replicas are lost in turn, faster than any of them computes."""
        for member in order:
            self.lose(member)
            self.heal(member)

    @rule(
        order=st.lists(
            st.tuples(st.integers(0, NUM_MEMBERS - 1), st.booleans()), min_size=2, max_size=5
        )
    )
    def crash_cores(self, order: list[tuple[int, bool]]) -> None:
        """Cores die of their own doing in turn, some of them after a few tokens."""
        for member, computes in order:
            if computes:
                self.run(1)
            self.lose_core(member, is_within=True, names_suspects=not computes)
            self.pass_time(2 * PATIENCE_S)
            self.replace_core(member)

    @rule(member=st.integers(0, NUM_MEMBERS - 1), fingerprint=st.sampled_from([b"a", b"b", b""]))
    def change_weights(self, member: int, fingerprint: bytes) -> None:
        self.kill(member, is_told=False)
        self.restart(member, fingerprint)

    @rule(member=st.integers(0, NUM_MEMBERS - 1))
    def partition(self, member: int) -> None:
        self.unlink(member)

    @rule(member=st.integers(0, NUM_MEMBERS - 1))
    def heal(self, member: int) -> None:
        replica = self.replicas[member]
        if replica.is_up and not replica.is_linked:
            self.link(member)

    @rule(member=st.integers(0, NUM_MEMBERS - 1), is_told=st.booleans())
    def kill(self, member: int, is_told: bool) -> None:
        self.unlink(member)
        replica = self.replicas[member]
        replica.is_up = False
        replica.copies.clear()
        replica.fences.clear()
        if is_told:
            replica.is_gone = True
            self.moves.gone(member, self.now)

    @rule(member=st.integers(0, NUM_MEMBERS - 1), fingerprint=st.sampled_from([b"a", b"b", b""]))
    def restart(self, member: int, fingerprint: bytes) -> None:
        replica = self.replicas[member]
        if replica.is_up:
            return
        replica.is_up = replica.has_core = True
        replica.fingerprint = fingerprint
        replica.incarnation += 1
        replica.drains_until = None
        self.link(member)

    @rule(
        member=st.integers(0, NUM_MEMBERS - 1),
        is_within=st.booleans(),
        names_suspects=st.booleans(),
    )
    def lose_core(self, member: int, is_within: bool, names_suspects: bool) -> None:
        replica = self.replicas[member]
        if not (replica.is_linked and replica.has_core and replica.drains_until is None):
            return
        replica.has_core = False
        replica.is_within = is_within
        computed = {stream for stream in replica.copies if stream % 3}
        replica.suspects = computed if names_suspects else None
        replica.core_away_since = self.now
        self.tell_core_away(member)

    def tell_core_away(self, member: int) -> None:
        replica = self.replicas[member]
        self.moves.load(
            member,
            "core_away",
            self.now,
            is_within=replica.is_within,
            suspects=replica.suspects,
        )

    @rule(member=st.integers(0, NUM_MEMBERS - 1))
    def replace_core(self, member: int) -> None:
        replica = self.replicas[member]
        if replica.has_core:
            return
        replica.has_core = True
        if replica.is_linked:
            for stream, reader in enumerate(self.readers):
                if reader.member == member:
                    self.count_death(stream, replica)
            self.moves.load(member, "serving", self.now)

    @rule(member=st.integers(0, NUM_MEMBERS - 1), within_s=st.floats(0.0, 10.0))
    def drain(self, member: int, within_s: float) -> None:
        replica = self.replicas[member]
        if replica.is_linked and replica.has_core and replica.drains_until is None:
            replica.drains_until = self.now + within_s
            self.moves.load(member, "draining", self.now, within_s=within_s)

    @rule(member=st.integers(0, NUM_MEMBERS - 1))
    def unlist(self, member: int) -> None:
        self.replicas[member].is_listed = False
        self.moves.remove(member, self.now)

    @rule(member=st.integers(0, NUM_MEMBERS - 1))
    def list_again(self, member: int) -> None:
        self.replicas[member].is_listed = True
        self.moves.add(member, self.now)

    @rule(seconds=st.sampled_from([0.01, 0.2, 0.6, 3.0]))
    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.moves.next_at <= end:
            self.now = max(self.now, self.moves.next_at)
            before = self.now
            self.decide()
            assert self.moves.next_at > before, "a decision that is due again at once"
        self.now = end
        self.check_none_waits_in_vain()

    def check_none_waits_in_vain(self) -> None:
        """No stream is left at a replica that is lost, where another could take it."""
        for reader in self.readers:
            if reader.member is None or reader.ends:
                continue
            replica = self.replicas[reader.member]
            since = replica.core_away_since if replica.is_linked else replica.away_since
            is_served = replica.is_linked and replica.has_core
            if is_served or self.now <= since + PATIENCE_S:
                continue
            assert not any(self.could_take(reader, other) for other in self.replicas)

    def could_take(self, reader: Reader, replica: Replica) -> bool:
        is_open = replica.is_linked and replica.has_core and replica.is_listed
        is_same = reader.bound is None or (reader.bound == replica.fingerprint != b"")
        is_same = is_same and reader.model in ("", MODELS[replica.fingerprint])
        return is_open and is_same and replica.drains_until is None

    # ---- what the reader does ----------------------------------------------------------------

    def decide(self) -> None:
        last = -1
        for decision in self.moves.due(self.now):
            match decision:
                case Hold():
                    self.hold(decision, is_other_model=False)
                case Start():
                    num_tokens = len(self.readers[decision.stream].tokens)
                    assert num_tokens >= last, "a longer stream before a shorter one"
                    last = num_tokens
                    self.start(decision)
                case Fail():
                    self.fail(decision)

    def hold(self, decision: Hold[int], *, is_other_model: bool) -> None:
        reader = self.readers[decision.stream]
        assert reader.member == decision.member
        replica = self.replicas[decision.member]
        if not is_other_model:
            self.check_left(decision.stream, replica)
        self.leave(decision.stream, decision.member)
        reader.held_at = self.now

    def check_left(self, stream: int, replica: Replica) -> None:
        reader = self.readers[stream]
        if replica.is_linked:
            assert not replica.has_core, "taken from a replica that serves"
            assert self.now >= replica.core_away_since + PATIENCE_S
            if self.count_death(stream, replica):
                assert reader.deaths < 3
        else:
            assert replica.is_gone or self.now >= replica.away_since + PATIENCE_S

    def count_death(self, stream: int, replica: Replica) -> bool:
        """Count the death of a replica's core against a stream, if it was computing it."""
        reader = self.readers[stream]
        is_named = replica.suspects is not None
        is_suspect = stream in replica.suspects if is_named else reader.is_accepted
        if not (replica.is_within and is_suspect):
            return False
        has_grown = len(reader.tokens) > reader.num_at_death
        reader.deaths = 1 if has_grown else reader.deaths + 1
        reader.num_at_death = len(reader.tokens)
        return True

    def leave(self, stream: int, member: int) -> None:
        replica = self.replicas[member]
        replica.aborts.add(self.readers[stream].handle)
        self.readers[stream].member, self.readers[stream].handle = None, -1

    def start(self, decision: Start[int]) -> None:
        reader = self.readers[decision.stream]
        replica = self.replicas[decision.member]
        assert replica.is_linked
        assert replica.has_core
        assert replica.drains_until is None
        assert replica.is_listed
        assert reader.member == decision.source
        replica.starts.append(self.now)
        recent = [at for at in replica.starts if self.now < at + 1.0]  # rounded alike
        assert len(recent) <= self.max_starts
        if reader.last_member is not None:
            has_grown = len(reader.tokens) > reader.num_at_move
            reader.idle_moves = 0 if has_grown else reader.idle_moves + 1
            assert reader.idle_moves <= self.settings.max_moves
            assert decision.moves == reader.num_moves + (reader.last_member is not None)
            if reader.bound == b"":
                assert decision.member == reader.last_member, "two unnamed models"
        reader.num_at_move = len(reader.tokens)
        reader.num_moves = decision.moves
        reader.last_member = decision.member
        assert decision.strikes == reader.deaths
        if decision.source is not None:
            self.leave(decision.stream, decision.source)
        self.begin(decision.stream, decision.member, decision.moves)

    def fail(self, decision: Fail[int]) -> None:
        reader = self.readers[decision.stream]
        assert reader.member == decision.member
        match decision.why:
            case Failure.NO_MEMBER:
                assert not any(self.could_take(reader, replica) for replica in self.replicas)
                wait_s = self.settings.accepted_wait_s if reader.is_accepted else 10.0
                assert self.now >= reader.held_at + wait_s
            case Failure.STRIKES:
                replica = self.replicas[decision.member]
                assert replica.is_within
                assert not replica.has_core
                assert reader.deaths >= 2
                assert reader.num_at_death == len(reader.tokens)
            case Failure.MAX_MOVES:
                assert len(reader.tokens) == reader.num_at_move
                assert reader.idle_moves == self.settings.max_moves
            case Failure.SHUT:
                raise AssertionError("nothing was shut")
        if decision.member is not None:
            self.leave(decision.stream, decision.member)
        reader.ends.append(decision.why.name)

    def begin(self, stream: int, member: int, moves: int) -> None:
        reader = self.readers[stream]
        self.num_handles += 1
        reader.member, reader.handle = member, self.num_handles
        reader.last_member = member
        self.submit_at(stream, member, moves)

    def submit_at(self, stream: int, member: int, moves: int) -> None:
        """The replica hears a Submit."""
        reader, replica = self.readers[stream], self.replicas[member]
        assert replica.is_linked
        reader.model = reader.model or MODELS[replica.fingerprint]
        assert reader.model == MODELS[replica.fingerprint], "asked of another model's replica"
        if reader.bound is not None:
            assert reader.bound == replica.fingerprint, "two models' texts are joined"
        known = replica.fences.get(stream, -1)
        assert moves >= known
        assert moves > known or reader.handle in replica.handles, "it is known by an older copy"
        replica.handles.add(reader.handle)
        self.hear_aborts(member)
        replica.fences[stream] = max(moves, known)
        begin = list(reader.tokens)
        replica.copies[stream] = Copy(reader.handle, moves, begin, len(begin))
        self.publish(member)

    def hear_aborts(self, member: int) -> None:
        replica = self.replicas[member]
        if replica.is_linked:
            for stream, copy in list(replica.copies.items()):
                if copy.handle in replica.aborts:
                    del replica.copies[stream]
            replica.aborts.clear()

    # ---- the wire ----------------------------------------------------------------------------

    def publish(self, member: int) -> None:
        replica = self.replicas[member]
        if not (replica.is_linked and replica.has_core):
            return
        for stream, copy in list(replica.copies.items()):
            if not copy.is_read:
                continue
            if not copy.is_accepted:
                copy.is_accepted = True
                fingerprint = replica.fingerprint
                replica.sent.append(("accepted", copy.handle, stream, fingerprint))
            new = copy.tokens[copy.num_sent :]
            is_over = len(copy.tokens) >= self.readers[stream].length
            if new or is_over:
                replica.sent.append(("tokens", copy.handle, stream, copy.num_sent, new, is_over))
                copy.num_sent = len(copy.tokens)
            if is_over:
                del replica.copies[stream]

    def hear(self, member: int, message: tuple) -> None:
        kind, handle, stream, *rest = message
        reader = self.readers[stream]
        if reader.ends or (reader.member, reader.handle) != (member, handle):
            return  # of a copy that is not read any more
        if kind == "accepted":
            reader.is_accepted = True
            reader.bound = reader.bound if reader.bound is not None else rest[0]
            return
        begin, tokens, is_over = rest
        assert begin <= len(reader.tokens), "tokens are lost"
        reader.tokens += tokens[len(reader.tokens) - begin :]
        if is_over:
            reader.ends.append("whole")
            reader.member = None
            self.moves.ended(stream)

    def unlink(self, member: int) -> None:
        replica = self.replicas[member]
        if replica.is_linked:
            replica.is_linked = False
            replica.away_since = self.now
            replica.sent.clear()  # of an epoch that the reader hears no more
            for copy in replica.copies.values():
                copy.is_read = False
            self.moves.detached(member, self.now)

    def link(self, member: int) -> None:
        replica = self.replicas[member]
        replica.is_linked, replica.is_gone = True, False
        gone = self.moves.attached(
            member,
            replica.fingerprint,
            self.now,
            incarnation=replica.incarnation,
            model=MODELS[replica.fingerprint],
        )
        for hold in gone:
            assert self.readers[hold.stream].bound != replica.fingerprint
            self.hold(hold, is_other_model=True)
        if not replica.has_core:
            replica.core_away_since = self.now
            self.tell_core_away(member)
        for stream, reader in enumerate(self.readers):
            if reader.member == member and not reader.ends:
                self.resume(stream, member)

    def resume(self, stream: int, member: int) -> None:
        """The reader states its position; what is unknown is submitted again with its tokens."""
        reader, replica = self.readers[stream], self.replicas[member]
        copy = replica.copies.get(stream)
        if copy is not None and copy.handle == reader.handle:
            assert copy.tokens[: len(reader.tokens)] == reader.tokens
            copy.num_sent = len(reader.tokens)
            copy.is_accepted, copy.is_read = reader.is_accepted, True
        else:
            self.submit_at(stream, member, self.moves._streams[stream].moves)

    # ---- what has to be true -----------------------------------------------------------------

    @invariant()
    def every_text_is_of_one_model(self) -> None:
        for stream, reader in enumerate(self.readers):
            texts = [whole_text(each, stream, len(reader.tokens)) for each in (b"a", b"b", b"")]
            assert reader.tokens in texts

    @invariant()
    def every_stream_has_at_most_one_end(self) -> None:
        for reader in self.readers:
            assert len(reader.ends) <= 1
            assert reader.ends != ["whole"] or len(reader.tokens) == reader.length

    def heal_all(self) -> None:
        """When all faults are over, every stream ends; whole, if a replica can take it."""
        for member, replica in enumerate(self.replicas):
            self.list_again(member)
            self.replace_core(member)
            if replica.drains_until is not None:
                self.kill(member, is_told=False)
            self.restart(member, replica.fingerprint)
            self.heal(member)
        there = {replica.fingerprint for replica in self.replicas} - {b""}
        failed = {stream for stream, reader in enumerate(self.readers) if reader.ends}
        for _ in range(80):
            self.pass_time(0.6)
            for member in range(NUM_MEMBERS):
                self.compute(member, 4)
                self.deliver(member, 1000)
        for stream, reader in enumerate(self.readers):
            assert len(reader.ends) == 1
            is_served = reader.model in {MODELS[replica.fingerprint] for replica in self.replicas}
            can_go_on = reader.bound in there if reader.bound is not None else is_served
            if stream not in failed and can_go_on and reader.ends != ["MAX_MOVES"]:
                assert reader.ends == ["whole"]


class TestFleet(Fleet.TestCase):
    settings = settings(max_examples=300, stateful_step_count=50)


# ---- single rules ----------------------------------------------------------------------------


class Few:
    """Moves of streams whose tokens a test sets."""

    def __init__(self, num_members: int = 3, **given: object) -> None:
        self.tokens: dict[str, int] = {}
        self.is_accepted = True
        self.moves: Moves[str] = Moves(
            MoveSettings(**given),  # type: ignore[arg-type]
            lambda stream: ReaderProgress(self.tokens[stream], self.is_accepted),
            lambda stream, members: members[0],
        )
        for member in range(num_members):
            self.moves.add(member, 0.0)
            self.moves.attached(member, b"f", 0.0)

    def place(self, stream: str, member: int, num_tokens: int = 1) -> None:
        self.tokens[stream] = num_tokens
        self.moves.place(stream, member, 0.0)


def test_a_lost_member_is_waited_for() -> None:
    few = Few()
    few.place("s", 0)
    few.moves.detached(0, 1.0)
    assert few.moves.due(1.4) == []
    assert few.moves.next_at == 1.5
    assert few.moves.due(1.5) == [Hold("s", 0), Start("s", None, 1, 1, 0)]


def test_a_member_that_is_back_within_patience_keeps_its_streams() -> None:
    few = Few()
    few.place("s", 0)
    few.moves.detached(0, 1.0)
    assert few.moves.attached(0, b"f", 1.3) == []
    assert few.moves.due(9.0) == []
    assert few.moves.member_of("s") == 0


def test_a_later_reader_goes_on_with_a_stream_and_its_numbers() -> None:
    few = Few()
    few.place("s", 0, num_tokens=5)
    few.moves.load(0, "core_away", 0.0, is_within=True)
    assert few.moves.due(0.5) == [Hold("s", 0), Start("s", None, 1, 1, 1)]
    few.tokens["t"] = 3
    few.moves.succeed("s", "t")
    few.moves.ended("s")
    assert few.moves.num_streams(1) == 1
    few.moves.load(1, "core_away", 1.0, is_within=True)
    assert few.moves.due(1.5) == [Hold("t", 1), Start("t", None, 2, 2, 2)]


def test_a_later_reader_stays_with_the_weights_that_the_stream_began_with() -> None:
    few = Few(2)
    few.place("s", 0)
    few.moves.attached(1, b"other", 0.0)
    few.is_accepted = True
    few.tokens["t"] = 0
    few.moves.succeed("s", "t")
    few.is_accepted = False  # the later one has heard nothing yet
    few.moves.detached(0, 1.0)
    assert few.moves.due(1.5) == []
    few.moves.attached(1, b"f", 2.0)
    assert few.moves.due(2.0) == [Hold("t", 0), Start("t", None, 1, 1, 0)]


def test_streams_stay_among_the_members_of_their_model() -> None:
    few = Few(num_members=0)
    for member, model in enumerate(["one", "one", "two"]):
        few.moves.add(member, 0.0)
        few.moves.attached(member, b"f", 0.0, model=model)
    assert few.moves.open_members("two") == [2]
    few.place("accepted", 0)
    few.is_accepted = False
    few.place("new", 0)
    few.moves.gone(0, 0.0)
    few.moves.detached(0, 0.0)
    starts = [each for each in few.moves.due(0.0) if isinstance(each, Start)]
    assert [(each.stream, each.member) for each in starts] == [("accepted", 1), ("new", 1)]
    few.moves.gone(1, 0.0)
    few.moves.detached(1, 0.0)
    assert few.moves.due(0.0) == []  # they wait where they are: "two" is another model
    few.is_accepted = False
    assert few.moves.attached(1, b"f", 0.0, model="two") == [Hold("accepted", 1), Hold("new", 1)]


def test_a_stream_of_no_model_yet_takes_that_of_its_first_member() -> None:
    few = Few(num_members=0)
    few.tokens["a"] = 0
    few.is_accepted = False
    few.moves.place("a", None, 0.0)
    for member, model in enumerate(["one", "two"]):
        few.moves.add(member, 0.0)
        few.moves.attached(member, b"f", 0.0, model=model)
    assert few.moves.due(0.0) == [Start("a", None, 0, 0, 0)]
    few.moves.gone(0, 0.0)
    few.moves.detached(0, 0.0)
    assert few.moves.due(0.0) == []


@pytest.mark.parametrize(("model", "waits"), [("one", True), ("two", False), ("", True)])
def test_a_member_that_loads_is_waited_for_by_streams_of_its_model(model: str, waits: bool) -> None:
    few = Few(num_members=0, wait_s=1.0)
    few.tokens["a"] = 0
    few.is_accepted = False
    few.moves.add(0, 0.0)
    few.moves.attached(0, b"f", 0.0, model="one")
    few.moves.detached(0, 0.0)
    few.moves.place("a", None, 0.0, model=model)
    few.moves.due(0.0)
    few.moves.starting(0, True)
    assert few.moves.due(5.0) == ([] if waits else [Fail("a", None, Failure.NO_MEMBER)])


def test_a_member_known_to_have_ended_is_not_waited_for() -> None:
    few = Few()
    few.place("s", 0)
    few.moves.detached(0, 1.0)
    few.moves.gone(0, 1.0)
    assert few.moves.due(1.0) == [Hold("s", 0), Start("s", None, 1, 1, 0)]


def test_the_last_member_is_waited_for() -> None:
    few = Few(1)
    few.place("s", 0)
    few.moves.detached(0, 1.0)
    assert few.moves.due(50.0) == []


def test_at_most_256_streams_start_within_a_second_the_shortest_first() -> None:
    few = Few(2)
    for index in range(600):
        few.place(f"s{index}", 0, num_tokens=1000 - index)
    few.moves.detached(0, 0.0)
    now, starts = 0.5, []
    while few.moves.num_streams(1) < 600:
        starts.append([each.stream for each in few.moves.due(now) if isinstance(each, Start)])
        now = few.moves.next_at
    assert [len(each) for each in starts] == [256, 256, 88]
    shortest_first = [f"s{index}" for index in reversed(range(600))]
    assert [each for some in starts for each in some] == shortest_first
    assert now > 2.5


def test_a_drain_moves_streams_before_its_end_and_they_run_until_then() -> None:
    few = Few()
    few.place("s", 0)
    few.moves.load(0, "draining", 1.0, within_s=10.0)
    assert few.moves.open_members() == [1, 2]
    assert few.moves.due(8.9) == []
    assert few.moves.next_at == 9.0
    assert few.moves.due(9.0) == [Start("s", 0, 1, 1, 0)]


def test_drain_moves_at_once() -> None:
    few = Few(drain_moves=True)
    few.place("s", 0)
    few.moves.load(0, "draining", 1.0, within_s=10.0)
    assert few.moves.due(1.0) == [Start("s", 0, 1, 1, 0)]


def test_a_request_that_kills_cores_is_failed_by_the_third() -> None:
    few = Few(4)
    few.place("s", 0)
    for member in range(2):
        few.moves.load(member, "core_away", 10.0 * member, is_within=True)
        strikes, target = member + 1, 1 - member  # the first core is back when the second dies
        due = few.moves.due(10.0 * member + 0.5)
        assert due == [Hold("s", member), Start("s", None, target, strikes, strikes)]
        few.moves.load(member, "serving", 10.0 * member + 5.0)
    few.moves.load(0, "core_away", 20.0, is_within=True)
    assert few.moves.due(20.5) == [Fail("s", 0, Failure.STRIKES)]


def test_deaths_of_a_core_that_was_back_at_once_count_too() -> None:
    few = Few(2)
    few.place("s", 0)
    few.place("t", 0)
    few.moves.load(0, "core_away", 1.0, is_within=True, suspects=["s"])
    few.moves.load(0, "serving", 1.1)
    assert few.moves.due(1.1) == []
    few.moves.load(0, "core_away", 2.0, is_within=True, suspects=["s"])
    starts = [each for each in few.moves.due(2.5) if isinstance(each, Start)]
    assert starts == [Start("s", None, 1, 1, 2), Start("t", None, 1, 1, 0)]
    few.moves.load(0, "serving", 3.0)
    few.moves.load(1, "core_away", 4.0, is_within=True, suspects=["s"])
    assert few.moves.due(4.5)[0] == Fail("s", 1, Failure.STRIKES)


def test_streams_that_a_dead_core_was_not_computing_get_no_strike() -> None:
    few = Few(2)
    few.is_accepted = False  # it died before it could say so
    few.place("s", 0)
    few.place("t", 0)
    few.moves.load(0, "core_away", 0.0, is_within=True, suspects=["t"])
    starts = [each for each in few.moves.due(0.5) if isinstance(each, Start)]
    assert starts == [Start("s", None, 1, 1, 0), Start("t", None, 1, 1, 1)]


def test_tokens_since_the_last_strike_leave_one() -> None:
    few = Few()
    few.place("s", 0)
    few.moves.load(0, "core_away", 0.0, is_within=True)
    few.moves.due(0.5)
    few.tokens["s"] += 1
    few.moves.load(1, "core_away", 1.0, is_within=True)
    assert few.moves.due(1.5) == [Hold("s", 1), Start("s", None, 2, 2, 1)]


def test_a_core_killed_from_outside_is_no_strike() -> None:
    few = Few()
    few.place("s", 0)
    few.moves.load(0, "core_away", 0.0)
    assert few.moves.due(0.5) == [Hold("s", 0), Start("s", None, 1, 1, 0)]


def test_moves_without_a_token_are_bounded() -> None:
    few = Few(2, max_moves=2)
    few.place("s", 0)
    few.tokens["s"] = 0
    few.moves.load(1, "serving", 0.0)
    decisions = []
    for turn in range(3):
        member = turn % 2
        few.moves.detached(member, 10.0 * turn)
        decisions += few.moves.due(10.0 * turn + 1.0)
        few.moves.attached(member, b"f", 10.0 * turn + 2.0)
    assert decisions[-1] == Fail("s", None, Failure.MAX_MOVES)


def test_another_fingerprint_takes_nothing_that_was_accepted() -> None:
    few = Few(1, accepted_wait_s=60.0)
    few.moves.add(1, 0.0)
    few.moves.attached(1, b"g", 0.0)
    few.place("s", 0)
    few.moves.detached(0, 1.0)
    assert few.moves.due(30.0) == []
    assert few.moves.attached(0, b"g", 30.0) == [Hold("s", 0)]
    assert few.moves.due(89.9) == []
    assert few.moves.due(90.0) == [Fail("s", None, Failure.NO_MEMBER)]


def test_a_shut_member_is_left_at_once_and_its_streams_fail_without_another() -> None:
    few = Few(2)
    few.place("s", 0)
    few.moves.shut(0, 1.0)
    assert few.moves.due(1.0) == [Hold("s", 0), Start("s", None, 1, 1, 0)]
    few.moves.shut(1, 2.0)
    assert few.moves.due(2.0) == [Fail("s", 1, Failure.SHUT)]


@pytest.mark.parametrize("is_open", [True, False])
def test_a_stream_that_a_leaving_member_turned_away_goes_elsewhere(is_open: bool) -> None:
    few = Few(2)
    few.place("s", 0)
    if not is_open:
        few.moves.detached(1, 0.0)
    assert few.moves.turned_away("s", 1.0) == (Hold("s", 0) if is_open else None)
    assert few.moves.due(1.0) == ([Start("s", None, 1, 1, 0)] if is_open else [])


def test_a_stream_that_was_turned_away_goes_to_the_first_member_that_opens() -> None:
    """It does not wait for the end of the drain."""
    few = Few(2)
    few.is_accepted = False
    few.place("s", 0, num_tokens=0)
    few.place("t", 0)
    few.moves.detached(1, 0.0)
    few.moves.load(0, "draining", 0.0, within_s=300.0)
    assert few.moves.turned_away("s", 0.1) is None
    few.moves.attached(1, b"f", 1.0)
    assert few.moves.due(1.0) == [Start("s", 0, 1, 1, 0)]
    assert few.moves.member_of("t") == 0


def test_a_stream_is_not_asked_again_of_a_member_that_is_full() -> None:
    few = Few(4)
    few.is_accepted = False
    few.place("s", 0, num_tokens=0)
    assert few.moves.overloaded("s", 0.0) == Hold("s", 0)
    assert few.moves.due(0.0) == [Start("s", None, 1, 1, 0)]
    assert few.moves.overloaded("s", 0.1) == Hold("s", 1)
    assert few.moves.due(0.1) == [Start("s", None, 2, 2, 0)]
    assert few.moves.overloaded("s", 0.2) is None


@pytest.mark.parametrize("is_accepted", [True, False])
def test_a_member_that_was_full_takes_a_stream_whose_own_member_is_lost(is_accepted: bool) -> None:
    few = Few(2)
    few.is_accepted = False
    few.place("s", 0, num_tokens=0)
    assert few.moves.overloaded("s", 0.0) == Hold("s", 0)
    assert few.moves.due(0.0) == [Start("s", None, 1, 1, 0)]
    few.is_accepted = is_accepted
    few.moves.detached(1, 1.0)
    assert few.moves.due(1.5) == [Hold("s", 1), Start("s", None, 0, 2, 0)]


def test_an_accepted_stream_drains_to_a_member_that_was_full() -> None:
    few = Few(2, drain_moves=True)
    few.is_accepted = False
    few.place("s", 0, num_tokens=0)
    assert few.moves.overloaded("s", 0.0) == Hold("s", 0)
    assert few.moves.due(0.0) == [Start("s", None, 1, 1, 0)]
    few.is_accepted = True
    few.moves.load(1, "draining", 1.0, within_s=60.0)
    assert few.moves.due(1.0) == [Start("s", 1, 0, 2, 0)]


def test_a_stream_that_was_moved_before_it_came_moves_on_from_there() -> None:
    few = Few(2)
    few.tokens["s"] = 1
    few.moves.place("s", 0, 0.0, moves=3)
    few.moves.detached(0, 1.0)
    few.moves.gone(0, 1.0)
    assert few.moves.due(1.0) == [Hold("s", 0), Start("s", None, 1, 4, 0)]


def test_the_wait_for_a_member_begins_anew_when_one_was_there() -> None:
    few = Few(1)
    few.tokens["s"] = 0
    few.moves.detached(0, 0.0)
    few.moves.place("s", None, 0.0)
    assert few.moves.due(59.0) == []
    assert few.moves.due(60.0) == [Fail("s", None, Failure.NO_MEMBER)]
