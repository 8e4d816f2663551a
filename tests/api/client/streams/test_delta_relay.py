"""Sessions with and without a relay: the same bytes from the server have the same effect."""

from __future__ import annotations

import copy
import pickle
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.fake_worker import MODEL

from slipstream.client.connection import link_session
from slipstream.client.connection.link_session import ClientSession
from slipstream.client.streams.stream_group import StreamGroup
from slipstream.client.streams.stream_state import StreamState
from slipstream.client.streams.unread_deltas import MOST_UNREAD
from slipstream.outputs import Delta
from slipstream.request.requests import checked_params, new_submit
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Deltas,
    End,
    Frame,
    Hello,
    Inspect,
    LogprobColumns,
    Ping,
    Submit,
    Welcome,
)
from slipstream_ipc.transport import dealer
from slipstream_ipc.transport.codec import front_codec
from slipstream_ipc.transport.local_socket import CHUNK_BYTES, LocalConnection
from slipstream_ipc.transport.sockets import is_numbered
from slipstream_worker.streams.registration import answers_of

MAX_BYTES = 2**22
TEXTS = ["", "a", "bc", "\u00fc\u20ac", "z" * 300]


class Bell:
    """A wakeup that counts its rings."""

    num_rings = 0

    def ring(self, _cause: object = None) -> None:
        self.num_rings += 1


class Side:
    """A session, and the server that it is attached to."""

    def __init__(self, *, relays: bool) -> None:
        self.now = 100.0
        self.num_relayed = 0
        self.sent_by_client: list[bytes] = []
        self.states: list[StreamState] = []
        self.bells: list[Bell] = []
        self.groups: list[StreamGroup] = []
        self.read: list[tuple[object, ...]] = []
        self.server: socket.socket | None = None
        with self._in_place():
            self.session = ClientSession(
                zmq.Context.instance(), "ipc:///nowhere/clients", 60.0, zmq.Poller(), self.now
            )
        if not relays:
            table: Any = self.session._table
            table.relay = lambda *_: None
        self.turn()

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Attaches meet this server."""
        with (
            patch.object(dealer, "connect_local", self._connect),
            patch.object(link_session, "token_bytes", bytes),
        ):
            yield

    def _connect(self, _address: str, _max_bytes: int) -> LocalConnection:
        self.hang_up()
        ours, self.server = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.server.setblocking(False)
        self._rest = b""
        self.seq = self.acked = self.num_received = 0
        return LocalConnection(ours, MAX_BYTES)

    def hang_up(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None

    # ---- the server ----------------------------------------------------------------------------

    def frame(self, body: Any, *, seq: int | None = None) -> bytes:
        """With its length."""
        if seq is None:
            self.seq += is_numbered(body)
            seq = self.seq
        frame = msgspec.msgpack.encode(Frame(self.epoch, seq, self.acked, body))
        return len(frame).to_bytes(4, "little") + frame

    def say(self, data: bytes) -> None:
        if self.server is not None:
            assert self.server.send(data) == len(data)

    def turn(self) -> None:
        """A turn of the client, and of the server until nothing is left to be said."""
        while True:
            if self.session._relay is not None:
                before = self.session._dealer.link.num_heard
                with patch.object(self.session, "_receive", lambda now: self._usual(now)):
                    self._is_usual = False
                    self.session.turn(self.now)
                self.num_relayed += not self._is_usual
                assert self._is_usual or self.session._dealer.link.num_heard == before + 1
            else:
                with self._in_place():
                    self.session.turn(self.now)
            if not self._hear():
                return

    def _usual(self, now: float) -> bool:
        self._is_usual = True
        with self._in_place():
            return ClientSession._receive(self.session, now)

    def _hear(self) -> bool:
        """Whether something was answered."""
        if self.server is None:
            return False
        try:
            self._rest += self.server.recv(2**20)
        except BlockingIOError:
            return False
        has_answered = False
        while len(self._rest) >= 4 + (num := int.from_bytes(self._rest[:4], "little")):
            data, self._rest = self._rest[4 : 4 + num], self._rest[4 + num :]
            self.sent_by_client.append(data)
            frame = front_codec().decode(data)
            self.num_received += is_numbered(frame.body)
            if isinstance(frame.body, Hello):
                self.epoch = frame.epoch
                self.say(self.frame(Welcome(PROTOCOL_VERSION, MODEL)))
                has_answered = True
            elif isinstance(frame.body, Submit):
                for each in answers_of(frame.body):
                    self.say(self.frame(Accepted(each.handle, pack_u32([1, 2]))))
                has_answered = True
        return has_answered

    # ---- the client ----------------------------------------------------------------------------

    def submit(self, num: int, *, is_group: bool) -> None:
        params = checked_params(None, {"max_tokens": 100})
        begin = len(self.states)
        for index in range(begin, begin + num):
            submit = new_submit(f"prompt {index}", params, stream_id=f"{index:032x}")
            self.states.append(StreamState(submit, wants_whole=False))
        bell = Bell()
        self.bells.append(bell)
        if is_group:
            group = StreamGroup(self.states[begin:])
            group.wake = bell.ring
            self.groups.append(group)
        for state in self.states[begin:]:
            if not is_group:
                state.wakeup = bell
            self.session.submit(state, self.now)

    @property
    def open(self) -> list[StreamState]:
        """The streams that are not over and accepted."""
        return [state for state in self.states if not state.is_over and state.prompt_ids]

    def look(self) -> tuple[object, ...]:
        """All that can be seen of the client."""
        table, link = self.session._table, self.session._dealer.link
        for state in self.states:
            self.read += [(state.index, *seen(delta)) for delta in state.deltas]
            state.deltas.clear()
        for group in self.groups:
            while group.unread:
                self.read += [(index, *seen(delta)) for index, delta in group.unread.popleft()]
        streams = [
            (
                state.is_over,
                repr(state.error),
                state.end,
                None if state.is_over else table.position(state),
                None if state.is_over else table.token_ids(state),
            )
            for state in self.states
        ]
        rings = [bell.num_rings for bell in self.bells]
        numbers = (link.num_acked, link.num_unacked, link.num_owed_acks, link.heard_at)
        return streams, rings, numbers, link.num_heard, self.read, self.sent_by_client


def seen(delta: Delta) -> tuple[object, ...]:
    batch = delta._batch
    return delta.text, delta.token_ids, delta.logprobs, batch.first_at, batch.end_of(delta._entry)


def plain(
    states: Sequence[StreamState],
    at: dict[int, tuple[int, int]],
    text: str,
    width: int = 0,
    spans: int = 0,
    **others: Any,
) -> Deltas:
    """A message with a token for each of these streams, at the positions `at`, which are moved.

    width: of each token's log-probabilities. spans: several tokens, another number for each number.
    """
    nums = [(spans + state.handle) % 4 if spans else 1 for state in states]
    num_tokens = sum(nums)
    if spans:
        others["counts"] = pack_u32(nums)
    if width:
        sizes = 4 * num_tokens * width, 4 * num_tokens
        columns = bytes(sizes[0]), bytes(sizes[0]), bytes(sizes[1])
        others["logprobs"] = LogprobColumns(width, *columns)
    places = [at.setdefault(state.handle, (0, 0)) for state in states]
    texts = [text + "." * (state.handle % 2) for state in states]
    message = Deltas(
        pack_u32([state.handle for state in states]),
        pack_u32([chars for chars, _ in places]),
        pack_u32([tokens for _, tokens in places]),
        texts,
        pack_u32(
            [
                7 + tokens + token
                for (_, tokens), num in zip(places, nums, strict=True)
                for token in range(num)
            ]
        ),
        **others,
    )
    for state, (chars, tokens), own, num in zip(states, places, texts, nums, strict=True):
        at[state.handle] = chars + len(own), tokens + num
    return message


class Worlds:
    """A session with relays and one without, to which the same happens."""

    def __init__(self, *, width: int = 0) -> None:
        """width: see `plain`."""
        self.width = width
        self.sides = [Side(relays=relays) for relays in (True, False)]
        self.at: dict[int, tuple[int, int]] = {}  # where the server is, by handle
        self.chosen = slice(None)  # of the open streams, those that messages are for
        self.last: list[bytes] = [b"", b""]

    def do(self, what: str, number: int, text: str) -> None:
        """The same on both sides, with a turn."""
        before, epochs = dict(self.at), [side.epoch for side in self.sides]
        for index, side in enumerate(self.sides):
            self.at = dict(before)
            self._do_at(index, side, what, number, text)
        assert len({side.epoch for side in self.sides}) == 1
        if self.sides[0].epoch != epochs[0]:  # the server goes on where the client is
            for side in self.sides:
                positions = {each.handle: side.session.position(each) for each in side.open}
            self.at = positions
        assert self.sides[0].sent_by_client == self.sides[1].sent_by_client
        assert self.sides[0].session._num_breaches == self.sides[1].session._num_breaches

    def _do_at(self, index: int, side: Side, what: str, number: int, text: str) -> None:
        states = side.open[self.chosen]
        match what:
            case "choose":
                self.chosen = slice(number % 3, None, 1 + number % 2)
            case "submit":
                side.submit(1 + number % 3, is_group=number % 2 == 0)
            case "abort" if states:
                side.session.abort(states[number % len(states)])
            case "abandon" if states:
                side.session.abandon(states[number % len(states)])
            case "position" if states:
                side.session.position(states[number % len(states)])
            case "ask":
                side.session.ask(Inspect(0), Future(), side.now, lambda _: None)
            case "look":
                side.look()
            case "beat":
                side.now += 0.2
            case "acknowledge" | "acknowledge with the next":
                side.acked = side.num_received
                if what == "acknowledge":
                    side.say(side.frame(None))
            case "ping":
                side.say(side.frame(Ping()))
            case "garbage" if number == 0:
                side.say((9).to_bytes(4, "little") + b"no frame.")
            case "hang up" if number < 3:
                side.hang_up()
            case "again":
                side.say(self.last[index])
            case _ if states:
                self._send(index, side, states, what, number, text)
        side.now += 0.001
        side.turn()

    def _send(
        self, index: int, side: Side, states: list[StreamState], what: str, number: int, text: str
    ) -> None:
        num, entry = len(states), number % len(states)
        match what:
            case "end":
                ends = (End("stop", 1),)
                body = plain(states, self.at, text, self.width, ended=pack_u32([entry]), ends=ends)
            case "kinds":
                body = plain(states, self.at, text, self.width, kinds=pack_u32([1] * num))
            case "behind":
                body = plain(states, dict.fromkeys(self.at, (0, 0)), text, self.width)
            case "ahead":
                body = plain(states, dict.fromkeys(self.at, (900, 90)), text, self.width)
            case "spans":
                body = plain(states, self.at, text, self.width, 1 + number)
            case "some":
                some = states[number % 2 :: 2] or states
                body = plain(some, self.at, text, self.width, number)
            case "large":
                body = plain(states, self.at, "L" * (CHUNK_BYTES + number), self.width)
            case _:
                body = plain(states, self.at, text, self.width)
        seq = side.seq + 2 if what == "gap" else None
        data = self.last[index] = side.frame(body, seq=seq)
        if what == "in parts":
            side.say(data[: 1 + number])
            side.turn()
            data = data[1 + number :]
        elif what == "several":
            data += b"".join(
                side.frame(plain(states, self.at, text, self.width)) for _ in range(number)
            )
        elif what == "one and a part":
            more = side.frame(plain(states, self.at, text, self.width))
            side.say(data + more[: 1 + number])
            side.turn()
            data = more[1 + number :]
        side.say(data)

    def close(self) -> None:
        for side in self.sides:
            side.session.close()
            side.hang_up()


WHAT = st.sampled_from(
    ["plain"] * 12
    + ["spans"] * 4
    + ["some"] * 3
    + ["several", "in parts", "one and a part", "end", "kinds", "large"]
    + ["behind", "ahead", "gap", "again", "garbage", "hang up", "ping"]
    + ["acknowledge", "acknowledge with the next", "beat", "look"]
    + ["choose", "submit", "abort", "abandon", "position", "ask"]
)


@settings(max_examples=80)
@given(
    st.booleans(),
    st.sampled_from([0, 0, 2]),
    st.lists(st.tuples(WHAT, st.integers(0, 9), st.sampled_from(TEXTS)), min_size=30, max_size=60),
)
def test_a_relay_changes_nothing(
    is_group: bool, width: int, steps: list[tuple[str, int, str]]
) -> None:
    worlds = Worlds(width=width)
    worlds.do("submit", 2 if is_group else 1, "")
    for what, number, text in steps:
        for _ in range(number if what in ("plain", "spans") else 1):
            worlds.do(what, number, text)
    seen = [side.look() for side in worlds.sides]
    for one, other in zip(*seen, strict=True):
        assert one == other
    worlds.close()


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize(
    ("what", "width"),
    [("plain", 0), ("plain", 2), ("large", 0), ("spans", 0), ("spans", 2), ("some", 0)],
)
def test_most_messages_are_relayed(what: str, width: int, number: int) -> None:
    worlds = Worlds(width=width)
    worlds.do("submit", number, "")
    for turn in range(60):
        worlds.do(what, turn % 5 if what in ("spans", "some") else 0, "ab")
    assert worlds.sides[0].num_relayed >= 55
    assert worlds.sides[1].num_relayed == 0
    assert worlds.sides[0].look() == worlds.sides[1].look()
    worlds.close()


def test_what_fills_two_chunks_is_acknowledged_as_without_a_relay() -> None:
    worlds = Worlds()
    worlds.do("submit", 1, "")
    worlds.do("submit", 2, "")
    for num_before in range(2, 20):  # so that an acknowledgement is due in the first chunk
        for _ in range(num_before):
            worlds.do("plain", 0, "a")
        worlds.do("several", 9, "z" * (CHUNK_BYTES // 20))  # `do` compares what is acknowledged
    assert worlds.sides[0].look() == worlds.sides[1].look()
    worlds.close()


@pytest.mark.parametrize("width", [0, 2])
def test_relayed_deltas_are_copied_and_pickled_as_others_are(width: int) -> None:
    worlds = Worlds(width=width)
    worlds.do("submit", 1, "")
    for _ in range(5):
        worlds.do("plain", 0, "ab")
    relayed, other = worlds.sides
    assert relayed.num_relayed >= 3
    delta, expected = relayed.states[0].deltas[-1], seen(other.states[0].deltas[-1])
    assert seen(copy.deepcopy(delta)) == expected
    assert seen(pickle.loads(pickle.dumps(delta))) == expected
    worlds.close()


def test_what_is_not_read_is_merged() -> None:
    worlds = Worlds()
    worlds.do("submit", 1, "")
    worlds.do("submit", 1, "")
    for _ in range(MOST_UNREAD + 20):
        worlds.do("plain", 0, "ab")
    relayed, other = worlds.sides
    assert relayed.num_relayed > MOST_UNREAD
    assert [len(each.deltas) for each in relayed.states] == [20] * 4
    assert relayed.look() == other.look()
    worlds.close()
