"""A peer that sends valid messages and mutations of them: one socket to a ROUTER, its frame
numbers, and a store of sent messages to replay. A `MessageSource` has the valid messages of a hop.

- Messages are drawn from `random`, never from the clock. Answers only decide when a new attach
  begins, the numbers that frames acknowledge, and the handles that the other side uses.
- Sending never blocks: what the socket does not accept stays queued until a later turn.
- A deaf attacker reads nothing, and so acknowledges nothing, until it attaches again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from random import Random
from typing import Any, Literal, Protocol

import msgspec
import zmq

from slipstream_ipc.messages import PROTOCOL_VERSION
from slipstream_verify.fuzz.mutation import flipped, noise, restructured, truncated

Kind = Literal[
    "valid",
    "truncated",
    "mutated",
    "restructured",
    "out of order",
    "replayed",
    "noise",
    "oversized",
]
KINDS: dict[Kind, float] = {
    "valid": 0.45,
    "truncated": 0.1,
    "mutated": 0.13,
    "restructured": 0.12,
    "out of order": 0.08,
    "replayed": 0.09,
    "noise": 0.02995,
    "oversized": 0.00005,
}

_HELLO, _WELCOME, _REATTACH, _REFUSAL, _PING = range(5)
_CONTROL = {_HELLO, _WELCOME, _REATTACH, _REFUSAL, _PING}
_NUM_KEPT = 256  # messages kept for replay
_READ_AT_ONCE = 64
_QUIET_TURNS = 20  # turns without an answer, or deaf, before it attaches again
_SEND_HWM = 64

_encode = msgspec.msgpack.Encoder().encode


class _Heard(msgspec.Struct, array_like=True):
    """A received frame, with its body not decoded."""

    epoch: int
    seq: int
    ack: int
    body: msgspec.Raw = msgspec.Raw(b"\xc0")


_decode = msgspec.msgpack.Decoder(_Heard).decode
_decode_body = msgspec.msgpack.Decoder().decode


class MessageSource(Protocol):
    """The messages that a peer of some hop may send."""

    def body(self) -> tuple[Any, ...] | None:
        """A valid message's tag and fields; None for a bare acknowledgement."""

    def heard(self, tag: int, fields: list[Any]) -> None:
        """The other side sent a message."""

    def attached(self) -> list[tuple[Any, ...]]:
        """The first messages of a new attach, after the Hello."""


class Attacker:
    """One attacking peer."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        random: Random,
        source: MessageSource,
        *,
        max_message_bytes: int,
        version: int = PROTOCOL_VERSION,
    ) -> None:
        self._context = context
        self._address = address
        self._random = random
        self._attach_random = _drawn(random)  # separate, since answers decide when it is drawn from
        self._source = source
        self._version = version
        self._oversized = bytes(max_message_bytes + 1)
        self._identity = random.randbytes(16)
        self._socket: zmq.Socket[bytes] | None = None
        self._epoch = self._seq = self._received = self._num_quiet = 0
        self._is_deaf = False
        self._is_asked_to_attach = False
        self._kept: deque[list[bytes]] = deque(maxlen=_NUM_KEPT)
        self._unsent: deque[tuple[Kind, list[bytes]]] = deque()
        self.sent: Counter[Kind] = Counter()
        self.heard: Counter[int] = Counter()  # messages received, by tag
        self.attach()

    def attach(self) -> None:
        """Attach on a new socket, sometimes under another identity, sometimes without a Hello."""
        random = self._attach_random
        self.close()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_HWM)
        self._socket.setsockopt(zmq.ROUTING_ID, random.randbytes(16))
        self._socket.connect(self._address)
        self._epoch += random.choice((1, 1, 1, 1, 2, 7))
        self._seq = self._received = 0
        self._unsent.clear()
        self._num_quiet = 0
        self._is_asked_to_attach = False
        self._is_deaf = random.random() < 0.1
        if random.random() < 0.02:
            self._identity = random.randbytes(16)
        if random.random() < 0.95:
            self._say((_HELLO, self._version, self._identity, random.random() < 0.5))
            for body in self._source.attached():
                self._say(body)

    def turn(self, num: int, on_sent: Callable[[list[bytes]], None]) -> int:
        """Read what has arrived and send about `num` messages; returns how many were sent."""
        self._num_quiet += 1
        self._read()
        is_stuck = self._num_quiet > _QUIET_TURNS
        if self._is_asked_to_attach or is_stuck or self._attach_random.random() < 0.003:
            self.attach()
        num_sent = 0
        while num_sent < num:
            if not self._unsent:
                self._compose()
            kind, parts = self._unsent[0]
            if not self._send(parts):
                break
            self._unsent.popleft()
            on_sent(parts)
            self.sent[kind] += 1
            num_sent += 1
        return num_sent

    def close(self) -> None:
        """Close the socket without a message."""
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None

    # ---- sending -----------------------------------------------------------------------------

    def _compose(self) -> None:
        random = self._random
        kind: Kind = random.choices(_NAMES, cum_weights=_WEIGHTS)[0]
        if kind == "valid":
            self._say(self._source.body())
            return
        if kind == "replayed" and self._kept:
            self._unsent.append((kind, random.choice(self._kept)))
            return
        self._unsent.append((kind, self._made(kind)))

    def _made(self, kind: Kind) -> list[bytes]:
        random = self._random
        body = self._source.body()
        is_numbered = body is not None and body[0] not in _CONTROL
        numbers = [self._epoch, self._seq + is_numbered, self._received]
        data = _encode([*numbers, body])
        match kind:
            case "truncated":
                return [truncated(random, data)]
            case "mutated":
                data = flipped(random, data)
            case "restructured":
                data = restructured(random, data)
            case "noise":
                data = noise(random)
            case "oversized":
                return [random.choice((self._oversized, data + self._oversized))]
            case _:
                at = random.randrange(3)
                jump = random.choice((-1, 1, 2, 5, 17, 1000, 2**31, 2**62))
                if at == 1 and random.random() < 0.8:
                    jump = -1  # a repeated number; one beyond the next ends the attach
                numbers[at] = max(0, numbers[at] + jump)
                data = _encode([*numbers, body])
        if random.random() < 0.01:  # several parts, of which only one is a message
            return random.choice(([data, data], [b"", data], [data, b"", b"x"]))
        return [data]

    def _say(self, body: tuple[Any, ...] | None) -> None:
        if body is not None and body[0] == _HELLO and body[1] == self._version:
            self._seq = self._received = 0
        if body is not None and body[0] not in _CONTROL:
            self._seq += 1
        parts = [_encode([self._epoch, self._seq, self._received, body])]
        self._kept.append(parts)
        self._unsent.append(("valid", parts))

    def _send(self, parts: list[bytes]) -> bool:
        assert self._socket is not None
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    # ---- receiving -----------------------------------------------------------------------------

    def _read(self) -> None:
        assert self._socket is not None
        if self._is_deaf:
            return
        for _ in range(_READ_AT_ONCE):
            try:
                heard = _decode(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            if heard.epoch != self._epoch:
                continue
            self._num_quiet = 0
            self._seq = max(self._seq, heard.ack)  # a mutation may have been accepted
            body = _decode_body(heard.body)
            if body is None:
                continue
            tag = body[0]
            self.heard[tag] += 1
            if tag == _REATTACH:
                self._is_asked_to_attach = True
            elif tag not in _CONTROL:
                self._received = max(self._received, heard.seq)
                self._source.heard(tag, body)


def _drawn(random: Random) -> Random:
    return Random(random.getrandbits(64))  # noqa: S311  (attacks are to be repeated)


_NAMES = tuple(KINDS)
_WEIGHTS = [sum(list(KINDS.values())[: i + 1]) for i in range(len(KINDS))]
