"""Steps that are written and sent in C: the same bytes and numbers as on the usual way."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_core.workers.plain_step import native_send_plain_step
from slipstream_ipc.columns import UInt32s, pack_u32
from slipstream_ipc.messages import Deltas, Frame, LogprobColumns, Step
from slipstream_ipc.transport.link import Link

send_plain_step = native_send_plain_step()
pytestmark = pytest.mark.skipif(send_plain_step is None, reason="no C compiler")

NUMBERS = st.integers(0, 300) | st.integers(2**16 - 2, 2**16 + 2) | st.integers(0, 2**63 - 1)
IDS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=600)


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
        self.link.take_ack(msgspec.msgpack.encode((epoch, num_received, num_acked, None)), 0.0)
        self.sent.clear()

    def write(self, data: bytes) -> bool:
        if self.takes:
            self.sent.append(data)
        return self.takes

    def send(self, step: Step, receipt: object) -> bool:
        return self.link.send(step, receipt, msgspec.msgpack.encode, self.write)

    def send_natively(self, step: Step, ids: UInt32s, receipt: object) -> bool:
        assert send_plain_step is not None
        number, rows, logprobs = step.step, step.rows, step.logprobs
        return send_plain_step(
            self.link, self.write, number, rows, ids, logprobs, step.is_awaited, receipt
        )

    @property
    def state(self) -> tuple[object, ...]:
        link = self.link
        return link.num_unacked, link.num_owed_acks, link.has_credit, link.take_receipts()


def logprobs_of(num: int, width: int | None) -> LogprobColumns | None:
    if width is None:
        return None
    values, ranks = bytes(range(256)) * (num * width // 64 + 1), bytes(4 * num)
    return LogprobColumns(width, values[: 4 * num * width], bytes(4 * num * width), ranks)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(NUMBERS, IDS, st.sampled_from([None, None, 1, 6, 30]), st.booleans()),
        min_size=1,
        max_size=20,
    ),
    NUMBERS,
    st.integers(0, 140),
    st.integers(0, 9),
    st.sampled_from([True] * 4 + [False]),
)
def test_the_same_bytes_leave(
    steps: list[tuple[int, list[int], int | None, bool]],
    epoch: int,
    num_received: int,
    num_acked: int,
    takes: bool,
) -> None:
    ends = [SendingEnd(epoch, num_received, num_acked) for _ in range(2)]
    for end in ends:
        end.takes = takes
    for number, token_ids, width, is_awaited in steps:
        ids = np.array(token_ids, np.uint32)
        rows, logprobs = pack_u32(np.arange(len(ids))), logprobs_of(len(ids), width)
        step = Step(number, rows, ids.tobytes(), b"", b"", logprobs, is_awaited)
        receipt = object()
        assert ends[0].send(step, receipt) == ends[1].send_natively(step, ids, receipt)
    assert ends[0].sent == ends[1].sent
    assert ends[0].state == ends[1].state


def test_what_cannot_be_sent_is_refused() -> None:
    end = SendingEnd(1, 0, 0)
    right: list[Any] = [end.link, end.write, 1, b"", np.zeros(1, np.uint32), None, True, None]
    assert send_plain_step is not None
    assert send_plain_step(*right)
    strided = np.zeros(8, np.uint32)[::2]
    wrong = {0: None, 1: None, 2: -1, 3: "a", 4: strided, 5: 1}
    for at, value in wrong.items():
        arguments = list(right)
        arguments[at] = value
        with pytest.raises((TypeError, ValueError, OverflowError, AttributeError, BufferError)):
            send_plain_step(*arguments)
    assert len(end.sent) == 1
