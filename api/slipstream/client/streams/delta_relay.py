"""Messages that continue the streams of the message before are relayed to these in C
(`delta_relay.c`): read from a local connection, counted and handed over in one call.

A relay takes a plain message (see `plain_deltas`) if it is the only one that has arrived, and
nothing else is due. It leaves anything else to the connection that it reads, from which it is then
taken the usual way, with the same effect.

- A relay looks anew at each message what its streams are, and whether anything waits to be sent or
  woken. So nothing has to report its changes to it.
- What it cannot see are attaches: it is of one link, and not to be used once that has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from slipstream.client.streams.received_ids import MOST_BYTES, ReceivedIds
from slipstream.client.streams.received_positions import FoundStreams, ReceivedPositions
from slipstream.client.streams.stream_group import StreamGroup
from slipstream.client.streams.stream_state import StreamState
from slipstream.delta_batch import DeltaBatch
from slipstream.delta_objects import ItemsOf
from slipstream.outputs import Delta
from slipstream_ipc.messages import Deltas, LogprobColumns
from slipstream_ipc.native.extension import MSGPACK_HEADER, SLOTS_HEADER, load_extension
from slipstream_ipc.transport import link_numbers
from slipstream_ipc.transport.link import MAY_OWE, Link
from slipstream_ipc.transport.local_socket import LocalConnection

__all__ = ["Delivery", "DeltaRelay", "new_delta_relay"]

_SOURCE = Path(__file__).with_name("delta_relay.c")
_HEADERS = (
    link_numbers.HEADER,
    MSGPACK_HEADER,
    SLOTS_HEADER,
    Path(__file__).with_name("plain_deltas.h"),
)


class Delivery(NamedTuple):
    """How streams are given a message in which none of them ends.

    With a `group`, `unread` of that gets `items_of(added_to, texts, batch)`, and its `wake` is
    called. Otherwise `add(added_to, batch)` and `ring(rung_for)` are. added_to: None for the
    streams, as they were found. rung_for: None for a call without an argument.
    """

    group: StreamGroup | None
    items_of: ItemsOf[Delta] | None
    add: Callable[[Any, DeltaBatch], None]
    added_to: list[int] | None
    ring: Callable[..., None]
    rung_for: StreamState | None


class DeltaRelay(Protocol):
    """Relays the messages of a link."""

    link: Link[Any]
    is_spent: bool  # the connection has to be looked at; the relay takes nothing any more

    def take(self, now: float) -> bool:
        """Take the message that has arrived, if it is plain and nothing else is due. now: in
        seconds of the monotonic clock.
        """
        ...


def new_delta_relay(
    link: Link[Any],
    connection: LocalConnection,
    received: ReceivedPositions[StreamState],
    kept: ReceivedIds,
    delivery_of: Callable[[FoundStreams[StreamState]], Delivery],
    watched: tuple[Sized, ...],
) -> DeltaRelay | None:
    """A relay of a link over a connection; None without a C compiler.

    delivery_of: called once for streams that were found. watched: what has to be empty where
    nothing else is due.
    """
    native = _native()
    if native is None:
        return None
    relay: DeltaRelay = native.DeltaRelay(
        link,
        connection,
        connection.fd if connection.is_socket else -1,
        received,
        kept,
        delivery_of,
        watched,
        MAY_OWE,
        MOST_BYTES,
    )
    return relay


@cache
def _native() -> Any:
    """The C extension, prepared; None where it, or a link in C, cannot be had."""
    numbers = link_numbers.NativeLinkNumbers
    native: Any = load_extension("delta_relay", _SOURCE, _HEADERS)
    if numbers is None or native is None:
        return None
    native.prepare(numbers, Deltas, LogprobColumns, DeltaBatch, FoundStreams, MappingProxyType({}))
    return native
