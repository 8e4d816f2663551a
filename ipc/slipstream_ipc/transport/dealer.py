"""The attaching end of a hop: a DEALER socket and its link, both replaced when they fail.

`Dealer` does the handshake, acknowledgements and pings. Its user states its positions after each
Welcome and drops the receipts of the previous attach.

- Each attach uses a fresh socket with a random routing id; the old one is closed with LINGER 0, so
  a message queued for one peer never reaches another.
- A new attach follows a gap, a Reattach, a missed heartbeat, or a broken connection once what had
  arrived over it has been read. It also follows an unanswered Hello, first after
  `welcome_within_s` and then after doubling intervals: with a fixed one, an accepting end slower
  than the interval would always answer a closed socket.
- `Starting` is a sign of life, not an answer: the Hello is repeated after the usual interval.
- A failed handshake does not count as a broken connection; the next attach waits for its interval.
  A permanent refusal is delivered as an AttachRefused, other failures are kept in `trouble`.
- An ipc:// peer is trusted because of its folder, which is checked before the first attach and at
  each Welcome: a server owned by another user is never sent more than a Hello.
- `receive` reads a bounded number of messages and bytes, so that a flood does not starve the loop.
"""

from __future__ import annotations

import secrets
from collections.abc import Container, Iterator
from typing import Generic, TypeVar

import zmq

from slipstream_ipc.errors import ProtocolError
from slipstream_ipc.messages import (
    PROTOCOL_VERSION,
    AttachRefused,
    Control,
    Fault,
    Frame,
    Hello,
    Ping,
    Reattach,
    Starting,
    Welcome,
)
from slipstream_ipc.transport.addresses import check_socket_folder
from slipstream_ipc.transport.codec import Codec
from slipstream_ipc.transport.curve import Access
from slipstream_ipc.transport.link import Beat, Header, Link, LinkVerdict
from slipstream_ipc.transport.sockets import (
    MAX_READ_AT_ONCE,
    MAX_READ_BYTES_AT_ONCE,
    DisconnectWatch,
    is_numbered,
    new_dealer,
)

Out = TypeVar("Out")
In = TypeVar("In")
Receipt = TypeVar("Receipt")

_MAX_WELCOME_TIMEOUT = 4.0  # the longest wait for a Welcome, in multiples of `welcome_within_s`


class Dealer(Generic[Out, In, Receipt]):
    """Keeps a hop to one accepting end attached. `poller` always has the current socket registered.

    `fresh` goes into the next Hello: True means that this end knows of no stream. A Welcome sets it
    to False; a user whose replay was cut short by a failing link sets it again.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        codec: Codec[Out, In],
        poller: zmq.Poller,
        *,
        identity: bytes,
        now: float,
        incarnation: int = 0,
        welcome_within_s: float = 1.0,
        fresh: bool = True,
        access: Access | None = None,
    ) -> None:
        """`access` is for a tcp:// address; an ipc:// address takes none.

        Raises: BadRequest for an invalid address; PermissionError if other users may enter the
        folder of an ipc:// socket.
        """
        assert 0 <= incarnation < 2**31
        check_socket_folder(address)
        self._context = context
        self._address = address
        self._codec = codec
        self._poller = poller
        self._identity = identity
        self._access = access
        self._welcome_within_s = welcome_within_s
        self._welcome_timeout_s = welcome_within_s
        self._epoch = incarnation << 32
        self._socket: zmq.Socket[bytes] | None = None
        self._has_heard = False  # the current `receive` has read a frame for this link
        self.is_attached = False
        self.is_starting = False  # the peer has received this Hello and cannot serve yet
        self.fresh = fresh
        self.trouble = ""  # how handshakes failed since the last Welcome
        self.attach(now)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """The socket of the current attach."""
        assert self._socket is not None
        return self._socket

    def is_among(self, arrived: Container[object]) -> bool:
        """Whether the sockets that a poller reports include one that `receive` reads."""
        return self._socket in arrived or self._watch.socket in arrived

    @property
    def epoch(self) -> int:
        """The epoch of the current attach; a later attach has a larger one."""
        return self._epoch

    @property
    def has_credit(self) -> bool:
        """Whether the dealer is attached and may send a numbered message."""
        return self.is_attached and self._link.has_credit

    @property
    def num_unacked(self) -> int:
        """Numbered messages of this attach that are not acknowledged."""
        return self._link.num_unacked

    def attach(self, now: float) -> None:
        """Begin a new epoch on a new socket."""
        self.close()
        self._epoch += 1
        self._socket = new_dealer(
            self._context,
            self._address,
            secrets.token_bytes(16),
            self._access,
            max_message_bytes=self._codec.max_message_bytes,
            connects=False,
        )
        self._poller.register(self._socket, zmq.POLLIN)
        self._watch = DisconnectWatch(self._socket, self._poller)
        self._socket.connect(self._address)  # after the watch, which would miss a quick failure
        self._link: Link[Receipt] = Link(self._epoch, now)
        self._hello_at = now
        hello = Hello(PROTOCOL_VERSION, self._identity, self.fresh)
        self._send_control(hello)

    def receive(self, now: float, *, acknowledges: bool = True) -> Iterator[In | AttachRefused]:
        """Bodies that have arrived, the Welcome included; acknowledges them at the end.

        The loop's body may send, attach and close. With `acknowledges` False the caller has to call
        `acknowledge`, after sending whatever may carry the acknowledgement.
        """
        self._has_heard = False
        num_bytes = 0
        for _ in range(MAX_READ_AT_ONCE):
            if self._socket is None:
                return
            if num_bytes >= MAX_READ_BYTES_AT_ONCE:
                break
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                break  # several times faster than catching zmq.Again
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            num_bytes += len(data)
            try:
                frame = self._codec.decode(data)
            except ProtocolError as error:
                yield AttachRefused(Fault("engine", f"the peer sent {error}"))
                continue
            body = self._receive_frame(frame, now)
            if body is not None:
                yield body
        if self._socket is not None and not self._has_heard:  # the poller reports a break again
            seen = self._watch.look()
            self.trouble = seen.refused or seen.trouble or self.trouble
            if seen.refused:
                yield AttachRefused(Fault("bad_request", seen.refused, "keys"))
            elif seen.is_broken:
                self.attach(now)  # everything that the peer had sent has been read
        if acknowledges:
            self.acknowledge()

    def acknowledge(self) -> None:
        """Acknowledge what has been received, unless a sent frame already has."""
        if self._socket is not None and self._link.owes_ack:
            self._send_control(None)

    def send(self, body: Out, receipt: Receipt) -> bool:
        """Send a numbered message; False if not attached, out of credit, or the socket is full.

        `receipt` is returned by `take_receipts` once the message is acknowledged.
        """
        link = self._link
        if not (self.is_attached and link.has_credit):
            return False
        header = link.next_header()
        frame: Frame[Out] = Frame(header.epoch, header.seq, header.ack, body)
        if not self._send(frame):
            return False
        link.sent(receipt)
        return True

    def take_receipts(self) -> list[Receipt]:
        """Receipts of the messages acknowledged since the last call."""
        return self._link.take_receipts()

    def beat(self, now: float) -> None:
        """Ping a silent peer and attach anew if it stays silent. To be called periodically."""
        if self._socket is None:
            return
        if not self.is_attached:
            if now - self._hello_at >= self._welcome_timeout_s:
                longest = _MAX_WELCOME_TIMEOUT * self._welcome_within_s
                self._welcome_timeout_s = min(2 * self._welcome_timeout_s, longest)
                self.attach(now)
            return
        beat = self._link.beat(now)
        if beat is Beat.PING:
            self._send_control(Ping())
        elif beat is Beat.DEAD:
            self.attach(now)

    def close(self) -> None:
        """Close the socket without notice to the peer; only `attach` opens a new one."""
        self.is_attached = self.is_starting = False
        if self._socket is not None:
            self._watch.close()
            self._poller.unregister(self._socket)
            self._socket.close(linger=0)
            self._socket = None

    def _receive_frame(self, frame: Frame[In], now: float) -> In | AttachRefused | None:
        """Account for a frame; its body if that is to be delivered, else None."""
        body = frame.body
        numbered = is_numbered(body)
        if not numbered and body is not None:
            if isinstance(body, Reattach):
                if frame.epoch == self._epoch:
                    self.attach(now)
                return None
            if isinstance(body, Starting):
                if frame.epoch == self._epoch and not self.is_attached:
                    self.is_starting = True
                    self._hello_at = now  # the peer keeps the Hello: no hurry to repeat it
                return None
            if isinstance(body, AttachRefused) and frame.epoch == 0:
                return body  # the peer could not read the epoch of what it refuses
        self._has_heard = True
        verdict = self._link.receive(Header(frame.epoch, frame.seq, frame.ack), numbered, now)
        if verdict is LinkVerdict.GAP:
            self.attach(now)
        elif verdict is LinkVerdict.DELIVER and body is not None:
            return body if numbered else self._handle_control(body)
        return None

    def _handle_control(self, body: In) -> In | AttachRefused | None:
        """Handle a control message of this attach; its body if that is to be delivered."""
        if isinstance(body, Ping):
            self._send_control(None)
            return None
        if not isinstance(body, Welcome):
            return body
        if self.is_attached:
            return None  # a repeated Welcome: delivering it would restart the attach
        if body.version != PROTOCOL_VERSION:
            return AttachRefused(Fault("engine", _mismatch(body.version)))
        try:
            check_socket_folder(self._address)
        except PermissionError as error:
            return AttachRefused(Fault("engine", str(error)))
        self.is_attached = True
        self.is_starting = False
        self.trouble = ""
        self.fresh = False
        self._welcome_timeout_s = self._welcome_within_s
        return body

    def _send_control(self, body: Control | None) -> None:
        header = self._link.control_header()
        frame: Frame[Control] = Frame(header.epoch, header.seq, header.ack, body)
        if self._send(frame):
            self._link.ack_sent()

    def _send(self, frame: Frame[Out] | Frame[Control]) -> bool:
        try:
            self.socket.send(self._codec.encode(frame), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


def _mismatch(version: int) -> str:
    return f"the server speaks protocol version {version}, this side {PROTOCOL_VERSION}"
