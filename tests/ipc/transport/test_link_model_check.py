"""The whole of a hop, in artificial time, over a network that does what it likes.

The code under test is the real one: `Dealer` and `Router` with their links and codecs, both
logs and the cursors. What is artificial are the sockets under them (each attach a FIFO of its own
whose messages may be dropped, doubled, delayed and overtaken by those of other attaches), the
clock, and the smallest users that keep the rules: a sender that has histories and a receiver that
states positions. One file, because none of its parts is of use without the others.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from slipstream_ipc.columns import (
    check_deltas,
    check_report,
    check_step,
    pack_u32,
    pack_u64,
    u32,
    u64,
)
from slipstream_ipc.history.cursors import Cursors, Portion
from slipstream_ipc.history.text_log import START, TextCursor, TextLog
from slipstream_ipc.history.token_log import TokenLog, history_digest
from slipstream_ipc.messages import (
    Admitted,
    AttachRefused,
    Deltas,
    Frame,
    Hello,
    ModelCard,
    Ping,
    Positions,
    Reattach,
    Report,
    Resume,
    Step,
    SyncDone,
    Welcome,
)
from slipstream_ipc.row_set import RowSet
from slipstream_ipc.transport.codec import Codec
from slipstream_ipc.transport.dealer import Dealer
from slipstream_ipc.transport.router import Router, Session

WINDOW = 3
TOKEN_BUDGET = 5
CHAR_BUDGET = 7
CARD = ModelCard("m", "p", 1000, 1000, ())

Up = Hello | Ping | Report | Positions | Resume
Down = Welcome | Reattach | AttachRefused | Ping | Admitted | Step | SyncDone | Deltas

# ---- the network ---------------------------------------------------------------------------


@dataclass
class Wire:
    """One attach's connection: two FIFOs, and what of them has arrived."""

    route: bytes
    up: deque[bytes] = field(default_factory=deque)
    down: deque[bytes] = field(default_factory=deque)
    arrived_down: deque[bytes] = field(default_factory=deque)
    is_open: bool = True
    is_known: bool = False  # to the accepting end, which has heard of it
    is_mourned: bool = False  # … and has noticed that it is gone


class Network:
    def __init__(self) -> None:
        self.wires: list[Wire] = []
        self.arrived_up: deque[tuple[bytes, bytes]] = deque()
        self.is_congested = False

    def socket(self, kind: int) -> FakeDealer:
        assert kind == zmq.DEALER
        return FakeDealer(self)

    def wire(self, route: bytes) -> Wire | None:
        return next((wire for wire in self.wires if wire.route == route), None)

    def bring_up(self, wire: Wire, num: int) -> None:
        for _ in range(min(num, len(wire.up))):
            wire.is_known = True
            self.arrived_up.append((wire.route, wire.up.popleft()))

    def bring_down(self, wire: Wire, num: int) -> None:
        for _ in range(min(num, len(wire.down))):
            wire.arrived_down.append(wire.down.popleft())


class FakeDealer:
    def __init__(self, network: Network) -> None:
        self._network = network

    def setsockopt(self, option: int, value: Any) -> None:
        if option == zmq.ROUTING_ID:
            self.wire = Wire(value)

    def connect(self, _address: str) -> None:
        self._network.wires.append(self.wire)

    def send(self, data: bytes, flags: int) -> None:
        assert flags == zmq.NOBLOCK
        assert self.wire.is_open
        if self._network.is_congested:
            raise zmq.Again
        self.wire.up.append(data)

    def getsockopt(self, option: int) -> int:
        assert option == zmq.EVENTS
        assert self.wire.is_open
        return zmq.POLLIN if self.wire.arrived_down else 0

    def recv(self, flags: int) -> bytes:
        assert flags == zmq.NOBLOCK
        assert self.wire.is_open
        if not self.wire.arrived_down:
            raise zmq.Again
        return self.wire.arrived_down.popleft()

    def get_monitor_socket(self, events: int) -> FakeMonitor:
        assert events & zmq.EVENT_DISCONNECTED
        return FakeMonitor()

    def disable_monitor(self) -> None:
        pass

    def close(self, linger: int) -> None:
        assert linger == 0
        self.wire.is_open = False  # what is on its way up may still arrive


class FakeMonitor:
    """Never says that a connection broke: the protocol must not depend on being told."""

    def recv_multipart(self, _flags: int) -> list[bytes]:
        raise zmq.Again

    def close(self, linger: int) -> None:
        assert linger == 0


class FakeRouter:
    def __init__(self, network: Network) -> None:
        self._network = network

    def getsockopt(self, option: int) -> int:
        assert option == zmq.EVENTS
        return zmq.POLLIN if self._network.arrived_up else 0

    def recv(self, _flags: int, copy: bool = True) -> bytes | zmq.Frame:
        """The route of the next message, then its body."""
        if not self._network.arrived_up:
            raise zmq.Again
        if copy:
            return self._network.arrived_up[0][0]
        return zmq.Frame(self._network.arrived_up.popleft()[1])

    def send_multipart(self, parts: tuple[bytes, bytes], _flags: int) -> None:
        wire = self._network.wire(parts[0])
        if wire is None or not wire.is_known or wire.is_mourned:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        if self._network.is_congested:
            raise zmq.Again
        wire.down.append(parts[1])


class FakePoller:
    def __init__(self) -> None:
        self.sockets: list[Any] = []

    def register(self, socket: Any, _flags: int) -> None:
        self.sockets.append(socket)

    def unregister(self, socket: Any) -> None:
        self.sockets.remove(socket)


# ---- the sender ----------------------------------------------------------------------------


@dataclass(eq=False)
class Stream:
    serial: int
    row: int
    text: TextLog = field(default_factory=TextLog)
    full_text: str = ""
    cursor: TextCursor | None = None  # of the text; None while it is not being sent

    @property
    def stream_id(self) -> bytes:
        return b"%016d" % self.serial


class TextReceipt:
    """That a stream's text was acknowledged up to some cursor."""

    def __init__(self, stream: Stream, cursor: TextCursor) -> None:
        self.stream, self.cursor = stream, cursor


class Sender:
    """The accepting end: histories, a cursor each, and states that wait for credit."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.tokens = TokenLog(rows=1)
        self.cursors = Cursors(rows=1)
        self.streams: dict[bytes, Stream] = {}
        self.free_rows: list[int] = []
        self.num_streams = 0
        self.text_acked: dict[bytes, int] = {}
        self.rebirth()

    def rebirth(self) -> None:
        """A new socket and no sessions; the histories have come back from elsewhere."""
        self.acceptor: Router[Any, Any, Any] = Router(
            FakeRouter(self._network), Codec(Frame[Up]), window=WINDOW
        )
        self.session: Session[Any] | None = None
        self.states: deque[Any] = deque()
        self.is_told = False  # what the receiver has; until then nothing is sent
        self.num_reports = 0

    def open(self) -> Stream:
        row = self.free_rows.pop() if self.free_rows else self.num_streams
        stream = Stream(self.num_streams, row)
        self.num_streams += 1
        self.streams[stream.stream_id] = stream
        self.tokens.open(row)
        if self.is_told:
            self._send_from(stream, 0, START)
        return stream

    def drop(self, stream: Stream) -> None:
        if self.cursors.is_open(stream.row):
            self.cursors.close(stream.row)
        self.tokens.drop(stream.row)
        del self.streams[stream.stream_id]
        self.free_rows.append(stream.row)

    def turn(self, now: float) -> None:
        for session, body in self.acceptor.receive(now, may_owe=1):
            self._handle(session, body)
        self._publish()
        self.acceptor.beat(now)
        for lost in self.acceptor.take_lost():
            assert not lost.is_open

    def _handle(self, session: Session[Any], body: Any) -> None:
        assert session.is_open
        if isinstance(body, Hello):
            self._attach(session)
            return
        assert session is self.session, "a message of an earlier life"
        match body:
            case Report():
                check_report(body)
                self.num_reports += 1
                assert body.step == self.num_reports, "a report was lost or doubled"
            case Resume():
                self.resumed[body.stream_id] = (body.num_chars, body.num_tokens)
            case Positions():
                self._resume(body)

    def _attach(self, session: Session[Any]) -> None:
        self.session = session
        self.states.clear()
        self.num_reports = 0
        self.resumed: dict[bytes, tuple[int, int]] = {}
        for stream in self.streams.values():
            stream.cursor = None
            if self.cursors.is_open(stream.row):
                self.cursors.close(stream.row)
        self.acceptor.welcome(session, CARD)
        self.is_told = session.fresh
        if session.fresh:
            for stream in self.streams.values():
                self._send_from(stream, 0, START)
            self.states.append(SyncDone())

    def _resume(self, positions: Positions) -> None:
        lengths = u32(positions.lengths, "lengths", len(positions.stream_ids)).tolist()
        digests = u64(positions.digests, "digests", len(lengths)).tolist()
        stated = dict(zip(positions.stream_ids, zip(lengths, digests, strict=True), strict=True))
        for stream in self.streams.values():
            length, digest = stated.get(stream.stream_id, (0, history_digest(np.array([], "u4"))))
            assert digest == history_digest(self.tokens.read(stream.row, 0, length))
            cursor = stream.text.find(*self.resumed.get(stream.stream_id, (0, 0)))
            assert cursor is not None, "a position that this stream never had"
            self._send_from(stream, length, cursor)
        self.is_told = True
        self.states.append(SyncDone())

    def _send_from(self, stream: Stream, position: int, cursor: TextCursor) -> None:
        self.states.append(Admitted(stream.stream_id, stream.row))
        self.cursors.open(stream.row, position)
        stream.cursor = cursor

    def _publish(self) -> None:
        session = self.session
        if session is None:
            return
        for receipt in session.link.take_receipts():
            if isinstance(receipt, Portion):
                self.cursors.acknowledge(receipt)
            elif isinstance(receipt, TextReceipt):
                stream_id = receipt.stream.stream_id
                before = self.text_acked.get(stream_id, 0)
                self.text_acked[stream_id] = max(before, receipt.cursor.num_chars)
        while self.states and self.acceptor.send(session, self.states[0], None):
            self.states.popleft()
        if not self.states and self.is_told:
            while self._publish_tokens(session):
                pass
            while self._publish_text(session):
                pass

    def _publish_tokens(self, session: Session[Any]) -> bool:
        rows = RowSet(np.array([stream.row for stream in self.streams.values()], np.int64))
        if not session.link.has_credit or not len(rows):
            return False
        portion = self.cursors.next_portion(rows, self.tokens.lengths(rows), TOKEN_BUDGET)
        if not len(portion.rows):
            return False
        values = self.tokens.gather(portion.rows, portion.starts, portion.counts)
        assert len(values) <= TOKEN_BUDGET
        columns = (portion.rows.array, values, portion.counts, portion.starts)
        if self.acceptor.send(session, Step(1, *map(pack_u32, columns)), portion):
            return True
        self.cursors.rewind(portion)
        return False

    def _publish_text(self, session: Session[Any]) -> bool:
        for stream in self.streams.values():
            start = stream.cursor
            if start is None or start.unit == stream.text.num_units:
                continue
            stop = stream.text.advance(start, CHAR_BUDGET)
            text = stream.text.text_between(start, stop)
            ids = np.zeros(stop.num_tokens - start.num_tokens, np.uint32)
            body = Deltas(
                pack_u32([stream.serial]),
                pack_u32([start.num_chars]),
                pack_u32([start.num_tokens]),
                [text],
                pack_u32(ids),
                pack_u32([len(ids)]),
            )
            if not self.acceptor.send(session, body, TextReceipt(stream, stop)):
                return False
            stream.cursor = stop
        return False


# ---- the receiver --------------------------------------------------------------------------


class Receiver:
    """The attaching end: what it has of each stream, from nothing."""

    def __init__(self, network: Network, incarnation: int, now: float) -> None:
        self.tokens: dict[bytes, list[int]] = {}
        self.texts: dict[bytes, tuple[str, int]] = {}
        self.at: dict[int, bytes] = {}
        self.states: deque[Any] = deque()
        self.is_synced = False
        self.num_reports = 0
        self.poller = FakePoller()
        self.beat_at = now
        self.attacher: Dealer[Any, Any, None] = Dealer(
            network,
            "ipc:///model/s",
            Codec(Frame[Down]),
            self.poller,
            identity=b"receiver",
            now=now,
            incarnation=incarnation,
        )

    def turn(self, now: float, limit: int) -> None:
        """Read `limit` bodies and lose patience with the rest, as a raising loop body would."""
        bodies = self.attacher.receive(now, acknowledges=False)
        for num, body in enumerate(bodies, start=1):
            self._handle(body)
            if num == limit:
                break
        self.attacher.take_receipts()
        while self.states and self.attacher.send(self.states[0], None):
            self.states.popleft()
        self.attacher.acknowledge(may_owe=1)
        if now >= self.beat_at:
            self.attacher.beat(now)
            self.beat_at = now + 0.5

    def report(self) -> None:
        if self.attacher.is_attached and not self.states:
            self.num_reports += self.attacher.send(Report(self.num_reports + 1), None)

    def _handle(self, body: Any) -> None:
        match body:
            case Welcome():
                self._attached()
            case Admitted():
                self.at[body.row] = body.stream_id
                self.tokens.setdefault(body.stream_id, [])
                self.texts.setdefault(body.stream_id, ("", 0))
            case SyncDone():
                self.is_synced = True
                self.attacher.fresh = False
            case Step():
                self._step(body)
            case Deltas():
                self._deltas(body)
            case _:
                raise AssertionError(body)

    def _attached(self) -> None:
        self.states.clear()
        self.at.clear()
        self.num_reports = 0
        if not self.is_synced:
            self.attacher.fresh = True  # until SyncDone: half of it is as good as nothing
            self.tokens.clear()
            self.texts.clear()
            return
        for stream_id, (text, num_tokens) in self.texts.items():
            self.states.append(Resume(0, stream_id, len(text), num_tokens))
        lengths = pack_u32([len(ids) for ids in self.tokens.values()])
        digests = [history_digest(np.array(ids, np.uint32)) for ids in self.tokens.values()]
        self.states.append(Positions(tuple(self.tokens), lengths, pack_u64(digests), True))

    def _step(self, step: Step) -> None:
        check_step(step)
        ids = u32(step.token_ids).tolist()
        for row, start, count in zip(
            u32(step.rows).tolist(), u32(step.starts).tolist(), u32(step.counts).tolist(),
            strict=True,
        ):  # fmt: skip
            mine = self.tokens[self.at[row]]
            assert start == len(mine), "lost or doubled"
            mine += ids[:count]
            del ids[:count]

    def _deltas(self, deltas: Deltas) -> None:
        check_deltas(deltas)
        stream_id = b"%016d" % u32(deltas.handles)[0]
        text, num_tokens = self.texts[stream_id]
        assert (u32(deltas.chars)[0], u32(deltas.tokens)[0]) == (len(text), num_tokens)
        more = len(u32(deltas.token_ids))
        self.texts[stream_id] = (text + deltas.texts[0], num_tokens + more)


# ---- the machine ---------------------------------------------------------------------------


class Hop(RuleBasedStateMachine):
    @initialize(num_streams=st.integers(0, 3), is_attached=st.booleans())
    def begin(self, num_streams: int, is_attached: bool) -> None:
        self.now = 0.0
        self.network = Network()
        self.sender = Sender(self.network)
        self.incarnation = 1
        self.receiver = Receiver(self.network, 1, self.now)
        self.histories: dict[bytes, list[int]] = {}  # all that each stream ever had
        self.texts: dict[bytes, str] = {}
        self.delivered: dict[bytes, int] = {}  # the most that any receiver had
        self.delivered_chars: dict[bytes, int] = {}
        for _ in range(num_streams):
            self.open_stream()
        if is_attached:
            self._flow(3)

    # what the parties do

    @rule()
    def open_stream(self) -> None:
        if len(self.sender.streams) < 6:
            stream = self.sender.open()
            self.histories[stream.stream_id] = []
            self.texts[stream.stream_id] = ""

    @rule(which=st.integers(0, 9))
    def drop_stream(self, which: int) -> None:
        if self.sender.streams:
            self.sender.drop(self._stream(which))

    @rule(which=st.integers(0, 9), has_arrived=st.booleans())
    def row_changes_hands(self, which: int, has_arrived: bool) -> None:
        """While messages about the stream that had it, or their acknowledgements, are under way."""
        if self.sender.streams:
            self.produce_a_step()
            self.sender.turn(self.now)
            if has_arrived:
                self.network.bring_down(self.network.wires[-1], 1000)
                self.receiver.turn(self.now, 1000)
                self.what_arrived_is_a_prefix()
            self.sender.drop(self._stream(which))
            self.open_stream()

    @rule(which=st.integers(0, 9), num=st.integers(1, 200))
    def produce_much(self, which: int, num: int) -> None:
        if self.sender.streams:
            self._produce(self._stream(which), num % 150 if num % 7 == 0 else num % 4 + 1)

    @rule()
    def produce_a_step(self) -> None:
        """One token for every stream, as an engine does."""
        streams = list(self.sender.streams.values())
        if not streams:
            return
        ids = [len(self.histories[s.stream_id]) * 7 + s.serial for s in streams]
        values = np.array(ids, np.uint32)
        self.sender.tokens.append(RowSet(np.array([s.row for s in streams])), values)
        for stream, value in zip(streams, values.tolist(), strict=True):
            self.histories[stream.stream_id].append(value)
            self._release(stream, f"{value}")

    @rule()
    def sender_turn(self) -> None:
        self.sender.turn(self.now)

    @rule(limit=st.sampled_from([1, 2, 1000]))
    def receiver_turn(self, limit: int) -> None:
        self.receiver.turn(self.now, limit)

    @rule()
    def report(self) -> None:
        self.receiver.report()

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 2.5, 9.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(times=st.integers(1, 4))
    def all_is_well(self, times: int) -> None:
        self._flow(times)

    # what befalls them

    @rule(which=st.integers(0, 9), num=st.integers(1, 5))
    def arrive_up(self, which: int, num: int) -> None:
        wires = [wire for wire in self.network.wires if wire.up]
        if wires:
            self.network.bring_up(wires[which % len(wires)], num)

    @rule(num=st.integers(1, 5))
    def arrive_down(self, num: int) -> None:
        self.network.bring_down(self.network.wires[-1], num)

    @rule(upwards=st.booleans(), at=st.integers(0, 20), later=st.sampled_from([None, 0, 1, 3]))
    def lose_or_double(self, upwards: bool, at: int, later: int | None) -> None:
        """One of the messages under way is lost, or comes again some messages `later`."""
        queues = [wire.up if upwards else wire.down for wire in self.network.wires]
        queues = [queue for queue in queues if queue]
        if queues:
            queue = queues[-1]
            at %= len(queue)
            if later is None:
                del queue[at]
            else:
                queue.insert(at + 1 + later, queue[at])

    @rule(
        upwards=st.booleans(),
        at=st.integers(0, 3),
        later=st.sampled_from([None, 0, 1, 3]),
        is_congested=st.booleans(),
    )
    def turns_with_a_fault(
        self, upwards: bool, at: int, later: int | None, is_congested: bool
    ) -> None:
        """Everybody works, and one message has bad luck, or one end cannot send."""
        self.produce_a_step()
        self.report()
        if upwards and not is_congested:
            self.lose_or_double(True, at, later)
        for wire in self.network.wires:
            self.network.bring_up(wire, 1000)
        self.network.is_congested = is_congested and not upwards
        self.sender.turn(self.now)
        self.network.is_congested = is_congested and upwards
        if not upwards and not is_congested:
            self.lose_or_double(False, at, later)
        self.network.bring_down(self.network.wires[-1], 1000)
        self.receiver.turn(self.now, 1000)
        self.network.is_congested = False

    @rule(is_congested=st.booleans())
    def congestion(self, is_congested: bool) -> None:
        self.network.is_congested = is_congested

    @rule()
    def notice_the_dead(self) -> None:
        for wire in self.network.wires:
            wire.is_mourned = not wire.is_open

    @rule(what=st.sampled_from(["connection", "receiver", "receiver", "sender"]))
    def disaster(self, what: str) -> None:
        if what == "connection":
            wire = self.network.wires[-1]
            wire.up.clear()
            wire.down.clear()
        elif what == "receiver":
            self.receiver.attacher.close()
            assert self.receiver.poller.sockets == []
            self.incarnation += 1
            self.receiver = Receiver(self.network, self.incarnation, self.now)
        else:
            self._replace_sender()

    def _replace_sender(self) -> None:
        """What is queued towards it goes to the next one, which binds the same address."""
        self.network.arrived_up.clear()
        for wire in self.network.wires:
            wire.down.clear()
            wire.is_known = False
        self.sender.rebirth()
        for stream in self.sender.streams.values():
            stream.cursor = None
            if self.sender.cursors.is_open(stream.row):
                self.sender.cursors.close(stream.row)

    @precondition(lambda self: len(self.histories) > 0)
    @rule()
    def heal(self) -> None:
        """Whatever happened: once the network works, everything arrives, and soon."""
        self.network.is_congested = False
        backlog = sum(stream.text.num_units for stream in self.sender.streams.values())
        for _ in range(300 + backlog):  # silence takes 60 turns to be noticed, a message one
            self._flow(1)
            self.now += 0.2
            if self._is_complete():
                break
        assert self._is_complete()
        assert len(self.sender.acceptor.sessions) == 1
        assert len(self.receiver.poller.sockets) == 2  # and its watch

    def teardown(self) -> None:
        if hasattr(self, "network"):
            if self.histories:
                self.heal()
            self.what_arrived_is_a_prefix()

    # what must hold

    @invariant()
    def what_arrived_is_a_prefix(self) -> None:
        for stream_id, ids in self.receiver.tokens.items():
            assert ids == self.histories[stream_id][: len(ids)]
            self.delivered[stream_id] = max(self.delivered.get(stream_id, 0), len(ids))
        for stream_id, (text, _) in self.receiver.texts.items():
            assert self.texts[stream_id].startswith(text)
            before = self.delivered_chars.get(stream_id, 0)
            self.delivered_chars[stream_id] = max(before, len(text))

    @invariant()
    def nothing_is_acknowledged_that_did_not_arrive(self) -> None:
        for stream in self.sender.streams.values():
            if self.sender.cursors.is_open(stream.row):
                acked = self.sender.cursors.acked[stream.row]
                assert acked <= self.delivered.get(stream.stream_id, 0)
                assert acked <= self.sender.cursors.sent(stream.row)
        for stream_id, acked in self.sender.text_acked.items():
            assert acked <= self.delivered_chars.get(stream_id, 0)

    @invariant()
    def credit_is_never_exceeded(self) -> None:
        for session in self.sender.acceptor.sessions:
            assert 0 <= session.link.num_unacked <= WINDOW
        assert 0 <= self.receiver.attacher.num_unacked <= 16

    @invariant()
    def one_identity_has_one_session(self) -> None:
        assert len(self.sender.acceptor.sessions) <= 1

    # helpers

    def _stream(self, which: int) -> Stream:
        return list(self.sender.streams.values())[which % len(self.sender.streams)]

    def _produce(self, stream: Stream, num: int) -> None:
        """Many tokens of one stream, released in units of one, two or three."""
        history = self.histories[stream.stream_id]
        at = len(history)
        history += [(at + i) * 7 + stream.serial for i in range(num)]
        self.sender.tokens.extend(stream.row, np.array(history[at:], np.uint32))
        while stream.text.num_tokens < len(history):
            unit = min(1 + stream.text.num_tokens % 3, len(history) - stream.text.num_tokens)
            text = "" if unit == 3 else f"{at}-{unit};"
            self._release(stream, text, stream.text.num_tokens + unit)
        if num == 2:
            self._release(stream, "text alone", stream.text.num_tokens)

    def _release(self, stream: Stream, text: str, num_tokens: int | None = None) -> None:
        tokens = len(self.histories[stream.stream_id]) if num_tokens is None else num_tokens
        stream.text.append(text, tokens)
        self.texts[stream.stream_id] += text

    def _flow(self, times: int) -> None:
        for _ in range(times):
            for wire in self.network.wires:
                self.network.bring_up(wire, 1000)
            self.sender.turn(self.now)
            self.network.bring_down(self.network.wires[-1], 1000)
            self.receiver.turn(self.now, 1000)
            self.what_arrived_is_a_prefix()

    def _is_complete(self) -> bool:
        sender, receiver = self.sender, self.receiver
        return (
            sender.session is not None
            and sender.session.is_open
            and not sender.session.link.num_unacked
            and not receiver.attacher.num_unacked
            and not receiver.states
            and all(
                receiver.tokens.get(key) == self.histories[key]
                and receiver.texts[key][0] == self.texts[key]
                and sender.cursors.acked[stream.row] == len(self.histories[key])
                for key, stream in sender.streams.items()
            )
        )


def check(max_examples: int, steps: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Hop,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_link_model_check() -> None:
    check(100, 50)


@pytest.mark.long
def test_link_model_check_at_length() -> None:
    check(500, 80)
