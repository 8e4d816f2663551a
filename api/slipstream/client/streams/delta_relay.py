"""Messages that continue streams are relayed to these in C (`delta_relay.c`): read from a local
connection, counted and handed over in one call.

A relay takes a plain message (see `plain_deltas`) if it is the only one that has arrived, and
nothing else is due. It leaves anything else to the connection that it reads, from which it is then
taken the usual way, with the same effect.

- A relay looks anew at each message what its streams are, whether anything waits to be sent or
  woken, and whether its connection is open. So nothing has to report its changes to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from slipstream.client.streams.received_ids import MOST_BYTES, ReceivedIds
from slipstream.client.streams.received_positions import MessageStreams, ReceivedPositions
from slipstream.client.streams.stream_group import StreamGroup
from slipstream.client.streams.stream_state import StreamState
from slipstream.client.streams.unread_deltas import MOST_UNREAD
from slipstream.compiled import DeltaRelay, prepare_delta_relay
from slipstream.delta_batch import DeltaBatch
from slipstream.delta_objects import ItemsOf
from slipstream.outputs import Delta
from slipstream_ipc._native import LinkNumbers
from slipstream_ipc.messages import Deltas, LogprobColumns
from slipstream_ipc.transport.link import MAY_OWE, Link
from slipstream_ipc.transport.local_socket import LocalConnection

__all__ = ["Delivery", "DeltaRelay", "Ways", "new_delta_relay"]


class Delivery(NamedTuple):
    """The delivery of a message in which no stream ends to a group: `add(numbers, batch)` adds its
    deltas, and `ring(first)` wakes the group's reader. With a `group`, C does the same as these two
    methods of it.
    """

    group: StreamGroup | None
    items_of: ItemsOf[Delta] | None
    add: Callable[[list[int], DeltaBatch], None]
    numbers: list[int]
    ring: Callable[[StreamState], None]
    first: StreamState


class Ways(NamedTuple):
    """The calls by which a relay passes work back to the table of streams.

    delivery_of: called once for streams of one group that were found. make_room: for a stream
    with more than MOST_UNREAD deltas, if it is in no group. wake: rings for the streams for which
    that was called.
    """

    delivery_of: Callable[[MessageStreams[StreamState]], Delivery]
    make_room: Callable[[StreamState], None]
    wake: Callable[[], None]


def new_delta_relay(
    link: Link[Any],
    connection: LocalConnection,
    received: ReceivedPositions[StreamState],
    kept: ReceivedIds,
    ways: Ways,
    watched: tuple[Sized, ...],
) -> DeltaRelay | None:
    """A relay of a link over a connection; None where instances of the classes that it makes have
    another layout.

    watched: what has to be empty where nothing else is due.
    """
    if not _can_be_made():
        return None
    return DeltaRelay(
        link,
        connection,
        connection.is_socket,
        received,
        kept,
        ways,
        watched,
        MAY_OWE,
        MOST_BYTES,
        MOST_UNREAD,
    )


@cache
def _can_be_made() -> bool:
    types = (LinkNumbers, LogprobColumns, MessageStreams, StreamState, Delta, Deltas, DeltaBatch)
    with suppress(TypeError):  # instances of another layout
        prepare_delta_relay(types, {})  # the ends of a batch without any, which is never written to
        return True
    return False
