"""The attaching end of a hop: a channel and its link, both replaced when they fail.

`Dealer` does the handshake, acknowledgements and pings. Its user states its positions after each
Welcome and drops the receipts of the previous attach.

- Each attach uses a fresh connection, over ZeroMQ with a random routing id; the old one is closed
  at once, so a message queued for one peer never reaches another.
- A new attach follows a gap, a Reattach, a missed heartbeat, or a broken connection once what had
  arrived over it has been read. It also follows an unanswered Hello, first after
  `welcome_within_s` and then after longer pauses (`reconnect_backoff`).
- `Starting` is a sign of life, not an answer: the Hello is repeated after the usual pause.
- Where no descriptor is left there is no connection; the next attach follows after the pause.
- A failed handshake does not count as a broken connection; the next attach waits for its pause.
  A permanent refusal is delivered as an AttachRefused, other failures are kept in `trouble`.
- At an ipc:// address the attach goes over a local connection (`local_socket`) where there is one
  to be had, else over ZeroMQ, and moves to a local one once the peer answers. Where a local one
  breaks before its Welcome, the next attach stays with ZeroMQ.
- An ipc:// peer is trusted because of its folder, which is checked before the first attach and at
  each Welcome: a server owned by another user is never sent more than a Hello.
- `receive` reads a bounded number of messages and bytes, so that a flood does not starve the loop.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import zmq

from slipstream_ipc.errors import ProtocolError
from slipstream_ipc.messages import (
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
from slipstream_ipc.transport.addresses import IPC, check_socket_folder
from slipstream_ipc.transport.channel import Channel, LocalChannel, ZmqChannel
from slipstream_ipc.transport.codec import Codec
from slipstream_ipc.transport.curve import Access
from slipstream_ipc.transport.link import (
    DEAD_AFTER_S,
    PING_AFTER_S,
    Beat,
    Link,
    LinkVerdict,
)
from slipstream_ipc.transport.local_socket import LocalConnection, connect_local
from slipstream_ipc.transport.reconnect_backoff import ReconnectBackoff
from slipstream_ipc.transport.sockets import is_numbered

Out = TypeVar("Out")
In = TypeVar("In")
Receipt = TypeVar("Receipt")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """The options of a link as its attaching end sets them. wants: goes into each Hello.
    welcome_within_s: until the first Hello that is not answered is followed by another.
    ping_after_s, dead_after_s: see `Link`.
    """

    wants: int = 0
    welcome_within_s: float = 1.0
    ping_after_s: float = PING_AFTER_S
    dead_after_s: float = DEAD_AFTER_S


class Dealer(Generic[Out, In, Receipt]):
    """Keeps a hop to one accepting end attached. `poller` always has the current channel.

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
        fresh: bool = True,
        access: Access | None = None,
        options: LinkOptions | None = None,
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
        self._options = options or LinkOptions()
        self._backoff = ReconnectBackoff(self._options.welcome_within_s)
        self._epoch = incarnation << 32
        self._channel: Channel | None = None  # None too where no descriptor was left for one
        self._is_closed = True
        self._may_move = False  # to a local connection, once there is one
        self._has_heard = False  # the current `receive` has read a frame for this link
        self.is_attached = False
        self.is_starting = False  # the peer has received this Hello and cannot serve yet
        self.fresh = fresh
        self.trouble = ""  # how handshakes failed since the last Welcome
        self.attach(now)

    def is_among(self, arrived: Container[object]) -> bool:
        """True if a poller's result includes something that `receive` reads."""
        return self._channel is not None and self._channel.is_among(arrived)

    @property
    def local_end(self) -> tuple[Link[Receipt], LocalConnection] | None:
        """The link and the connection of the current attach; None if it is not attached, or not
        locally.
        """
        channel = self._channel
        if not self.is_attached or not isinstance(channel, LocalChannel):
            return None
        return self.link, channel.connection

    @property
    def epoch(self) -> int:
        """The epoch of the current attach; a later attach has a larger one."""
        return self._epoch

    @property
    def has_credit(self) -> bool:
        """True if the dealer is attached and may send a numbered message."""
        return self.is_attached and self.link.has_credit

    @property
    def num_unacked(self) -> int:
        """Numbered messages of this attach that are not acknowledged."""
        return self.link.num_unacked

    def attach(self, now: float) -> None:
        """Begin a new epoch on a new connection."""
        self.close()  # its descriptors may be the only free ones
        local = self._connect_local()
        self._attach(now, local, may_move=local is None)

    def receive(self, now: float, *, acknowledges: bool = True) -> Iterator[In | AttachRefused]:
        """Bodies that have arrived, the Welcome included; acknowledges them at the end.

        The loop's body may send, attach and close. With `acknowledges` False the caller has to call
        `acknowledge`, after sending whatever may carry the acknowledgement.
        """
        channel = self._channel
        if channel is None:
            return
        self._has_heard = False
        messages, decode = channel.messages, self._codec.decode
        channel.fill()
        while messages:
            try:
                frame = decode(messages.popleft())
            except ProtocolError as error:
                yield AttachRefused(Fault("engine", f"the peer sent {error}"))
            else:
                body: In | AttachRefused | None = self.link.take_next(frame, now)
                if body is not None:
                    self._has_heard = True
                    yield body
                else:
                    body = self._receive_frame(frame, now)
                    if body is not None:
                        yield body
            if self._channel is not channel:
                return  # it attached anew, or was closed
        if not self._has_heard:  # the poller reports a break again
            yield from self._look(channel, now)
        if acknowledges:
            self.acknowledge()

    def acknowledge(self, may_owe: int = 0) -> None:
        """Acknowledge what has been received, unless at most `may_owe` messages have been, or a
        sent frame has.

        What is owed is acknowledged by the next `send`, or a later call of this.
        """
        if self._channel is not None and self.link.num_owed_acks > may_owe:
            self._send_control(None)

    def send(self, body: Out, receipt: Receipt) -> bool:
        """Send a numbered message; False if not attached, out of credit, or the socket is full.

        `receipt` is returned by `take_receipts` once the message is acknowledged.
        """
        if not self.is_attached:
            return False
        assert self._channel is not None
        return self.link.send(body, receipt, self._codec.encode, self._channel.send)

    def take_receipts(self) -> list[Receipt]:
        """Receipts of the messages acknowledged since the last call."""
        return self.link.take_receipts()

    def beat(self, now: float) -> None:
        """Acknowledge what is owed, ping a silent peer, and attach anew if it stays silent.

        To be called periodically.
        """
        if self._is_closed:
            return
        if not self.is_attached:
            if now - self._hello_at >= self._backoff.pause_s:
                self._backoff.lengthen()
                self.attach(now)
            return
        self.acknowledge()
        beat = self.link.beat(now)
        if beat is Beat.PING:
            self._send_control(Ping())
        elif beat is Beat.DEAD:
            self.attach(now)

    def close(self) -> None:
        """Close the connection without notice to the peer; only `attach` opens a new one."""
        self.is_attached = self.is_starting = False
        self._is_closed = True
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _attach(self, now: float, local: LocalConnection | None, *, may_move: bool) -> None:
        """Begin a new epoch on a local connection, or on ZeroMQ."""
        self.close()
        self._is_closed = False
        self._may_move = may_move
        self._epoch += 1
        self.link: Link[Receipt] = Link(
            self._epoch,
            now,
            ping_after_s=self._options.ping_after_s,
            dead_after_s=self._options.dead_after_s,
        )
        self._hello_at = now
        if local is not None:
            self._channel = LocalChannel(local, self._poller)
        elif not self._open_zmq():
            return
        self._send_control(
            Hello(self._codec.version, self._identity, self.fresh, self._options.wants)
        )

    def _open_zmq(self) -> bool:
        """Open a channel over ZeroMQ; False where no descriptor is left."""
        try:
            self._channel = ZmqChannel(
                self._context,
                self._address,
                self._access,
                self._codec.max_message_bytes,
                self._poller,
            )
        except zmq.ZMQError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self.trouble = "no file descriptors are left for a connection"
            logger.warning("cannot attach to %s: %s", self._address, self.trouble)
            return False
        return True

    def _connect_local(self) -> LocalConnection | None:
        if not self._address.startswith(IPC):
            return None
        return connect_local(self._address, self._codec.max_message_bytes)

    def _moves(self, now: float) -> bool:
        """Attach locally to the peer that has answered over ZeroMQ, if possible; return True if
        done.
        """
        local = self._connect_local() if self._may_move else None
        if local is not None:
            self._attach(now, local, may_move=False)
        return local is not None

    def _look(self, channel: Channel, now: float) -> Iterator[AttachRefused]:
        """Look what has become of the connection, and attach anew if it is broken."""
        seen = channel.look()
        self.trouble = seen.refused or seen.trouble or self.trouble
        if seen.refused:
            yield AttachRefused(Fault("bad_request", seen.refused, "keys"))
        elif seen.is_broken and channel.is_local and not self.is_attached:
            self._attach(now, None, may_move=False)
        elif seen.is_broken:
            self.attach(now)  # everything that the peer had sent has been read

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
                if frame.epoch == self._epoch and not self.is_attached and not self._moves(now):
                    self.is_starting = True
                    self._hello_at = now  # the peer keeps the Hello: no hurry to repeat it
                return None
            if isinstance(body, AttachRefused) and frame.epoch == 0:
                return body  # the peer could not read the epoch of what it refuses
        self._has_heard = True
        verdict = self.link.receive(frame, numbered, now)
        if verdict is LinkVerdict.GAP:
            self.attach(now)
        elif verdict is LinkVerdict.DELIVER and body is not None:
            return body if numbered else self._handle_control(body, now)
        return None

    def _handle_control(self, body: In, now: float) -> In | AttachRefused | None:
        """Handle a control message of this attach; its body if that is to be delivered."""
        if isinstance(body, Ping):
            self._send_control(None)
            return None
        if not isinstance(body, Welcome):
            return body
        if self.is_attached:
            return None  # a repeated Welcome: delivering it would restart the attach
        if body.version != self._codec.version:
            return AttachRefused(Fault("engine", _mismatch(body.version, self._codec.version)))
        try:
            check_socket_folder(self._address)
        except PermissionError as error:
            return AttachRefused(Fault("engine", str(error)))
        if self._moves(now):
            return None
        self.is_attached = True
        self.is_starting = False
        self.trouble = ""
        self.fresh = False
        self._backoff.reset()
        return body

    def _send_control(self, body: Control | None) -> None:
        assert self._channel is not None
        self.link.send_control(body, self._codec.encode, self._channel.send)


def _mismatch(version: int, own: int) -> str:
    return f"the server speaks protocol version {version}, this side {own}"
