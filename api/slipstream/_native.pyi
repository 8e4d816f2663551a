"""The api's C; each part stands in a `.c` file beside the module that uses it."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from slipstream.client.streams.received_ids import ReceivedIds
from slipstream.client.streams.received_positions import ReceivedPositions
from slipstream_ipc.arrays import Int64s, UInt32s, UInt64s
from slipstream_ipc.transport.link import Link
from slipstream_ipc.transport.local_socket import LocalConnection

Item = TypeVar("Item")
Rows = npt.NDArray[np.intp]
TailColumns = tuple[bytes, bytes, bytes]

class EntryObjects:
    """The objects of a message's entries: new ones with each call."""

    def __init__(
        self,
        num: int,
        token_ids: bytes,
        counts: bytes,
        width: int,
        values: bytes,
        ids: bytes,
        ranks: bytes,
        widths: bytes,
        logprob: type,
    ) -> None: ...
    def token_ids(self, entry: int, skip: int) -> list[int]:
        """See `DeltaBatch.token_ids`."""

    def logprobs(self, entry: int, skip: int) -> list[Any] | None:
        """See `DeltaBatch.logprobs`."""

class ColumnGetter:
    """A property of `Delta` that makes its value from the columns of the message."""

    def __init__(
        self,
        owner: type,
        name: str,
        doc: str | None,
        types: tuple[type, type, type],
        logprob: type,
    ) -> None: ...

class DeltaMaker(Generic[Item]):
    """Makes instances of a class; see `delta_objects.items_of`. Raises: TypeError for a class of
    another layout than `Delta`.
    """

    def __init__(self, delta: type[Item]) -> None: ...
    def items(
        self, indices: list[int], texts: list[str], batch: object
    ) -> Iterator[tuple[int, Item]]: ...

def known_depths(
    tags: UInt64s,
    times: npt.NDArray[np.float64],
    chain: Int64s,
    salts: Sequence[int],
    since: Sequence[float],
) -> list[int]:
    """The number of hashes of the longest beginning that was sent after its `since`, for each
    salt.

    tags: uint64 [sets, SET_SIZE]. times: float64 of the same shape, -inf where there is no entry.
    chain: int64 [n], hashes of ever longer beginnings.
    """

def remember_chain(
    tags: UInt64s, times: npt.NDArray[np.float64], chain: Int64s, salt: int, now: float
) -> None:
    """Put the hashes into their sets; the shortest beginning is the last one there."""

def ends_of(
    chars: bytes, tokens: bytes, texts: Sequence[str], counts: bytes
) -> tuple[bytes, bytes]:
    """The positions at which a message's entries end: u32 columns of characters and tokens.

    chars, tokens: u32 columns of where they begin. counts: u32 column of tokens to an entry; empty
    means one each.
    """

def find_rows(
    handles: bytes,
    table: Int64s,
    scratch: Rows,
    group_ids: Int64s,
    numbers: npt.NDArray[np.object_],
    items: npt.NDArray[np.object_],
) -> tuple[bytes, int, list[Any]] | None:
    """The rows of a u32 column of handles, the group of all of them (0: none), and their numbers in
    it, or else their items; None unless all are known and distinct.
    """

def rows_are_at(
    rows: Rows, chars: bytes, tokens: bytes, all_chars: UInt32s, all_tokens: UInt32s
) -> bool:
    """True if the rows are at the positions of these u32 columns."""

def add_received_ids(
    kept: dict[int, bytearray], messages: list[tuple[bytes, bytes, bytes]]
) -> bool:
    """Add the ids of messages (handles, ids, counts) to those kept by handle; False, without
    effect, where the handles are too far apart.
    """

def write_texts(
    streams: Sequence[Any],
    texts: Sequence[str],
    tails: bytes | None,
    chats: bytes | None,
    kinds: bytes,
    token_ids: bytes,
    counts: bytes,
    ends: bytes,
    lengths: bytes,
    chat_ends: bytes,
    left: bytearray,
) -> None:
    """Write the entries that are plain text, or that and the log-probabilities of one token, whose
    byte in `left` is 0, and whose connections have room; the bytes of the others are set.
    """

def completion_tails(
    ids: bytes,
    numbers: bytes,
    widths: bytes,
    ranks: bytes,
    text: Any,
    starts: Any,
    sizes: Any,
    lengths: Any,
) -> TailColumns | list[int]:
    """The `Tails` of a completion's tokens, or the ids that the columns do not have.

    widths: u32, of each token. ids: u32, of all candidates, each token's own first. numbers: their
    log-probabilities as a JSON list. ranks: u32, of the tokens with candidates. text, starts,
    sizes, lengths: `TokenTextColumns`.
    """

def chat_tails(
    ids: bytes,
    numbers: bytes,
    widths: bytes,
    ranks: bytes,
    text: Any,
    starts: Any,
    sizes: Any,
    lengths: Any,
) -> TailColumns | list[int]:
    """The same of a chat's tokens."""

class SocketWriter:
    """A connection's `write` that sends at once what its socket takes, without blocking; the rest
    is left to the transport's `write`, and all of it until `unsent()` is 0.
    """

    def __init__(
        self, fd: int, unsent: Callable[[], int], write: Callable[[bytes], None]
    ) -> None: ...
    def __call__(self, data: bytes, /) -> None: ...
    def wait(self) -> None:
        """Bytes were written to the transport otherwise."""

    def detach(self) -> None:
        """Leave the socket alone from now on."""

class DeltaRelay:
    """Relays the messages of a link."""

    link: Link[Any]
    is_spent: bool  # the connection has to be looked at; the relay takes nothing any more

    def __init__(
        self,
        link: Link[Any],
        connection: LocalConnection,
        is_socket: bool,
        received: ReceivedPositions[Any],
        kept: ReceivedIds,
        ways: tuple[Any, Any, Any],
        watched: tuple[Sized, ...],
        may_owe: int,
        most_bytes: int,
        most_unread: int,
    ) -> None: ...
    def take(self, now: float) -> bool:
        """Take the message that has arrived, if it is plain and nothing else is due. now: in
        seconds of the monotonic clock.
        """

def prepare_delta_relay(types: tuple[type, ...], no_ends: Mapping[int, Any]) -> None:
    """Say what relays work on and make: LinkNumbers, LogprobColumns, MessageStreams, StreamState,
    Delta, Deltas and DeltaBatch, and the ends of a message without any.

    Raises: TypeError or AttributeError where their instances have other fields.
    """
