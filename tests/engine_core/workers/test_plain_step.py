"""Steps that are written and sent in C: the same bytes and numbers as on the usual way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_core.workers.plain_step import (
    AWAITED,
    RECEIPTS,
    SENT,
    PlainStepSender,
)
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.history.streak import Streak
from slipstream_ipc.messages import Deltas, Frame, LogprobColumns, Step
from slipstream_ipc.row_set import RowSet
from slipstream_ipc.transport.link import Link

NUMBERS = st.integers(0, 300) | st.integers(2**16 - 2, 2**16 + 2) | st.integers(0, 2**63 - 1)
WIDTHS = st.sampled_from([None, None, 1, 6, 30])
UNMARKED = np.zeros(0, np.bool_)


class SendingEnd:
    """The sending end of a link, and what has left it."""

    def __init__(self, epoch: int, num_received: int, num_acked: int) -> None:
        self.sent: list[bytes] = []
        self.takes = True
        self.link: Link[Any] = Link(epoch, 0.0)
        for seq in range(1, num_received + 1):
            body = Deltas(b"", b"", b"", [], b"")
            assert self.link.take_next(Frame(epoch, seq, 0, body), 0.0) is body
        for _ in range(num_acked):
            assert self.link.send(None, "old", msgspec.msgpack.encode, self.write)
        self.acknowledge(num_acked)
        self.link.take_receipts()
        self.sent.clear()

    def acknowledge(self, num: int) -> None:
        received = self.link.num_owed_acks
        frame = msgspec.msgpack.encode((self.link.epoch, received, num, None))
        assert self.link.take_ack(frame, 0.0)

    def write(self, data: bytes) -> bool:
        if self.takes:
            self.sent.append(data)
        return self.takes

    @property
    def numbers(self) -> tuple[object, ...]:
        link = self.link
        return link.num_unacked, link.num_owed_acks, link.has_credit, link.num_acked


class Plain:
    """A sender with its streak, beside the tokens that it sends."""

    def __init__(
        self, end: SendingEnd, num: int, *, by_any: bool = False, logprobs: bool = False
    ) -> None:
        self.rows = RowSet(np.arange(num))
        ones = np.ones(num, np.int64)
        self.streak = Streak(self.rows, 4 * ones, ones, ones, 0)
        self.tokens = SimpleNamespace(latest=(None, None), last=self._last)
        self.deferred: list[LogprobColumns] | None = [] if logprobs else None
        self.num_asked = 0
        self.marks = np.zeros(10, np.bool_)
        self.sender = PlainStepSender(
            end.link,
            self.streak,
            self.tokens,
            self.rows,
            pack_u32(self.rows.array),
            end.write,
            by_any,
            self.marks,
            self.deferred,
        )

    def _last(self, rows: RowSet) -> Any:
        assert rows is self.rows
        self.num_asked += 1
        return self.ids

    def send(self, step: int, ids: list[int], *, is_latest: bool = True) -> int:
        self.ids = np.array(ids, np.uint32)
        self.tokens.latest = (self.rows if is_latest else RowSet(self.rows.array), self.ids)
        return self.sender.send(self.rows, step)


def logprobs_of(num: int, width: int | None) -> LogprobColumns | None:
    if width is None:
        return None
    values, ranks = bytes(range(256)) * (num * width // 64 + 1), bytes(4 * num)
    return LogprobColumns(width, values[: 4 * num * width], bytes(4 * num * width), ranks)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_same_bytes_leave(data: st.DataObject) -> None:
    epoch, num = data.draw(NUMBERS), data.draw(st.integers(1, 600))
    num_received, num_acked = data.draw(st.integers(0, 140)), data.draw(st.integers(0, 9))
    width, by_any = data.draw(WIDTHS), data.draw(st.booleans())
    ends = [SendingEnd(epoch, num_received, num_acked) for _ in range(2)]
    plain = Plain(ends[1], num, by_any=by_any, logprobs=width is not None)
    receipts: list[object] = []
    for _ in range(data.draw(st.integers(1, 20))):
        takes = data.draw(st.sampled_from([True] * 4 + [False]))
        for end in ends:
            end.takes = takes
        number, first = data.draw(NUMBERS), data.draw(st.integers(10, 2**32 - 1))
        ids = [(first + 77 * at) % 2**32 for at in range(num)]
        if any(token_id < 10 for token_id in ids):
            continue
        logprobs = logprobs_of(num, width)
        if plain.deferred is not None and logprobs is not None:
            plain.deferred.append(logprobs)
        columns = pack_u32(ids)
        step = Step(number, pack_u32(np.arange(num)), columns, b"", b"", logprobs, by_any)
        is_sent = ends[0].link.send(step, plain.streak, msgspec.msgpack.encode, ends[0].write)
        found = plain.send(number, ids, is_latest=data.draw(st.booleans()))
        assert found == (is_sent and (SENT | AWAITED if by_any else SENT))
        if data.draw(st.booleans()):
            for end in ends:
                end.acknowledge(num_acked + len(ends[0].sent))
        assert ends[0].sent == ends[1].sent
        assert ends[0].numbers == ends[1].numbers
        if is_sent:
            receipts += ends[0].link.take_receipts()
        assert plain.streak.num_sent == 1 + len(ends[0].sent)
    receipts += ends[0].link.take_receipts()
    left = ends[1].link.take_receipts()
    assert plain.streak.num_acked + len(left) == len(receipts)
    assert all(receipt is plain.streak for receipt in left)


def test_what_is_left_alone() -> None:
    end = SendingEnd(1, 0, 0)
    plain = Plain(end, 2, logprobs=True)
    assert plain.deferred is not None
    assert not plain.send(1, [10, 11]), "without log-probabilities"
    first = logprobs_of(2, 3)
    assert first is not None
    plain.deferred.append(first)
    assert not plain.sender.send(None, 1)
    assert not plain.sender.send(RowSet(plain.rows.array), 1), "other rows"
    assert not end.sent
    assert plain.send(1, [10, 11]) == SENT
    assert not plain.send(2, [10, 11]), "those of the step before"
    plain.deferred.append(logprobs_of(2, 3) or first)
    plain.marks[3] = True
    assert not plain.send(2, [10, 3]), "an id that may end a stream"
    assert plain.send(2, [10, 2**32 - 1]) == SENT
    plain.deferred.append(logprobs_of(2, 3) or first)
    plain.streak.is_on = False
    assert not plain.send(3, [10, 11])
    assert (len(end.sent), plain.streak.num_sent) == (2, 3)
    assert (plain.streak.is_written, plain.streak.is_acked_written) == (False, True)


def test_other_receipts_are_left_to_be_taken() -> None:
    end = SendingEnd(1, 0, 0)
    plain = Plain(end, 1)
    assert plain.send(1, [10]) == SENT
    assert end.link.send(None, "other", msgspec.msgpack.encode, end.write)
    assert plain.send(2, [10]) == SENT
    end.acknowledge(3)
    assert plain.send(3, [10]) == SENT | RECEIPTS
    assert plain.streak.num_acked == 1
    assert end.link.take_receipts() == ["other", plain.streak]
    assert plain.send(4, [10]) == SENT


def test_what_cannot_be_sent_is_refused() -> None:
    end = SendingEnd(1, 0, 0)
    rows = RowSet(np.zeros(1, np.int64))
    streak = Streak(rows, rows.array, rows.array, rows.array, 0)
    right: list[Any] = [end.link, streak, None, rows, b"1234", end.write, False, UNMARKED, None]
    wrong = {0: None, 1: None, 4: "a", 7: "a", 8: (1,)}
    for at, value in wrong.items():
        arguments = list(right)
        arguments[at] = value
        with pytest.raises((TypeError, ValueError, BufferError)):
            PlainStepSender(*arguments)
    plain = Plain(end, 2)
    for ids in (np.zeros(1, np.uint32), np.zeros(4, np.uint32)[::2], None):
        plain.tokens.latest = plain.rows, ids
        with pytest.raises((TypeError, ValueError, BufferError)):
            plain.sender.send(plain.rows, 1)
    plain.tokens.latest = plain.rows, np.zeros(2, np.uint32)
    with pytest.raises(OverflowError):
        plain.sender.send(plain.rows, -1)
    assert not end.sent
