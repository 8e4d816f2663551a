"""The ground floor's C; each part stands in a `.c` file beside the module that uses it."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from slipstream_ipc.arrays import Int64s, UInt32s
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.messages import Control, Frame, LogprobColumns
from slipstream_ipc.row_set import RowSet
from slipstream_ipc.transport.link_numbers import LinkVerdict

Body = TypeVar("Body")
Receipt = TypeVar("Receipt")
Encode = Callable[[Any], bytes]  # of a frame
Write = Callable[[bytes], bool]  # whether the bytes have left

class LinkNumbers(Generic[Receipt]):
    """The numbers of one end of one attach.

    heard_at, num_heard: when the last frame of this epoch came, and how many have. num_acked:
    numbered frames that the peer has acknowledged.
    """

    epoch: int
    window: int
    heard_at: float
    num_heard: int
    num_acked: int
    def __init__(self, epoch: int, now: float, window: int) -> None: ...
    @property
    def has_credit(self) -> bool:
        """True if a numbered frame may be sent."""

    @property
    def num_unacked(self) -> int:
        """Numbered frames that the peer has not acknowledged."""

    @property
    def has_receipts(self) -> bool:
        """True if `take_receipts` has any to return."""

    @property
    def owes_ack(self) -> bool:
        """True if numbered frames have been received and not yet acknowledged to the peer."""

    @property
    def num_owed_acks(self) -> int:
        """Numbered frames received and not yet acknowledged to the peer."""

    def numbered(self, body: Body) -> Frame[Body]:
        """The next numbered frame, which needs credit; call `sent` once it has left."""

    def sent(self, receipt: Receipt) -> None:
        """The frame of `numbered` has left; its acknowledgement releases `receipt`."""

    def control(self, body: Control | None) -> Frame[Control]:
        """An unnumbered frame; call `ack_sent` once it has left."""

    def ack_sent(self) -> None:
        """The frame of `control` has left, and with it the acknowledgement."""

    def send(self, body: Any, receipt: Receipt, encode: Encode, write: Write) -> bool:
        """Send a numbered frame; False without credit, or where `write` does not take it."""

    def send_control(self, body: Control | None, encode: Encode, write: Write) -> bool:
        """Send an unnumbered frame; False where `write` does not take it."""

    def receive(self, frame: Frame[Any], is_numbered: bool, now: float) -> LinkVerdict:
        """Judge a frame; a numbered one that is to be delivered counts as received."""

    def take_next(self, frame: Frame[Body], now: float) -> Body | None:
        """Receive a frame if it is the next numbered one, and return its body. Returns None for any
        other, which has to be judged by `receive`.
        """

    def take_ack(self, data: bytes, now: float) -> bool:
        """Receive an encoded frame if it is nothing but an acknowledgement. Returns False, without
        effect, for any other, which has to be decoded.
        """

    def take_receipts(self) -> list[Receipt]:
        """Receipts of the frames acknowledged since the last call, oldest first."""

    def end(self) -> None:
        """End the link: unacknowledged frames never will be, and their receipts are dropped."""

def prepare_link_numbers(
    frame: type[Frame[Any]],
    unnumbered: frozenset[type],
    verdicts: tuple[LinkVerdict, LinkVerdict, LinkVerdict],
) -> None:
    """Say what the numbers are of, the types of bodies without one, and what to answer for a frame
    to be delivered, one to be ignored, and a gap.
    """

def send_message(fd: int, message: bytes) -> int:
    """Send a message's length and the message; how many bytes of both the kernel took.

    Raises: OSError where the connection is gone.
    """

def read_messages(fd: int, append: Callable[[bytes], object], max_bytes: int) -> bytes | None:
    """Read what has arrived, at most CHUNK_BYTES, and pass each whole message to `append`, up to
    one of more than `max_bytes`.

    Returns the bytes behind the last message passed on; None where the connection is gone.
    """

class TokenPages:
    """The columns of a paged token history, until one of them is replaced."""

    is_current: bool

    def __init__(
        self, lengths: Int64s, offsets: Int64s, tables: Int64s, free: Int64s, pool: UInt32s
    ) -> None: ...
    def append(self, rows: Int64s, values: UInt32s, num_free: int, counts: Int64s | None, /) -> int:
        """Append `counts[i]` (None: one) values to each row; how many pages are then left of the
        `num_free` free ones, or -1, without effect, where columns have to grow first.
        """

    def last(self, found: UInt32s, rows: Int64s) -> None:
        """Write the last value of each row into `found`. Raises: IndexError for an empty row."""

    def gather(self, found: UInt32s, rows: Int64s, starts: Int64s, counts: Int64s | None) -> None:
        """Write `counts[i]` (None: one) values of each row from `starts[i]` on into `found`.

        Raises: IndexError for a position outside of the history.
        """

class RowAppender:
    """Appends to the rows that it was made for."""

    def __init__(self, log: TokenLog, pages: TokenPages, rows: RowSet, array: Int64s) -> None: ...
    def append(self, values: UInt32s) -> bool:
        """Append to its rows as `TokenLog.append` does; False, without effect, if that has to be
        called.
        """

def has_marked(marks: npt.NDArray[np.bool_], token_ids: UInt32s) -> bool:
    """True if any of these ids is marked. marks: bool [number of ids]; larger ids are not
    marked.
    """

def write_logprobs(
    deferred: list[LogprobColumns],
    width: int,
    num_free: int,
    rows: Int64s,
    lengths: Int64s,
    offsets: Int64s,
    tables: Int64s,
    free: Int64s,
    values: npt.NDArray[np.float32],
    ids: UInt32s,
    ranks: UInt32s,
) -> int:
    """Write the columns of one token after another of each row into its pages; how many pages are
    then left of the `num_free` free ones, or -1, without effect, where the table has to grow first.
    """
