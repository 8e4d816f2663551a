"""The two ends of a hop over real sockets: attaches, refusals, credit, silence, deaths."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from tests.helpers.patience import PATIENCE_S

from slipstream_ipc.messages import (
    CORE_HOP_VERSION,
    PROTOCOL_VERSION,
    Abort,
    AttachRefused,
    Deltas,
    Detokenize,
    Detokenized,
    Fault,
    Frame,
    Goodbye,
    Hello,
    ModelCard,
    Ping,
    Reattach,
    UnknownStreams,
    Welcome,
)
from slipstream_ipc.transport.codec import client_codec, core_codec, front_codec, worker_codec
from slipstream_ipc.transport.dealer import LinkOptions
from slipstream_ipc.transport.local_socket import connect_local
from slipstream_ipc.transport.router import Router
from slipstream_ipc.transport.sockets import MAX_READ_AT_ONCE, MAX_READ_BYTES_AT_ONCE, new_dealer

POLL_MS = int(PATIENCE_S * 1e3)
only_zmq = pytest.mark.parametrize("hop", ["zmq"], indirect=True)
CARD = ModelCard("m", "p", 100, 64, (2,))


class LocalRaw:
    """A local connection, with as much of a ZeroMQ socket's interface as `Raw` needs."""

    def __init__(self, hop: Any) -> None:
        connection = connect_local(hop.address, 2**20)
        assert connection is not None
        self.connection = connection
        hop.cleanup.callback(connection.close)

    def send(self, data: bytes) -> None:
        assert self.connection.send(data)

    def poll(self, _timeout: int) -> bool:
        self.connection.flush()
        self.connection.fill()
        return bool(self.connection.messages)

    def recv(self) -> bytes:
        return self.connection.messages.popleft()

    def close(self, linger: int) -> None:
        self.connection.close()


class Raw:
    """A peer that says whatever it likes."""

    def __init__(self, hop: Any, route: bytes = b"raw-route") -> None:
        self.hop = hop
        self.route = route
        if hop.is_local:
            self.socket: Any = LocalRaw(hop)
        else:
            self.socket = new_dealer(hop.context, hop.address, route)

    def say(self, body: Any, *, epoch: int = 1, seq: int = 0, ack: int = 0) -> None:
        self.socket.send(client_codec().encode(Frame(epoch, seq, ack, body)))

    def hear(self) -> Frame[Any]:
        self.hop.until(lambda: self.socket.poll(0))
        return client_codec().decode(self.socket.recv())

    def hello(self, identity: bytes = b"raw", epoch: int = 1) -> None:
        self.say(Hello(PROTOCOL_VERSION, identity), epoch=epoch)
        assert isinstance(self.hear().body, Welcome)


def tell(hop: Any, session: Any, data: bytes) -> None:
    """Send these bytes to a session's peer."""
    if hop.is_local:
        assert session.route.send(data)
    else:
        hop.router.send_multipart([session.route, data])


# ---- attach --------------------------------------------------------------------------------


def test_handshake(hop: Any) -> None:
    attacher = hop.attacher()
    assert (attacher.is_attached, attacher.has_credit) == (False, False)
    assert not attacher.send(Goodbye(), None)
    hop.until(lambda: attacher.is_attached)
    (welcome,) = hop.answers[attacher]
    assert isinstance(welcome, Welcome)
    assert welcome.model.name == "m"
    assert hop.hellos == [Hello(PROTOCOL_VERSION, b"me", fresh=True)]
    assert hop.session().link.epoch == attacher.epoch == 1
    assert attacher.has_credit


def test_the_poller_has_the_current_socket_and_its_watch_alone(hop: Any) -> None:
    attacher = hop.attached()
    for _ in range(3):
        attacher.attach(hop.now)
        channel, sources = attacher._channel, attacher._poller._sources.values()
        own = {channel.connection.fd} if hop.is_local else {channel.socket, channel._watch.socket}
        assert set(sources) == own
    attacher.close()
    attacher.close()
    assert not attacher._poller._sources


def test_a_peer_that_died_is_noticed_without_a_clock(hop: Any) -> None:
    attacher = hop.attached()
    before = attacher.epoch
    hop.sockets.close()
    hop.accept()
    # time stands still: neither ping nor patience can tell
    hop.until(lambda: attacher.epoch > before and attacher.is_attached)
    assert attacher.epoch == before + 1


def test_what_a_dying_peer_sent_last_is_read_first(hop: Any) -> None:
    attacher = hop.attached()
    hop.acceptor.refuse_all(Fault("engine", "going"))
    hop.sockets.close(1000)
    assert attacher._poller.poll(POLL_MS)
    hop.accept()
    hop.until(lambda: any(isinstance(a, AttachRefused) for a in hop.answers[attacher]))


def test_what_a_dying_peer_sent_last_is_read_by_who_was_speaking(hop: Any) -> None:
    attacher = hop.attached()
    hop.acceptor.refuse_all(Fault("engine", "going"), is_leaving=True)
    hop.sockets.close(1000)
    attacher.send(Abort(b"x"), None)
    hop.accept()
    hop.until(lambda: any(isinstance(a, AttachRefused) for a in hop.answers[attacher]))


def test_who_cannot_serve_yet_says_so_and_keeps_the_newest_hello(hop: Any) -> None:
    attacher, other = hop.attacher(), hop.attacher(b"other")

    def queue_hellos() -> None:
        hop.acceptor.queue_hellos()
        for each in hop.attachers:
            hop.answers[each] += each.receive(hop.now)

    hop.until(lambda: attacher.is_starting and other.is_starting, queue_hellos)
    assert not attacher.is_attached
    for _ in range(3):  # its patience ends, and it tries again
        hop.now += 100.0
        attacher.beat(hop.now)
        assert not attacher.is_starting
        hop.until(lambda: attacher.is_starting, queue_hellos)
    assert attacher.epoch == 4
    raw = Raw(hop)
    raw.say(Goodbye(), epoch=7)
    hop.until(lambda: raw.socket.poll(0), queue_hellos)
    assert isinstance(client_codec().decode(raw.socket.recv()).body, Reattach)
    raw.say(Hello(PROTOCOL_VERSION + 1, b"raw"))
    hop.until(lambda: raw.socket.poll(0), queue_hellos)
    assert isinstance(client_codec().decode(raw.socket.recv()).body, AttachRefused)
    assert hop.acceptor.sessions == []
    hop.serve()
    assert {(s.identity, s.link.epoch) for s in hop.acceptor.sessions} == {
        (b"me", 4),
        (b"other", 1),
    }
    hop.until(lambda: attacher.is_attached and other.is_attached)
    assert attacher.epoch == 4  # welcomed as it was
    assert not attacher.is_starting


def test_a_doubled_welcome_begins_nothing_again(hop: Any) -> None:
    attacher = hop.attached()
    fill(hop, 1)
    hop.acceptor.welcome(hop.session(), CARD)
    fill(hop, 1)
    hop.until(lambda: len(hop.answers[attacher]) >= 3)
    kinds = [type(answer) for answer in hop.answers[attacher]]
    assert kinds == [Welcome, UnknownStreams, UnknownStreams]


def test_epochs_grow_and_a_later_incarnations_are_later_than_all_before(hop: Any) -> None:
    attacher = hop.attacher(incarnation=3)
    assert attacher.epoch == (3 << 32) + 1
    attacher.attach(hop.now)
    assert attacher.epoch == (3 << 32) + 2
    assert hop.attacher(incarnation=4).epoch > attacher.epoch
    with pytest.raises(AssertionError):
        hop.attacher(incarnation=2**31)


def test_hello_says_fresh_until_a_welcome_has_come(hop: Any) -> None:
    """A server that is slow to start must not take a fresh party for one that states positions."""
    hop.is_welcoming = False
    attacher = hop.attacher()
    hop.until(lambda: len(hop.hellos) == 1)
    hop.now += 1.0
    attacher.beat(hop.now)
    hop.is_welcoming = True
    hop.until(lambda: attacher.is_attached)
    attacher.attach(hop.now)
    hop.until(lambda: attacher.is_attached)
    assert [hello.fresh for hello in hop.hellos] == [True, True, False]
    attacher.fresh = True  # what the Welcome began has not come to its end
    attacher.attach(hop.now)
    hop.until(lambda: attacher.is_attached)
    assert hop.hellos[-1].fresh


def test_an_unanswered_hello_is_repeated_with_growing_patience(hop: Any) -> None:
    hop.is_welcoming = False
    attacher = hop.attacher(options=LinkOptions(welcome_within_s=1.0))
    attaches = []
    for tick in range(1, 200):
        epoch = attacher.epoch
        attacher.beat(hop.now + tick * 0.1)
        if attacher.epoch > epoch:
            attaches.append(tick)
    assert attaches == [10, 30, 70, 110, 150, 190]
    hop.now += 20
    hop.is_welcoming = True
    attacher.attach(hop.now)
    hop.until(lambda: attacher.is_attached)
    hop.is_welcoming = False
    attacher.attach(hop.now)
    attacher.beat(hop.now + 1.0)
    assert not attacher.is_attached
    assert attacher.epoch == 10  # the patience is the first one's again


def test_two_attaches_of_one_identity_the_older_is_ignored(hop: Any) -> None:
    newer, older = Raw(hop, b"newer"), Raw(hop, b"older")
    newer.hello(b"one", epoch=7)
    for epoch in (6, 7):  # delayed on its way, or doubled
        older.say(Hello(PROTOCOL_VERSION, b"one"), epoch=epoch)
        older.say(Abort(b"x"), epoch=epoch, seq=1)
        answer = older.hear()
        assert isinstance(answer.body, Reattach)
        assert answer.epoch == epoch
    newer.say(Abort(b"y"), epoch=7, seq=1)
    assert newer.hear().ack == 1
    assert hop.received == [Abort(b"y")]
    assert [session.link.epoch for session in hop.acceptor.sessions] == [7]


def test_a_newer_attach_takes_the_olders_place(hop: Any) -> None:
    older, newer = Raw(hop, b"older"), Raw(hop, b"newer")
    older.hello(b"one", epoch=1)
    session = hop.session(b"one")
    hop.acceptor.send(session, UnknownStreams((1,)), "receipt")
    newer.hello(b"one", epoch=2)
    assert not session.is_open
    assert not hop.acceptor.send(session, UnknownStreams((2,)), "receipt")
    assert hop.acceptor.take_lost() == []  # it was replaced, not lost
    older.say(Abort(b"x"), seq=1)
    assert isinstance(older.hear().body, UnknownStreams)
    assert isinstance(older.hear().body, Reattach)
    assert hop.received == []


def test_a_doubled_hello_changes_nothing(hop: Any) -> None:
    raw = Raw(hop)
    raw.hello()
    session = hop.session(b"raw")
    raw.say(Hello(PROTOCOL_VERSION, b"raw"))
    raw.say(Abort(b"x"), seq=1)
    assert raw.hear().ack == 1
    assert hop.session(b"raw") is session


def test_repeated_hellos_leak_no_sessions(hop: Any) -> None:
    """One socket that takes ever other identities has one session, the others are lost."""
    raw = Raw(hop)
    num = 20
    sessions = []
    for i in range(num):
        raw.hello(b"party-%d" % i, epoch=i + 1)
        sessions.append(hop.session(b"party-%d" % i))
    assert len(hop.acceptor.sessions) == len(hop.acceptor._identities) == 1
    assert [s.identity for s in hop.acceptor.take_lost()] == [b"party-%d" % i for i in range(19)]
    assert [session.is_open for session in sessions] == [False] * 19 + [True]
    hop.acceptor.close(sessions[-1])
    assert hop.acceptor._identities == hop.acceptor._routes == {}


def test_many_attaches_of_one_party_leave_one_session(hop: Any) -> None:
    attacher = hop.attached()
    for _ in range(10):
        attacher.attach(hop.now)
        hop.until(lambda: attacher.is_attached)
    assert len(hop.acceptor.sessions) == len(hop.acceptor._identities) == 1


# ---- what is refused -----------------------------------------------------------------------


def test_version_mismatch_reaches_the_other_side(hop: Any) -> None:
    codec = client_codec()
    codec.version = 999
    attacher = hop.attacher(codec=codec)
    hop.until(lambda: hop.answers[attacher])
    (refusal,) = hop.answers[attacher]
    assert isinstance(refusal, AttachRefused)
    assert "999" in refusal.fault.message
    assert str(PROTOCOL_VERSION) in refusal.fault.message
    assert not attacher.is_attached
    assert hop.acceptor.sessions == []


def test_a_server_of_another_version_is_refused_here(hop: Any) -> None:
    codec = client_codec()
    codec.version = hop.acceptor._codec.version = 999
    attacher = hop.attacher(codec=codec)
    hop.until(lambda: hop.hellos, hop.serve)
    codec.version = 1
    hop.until(lambda: hop.answers[attacher])
    (refusal,) = hop.answers[attacher]
    assert isinstance(refusal, AttachRefused)
    assert "999" in refusal.fault.message
    assert not attacher.is_attached


def test_the_hop_of_a_core_has_a_version_of_its_own(hop: Any) -> None:
    """A worker of another release is refused by its core, whatever clients speak."""
    assert worker_codec().version == core_codec().version == CORE_HOP_VERSION
    assert client_codec().version == front_codec().version == PROTOCOL_VERSION
    attacher = hop.attacher(codec=worker_codec())
    hop.until(lambda: hop.answers[attacher])
    assert f"version {CORE_HOP_VERSION}" in hop.answers[attacher][0].fault.message


@pytest.mark.parametrize("identity", [b"", b"x" * 65])
def test_identities_that_are_none(hop: Any, identity: bytes) -> None:
    attacher = hop.attacher(identity)
    hop.until(lambda: hop.answers[attacher])
    assert "identity" in hop.answers[attacher][0].fault.message


def test_an_unknown_route_is_told_to_attach(hop: Any) -> None:
    raw = Raw(hop)
    for body in (None, Ping(), Abort(b"x")):
        raw.say(body, epoch=5, seq=3)
        answer = raw.hear()
        assert isinstance(answer.body, Reattach)
        assert answer.epoch == 5
    assert hop.received == []


@pytest.mark.parametrize(
    "parts",
    [
        [b""],
        [b"\xc1 noise"],
        [b"\x94\x01\x01\x01\x91\xcc\xff"],
        [b"a", b"b"],
        [b"", b"\x93\x01\x01\x01"],  # a REQ's empty part in front
        [b""] * 50,
        [client_codec().encode(Frame(1, 1, 0, Abort(b"x"))), b"and more"],
    ],
)
def test_garbage_is_refused_and_nobody_else_disturbed(hop: Any, parts: list[bytes]) -> None:
    stranger, peer, other = Raw(hop, b"stranger"), Raw(hop, b"peer"), hop.attached(b"other")
    peer.hello()
    for raw in (stranger, peer):
        if hop.is_local:
            raw.socket.send(b"\xc1".join(parts))  # a message has no parts
        else:
            raw.socket.send_multipart(parts)
        answer = raw.hear()
        assert isinstance(answer.body, AttachRefused)
        assert answer.body.fault.code == "bad_request"
    assert other.send(Abort(b"fine"), "receipt")
    peer.say(Abort(b"fine too"), seq=1)
    hop.until(lambda: len(hop.received) == 2 and other.num_unacked == 0)
    assert {body.stream_id for body in hop.received} == {b"fine", b"fine too"}
    assert len(hop.acceptor.sessions) == 2


@only_zmq
@pytest.mark.parametrize("knows_connections", [False, True])
def test_a_message_is_read_by_three_calls(hop: Any, knows_connections: bool) -> None:
    """Whether there is one, its route, its body; a worker reads thousands in a second."""
    calls: list[str] = []

    class Counting(zmq.Socket[bytes]):
        def recv(self, *args: Any, **options: Any) -> Any:
            calls.append("recv")
            return super().recv(*args, **options)

        def getsockopt(self, option: int) -> Any:
            calls.append({zmq.EVENTS: "EVENTS", zmq.FD: "FD"}.get(option, "more"))
            return super().getsockopt(option)

    heard: list[int] = []
    connections: Any = SimpleNamespace(heard=heard.append) if knows_connections else None
    hop.acceptor = Router(
        Counting.shadow(hop.router), front_codec(), window=4, connections=connections
    )
    peer = Raw(hop, b"peer")
    peer.hello()
    assert len(heard) == knows_connections
    assert all(os.stat(f"/proc/self/fd/{fd}") for fd in heard)
    num = 50
    for seq in range(1, 1 + num):
        peer.say(Abort(b"x"), seq=seq)
    calls.clear()
    hop.until(lambda: len(hop.received) == num)
    assert calls.count("recv") == 2 * num
    assert set(calls) == {"recv", "EVENTS", "FD"}  # the last of the poller


def test_a_refusal_of_what_could_not_be_read_is_delivered(hop: Any) -> None:
    """Whoever sent it first thing has no session, and no epoch that the refusal could name."""
    hop.is_welcoming = False
    attacher = hop.attacher()
    hop.until(lambda: hop.hellos)
    hop.acceptor.close(hop.session())
    attacher._channel.send(b"garbage")
    hop.until(lambda: hop.answers[attacher])
    assert isinstance(hop.answers[attacher][0], AttachRefused)


def test_garbage_from_the_accepting_end_is_reported(hop: Any) -> None:
    attacher = hop.attached()
    tell(hop, hop.session(), b"\xc1")
    hop.until(lambda: len(hop.answers[attacher]) > 1)
    refusal = hop.answers[attacher][1]
    assert isinstance(refusal, AttachRefused)
    assert refusal.fault.code == "engine"
    assert attacher.is_attached


# ---- loss ----------------------------------------------------------------------------------


def test_a_gap_on_the_way_up_ends_in_a_new_attach(hop: Any) -> None:
    attacher = hop.attached()
    session = hop.session()
    attacher.link.sent("lost on its way")
    assert attacher.send(Abort(b"late"), None)
    hop.until(lambda: attacher.epoch == 2 and attacher.is_attached)
    assert hop.received == []
    assert not session.is_open
    assert attacher.num_unacked == 0
    assert hop.acceptor.take_lost() == []


def test_a_gap_on_the_way_down_ends_in_a_new_attach(hop: Any) -> None:
    attacher = hop.attached()
    hop.session().link.sent("lost on its way")
    assert hop.acceptor.send(hop.session(), UnknownStreams((1,)), None)
    hop.until(lambda: attacher.epoch == 2 and attacher.is_attached)
    assert len([a for a in hop.answers[attacher] if isinstance(a, UnknownStreams)]) == 0


def test_a_session_that_was_told_to_attach_and_does_not_is_lost(hop: Any) -> None:
    raw = Raw(hop)
    raw.hello()
    session = hop.session(b"raw")
    hop.acceptor.reattach(session)
    hop.acceptor.reattach(session)
    assert isinstance(raw.hear().body, Reattach)
    assert hop.acceptor.take_lost() == [session]
    assert hop.acceptor.take_lost() == []


@only_zmq
def test_stale_queue_never_touches_new_core(hop: Any) -> None:
    """What a DEALER had queued for a dead acceptor goes to the next one: it touches nothing."""
    attacher = hop.attached()
    monitor = attacher._channel.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    hop.sockets.close()
    assert monitor.poll(POLL_MS)
    attacher._channel.socket.disable_monitor()
    assert attacher.send(Abort(b"stale 1"), 1)
    assert attacher.send(Abort(b"stale 2"), 2)
    assert attacher.send(Abort(b"stale 3"), 3)
    hop.accept()
    hop.until(lambda: attacher.is_attached and attacher.epoch == 2)
    assert hop.received == []
    assert attacher.take_receipts() == []
    assert attacher.send(Abort(b"anew"), 4)
    hop.until(lambda: attacher.num_unacked == 0)
    assert hop.received == [Abort(b"anew")]
    assert attacher.take_receipts() == [4]


def test_what_was_lost_with_a_core_is_noticed_by_the_next_ping(hop: Any) -> None:
    """Nothing is queued, nobody has anything to say: silence brings it out."""
    attacher = hop.attached()
    hop.sockets.close()
    hop.accept()
    hop.now += 2.0
    attacher.beat(hop.now)

    def turn() -> None:
        hop.turn()
        hop.now += 0.1
        attacher.beat(hop.now)

    hop.until(lambda: attacher.is_attached and attacher.epoch > 1, turn)
    assert hop.received == []


def test_a_peer_that_is_gone_is_noticed_when_it_is_sent_something(hop: Any) -> None:
    raw = Raw(hop)
    raw.hello()
    session = hop.session(b"raw")
    raw.socket.close(linger=0)

    def send() -> None:
        if session.link.has_credit:
            hop.acceptor.send(session, UnknownStreams((1,)), None)
        else:
            hop.acceptor._send_control(session, None)

    hop.until(lambda: not session.is_open, send)
    assert hop.acceptor.take_lost() == [session]
    assert hop.acceptor.sessions == []


# ---- credit --------------------------------------------------------------------------------


def test_credit_runs_out_and_comes_back(hop: Any) -> None:
    attacher = hop.attached()
    session = hop.session()
    for i in range(4):
        assert hop.acceptor.send(session, UnknownStreams((i,)), i)
    assert not hop.acceptor.send(session, UnknownStreams((4,)), 4)
    hop.until(lambda: session.link.num_unacked == 0)
    assert session.link.has_credit
    assert session.link.take_receipts() == [0, 1, 2, 3]
    assert hop.acceptor.send(session, UnknownStreams((4,)), 4)
    hop.until(lambda: len(hop.answers[attacher]) == 6)
    got = [a.handles[0] for a in hop.answers[attacher] if isinstance(a, UnknownStreams)]
    assert got == [0, 1, 2, 3, 4]


def test_credit_of_the_attaching_end(hop: Any) -> None:
    attacher = hop.attached()
    num = 0
    while attacher.send(Abort(b"%d" % num), num):
        num += 1
    assert num == attacher.num_unacked == 16
    hop.until(lambda: attacher.num_unacked == 0)
    assert attacher.has_credit
    assert attacher.take_receipts() == list(range(16))
    assert [body.stream_id for body in hop.received] == [b"%d" % i for i in range(16)]


def test_a_few_messages_may_wait_for_what_says_that_they_have_come(hop: Any) -> None:
    raw = Raw(hop)
    raw.hello()
    session = hop.session(b"raw")

    def receive() -> None:
        hop.received += [body for _, body in hop.acceptor.receive(hop.now, may_owe=2)]

    for seq in (1, 2):
        raw.say(Abort(b"x"), seq=seq)
    hop.until(lambda: session.link.num_owed_acks == 2, receive)
    assert not raw.socket.poll(0)
    raw.say(Abort(b"x"), seq=3)  # that is too many
    hop.until(lambda: raw.socket.poll(0), receive)
    assert raw.hear() == Frame(1, 0, 3)
    raw.say(Abort(b"x"), seq=4)
    hop.until(lambda: session.link.owes_ack, receive)
    hop.acceptor.send(session, UnknownStreams((1,)), None)  # and says it
    assert raw.hear() == Frame(1, 1, 4, UnknownStreams((1,)))
    raw.say(Abort(b"x"), seq=5, ack=1)
    hop.until(lambda: session.link.owes_ack, receive)
    hop.acceptor.beat(hop.now)
    assert raw.hear() == Frame(1, 1, 5)
    raw.say(Abort(b"x"), seq=6)
    hop.until(lambda: session.link.owes_ack, receive)
    assert list(hop.acceptor.receive(hop.now)) == []  # there is nothing new, and no more leave
    assert raw.hear() == Frame(1, 1, 6)
    receive()
    hop.acceptor.beat(hop.now)
    assert not raw.socket.poll(0), "each is acknowledged once"


@pytest.mark.parametrize("hop", ["local"], indirect=True)
def test_what_a_session_takes_undecoded_is_acknowledged(hop: Any) -> None:
    raw = Raw(hop)
    raw.hello()
    session = hop.session(b"raw")

    def take(data: bytes, now: float) -> bool:
        return session.link.take_next(front_codec().decode(data), now) is not None

    def take_acks() -> bool:
        return hop.acceptor.take_acks(hop.now, may_owe=1)

    session.take = take
    list(hop.acceptor.receive(hop.now))
    assert take_acks(), "there is nothing"
    raw.say(Abort(b"x"), seq=1)
    hop.until(lambda: session.link.owes_ack, take_acks)
    assert take_acks()
    assert not raw.socket.poll(0)
    raw.say(Abort(b"x"), seq=2)
    hop.until(lambda: raw.socket.poll(0), take_acks)
    assert raw.hear() == Frame(1, 0, 2)
    raw.say(Abort(b"x"), seq=3)
    hop.until(lambda: session.link.owes_ack, lambda: list(hop.acceptor.receive(hop.now, may_owe=1)))
    hop.acceptor.beat(hop.now)
    assert raw.hear() == Frame(1, 0, 3)
    raw.say(Ping(), seq=3)
    hop.until(lambda: not take_acks(), lambda: None)
    assert not raw.socket.poll(0)
    list(hop.acceptor.receive(hop.now))
    assert raw.hear() == Frame(1, 0, 3)


def test_the_attaching_end_may_owe_a_few_until_it_speaks_or_beats(hop: Any) -> None:
    attacher = hop.attached()
    link = hop.session().link

    def owes(may_owe: int, num: int) -> None:
        """Receive one more, and owe this many then."""
        fill(hop, 1)
        hop.until(lambda: list(attacher.receive(hop.now, acknowledges=False)), lambda: None)
        attacher.acknowledge(may_owe)
        assert attacher.link.num_owed_acks == num

    owes(2, 1)
    owes(2, 2)
    owes(2, 0)
    hop.until(lambda: link.num_unacked == 0, hop.serve)
    owes(2, 1)
    assert attacher.send(Abort(b"x"), None)  # and says it
    assert attacher.link.num_owed_acks == 0
    hop.until(lambda: hop.received, hop.serve)
    assert link.num_unacked == 0
    owes(2, 1)
    attacher.beat(hop.now)
    hop.until(lambda: link.num_unacked == 0, hop.serve)


def test_an_acknowledgement_is_sent_once(hop: Any) -> None:
    raw, attacher = Raw(hop), hop.attached()
    raw.hello()
    raw.say(Abort(b"x"), seq=1)
    assert raw.hear() == Frame(1, 0, 1)
    hop.acceptor.send(hop.session(), UnknownStreams((1,)), None)
    hop.until(lambda: hop.session().link.num_unacked == 0)
    for _ in range(5):
        hop.turn()
    assert not attacher.link.owes_ack
    raw.say(Ping())
    assert raw.hear() == Frame(1, 0, 1)
    assert not raw.socket.poll(0)


@contextmanager
def no_free_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # those below it are taken
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_a_free_descriptor_the_attach_is_made_later(hop: Any) -> None:
    attacher = hop.attached()
    with no_free_descriptors():
        attacher.attach(hop.now)
        assert list(attacher.receive(hop.now)) == []
        attacher.acknowledge()
        attacher.beat(hop.now)
        assert not attacher.is_attached
        assert not attacher.send(Abort(b"x"), None)
        assert "descriptors" in attacher.trouble
        hop.now += 10
        attacher.beat(hop.now)
        assert not attacher.is_attached
    hop.now += 10
    attacher.beat(hop.now)
    hop.until(lambda: attacher.is_attached)
    assert attacher.trouble == ""


class Full:
    """A socket whose queue is full."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def send(self, *_: Any) -> None:
        raise zmq.Again

    def send_multipart(self, *_: Any) -> None:
        raise zmq.Again


@only_zmq
def test_a_full_queue_costs_neither_numbers_nor_acknowledgements(hop: Any) -> None:
    attacher = hop.attached()
    session = hop.session()
    real_dealer, real_router = attacher._channel.socket, hop.acceptor._socket

    attacher._channel.socket = Full(real_dealer)
    assert not attacher.send(Abort(b"x"), 1)
    assert attacher.num_unacked == 0
    hop.acceptor.send(session, UnknownStreams((1,)), "a")
    hop.until(lambda: len(hop.answers[attacher]) == 2)
    assert attacher.link.owes_ack  # it could not be sent
    attacher._channel.socket = real_dealer
    hop.until(lambda: not session.link.num_unacked)

    hop.acceptor._socket = Full(real_router)
    assert not hop.acceptor.send(session, UnknownStreams((2,)), "b")
    assert session.link.num_unacked == 0
    assert attacher.send(Abort(b"y"), 2)
    hop.until(lambda: hop.received == [Abort(b"y")])
    assert session.link.owes_ack
    hop.acceptor._socket = real_router
    attacher.beat(hop.now + 2.0)  # asks
    hop.until(lambda: not attacher.num_unacked)
    assert attacher.epoch == 1
    assert session.is_open


def test_what_cannot_be_encoded_costs_no_number(hop: Any) -> None:
    attacher = hop.attached()
    with pytest.raises(UnicodeEncodeError):
        hop.acceptor.send(hop.session(), Deltas(b"", b"", b"", ["\ud800"], b""), None)
    assert hop.acceptor.send(hop.session(), UnknownStreams((1,)), None)
    hop.until(lambda: len(hop.answers[attacher]) == 2)
    assert attacher.epoch == 1


# ---- silence -------------------------------------------------------------------------------


def test_silence_is_asked_and_answered(hop: Any) -> None:
    attacher = hop.attached()
    session = hop.session()
    for _ in range(20):  # nobody sends anything but pings and their answers
        hop.now += 2.0
        attacher.beat(hop.now)
        hop.acceptor.beat(hop.now)
        hop.until(lambda: session.link._pinged_at is None and attacher.link._pinged_at is None)
    assert (session.is_open, attacher.epoch) == (True, 1)
    assert len(hop.answers[attacher]) == 1  # pings are nobody else's business
    assert hop.received == []


def test_an_unanswered_ping_is_a_death_on_the_accepting_end(hop: Any) -> None:
    hop.attached()
    session = hop.session()
    for after in (2.0, 10.0, 10.5):
        assert session.is_open
        hop.acceptor.beat(hop.now + after)
        list(hop.acceptor.receive(hop.now + after))
    assert not session.is_open
    assert hop.acceptor.take_lost() == [session]


def test_an_unanswered_ping_is_a_death_on_the_attaching_end(hop: Any) -> None:
    attacher = hop.attached()
    for after in (2.0, 10.0, 10.5):
        assert attacher.epoch == 1
        attacher.beat(hop.now + after)
        list(attacher.receive(hop.now + after))
    assert attacher.epoch == 2
    assert not attacher.is_attached
    hop.now += 10.5
    hop.until(lambda: attacher.is_attached)


def test_who_was_busy_reads_before_it_gives_anybody_up(hop: Any) -> None:
    attacher = hop.attached()
    session = hop.session()
    attacher.beat(hop.now + 2.0)
    hop.acceptor.beat(hop.now + 2.0)
    hop.until(lambda: session.link._pinged_at is None, hop.serve)  # has read the other's ping
    assert attacher._poller.poll(POLL_MS)  # the answer is here, unread
    hop.now += 100.0
    attacher.beat(hop.now)
    hop.until(lambda: attacher.link._pinged_at is None)
    attacher.beat(hop.now + 0.1)
    assert attacher.epoch == 1
    assert session.is_open


# ---- callers' habits -----------------------------------------------------------------------


def fill(hop: Any, num: int = 3) -> None:
    for i in range(num):
        assert hop.acceptor.send(hop.session(), UnknownStreams((i,)), i)


def test_closing_while_reading(hop: Any) -> None:
    attacher = hop.attached()
    fill(hop)
    assert attacher._poller.poll(POLL_MS)
    got = []
    for body in attacher.receive(hop.now):
        got.append(body)
        attacher.close()
    assert len(got) == 1
    assert list(attacher.receive(hop.now)) == []
    assert not attacher.send(Abort(b"x"), None)
    attacher.beat(hop.now + 100.0)  # who left stays away
    assert attacher._channel is None


def test_attaching_while_reading(hop: Any) -> None:
    attacher = hop.attached()
    fill(hop)
    assert attacher._poller.poll(POLL_MS)
    for _ in attacher.receive(hop.now):
        attacher.attach(hop.now)
    assert attacher.epoch == 2
    hop.until(lambda: attacher.is_attached)
    assert len(hop.answers[attacher]) == 2  # the Welcomes: what was unread went with its socket


def test_sending_while_reading_acknowledges_what_was_read(hop: Any) -> None:
    attacher = hop.attached()
    fill(hop)
    assert attacher._poller.poll(POLL_MS)
    for _ in attacher.receive(hop.now):
        assert attacher.send(Abort(b"x"), None)
    hop.until(lambda: not hop.session().link.num_unacked and not attacher.num_unacked)
    assert attacher.epoch == 1


def test_a_caller_that_fails_while_reading_loses_nothing_else(hop: Any) -> None:
    attacher = hop.attached()
    fill(hop)
    assert attacher._poller.poll(POLL_MS)
    for body in attacher.receive(hop.now):
        assert body == UnknownStreams((0,))
        break
    hop.until(lambda: len(hop.answers[attacher]) == 3)
    hop.until(lambda: not hop.session().link.num_unacked)
    assert hop.answers[attacher][1:] == [UnknownStreams((1,)), UnknownStreams((2,))]


def test_ending_sessions_while_reading(hop: Any) -> None:
    first, second = Raw(hop, b"first"), Raw(hop, b"second")
    first.hello(b"first")
    second.hello(b"second")
    for raw in (first, second):
        for seq in (1, 2, 3):
            raw.say(Abort(raw.route), seq=seq)
    got: list[bytes] = []

    def serve() -> None:
        for session, body in hop.acceptor.receive(hop.now):
            got.append(body.stream_id)
            if session.identity == b"first":
                hop.acceptor.reattach(session)

    hop.until(lambda: len(got) == 4, serve)
    assert sorted(got) == [b"first"] + [b"second"] * 3
    assert isinstance(first.hear().body, Reattach)
    assert hop.session(b"second").link.owes_ack is False
    assert [s.identity for s in hop.acceptor.sessions] == [b"second"]


def test_a_closed_session_keeps_no_receipts_but_those_that_are_due(hop: Any) -> None:
    hop.attached()
    session = hop.session()
    fill(hop, 2)
    hop.until(lambda: not session.link.num_unacked)
    fill(hop, 2)
    hop.acceptor.close(session)
    hop.acceptor.close(session)
    assert session.link.take_receipts() == [0, 1]
    assert session.link.take_receipts() == []
    assert not hop.acceptor.send(session, UnknownStreams((9,)), 9)


def test_a_flood_starves_nobody(hop: Any) -> None:
    raw = Raw(hop)
    raw.hello()
    other = hop.attached(b"other")
    num = 3 * MAX_READ_AT_ONCE
    for _ in range(num):
        raw.say(Ping())
    raw.say(Abort(b"at last"), seq=1)
    assert other.send(Abort(b"in between"), None)
    num_turns = 0

    def serve() -> None:
        nonlocal num_turns
        num_turns += len(hop.received) < 2
        raw.socket.poll(0)
        hop.serve()

    hop.until(lambda: len(hop.received) == 2, serve)
    assert hop.received[0] == Abort(b"in between")
    assert num_turns >= 3
    flood = [front_codec().encode(Frame(other.epoch, 0, 0, Ping()))] * num
    for data in flood:
        tell(hop, hop.session(b"other"), data)
    hop.acceptor.send(hop.session(b"other"), UnknownStreams((1,)), None)
    hop.until(lambda: len(hop.answers[other]) == 2)


@pytest.mark.parametrize("num_bytes", [MAX_READ_BYTES_AT_ONCE, 2 * MAX_READ_BYTES_AT_ONCE])
def test_large_messages_are_read_a_few_at_a_time(hop: Any, num_bytes: int) -> None:
    """Either way: what else there is to do is done between them."""
    attacher = hop.attached()
    turns: list[int] = []
    waiting = [Detokenize(number, bytes(num_bytes)) for number in range(4)]

    def serve() -> None:
        while waiting and attacher.send(waiting[0], None):
            del waiting[0]
        attacher._channel.fill()
        bodies = [body for _, body in hop.acceptor.receive(hop.now)]
        turns.extend([len(bodies)] if bodies else [])

    hop.until(lambda: sum(turns) == 4, serve)
    assert turns == [1] * 4
    session = hop.session()
    answers = [Detokenized(number, "x" * num_bytes) for number in range(4)]
    turns.clear()

    def hear() -> None:
        while answers and hop.acceptor.send(session, answers[0], None):
            del answers[0]
        assert list(hop.acceptor.receive(hop.now)) == []
        bodies = list(attacher.receive(hop.now))
        turns.extend([len(bodies)] if bodies else [])

    hop.until(lambda: sum(turns) == 4, hear)
    assert turns == [1] * 4


def test_nothing_of_another_life_counts(hop: Any) -> None:
    """Not as a sign of life, not as an acknowledgement, not as a message."""
    attacher = hop.attached()
    session = hop.session()
    fill(hop, 1)
    codec = client_codec()
    for epoch in (0, 2, 2**64 - 1, -1):
        attacher._channel.send(codec.encode(Frame(epoch, 1, 1, Abort(b"x"))))
    attacher._channel.send(codec.encode(Frame(1, 1, 2, Abort(b"acknowledges the unsent"))))
    attacher._channel.send(codec.encode(Frame(1, 1, 0, Abort(b"good"))))
    hop.until(lambda: hop.received, hop.serve)
    assert hop.received == [Abort(b"good")]
    assert session.link.num_unacked == 1
    for epoch in (0, 2):
        reattach = front_codec().encode(Frame(epoch, 0, 0, Reattach()))
        tell(hop, session, reattach)
    hop.until(lambda: not session.link.num_unacked)
    assert attacher.epoch == 1


def test_numbers_at_the_end_of_64_bits(hop: Any) -> None:
    raw = Raw(hop)
    raw.hello(epoch=2**64 - 1)
    raw.say(Abort(b"x"), epoch=2**64 - 1, seq=2**64 - 1)
    assert isinstance(raw.hear().body, Reattach)
    raw.socket.send(msgspec.msgpack.encode([-(2**63), -(2**63), -(2**63), [12, b"x"]]))
    refusal = raw.hear().body
    assert isinstance(refusal, AttachRefused)
    assert refusal.fault.field == "epoch"
    raw.socket.send(b"\x93" + (b"\xc7\x09\x00" + bytes(9)) * 3)
    assert isinstance(raw.hear().body, AttachRefused)


def test_refusals_to_who_is_gone_raise_nothing(hop: Any) -> None:
    raw = Raw(hop)
    raw.socket.send(b"garbage")
    raw.socket.close(linger=0)
    hop.serve()
    assert hop.acceptor.sessions == []


def test_faults_travel(hop: Any) -> None:
    attacher = hop.attached()
    fault = Fault("overloaded", "busy", "prompt")
    hop.acceptor._send_control(hop.session(), AttachRefused(fault))
    hop.until(lambda: len(hop.answers[attacher]) == 2)
    assert hop.answers[attacher][1] == AttachRefused(fault)
