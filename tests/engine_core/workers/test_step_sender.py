"""Steps that are written and sent in C: the same bytes, numbers and cursors as on the usual way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_core.workers.step_sender import AWAITED, RECEIPTS, SENT, SentRows, StepSender
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.history.cursors import Cursors
from slipstream_ipc.messages import Deltas, Frame, LogprobColumns, Step
from slipstream_ipc.row_set import RowSet
from slipstream_ipc.transport.link import Link

NUMBERS = st.integers(0, 300) | st.integers(2**16 - 2, 2**16 + 2) | st.integers(0, 2**63 - 1)
WIDTHS = st.sampled_from([None, None, 1, 6, 30])
BUDGET = 2**17
FIRST = 4  # position from which each row is sent


class SendingEnd:
    """The sending end of a link, what has left it, and the cursors of those rows."""

    def __init__(self, epoch: int, num_received: int, num_acked: int, num: int) -> None:
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
        self.cursors = Cursors(rows=num)
        for row in range(num):
            self.cursors.open(row, FIRST)

    def acknowledge(self, num: int) -> None:
        received = self.link.num_owed_acks
        frame = msgspec.msgpack.encode((self.link.epoch, received, num, None))
        assert self.link.take_ack(frame, 0.0)

    def write(self, data: bytes) -> bool:
        if self.takes:
            self.sent.append(data)
        return self.takes

    def take_receipts(self) -> None:
        """As WorkerSender does."""
        for receipt in self.link.take_receipts():
            if isinstance(receipt, SentRows):
                rows, ends = (
                    np.frombuffer(each, np.uint32).astype(np.int64)
                    for each in (receipt.rows, receipt.ends)
                )
                self.cursors.acknowledge_ends(rows, ends, receipt.life)
            else:
                self.cursors.acknowledge(receipt)

    @property
    def numbers(self) -> tuple[object, ...]:
        link = self.link
        positions = [self.cursors.sent(row) for row in range(self.cursors.num_rows)]
        return link.num_unacked, link.num_owed_acks, link.has_credit, link.num_acked, positions


class Native:
    """A sender of steps, beside the tokens that it sends."""

    def __init__(self, end: SendingEnd, by_any: list[bool]) -> None:
        self.end = end
        self.tokens: Any = SimpleNamespace(latest=(None, None, None))
        self.marks = np.zeros(10, np.bool_)
        self.sender = StepSender(
            end.link,
            end.cursors,
            end.cursors.columns,
            self.tokens,
            end.write,
            (np.array(by_any), self.marks),
            BUDGET,
        )

    def send(
        self,
        step: int,
        ids: list[int],
        *,
        rows: list[int] | None = None,
        counts: list[int] | None = None,
        deferred: list[LogprobColumns] | None = None,
    ) -> int:
        row_set = RowSet(np.array(range(len(ids)) if rows is None else rows, np.int64))
        spans = None if counts is None else np.array(counts, np.int64)
        self.tokens.latest = row_set, np.array(ids, np.uint32), spans
        return self.sender.send(row_set, step, deferred)


def logprobs_of(num: int, width: int | None) -> LogprobColumns | None:
    if width is None:
        return None
    values, ranks = bytes(range(256)) * (num * width // 64 + 1), bytes(4 * num)
    return LogprobColumns(width, values[: 4 * num * width], bytes(4 * num * width), ranks)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_same_bytes_leave(data: st.DataObject) -> None:
    epoch, num = data.draw(NUMBERS), data.draw(st.integers(1, 9) | st.sampled_from([300, 600]))
    num_received, num_acked = data.draw(st.integers(0, 140)), data.draw(st.integers(0, 9))
    ends = [SendingEnd(epoch, num_received, num_acked, num) for _ in range(2)]
    by_any = [data.draw(st.booleans()) and row % 3 == 1 for row in range(num)]
    native = Native(ends[1], by_any)
    width = data.draw(WIDTHS)
    deferred: list[LogprobColumns] | None = None if width is None else []
    for _ in range(data.draw(st.integers(1, 20))):
        takes = data.draw(st.sampled_from([True] * 4 + [False]))
        for end in ends:
            end.takes = takes
        number, first = data.draw(NUMBERS), data.draw(st.integers(10, 2**31))
        rows = data.draw(st.permutations(range(num))) if num < 10 else list(range(num))
        rows = rows[: data.draw(st.integers(1, num))]
        most = data.draw(st.integers(1, 4)) if width is None else 1
        counts = [1 + (first + row) % most for row in rows]
        ids = [first + at for at in range(sum(counts))]
        logprobs = logprobs_of(len(rows), width)
        if deferred is not None and logprobs is not None:
            deferred.append(logprobs)
        # the usual way
        row_set, cursors = RowSet(np.array(rows, np.int64)), ends[0].cursors
        lengths = np.array([cursors.sent(row) for row in rows]) + counts
        portion = cursors.next_portion(row_set, lengths, BUDGET)
        is_awaited = any(by_any[row] for row in rows)
        spans = (b"", b"") if portion.is_one_each else (pack_u32(counts), pack_u32(portion.starts))
        step = Step(number, pack_u32(rows), pack_u32(ids), *spans, logprobs, is_awaited)
        is_sent = ends[0].link.send(step, portion, msgspec.msgpack.encode, ends[0].write)
        if not is_sent:
            cursors.rewind(portion)
        given_counts = None if most == 1 and data.draw(st.booleans()) else counts
        found = native.send(number, ids, rows=rows, counts=given_counts, deferred=deferred)
        assert found == (is_sent and (SENT | AWAITED if is_awaited else SENT))
        if data.draw(st.booleans()):
            for end in ends:
                end.acknowledge(num_acked + len(ends[0].sent))
        if num < 10 and data.draw(st.integers(0, 5)) == 0:
            row, position = data.draw(st.integers(0, num - 1)), data.draw(st.integers(0, 9))
            for end in ends:  # another stream's from here on
                end.cursors.close(row)
                end.cursors.open(row, position)
        assert ends[0].sent == ends[1].sent
        assert ends[0].numbers == ends[1].numbers
    for end in ends:
        end.take_receipts()
    assert ends[0].cursors.acked.tolist() == ends[1].cursors.acked.tolist()


def test_what_is_left_alone() -> None:
    end = SendingEnd(1, 0, 0, 3)
    native = Native(end, [False] * 3)
    deferred: list[LogprobColumns] = []
    assert not native.send(1, [10, 11], deferred=deferred), "without log-probabilities"
    deferred += [each for each in [logprobs_of(2, 3)] if each is not None]
    assert not native.sender.send(RowSet(np.arange(2)), 1, deferred), "others were appended to"
    spans: Any = {"rows": [0, 1], "counts": [1, 2]}
    assert not native.send(1, [10, 11, 12], **spans, deferred=deferred), "several"
    assert native.send(1, [10, 11], deferred=deferred) == SENT
    assert not native.send(2, [10, 11], deferred=deferred), "those of the step before"
    native.marks[3] = True
    assert not native.send(2, [10, 3]), "an id that may end a stream"
    assert native.send(2, [10, 2**32 - 1]) == SENT
    assert not native.send(3, []), "no rows"
    assert not native.send(3, [10], rows=[3]), "no row"
    assert not native.send(3, [10] * (BUDGET + 1), rows=[0], counts=[BUDGET + 1])
    end.cursors.close(1)
    assert not native.send(3, [10, 11]), "a row that is closed"
    assert native.send(3, [10, 11], rows=[0, 2]) == SENT
    end.cursors.open(3, 0)
    assert not native.send(4, [10], rows=[0]), "the columns are others now"
    assert len(end.sent) == 3
    assert [end.cursors.sent(row) for row in range(3)] == [FIRST + 3, FIRST + 2, FIRST + 1]


def test_other_receipts_are_left_to_be_taken() -> None:
    end = SendingEnd(1, 0, 0, 1)
    native = Native(end, [False])
    assert native.send(1, [10]) == SENT
    assert end.link.send(None, "other", msgspec.msgpack.encode, end.write)
    assert native.send(2, [10, 11], rows=[0], counts=[2]) == SENT
    end.acknowledge(3)
    assert native.send(3, [10]) == SENT | RECEIPTS
    assert end.cursors.acked[0] == FIRST + 1
    other, receipt = end.link.take_receipts()
    assert other == "other"
    assert np.frombuffer(receipt.ends, np.uint32).tolist() == [FIRST + 3]
    assert native.send(4, [10]) == SENT


def test_what_cannot_be_sent_is_refused() -> None:
    end = SendingEnd(1, 0, 0, 2)
    by_row, flags = np.zeros(2, np.int64), np.zeros(2, np.bool_)
    right: list[Any] = [
        end.link,
        end.cursors,
        (by_row, by_row, flags, by_row),
        None,
        end.write,
        (flags, flags),
        9,
    ]
    read_only = np.zeros(2, np.int64)
    read_only.setflags(write=False)
    for at, value in (
        (0, None),
        (2, (by_row, by_row, flags[1:], by_row)),
        (2, (read_only, by_row, flags, by_row)),
        (2, None),
        (5, ("a", flags)),
        (6, None),
    ):
        arguments = list(right)
        arguments[at] = value
        with pytest.raises((TypeError, ValueError, BufferError)):
            StepSender(*arguments)
    native = Native(end, [False] * 2)
    rows = RowSet(np.arange(2))
    for ids, counts in (
        (np.zeros(1, np.uint32), None),
        (np.zeros(4, np.uint32)[::2], None),
        (None, None),
        (np.zeros(2, np.uint32), np.array([1])),
        (np.zeros(2, np.uint32), np.array([1, 2])),
    ):
        native.tokens.latest = rows, ids, counts
        with pytest.raises((TypeError, ValueError, BufferError)):
            native.sender.send(rows, 1, None)
    native.tokens.latest = rows, np.zeros(2, np.uint32), None
    with pytest.raises(OverflowError):
        native.sender.send(rows, -1, None)
    with pytest.raises(TypeError):
        native.sender.send(rows, 1, ())  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        SentRows()
    assert not end.sent
