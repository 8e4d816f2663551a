"""The numbers of one end of a link, as `slipstream_ipc._native.LinkNumbers` keeps them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from slipstream_ipc.messages import Control, Frame
from slipstream_ipc.transport.link_numbers import UNNUMBERED, LinkVerdict

Body = TypeVar("Body")
Receipt = TypeVar("Receipt")
Encode = Callable[[Any], bytes]  # of a frame
Write = Callable[[bytes], bool]  # whether the bytes have left

_Number = Annotated[int, msgspec.Meta(ge=0)]
_ack_decoder = msgspec.msgpack.Decoder(tuple[_Number, _Number, _Number, None])


class LinkNumbers(Generic[Receipt]):
    """The numbers of one end of one attach.

    heard_at, num_heard: when the last frame of this epoch came, and how many have. num_acked:
    numbered frames that the peer has acknowledged.
    """

    def __init__(self, epoch: int, now: float, window: int) -> None:
        self.epoch = epoch
        self.window = window
        self.heard_at = now
        self.num_heard = 0
        self.num_acked = 0
        self._sent = 0
        self._received = 0
        self._last_ack_sent = 0  # the last number acknowledged to the peer
        self._receipts: deque[Receipt] = deque()  # of frames num_acked + 1 …, and untaken ones

    @property
    def has_credit(self) -> bool:
        """True if a numbered frame may be sent."""
        return self._sent - self.num_acked < self.window

    @property
    def num_unacked(self) -> int:
        """Numbered frames that the peer has not acknowledged."""
        return self._sent - self.num_acked

    @property
    def has_receipts(self) -> bool:
        """True if `take_receipts` has any to return."""
        return len(self._receipts) > self.num_unacked

    @property
    def owes_ack(self) -> bool:
        """True if numbered frames have been received and not yet acknowledged to the peer."""
        return self._last_ack_sent < self._received

    @property
    def num_owed_acks(self) -> int:
        """Numbered frames received and not yet acknowledged to the peer."""
        return self._received - self._last_ack_sent

    def numbered(self, body: Body) -> Frame[Body]:
        """The next numbered frame, which needs credit; call `sent` once it has left."""
        return Frame(self.epoch, self._sent + 1, self._received, body)

    def sent(self, receipt: Receipt) -> None:
        """The frame of `numbered` has left; its acknowledgement releases `receipt`."""
        self._sent += 1
        self._receipts.append(receipt)
        self._last_ack_sent = self._received

    def control(self, body: Control | None) -> Frame[Control]:
        """An unnumbered frame; call `ack_sent` once it has left."""
        return Frame(self.epoch, self._sent, self._received, body)

    def ack_sent(self) -> None:
        """The frame of `control` has left, and with it the acknowledgement."""
        self._last_ack_sent = self._received

    def send(self, body: Any, receipt: Receipt, encode: Encode, write: Write) -> bool:
        """Send a numbered frame; False without credit, or where `write` does not take it."""
        if not self.has_credit or not write(encode(self.numbered(body))):
            return False
        self.sent(receipt)
        return True

    def send_control(self, body: Control | None, encode: Encode, write: Write) -> bool:
        """Send an unnumbered frame; False where `write` does not take it."""
        if not write(encode(self.control(body))):
            return False
        self.ack_sent()
        return True

    def receive(self, frame: Frame[Any], is_numbered: bool, now: float) -> LinkVerdict:
        """Judge a frame; a numbered one that is to be delivered counts as received."""
        seq, ack, received = frame.seq, frame.ack, self._received
        if frame.epoch != self.epoch or ack > self._sent:
            return LinkVerdict.IGNORE
        self._heard(ack, now)
        if not is_numbered:
            return LinkVerdict.DELIVER if seq <= received else LinkVerdict.GAP
        if seq <= received:
            return LinkVerdict.IGNORE
        if seq > received + 1:
            return LinkVerdict.GAP
        self._received = seq
        return LinkVerdict.DELIVER

    def take_next(self, frame: Frame[Body], now: float) -> Body | None:
        """Receive a frame if it is the next numbered one, and return its body. Returns None for any
        other, which has to be judged by `receive`.
        """
        body = frame.body
        if type(body) in UNNUMBERED or frame.epoch != self.epoch:
            return None
        if frame.seq != self._received + 1 or frame.ack > self._sent:
            return None
        self._heard(frame.ack, now)
        self._received = frame.seq
        return body

    def take_ack(self, data: bytes, now: float) -> bool:
        """Receive an encoded frame if it is nothing but an acknowledgement. Returns False, without
        effect, for any other, which has to be decoded.
        """
        try:
            epoch, seq, ack, _ = _ack_decoder.decode(data)
        except msgspec.DecodeError:
            return False
        if epoch != self.epoch or seq > self._received or ack > self._sent:
            return False
        self._heard(ack, now)
        return True

    def take_receipts(self) -> list[Receipt]:
        """Receipts of the frames acknowledged since the last call, oldest first."""
        due = len(self._receipts) - self.num_unacked
        return [self._receipts.popleft() for _ in range(due)]

    def end(self) -> None:
        """End the link: unacknowledged frames never will be, and their receipts are dropped."""
        for _ in range(self.num_unacked):
            self._receipts.pop()
        self._sent = self.num_acked

    def _heard(self, ack: int, now: float) -> None:
        self.heard_at = now
        self.num_heard += 1
        if ack > self.num_acked:
            self.num_acked = ack
