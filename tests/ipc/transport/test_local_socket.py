"""Local connections: what arrives is what was sent, whatever the kernel cuts; bounds; strangers."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.patience import Patience

from slipstream_ipc.messages import PROTOCOL_VERSION, Abort, Frame, Hello, Ping, UnknownStreams
from slipstream_ipc.transport import local_socket
from slipstream_ipc.transport.codec import client_codec, front_codec
from slipstream_ipc.transport.local_socket import (
    CHUNK_BYTES,
    MAX_STRANGER_BYTES,
    MAX_UNSENT_BYTES,
    LocalConnection,
    LocalListener,
    connect_local,
    listen_local,
)
from slipstream_ipc.transport.poller import Poller
from slipstream_ipc.transport.router import Router
from slipstream_ipc.transport.sockets import MAX_READ_AT_ONCE

MAX_BYTES = 2**22
only_local = pytest.mark.parametrize("hop", ["local"], indirect=True)
Pair = tuple[LocalConnection, LocalConnection]


def pair() -> Pair:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return LocalConnection(left, MAX_BYTES), LocalConnection(right, MAX_BYTES)


@pytest.fixture
def ends() -> Iterator[Pair]:
    ends = pair()
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def listener(address: str) -> Iterator[LocalListener]:
    listener = LocalListener(address, max_message_bytes=MAX_BYTES, max_connections=4)
    yield listener
    listener.close()


def until(is_done: Callable[[], Any], turn: Callable[[], Any]) -> None:
    patience = Patience()
    while not is_done():
        patience.check()
        turn()


def taken(connection: LocalConnection) -> list[bytes]:
    messages = list(connection.messages)
    connection.messages.clear()
    return messages


SIZES = st.one_of(
    st.integers(0, 20),
    st.sampled_from([CHUNK_BYTES - 5, CHUNK_BYTES - 4, CHUNK_BYTES, CHUNK_BYTES + 1, 2**16, 2**18]),
    st.integers(0, 300_000),
)


@given(st.lists(SIZES, max_size=12))
def test_what_arrives_is_what_was_sent(sizes: list[int]) -> None:
    left, right = pair()
    try:
        sent = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
        got: list[bytes] = []

        def turn() -> None:
            left.flush()
            right.fill()
            got.extend(taken(right))

        for message in sent:
            until(lambda message=message: left.send(message), turn)
        until(lambda: len(got) == len(sent), turn)
        assert got == sent
        assert not left.has_unsent
    finally:
        left.close()
        right.close()


@given(
    st.lists(SIZES.filter(lambda size: size < 40_000), max_size=6),
    st.lists(st.integers(1, 50_000), min_size=1, max_size=8),
)
def test_wherever_the_stream_is_cut(sizes: list[int], cuts: list[int]) -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    connection = LocalConnection(right, MAX_BYTES)
    try:
        sent = [os.urandom(size) for size in sizes]
        stream = b"".join(len(one).to_bytes(4, "little") + one for one in sent)
        got: list[bytes] = []
        at = turn = 0
        while at < len(stream):
            piece = stream[at : at + cuts[turn % len(cuts)]]
            left.sendall(piece)
            at, turn = at + len(piece), turn + 1
            for _ in range(1 + len(piece) // CHUNK_BYTES):
                connection.fill()
            got += taken(connection)
        until(
            lambda: len(got) == len(sent),
            lambda: (connection.fill(), got.extend(taken(connection))),
        )
        assert got == sent
    finally:
        left.close()
        connection.close()


@given(st.lists(st.binary(max_size=30) | st.just(b"L" * (CHUNK_BYTES + 9)), max_size=5), st.data())
def test_what_was_read_elsewhere_is_taken_in(messages: list[bytes], data: st.DataObject) -> None:
    sent = b"".join(len(each).to_bytes(4, "little") + each for each in messages)
    begins = {sum(4 + len(each) for each in messages[:at]) for at in range(len(messages) + 1)}
    cut = data.draw(st.sampled_from(sorted(begins)) | st.integers(0, len(sent)))
    left, right = pair()
    assert right.is_bare
    if cut:
        assert right.take_in(sent[:cut]) == (cut in begins)
    assert right.is_bare == (not cut)
    left._socket.send(sent[cut:])
    for _ in range(2 + 2 * len(messages)):
        right.fill()
    assert taken(right) == messages
    assert right.is_bare
    assert not right.take_in(b"")
    assert right.is_broken
    assert not right.is_bare
    left.close()
    right.close()


def test_what_is_not_read_is_bounded_and_says_so(ends: Pair) -> None:
    left, right = ends
    wishes: list[bool] = []
    left.on_write_wish = lambda connection: wishes.append(connection.has_unsent)
    message = bytes(100_000)
    num = 0
    while left.send(message):
        num += 1
        assert num < 100
    assert MAX_UNSENT_BYTES <= left.num_unsent < MAX_UNSENT_BYTES + len(message) + 4
    assert not left.send(b"nor anything small")
    assert wishes == [True]
    got: list[bytes] = []

    def turn() -> None:
        left.flush()
        right.fill()
        got.extend(taken(right))

    until(lambda: len(got) == num, turn)
    assert got == [message] * num
    assert wishes == [True, False]
    assert left.send(b"again")


def test_the_end_of_the_other_side_comes_behind_what_it_sent(ends: Pair) -> None:
    left, right = ends
    assert right.send(b"unread by the left")
    for _ in range(3):
        assert left.send(b"last words")
    left.close()
    right.fill()
    assert taken(right) == [b"last words"] * 3
    right.fill()
    assert right.is_broken
    assert not right.send(b"into the void")


@pytest.mark.parametrize("num_bytes", [10, 2 * CHUNK_BYTES])
def test_what_has_arrived_is_read_after_a_send_that_failed(ends: Pair, num_bytes: int) -> None:
    left, right = ends
    sent = [bytes([number]) * num_bytes for number in range(4)]
    assert all(left.send(message) for message in sent)
    left.close()
    assert not right.send(b"into the void")
    until(lambda: right.is_broken, right.fill)
    assert taken(right) == sent


def test_what_waits_does_not_keep_what_has_arrived(ends: Pair) -> None:
    left, right = ends
    assert right.send(bytes(2**20))
    assert right.has_unsent
    assert left.send(b"last words")
    left.close()
    right.flush()
    assert not right.has_unsent
    until(lambda: right.is_broken, right.fill)
    assert taken(right) == [b"last words"]


def test_a_message_that_is_too_large_breaks_the_connection(ends: Pair) -> None:
    left, right = ends
    right.max_bytes = 1000
    assert left.send(b"fine")
    assert left.send(bytes(1001))
    right.fill()
    assert taken(right) == [b"fine"]
    assert right.is_broken


def test_there_is_no_connection_without_a_listener(address: str) -> None:
    assert connect_local(address, MAX_BYTES) is None
    listener = LocalListener(address, max_message_bytes=MAX_BYTES, max_connections=4)
    connection = connect_local(address, MAX_BYTES)
    assert connection is not None
    connection.close()
    listener.close()
    assert connect_local(address, MAX_BYTES) is None


def test_a_successor_takes_the_path_and_keeps_it(address: str) -> None:
    before = LocalListener(address, max_message_bytes=MAX_BYTES, max_connections=4)
    after = LocalListener(address, max_message_bytes=MAX_BYTES, max_connections=4)
    before.close()  # late, and takes nothing with it
    connection = connect_local(address, MAX_BYTES)
    assert connection is not None
    after.ready()
    assert len(after) == 1
    connection.close()
    after.close()


def test_peers_of_other_users_are_refused(
    address: str, listener: LocalListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = connect_local(address, MAX_BYTES)
    assert connection is not None
    own = os.getuid()
    monkeypatch.setattr(local_socket.os, "getuid", lambda: own + 1)
    listener.ready()
    assert len(listener) == 0
    assert connect_local(address, MAX_BYTES) is None
    connection.fill()
    assert connection.is_broken
    connection.close()


def test_the_oldest_stranger_makes_room_and_who_was_heard_stays(
    address: str, listener: LocalListener
) -> None:
    def connect() -> LocalConnection:
        connection = connect_local(address, MAX_BYTES)
        assert connection is not None
        listener.ready()
        return connection

    known = [connect() for _ in range(3)]
    for connection in list(listener._connections.values()):
        listener.heard(connection)
    stranger = connect()
    late = connect()
    for connection in (stranger, *known, late):
        connection.fill()
    assert stranger.is_broken
    assert not any(connection.is_broken for connection in (*known, late))
    listener.heard(next(iter(listener._strangers.values())))
    too_late = connect()
    too_late.fill()
    assert too_late.is_broken
    assert (len(listener), listener.num_refused) == (4, 2)
    for connection in (*known, stranger, late, too_late):
        connection.close()


def test_a_stranger_may_say_no_more_than_a_hello(address: str, listener: LocalListener) -> None:
    stranger = connect_local(address, MAX_BYTES)
    assert stranger is not None
    assert stranger.send(bytes(MAX_STRANGER_BYTES + 1))
    until(lambda: listener.ready(), lambda: None)
    (connection,) = listener.unread
    assert connection.is_broken
    stranger.close()


def test_without_free_descriptors_it_waits_for_a_beat(
    address: str, listener: LocalListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = connect_local(address, MAX_BYTES)
    assert connection is not None
    real = listener._listener

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def accept(self) -> Any:
            raise OSError(24, "Too many open files")

    monkeypatch.setattr(listener, "_listener", Full())
    listener.ready()
    assert listener._epoll.poll(0) == []  # it does not spin
    monkeypatch.setattr(listener, "_listener", real)
    listener.beat()
    listener.beat()
    listener.ready()
    assert len(listener) == 1
    connection.close()


def test_a_folder_that_others_may_enter(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(PermissionError):
        LocalListener(f"ipc://{tmp_path}/s", max_message_bytes=1, max_connections=1)
    assert listen_local(f"ipc://{tmp_path}/none/s", max_message_bytes=1, max_connections=1) is None


# ---- with sessions on them ---------------------------------------------------------------------


@only_local
def test_the_end_of_a_connection_ends_its_session_at_once(hop: Any) -> None:
    attacher = hop.attached()
    session = hop.session()
    attacher.close()
    hop.until(lambda: not session.is_open, hop.serve)
    assert hop.acceptor.take_lost() == [session]
    assert len(hop.sockets.local) == 0


@only_local
def test_an_attach_over_zeromq_moves_when_there_is_a_listener(hop: Any) -> None:
    """A peer that came first waits with ZeroMQ; its epoch tells its two attaches apart."""
    hop.sockets.close()
    attacher = hop.attacher()
    assert not attacher._channel.is_local
    hop.accept()
    hop.until(lambda: attacher.is_attached)
    assert attacher._channel.is_local
    assert attacher.epoch == 2
    assert len(hop.acceptor.sessions) == 1
    assert hop.session().link.epoch == 2
    assert attacher.send(Abort(b"x"), None)
    hop.until(lambda: hop.received == [Abort(b"x")])


@only_local
def test_a_listener_that_closes_at_once_leaves_zeromq(hop: Any) -> None:
    hop.sockets.local._max_connections = 0
    attacher = hop.attacher()
    assert attacher._channel.is_local
    hop.until(lambda: attacher.is_attached)
    assert not attacher._channel.is_local
    assert attacher.epoch == 2
    hop.sockets.local._max_connections = 4
    attacher.attach(hop.now)
    hop.until(lambda: attacher.is_attached)
    assert attacher._channel.is_local


@only_local
def test_a_peer_that_does_not_read_costs_a_bounded_number_of_bytes(hop: Any) -> None:
    deaf = connect_local(hop.address, MAX_BYTES)
    assert deaf is not None
    assert deaf.send(client_codec().encode(Frame(1, 0, 0, Hello(PROTOCOL_VERSION, b"deaf"))))
    hop.until(lambda: hop.acceptor.sessions, hop.serve)
    session = hop.session(b"deaf")
    session.link.window = 10_000
    num = 0
    while hop.acceptor.send(session, UnknownStreams(tuple(range(2000))), None):
        num += 1
        assert num < 10_000
    assert session.is_open
    assert session.link.num_unacked == num  # what was refused took no number
    assert session.route.num_unsent < MAX_UNSENT_BYTES + 2**14
    got: list[bytes] = []

    def turn() -> None:
        hop.serve()
        deaf.fill()
        got.extend(taken(deaf))

    hop.until(lambda: len(got) == num + 1, turn)
    assert [front_seq(data) for data in got] == [0, *range(1, num + 1)]
    deaf.close()


@only_local
def test_an_acknowledgement_without_room_is_sent_later(hop: Any) -> None:
    """The peer said it while it read nothing; what it reads later is no numbered message."""
    deaf = connect_local(hop.address, MAX_BYTES)
    assert deaf is not None
    codec = client_codec()
    assert deaf.send(codec.encode(Frame(1, 0, 0, Hello(PROTOCOL_VERSION, b"deaf"))))
    hop.until(lambda: hop.acceptor.sessions, hop.serve)
    session = hop.session(b"deaf")
    while session.route.send(bytes(2**18)):
        pass
    assert deaf.send(codec.encode(Frame(1, 1, 0, Abort(b"x"))))
    hop.until(lambda: hop.received, hop.serve)
    assert session.link.owes_ack

    def turn() -> None:
        hop.serve()
        deaf.fill()
        hop.acceptor.beat(hop.now)

    hop.until(lambda: not session.link.owes_ack, turn)
    assert session.is_open
    deaf.close()


@only_local
def test_a_flood_of_small_messages_is_read_a_part_at_a_time(
    hop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = client_codec()
    num = CHUNK_BYTES // (4 + len(codec.encode(Frame(1, 0, 0, Ping()))))
    floods = []
    for number in range(3):
        said = [Frame(1, 0, 0, Hello(PROTOCOL_VERSION, b"flood %d" % number))]
        said += [Frame(1, 0, 0, Ping())] * num
        said += [Frame(1, 1, 0, Abort(b"last"))]
        data = [codec.encode(each) for each in said]
        flood = socket.socket(socket.AF_UNIX)
        flood.connect(f"{hop.address.removeprefix('ipc://')}.local")
        flood.sendall(b"".join(len(each).to_bytes(4, "little") + each for each in data))
        floods.append(flood)
    acceptors, turns = hop.acceptor._codec, []
    decode = type(acceptors).decode

    def serve() -> None:
        turns.append(0)
        hop.serve()

    def counted(self: Any, data: bytes) -> Any:
        if self is acceptors:
            turns[-1] += 1
        return decode(self, data)

    monkeypatch.setattr(type(acceptors), "decode", counted)
    poller = Poller()
    hop.acceptor.register(poller)
    until(
        lambda: len(hop.received) == 3,
        lambda: serve() if poller.poll(1000) else pytest.fail("it sleeps beside unread messages"),
    )
    assert max(turns) <= MAX_READ_AT_ONCE
    assert sum(turns) == 3 * (num + 2)
    for flood in floods:
        flood.close()
    hop.until(lambda: not hop.acceptor.sessions, hop.serve)


def front_seq(data: bytes) -> int:
    return client_codec().decode(data).seq


# ---- the poller --------------------------------------------------------------------------------


def test_the_poller_reports_sockets_and_descriptors(hop: Any) -> None:
    poller = Poller()
    bell = os.eventfd(0)
    try:
        poller.register(bell)
        hop.acceptor.register(poller)
        assert poller.poll(0) == []
        os.eventfd_write(bell, 1)
        assert poller.poll(None) == [(bell, 1)]
        attacher = hop.attacher()
        ready: set[Any] = set()
        until(lambda: len(ready) == 2, lambda: ready.update(dict(poller.poll(10))))
        assert ready == {bell, hop.sockets.local.fd if hop.is_local else hop.router}
        assert (hop.router in dict(poller.poll(0))) is not hop.is_local, "until it is read"
        os.eventfd_read(bell)
        poller.unregister(bell)
        hop.until(lambda: attacher.is_attached)
        until(lambda: not poller.poll(1), hop.turn)
        hop.acceptor.unregister(poller)
        assert attacher.send(Abort(b"x"), None)
        assert poller.poll(1) == []
    finally:
        os.close(bell)


def test_the_poller_waits_for_output_where_asked(ends: Pair) -> None:
    left, _ = ends
    poller = Poller()
    poller.register(left.fd, 1)
    assert poller.poll(0) == []
    poller.register(left.fd, 3)
    assert poller.poll(0) == [(left.fd, 2)]
    poller.register(left.fd, 1)
    assert poller.poll(0) == []


@only_local
def test_router_of_both(hop: Any) -> None:
    """Peers of both kinds are served by one router."""
    local = hop.attached(b"local")
    local._may_move = False
    hop.sockets.local._max_connections = 0  # so that the next one stays with ZeroMQ
    remote = hop.attached(b"remote")
    assert (local._channel.is_local, remote._channel.is_local) == (True, False)
    assert isinstance(hop.acceptor, Router)
    for attacher in (local, remote):
        assert attacher.send(Abort(attacher._identity), None)
    hop.until(lambda: len(hop.received) == 2)
    for identity in (b"local", b"remote"):
        assert hop.acceptor.send(hop.session(identity), UnknownStreams((1,)), None)
    hop.until(lambda: all(len(hop.answers[each]) == 2 for each in (local, remote)))
    assert front_codec().max_message_bytes
