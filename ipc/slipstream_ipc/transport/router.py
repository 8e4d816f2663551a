"""The accepting end of a hop: its sockets, with a session and a link for each peer.

`Router` does acknowledgements and pings. Its user answers each Hello with `welcome` and drops the
receipts of the peer's previous session.

- An identity has one session, that of its latest epoch; frames of an older one are stale.
- A route is a ROUTER's routing id, or a local connection. The end of a local connection ends its
  session at once.
- A route has one session: a Hello of another identity on the same route ends the previous one.
- A frame on a route without a session is answered with Reattach, and so is a gap, which ends its
  session.
- A message that cannot be read is answered with AttachRefused and affects no other peer.
- A server that cannot serve yet calls `queue_hellos` instead of `receive`: the newest Hello of each
  identity is kept and answered with Starting, and any other message with Reattach.
- `receive` reads a bounded number of messages and bytes, so that a flood does not starve the loop.
- Messages are acknowledged at once, unless `may_owe` allows a few to wait until the next `beat` for
  a message that carries the acknowledgement.
- An identity is a name, not a secret: a peer that may open the socket can replace another one's
  session with a later epoch. The mode of the directory decides which users may open it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Generic, TypeVar

import zmq

from slipstream_ipc.errors import ProtocolError
from slipstream_ipc.messages import (
    MAX_IDENTITY_BYTES,
    WANTS_MEMBERS,
    AttachRefused,
    Control,
    Fault,
    Frame,
    Hello,
    ModelCard,
    Ping,
    Reattach,
    Starting,
    Welcome,
)
from slipstream_ipc.transport.codec import Codec
from slipstream_ipc.transport.connections import Connections
from slipstream_ipc.transport.curve import public_key_of
from slipstream_ipc.transport.link import Beat, Link, LinkVerdict
from slipstream_ipc.transport.local_socket import LocalConnection, LocalListener
from slipstream_ipc.transport.poller import EVENTS, POLLIN, Poller
from slipstream_ipc.transport.sockets import MAX_READ_AT_ONCE, MAX_READ_BYTES_AT_ONCE, is_numbered

Out = TypeVar("Out")
In = TypeVar("In")
Receipt = TypeVar("Receipt")

Route = bytes | LocalConnection

_MAX_QUEUED_HELLOS = 2**16


@dataclass(eq=False, slots=True)
class Session(Generic[Receipt]):
    """One attach of one peer. public_key: of the peer, in Z85; empty for a peer without
    CURVE, and for a front. identity: the one in its Hello, and the public key.
    wants: see `Hello`. take: receives an encoded frame that need not be decoded, or returns False
    without effect; at first it takes acknowledgements alone.
    """

    route: Route
    identity: bytes
    link: Link[Receipt]
    fresh: bool
    public_key: bytes = b""
    wants: int = 0
    is_open: bool = True
    take: Callable[[bytes, float], bool] = field(init=False)

    def __post_init__(self) -> None:
        """Take acknowledgements alone."""
        self.take = self.link.take_ack


class Router(Generic[Out, In, Receipt]):
    """The peers of one ROUTER socket, which the caller has bound with `sockets.bind_router`, and of
    the local connections beside it.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        codec: Codec[Out, In],
        *,
        window: int,
        ping_after_s: float = 2.0,
        dead_after_s: float = 8.0,
        stalled_after_s: float = inf,
        connections: Connections | None = None,
        local: LocalListener | None = None,
    ) -> None:
        """
        stalled_after_s: a live peer that acknowledges nothing of what it was sent for this long
        loses its session (`take_stalled`).
        connections: is notified of each ZeroMQ connection that has sent a Hello.
        """
        self._connections = connections
        self._local = local
        # whether nothing was left unread when the ROUTER was last asked, and nothing sent since:
        # then its descriptor reports what comes
        self._is_drained = False
        if local is not None:
            local.watch(int(socket.getsockopt(zmq.FD)))
        self._socket = socket
        self._codec = codec
        self._window = window
        self._ping_after_s = ping_after_s
        self._dead_after_s = dead_after_s
        self._stalled_after_s = stalled_after_s
        self._routes: dict[Route, Session[Receipt]] = {}
        self._identities: dict[bytes, Session[Receipt]] = {}
        self._heard: set[Session[Receipt]] = set()
        self._lost: list[Session[Receipt]] = []
        self._stalled: list[Session[Receipt]] = []
        # by identity: route, epoch, Hello and public key
        self._queued_hellos: dict[bytes, tuple[Route, int, Hello, bytes]] = {}

    @property
    def sessions(self) -> list[Session[Receipt]]:
        """Every open session."""
        return list(self._routes.values())

    def register(self, poller: zmq.Poller) -> None:
        """Have the poller report what arrives, for `is_among`."""
        if self._local is not None and isinstance(poller, Poller):
            poller.register_input(self._local.fd, self._has_input)
            return
        poller.register(self._socket, POLLIN)
        if self._local is not None:
            poller.register(self._local.fd, POLLIN)

    def unregister(self, poller: zmq.Poller) -> None:
        """Take back `register`."""
        if self._local is not None:
            poller.unregister(self._local.fd)
        if self._local is None or not isinstance(poller, Poller):
            poller.unregister(self._socket)

    def is_among(self, arrived: Container[object]) -> bool:
        """True if a poller's result, or queued Hellos, give `receive` work."""
        local = self._local
        if local is not None and (local.fd in arrived or local.unread):
            return True
        return bool(self._queued_hellos) or self._socket in arrived

    def receive(
        self, now: float, *, may_owe: int = 0
    ) -> Iterator[tuple[Session[Receipt], In | Hello]]:
        """Sessions and the bodies that have arrived for them, a new session's Hello first.

        may_owe: messages per peer that may stay unacknowledged because a message that is sent soon
        will acknowledge them. The loop's body may send, and end sessions.
        """
        if self._queued_hellos:
            queued, self._queued_hellos = self._queued_hellos, {}
            for route, epoch, hello, key in queued.values():
                session = self._open(route, epoch, hello, key, now)
                if session is not None:
                    yield session, hello
        local = self._local
        if local is not None:
            unread, num_left, routes = local.ready(), MAX_READ_AT_ONCE, self._routes
            decode = self._codec.decode
            while unread and num_left:
                connection = unread[0]
                messages = connection.messages
                while messages and num_left:
                    num_left -= 1
                    data, session = messages.popleft(), routes.get(connection)
                    if session is not None and session.take(data, now):
                        if session.link.owes_ack:
                            self._heard.add(session)
                        continue
                    try:
                        frame = decode(data)
                    except ProtocolError as error:
                        self._refuse(connection, str(error), field=error.field)
                        continue
                    body = None if session is None else session.link.take_next(frame, now)
                    if session is None or body is None:
                        session = self._receive_frame(connection, frame, b"", now)
                        body = frame.body
                    else:
                        self._heard.add(session)
                    if session is not None and body is not None:
                        yield session, body
                self._leave(connection, local)
            if self._is_drained and not local.is_other_ready:
                if self._heard:
                    self.acknowledge(may_owe)
                return
        for route, frame, key in self._zmq_frames():
            session = self._receive_frame(route, frame, key, now)
            if session is not None and frame.body is not None:
                yield session, frame.body
        self.acknowledge(may_owe)

    def _leave(self, connection: LocalConnection, local: LocalListener) -> None:
        """Take the first connection out of the unread ones, or put it behind them if it still has
        messages.
        """
        local.unread.popleft()
        if connection.messages:
            local.unread.append(connection)
        elif connection.is_broken:
            self._end_route(connection)

    def take_acks(self, now: float, *, may_owe: float = inf) -> bool:
        """Take in what has arrived locally, up to the first message that has to be decoded (see
        `Session`); return True if there is none, nor anything else to receive. may_owe: as in
        `receive`.
        """
        local = self._local
        if local is None or self._queued_hellos:
            return False
        unread, heard = local.ready(), self._heard
        while unread:
            connection = unread[0]
            session = self._routes.get(connection)
            if session is None:
                return False
            messages, take = connection.messages, session.take
            while messages and take(messages[0], now):
                messages.popleft()
            if session.link.owes_ack:
                heard.add(session)
            if messages or connection.is_broken:
                return False
            unread.popleft()
        if local.is_other_ready or not self._is_drained:
            return False
        for session in heard:
            if session.link.num_owed_acks > may_owe:
                self.acknowledge(int(may_owe))
                break
        return True

    def acknowledge(self, may_owe: int = 0) -> None:
        """Acknowledge the messages of each peer with more than `may_owe` unacknowledged ones."""
        if not self._heard:
            return
        waiting = []
        for session in self._heard:
            num = session.link.num_owed_acks if session.is_open else 0
            if num and (num <= may_owe or not self._send_control(session, None)):
                waiting.append(session)
        self._heard.clear()
        self._heard.update(waiting)

    def queue_hellos(self) -> None:
        """Read what has arrived while no peer can be served: keep Hellos, answer with Starting."""
        for route, frame, key in self._frames():
            hello = frame.body
            if not isinstance(hello, Hello):
                self._answer(route, frame.epoch, Reattach())
            elif (
                self._is_acceptable(route, frame.epoch, hello)
                and len(self._queued_hellos) < _MAX_QUEUED_HELLOS
            ):
                identity = hello.identity + key
                before = self._queued_hellos.get(identity)
                if before is None or before[1] < frame.epoch:
                    self._queued_hellos[identity] = (route, frame.epoch, hello, key)
                self._answer(route, frame.epoch, Starting())

    def welcome(
        self,
        session: Session[Receipt],
        model: ModelCard,
        *,
        worker: int = 0,
        num_workers: int = 1,
        replica: bytes = b"",
        incarnation: int = 0,
        members: tuple[str, ...] = (),
        answers: int = 0,
    ) -> None:
        """Answer a session's Hello. For what follows the model, see `Welcome`."""
        if not session.wants & WANTS_MEMBERS:
            members = ()
        welcome = Welcome(
            self._codec.version, model, worker, num_workers, replica, incarnation, members, answers
        )
        self._send_control(session, welcome)

    def send(self, session: Session[Receipt], body: Out, receipt: Receipt) -> bool:
        """Send a numbered message; False if the session is closed or out of credit, or not sent.

        `receipt` is returned by the session's link once the message is acknowledged.
        """
        if not session.is_open:
            return False
        route, encode = session.route, self._codec.encode
        if not isinstance(route, LocalConnection):
            return session.link.send(body, receipt, encode, partial(self._send_zmq, route))
        if session.link.send(body, receipt, encode, route.send):
            return True
        self._look_at(route)
        return False

    def send_unnumbered(self, session: Session[Receipt], body: Control) -> bool:
        """Send a message that takes no credit, and may be lost; False if it was not sent."""
        return session.is_open and self._send_control(session, body)

    def reattach(self, session: Session[Receipt]) -> None:
        """End a session and send its peer a Reattach."""
        self._send_control(session, Reattach())
        self._lose(session)

    def refuse_all(self, fault: Fault, *, is_leaving: bool = False) -> None:
        """Send every peer an AttachRefused; with `is_leaving`, close its session too."""
        for session in self.sessions:
            self._send_control(session, AttachRefused(fault, is_leaving))
            if is_leaving:
                self.close(session)

    def beat(self, now: float) -> None:
        """Acknowledge what is owed, ping silent peers, end sessions of dead and stalled ones.

        To be called periodically.
        """
        if self._local is not None:
            self._local.beat()
        self.acknowledge()
        for session in list(self._routes.values()):
            beat = session.link.beat(now)
            if beat is Beat.PING:
                self._send_control(session, Ping())
            elif beat is Beat.DEAD:
                self._lose(session)
            elif beat is Beat.STALLED:
                why = f"nothing was acknowledged for {self._stalled_after_s:g} s"
                self._send_control(session, AttachRefused(Fault("bad_request", why)))
                self.close(session)
                self._stalled.append(session)

    def take_lost(self) -> list[Session[Receipt]]:
        """Sessions lost since the last call, without those whose identity has a new session."""
        lost, self._lost = self._lost, []
        return [s for s in lost if s.identity not in self._identities]

    def take_stalled(self) -> list[Session[Receipt]]:
        """Sessions ended since the last call because their peers acknowledged nothing."""
        stalled, self._stalled = self._stalled, []
        return stalled

    def close(self, session: Session[Receipt]) -> None:
        """Forget a session, after acknowledging what it sent last. Idempotent."""
        owes_ack = session.is_open and session.link.owes_ack
        session.is_open = False
        if self._routes.get(session.route) is session:
            del self._routes[session.route]
            if owes_ack:
                self._send_control(session, None)
        session.link.end()
        if self._identities.get(session.identity) is session:
            del self._identities[session.identity]

    def _frames(self) -> Iterator[tuple[Route, Frame[In], bytes]]:
        """Frames that have arrived, with their routes, and with the peer's public key if they are
        Hellos. Unreadable messages are answered here.
        """
        if self._local is not None:
            yield from self._local_frames(self._local)
        yield from self._zmq_frames()

    def _zmq_frames(self) -> Iterator[tuple[Route, Frame[In], bytes]]:
        """The frames of `_frames` that have come over ZeroMQ."""
        num_bytes = 0
        self._is_drained = False
        for _ in range(MAX_READ_AT_ONCE):
            if num_bytes >= MAX_READ_BYTES_AT_ONCE:
                return
            if not int(self._socket.getsockopt(EVENTS)) & POLLIN:
                self._is_drained = True
                return  # several times faster than catching zmq.Again
            try:
                route = self._socket.recv(zmq.NOBLOCK)
                # an uncopied part carries its `more` flag and its connection's descriptor, which
                # takes fewer calls than `recv_multipart`
                part = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            num_bytes += len(part)
            if part.more:
                num_bytes += sum(map(len, self._socket.recv_multipart(zmq.NOBLOCK)))
                self._refuse(route, "a message of one part expected")
                continue
            frame = self._decode(route, part.bytes)
            if frame is None:
                continue
            key = b""
            if isinstance(frame.body, Hello):
                key = public_key_of(part)
                if self._connections is not None:
                    self._connections.heard(int(part.get(zmq.SRCFD)))
            yield route, frame, key

    def _has_input(self) -> bool:
        """True if there is input that the descriptors do not report."""
        if self._local is not None and self._local.unread:
            return True
        if not self._is_drained:
            self._is_drained = not int(self._socket.getsockopt(EVENTS)) & POLLIN
        return not self._is_drained

    def _local_frames(self, local: LocalListener) -> Iterator[tuple[Route, Frame[In], bytes]]:
        unread, num_left = local.ready(), MAX_READ_AT_ONCE
        while unread and num_left:
            connection = unread[0]
            messages = connection.messages
            while messages and num_left:
                num_left -= 1
                frame = self._decode(connection, messages.popleft())
                if frame is not None:
                    if isinstance(frame.body, Hello):
                        local.heard(connection)
                    yield connection, frame, b""
            self._leave(connection, local)

    def _decode(self, route: Route, data: bytes) -> Frame[In] | None:
        """The frame in `data`; None if there is none, which is answered."""
        try:
            return self._codec.decode(data)
        except ProtocolError as error:
            self._refuse(route, str(error), field=error.field)
            return None

    def _end_route(self, connection: LocalConnection) -> None:
        """A local connection has ended: so has its session."""
        session = self._routes.get(connection)
        if session is not None:
            self._lose(session)
        assert self._local is not None
        self._local.drop(connection)

    def _receive_frame(
        self, route: Route, frame: Frame[In], key: bytes, now: float
    ) -> Session[Receipt] | None:
        """Account for a frame; the session if its body is to be delivered, else None."""
        body = frame.body
        if isinstance(body, Hello):
            if self._local is not None and isinstance(route, LocalConnection):
                self._local.heard(route)
            return self._open(route, frame.epoch, body, key, now)
        session = self._routes.get(route)
        if session is None:
            self._answer(route, frame.epoch, Reattach())
            return None
        verdict = session.link.receive(frame, is_numbered(body), now)
        if verdict is LinkVerdict.GAP:
            self.reattach(session)
            return None
        if verdict is LinkVerdict.IGNORE:
            return None
        self._heard.add(session)
        if isinstance(body, Ping):
            self._send_control(session, None)
            return None
        return session

    def _is_acceptable(self, route: Route, epoch: int, hello: Hello) -> bool:
        if hello.version != self._codec.version:
            mismatch = f"protocol version {hello.version}, expected {self._codec.version}"
            self._refuse(route, mismatch, epoch, "version")
            return False
        if not 0 < len(hello.identity) <= MAX_IDENTITY_BYTES:
            why = f"an identity of 1 to {MAX_IDENTITY_BYTES} bytes expected"
            self._refuse(route, why, epoch, "identity")
            return False
        return True

    def _open(
        self, route: Route, epoch: int, hello: Hello, key: bytes, now: float
    ) -> Session[Receipt] | None:
        if not self._is_acceptable(route, epoch, hello):
            return None
        identity = hello.identity + key  # one that another key knows is not its own
        before = self._identities.get(identity)
        if before is not None:
            if epoch <= before.link.epoch:
                return None
            self.close(before)
        on_route = self._routes.get(route)
        if on_route is not None:
            self._lose(on_route)
        link: Link[Receipt] = Link(
            epoch,
            now,
            window=self._window,
            ping_after_s=self._ping_after_s,
            dead_after_s=self._dead_after_s,
            stalled_after_s=self._stalled_after_s,
        )
        session = Session(route, identity, link, hello.fresh, key, hello.wants)
        self._routes[route] = self._identities[identity] = session
        return session

    def _refuse(self, route: Route, why: str, epoch: int = 0, field: str | None = None) -> None:
        """Answer with AttachRefused. `epoch` is the refused frame's, 0 if it could not be read."""
        session = self._routes.get(route)
        refusal = AttachRefused(Fault("bad_request", why, field))
        if session is not None:
            self._send_control(session, refusal)
        else:
            self._answer(route, epoch, refusal)

    def _send_control(self, session: Session[Receipt], body: Control | None) -> bool:
        write = partial(self._send, session.route)
        return session.link.send_control(body, self._codec.encode, write)

    def _answer(self, route: Route, epoch: int, body: Control) -> None:
        """Send a control message to a route without a session."""
        frame: Frame[Control] = Frame(epoch, 0, 0, body)
        self._send(route, self._codec.encode(frame))

    def _lose(self, session: Session[Receipt]) -> None:
        if session.is_open:
            self.close(session)
            self._lost.append(session)

    def _send(self, route: Route, data: bytes) -> bool:
        if not isinstance(route, LocalConnection):
            return self._send_zmq(route, data)
        if route.send(data):
            return True
        self._look_at(route)
        return False

    def _look_at(self, connection: LocalConnection) -> None:
        """Look what has become of a local connection that took no message."""
        if connection.is_broken and connection.messages and self._local is not None:
            self._local.read_later(connection)  # then the route ends
        elif connection.is_broken:
            self._end_route(connection)

    def _send_zmq(self, route: bytes, data: bytes) -> bool:
        self._is_drained = False
        try:
            self._socket.send_multipart((route, data), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            session = self._routes.get(route)
            if session is not None:
                self._lose(session)
            return False
        return True
