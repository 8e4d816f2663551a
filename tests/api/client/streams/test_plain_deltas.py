"""Messages that continue the streams of the message before: C beside the usual way."""

from __future__ import annotations

import gc
import os
import socket
from collections import deque
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.client.streams.delta_relay import Delivery, DeltaRelay, Ways, new_delta_relay
from slipstream.client.streams.plain_deltas import plain_ends
from slipstream.client.streams.received_ids import ReceivedIds
from slipstream.client.streams.received_positions import MessageStreams
from slipstream.client.streams.stream_state import StreamState
from slipstream.compiled import prepare_delta_relay
from slipstream.delta_batch import DeltaBatch
from slipstream.outputs import Delta
from slipstream_ipc.columns import check_deltas, pack_u32, u32
from slipstream_ipc.errors import ProtocolError
from slipstream_ipc.messages import AnswerEvent, Deltas, End, EventKind, Frame, LogprobColumns
from slipstream_ipc.transport.codec import client_codec
from slipstream_ipc.transport.link import MAY_OWE, Link
from slipstream_ipc.transport.local_socket import LocalConnection


def column(*values: int) -> bytes:
    return pack_u32(np.array(values, np.uint32))


LOGPROBS = st.sampled_from(
    [None] * 5
    + [LogprobColumns(0, b"", b"", b"")]
    + [LogprobColumns(2, bytes(8 * num), bytes(8 * num), bytes(4 * num)) for num in (1, 1, 1, 2)]
    + [
        LogprobColumns(1, bytes(4), bytes(8), bytes(4)),
        LogprobColumns(1, bytes(4), bytes(4), b""),
        LogprobColumns(1, bytes(4), bytes(4), bytes(4), column(1)),
        LogprobColumns(2**32 - 1, bytes(4), bytes(4), bytes(4)),
    ]
)
EVENTS = st.sampled_from([(), (), (), ((),), ((AnswerEvent(EventKind.CONTENT, "a", 0),),)])
COLUMNS = st.sampled_from([b"", column(0), column(1), column(3, 4), column(2**32 - 1, 0)])
TEXTS = st.sampled_from(["", "a", "\u00fc\u20ac\U0001d11e", "z" * 40, "z" * 300, "z" * 70_000])
MESSAGES = st.builds(
    Deltas,
    COLUMNS,
    COLUMNS,
    COLUMNS,
    st.lists(TEXTS, max_size=2),
    COLUMNS,
    counts=st.sampled_from([b""] * 4 + [column(1), column(2), column(0, 2), column(1, 1), b"1"]),
    ended=st.sampled_from([b""] * 5 + [column(0)]),
    ends=st.sampled_from([()] * 5 + [(End("stop", 1),)]),
    logprobs=LOGPROBS,
    kinds=st.sampled_from([b""] * 5 + [column(0)]),
    event_entries=st.sampled_from([b""] * 5 + [column(0)]),
    events=EVENTS,
)


class ReceivingEnd:
    """The receiving end of a link, and the streams of the message before."""

    def __init__(self, columns: tuple[bytes, bytes, bytes], num_received: int) -> None:
        self.link: Link[None] = Link(7, 0.0)
        for seq in range(1, num_received + 1):
            assert self.link.take_next(Frame(7, seq, 0, Deltas(b"", b"", b"", [], b"")), 0.0)
        handles, chars, tokens = columns
        self.found: MessageStreams[Any] = MessageStreams(
            handles, np.zeros(len(handles) // 4, np.intp), 1, [7], [], chars, tokens
        )
        self.kept = ReceivedIds()
        for handle in set(u32(handles).tolist()):
            self.kept.open(handle)
        self.messages: deque[bytes] = deque()
        self.sent: list[bytes] = []
        self.batches: list[DeltaBatch] = []
        self.num_rings = 0

    def take(self, message: bytes) -> Deltas | None:
        """The usual way."""
        try:
            frame = client_codec().decode(message)
        except ProtocolError:
            return None
        deltas, found = frame.body, self.found
        if not isinstance(deltas, Deltas):
            return None
        ends = plain_ends(deltas, found.handles, found.chars, found.tokens)
        if ends is None or self.link.take_next(frame, 1.5) is None:
            return None
        check_deltas(deltas)
        found.chars, found.tokens = ends
        found.is_ahead = True
        self.kept.add(deltas.handles, deltas.token_ids, deltas.counts)
        return deltas

    def relay(self, *watched: list[int], connection: Any = None) -> DeltaRelay:
        """A relay of messages that wait here, or of a connection."""
        connection = connection or SimpleNamespace(
            fd=7,
            is_socket=False,
            is_bare=True,
            messages=self.messages,
            send=lambda message: self.sent.append(message) is None,
            take_in=None,
        )
        received: Any = SimpleNamespace(latest=self.found, find=lambda *_: None)
        ways = Ways(self._delivery, print, print)
        relay = new_delta_relay(self.link, connection, received, self.kept, ways, watched)
        assert relay is not None
        return relay

    def take_in_c(self, message: bytes) -> Deltas | None:
        """With a relay."""
        self.messages.append(message)
        num_rings = self.num_rings
        if not self.relay().take(1.5):
            assert self.messages.pop() == message
            return None
        assert (len(self.messages), self.num_rings) == (0, num_rings + 1)
        batch = self.batches.pop()
        expected = DeltaBatch(batch.message, {}, 1.5)
        for name in ("ends", "first_at", "last_at", "has_one_each", "has_events", "_objects"):
            assert getattr(batch, name) == getattr(expected, name)
        return batch.message

    def _delivery(self, found: MessageStreams[Any]) -> Delivery:
        def add(numbers: list[int], batch: DeltaBatch) -> None:
            assert numbers is found.numbers
            self.batches.append(batch)

        def ring(state: object) -> None:
            assert state is found
            self.num_rings += 1

        first: Any = found
        return Delivery(None, None, add, found.numbers, ring, first)

    @property
    def state(self) -> tuple[object, ...]:
        link, found = self.link, self.found
        control = link.control(None)
        numbers = (control.seq, control.ack, link.num_owed_acks, link.heard_at, link.num_heard)
        kept = [self.kept.of(handle) for handle in u32(found.handles).tolist()]
        return (*numbers, found.handles, found.chars, found.tokens, found.is_ahead, kept)


@settings(max_examples=400, deadline=None)
@given(
    MESSAGES,
    st.tuples(COLUMNS, COLUMNS, COLUMNS),
    st.integers(0, 9),
    st.sampled_from([7] * 9 + [8, 2**40]),
    st.sampled_from([0] * 9 + [1]),
    st.data(),
)
def test_the_same_messages_are_taken_with_the_same_effect(
    message: Deltas,
    columns: tuple[bytes, bytes, bytes],
    kind: int,
    epoch: int,
    ack: int,
    data: st.DataObject,
) -> None:
    if kind < 8 and len(message.handles) == len(message.chars) == len(message.tokens):
        columns = (message.handles, message.chars, message.tokens)
    if len({len(each) for each in columns}) > 1 or not columns[0]:
        return  # no streams have such columns
    seq = data.draw(st.sampled_from([3] * 5 + [1, 2, 4, 200, 70_000]))
    ends = [ReceivingEnd(columns, 2), ReceivingEnd(columns, 2)]
    encoded = msgspec.msgpack.encode(Frame(epoch, seq, ack, message))
    if kind == 9:
        at = data.draw(st.integers(0, len(encoded) - 1))
        encoded = data.draw(
            st.sampled_from(
                [
                    encoded[:at],
                    encoded + b"\0",
                    encoded[:at] + bytes([encoded[at] ^ 0x10]) + encoded[at + 1 :],
                    encoded[:at] + bytes([encoded[at] ^ 0x81]) + encoded[at + 1 :],
                ]
            )
        )
    before = ends[0].state
    taken = [ends[0].take(encoded), ends[1].take_in_c(encoded)]
    assert taken[0] == taken[1]
    assert ends[0].state == ends[1].state
    if taken[0] is None:
        assert ends[0].state == before


def test_most_messages_are_taken() -> None:
    columns = (column(5, 6), column(0, 0), column(0, 3))
    end = ReceivingEnd(columns, 0)
    for seq in range(1, 300):
        chars, tokens = end.found.chars, end.found.tokens
        logprobs = LogprobColumns(1, bytes(8), bytes(8), bytes(8)) if seq % 2 else None
        message = Deltas(columns[0], chars, tokens, ["a", "bc"], column(1, seq), logprobs=logprobs)
        taken = end.take_in_c(msgspec.msgpack.encode(Frame(7, seq, 0, message)))
        assert taken == message
    assert end.found.chars == column(299, 598)
    assert end.found.tokens == column(299, 302)
    assert end.kept.of(6) == column(*range(1, 300))
    owed = MAY_OWE + 1
    acks = [msgspec.msgpack.encode(Frame(7, 0, owed * at, None)) for at in range(1, 300 // owed)]
    assert end.sent[: len(acks)] == acks


def test_nothing_is_taken_while_something_is_due() -> None:
    columns = (column(5), column(0), column(0))
    end = ReceivingEnd(columns, 0)
    queues: list[list[int]] = [[], []]
    relay = end.relay(*queues)
    end.messages.append(msgspec.msgpack.encode(Frame(7, 1, 0, Deltas(*columns, ["a"], column(1)))))
    for queue in queues:
        queue.append(1)
        assert not relay.take(0.0)
        queue.clear()
    assert relay.take(0.0)
    assert not relay.take(0.0)  # nothing has arrived
    assert len(end.batches) == end.num_rings == 1


def test_a_closed_connection_is_not_read() -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    columns = (column(5), column(0), column(0))
    end = ReceivingEnd(columns, 0)
    connection = LocalConnection(right, 2**20)
    relay = end.relay(connection=connection)
    frame = msgspec.msgpack.encode(Frame(7, 1, 0, Deltas(*columns, ["a"], column(1))))
    data = len(frame).to_bytes(4, "little") + frame
    fd = connection.fd
    other_left, other_right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.close()
    os.dup2(other_right.fileno(), fd)  # the number is another connection's now
    other_left.send(data)
    assert not relay.take(0.0)
    assert os.read(fd, 1000) == data
    os.close(fd)
    for each in (left, other_left, other_right):
        each.close()


def test_an_acknowledgement_that_does_not_leave_ends_the_relay() -> None:
    columns = (column(5), column(0), column(0))
    end = ReceivingEnd(columns, MAY_OWE)
    relay: Any = end.relay()
    message = Deltas(*columns, ["a"], column(1))
    end.messages.append(msgspec.msgpack.encode(Frame(7, 1 + MAY_OWE, 0, message)))
    connection = next(each for each in gc.get_referents(relay) if isinstance(each, SimpleNamespace))
    connection.is_bare = False
    assert relay.take(0.0)
    assert relay.is_spent
    assert len(end.sent) == end.num_rings == 1
    message = Deltas(columns[0], end.found.chars, end.found.tokens, ["a"], column(1))
    end.messages.append(msgspec.msgpack.encode(Frame(7, 2 + MAY_OWE, 0, message)))
    assert not relay.take(0.0)


def test_what_is_no_relay_is_refused() -> None:
    end = ReceivingEnd((column(1), column(0), column(0)), 0)
    with pytest.raises(TypeError):
        DeltaRelay(None, end, False, end, end.kept, (print, print, print), (), 3, 9, 9)
    with pytest.raises(AttributeError):
        DeltaRelay(end.link, None, False, end, end.kept, (print, print, print), (), 3, 9, 9)
    types = [Link, LogprobColumns, MessageStreams, StreamState, Delta, Deltas, DeltaBatch]
    for at, other in ((2, Deltas), (3, Delta), (4, Deltas), (5, DeltaBatch), (6, Deltas)):
        with pytest.raises((TypeError, AttributeError)):
            prepare_delta_relay((*types[:at], other, *types[at + 1 :]), {})
    with pytest.raises(TypeError, match="float"):
        end.relay().take(1)
    message = Deltas(column(1), column(0), column(0), ["a"], column(1))
    end.messages.append(msgspec.msgpack.encode(Frame(7, 1, 0, message)))
    end.found.delivery = "none"
    with pytest.raises(TypeError, match="delivery"):
        end.relay().take(0.0)
    assert end.link.num_owed_acks == 0
    end.found.chars = b""
    assert not end.relay().take(0.0)
