"""The numbers of a link in Python and in C: the same frames, verdicts, receipts and credit."""

from __future__ import annotations

import gc
import weakref
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.oracles.link_numbers import LinkNumbers

from slipstream_ipc.messages import Abort, Frame, Hello, Ping
from slipstream_ipc.transport.link_numbers import LinkNumbers as InC

BODY = Abort(bytes(16), 1)


SMALL = st.integers(-3, 12)
NUMBERS = st.one_of(SMALL, st.sampled_from([2**63 - 1, 2**63, 2**64 - 1, -(2**63), -(2**70)]))
FRAMES = st.builds(
    Frame,
    st.sampled_from([7, 7, 7, 7, 6, 2**64 - 1]),
    NUMBERS,
    NUMBERS,
    st.sampled_from([None, BODY, Ping(), Hello(1, b"me", True)]),
)
STEPS = st.one_of(
    st.tuples(st.just("send"), st.booleans()),
    st.tuples(st.just("send_control"), st.booleans()),
    st.tuples(st.just("receive"), FRAMES, st.booleans()),
    st.tuples(st.just("take_next"), FRAMES),
    st.tuples(st.just("take_ack"), FRAMES, st.binary(max_size=2), st.integers(0, 30)),
    st.tuples(st.just("next_ack"), st.integers(0, 3), st.integers(-2, 2)),
    st.tuples(st.just("next"), st.integers(0, 3)),
    st.tuples(st.sampled_from(["take_receipts", "end", "sent", "ack_sent"])),
)


class Side:
    """One implementation, with what it wrote."""

    def __init__(self, kind: Any, epoch: int, window: int) -> None:
        self.link, self.num = kind(epoch, 1.0, window), 0
        self.written: list[Any] = []

    def do(self, step: tuple[Any, ...], now: float) -> Any:
        link, name = self.link, step[0]

        def write(frame: Frame[Any]) -> bool:
            self.written.append((frame.epoch, frame.seq, frame.ack, frame.body))
            return bool(step[1])

        self.num += 1
        match name:
            case "send":
                return link.send(BODY, self.num, lambda frame: frame, write)
            case "send_control":
                return link.send_control(Ping(), lambda frame: frame, write)
            case "receive":
                return link.receive(step[1], step[2], now)
            case "take_next":
                return link.take_next(step[1], now)
            case "take_ack":  # perhaps cut off, or with something behind it
                frame = step[1]
                if not 0 <= min(frame.seq, frame.ack) <= max(frame.seq, frame.ack) < 2**64:
                    return None
                data = msgspec.msgpack.encode([frame.epoch, frame.seq, frame.ack, None])
                return link.take_ack(data[: step[3]] + step[2], now)
            case "next_ack":
                numbers = link.control(None).ack + step[2], max(0, link.num_acked + step[1])
                return link.take_ack(msgspec.msgpack.encode([link.epoch, *numbers, None]), now)
            case "next":  # of the peer, most often: it continues what came
                received = link.control(None).ack
                frame = Frame(link.epoch, received + 1, max(0, link.num_acked + step[1] - 1), BODY)
                return link.take_next(frame, now)
            case "sent":
                return link.sent(self.num)
            case _:
                return getattr(link, name)()

    def state(self) -> Any:
        link, frames = self.link, [self.link.numbered(BODY), self.link.control(None)]
        return (
            (link.epoch, link.window, link.heard_at, link.num_heard, link.num_acked),
            (
                link.has_credit,
                link.has_receipts,
                link.num_unacked,
                link.owes_ack,
                link.num_owed_acks,
            ),
            [(frame.epoch, frame.seq, frame.ack, frame.body) for frame in frames],
            self.written,
        )


@given(st.sampled_from([7, 2**64 - 1]), st.integers(0, 4), st.lists(STEPS, max_size=40))
def test_both_do_the_same(epoch: int, window: int, steps: list[tuple[Any, ...]]) -> None:
    sides = [Side(kind, epoch, window) for kind in (LinkNumbers, InC)]
    for number, step in enumerate(steps):
        found = [side.do(step, float(number)) for side in sides]
        assert found[0] == found[1]
        assert sides[0].state() == sides[1].state()


@pytest.mark.parametrize("kind", [LinkNumbers, InC])
def test_an_error_while_sending_counts_nothing(kind: Any) -> None:
    link = kind(7, 0.0, 4)

    def fail(_given: Any) -> Any:
        raise KeyError("no")

    for encode, write in ((fail, bool), (bytes, fail)):
        with pytest.raises((KeyError, TypeError)):
            link.send(BODY, 1, encode, write)
        with pytest.raises((KeyError, TypeError)):
            link.send_control(None, encode, write)
    assert (link.num_unacked, link.take_receipts()) == (0, [])


def test_wrong_arguments_are_errors() -> None:
    link = InC(7, 0.0, 4)
    for call in (
        lambda: InC("seven", 0.0, 4),
        lambda: InC(7, 0.0),
        lambda: InC(7, now=0.0, window=4),
        lambda: link.receive(object(), True, 0.0),
        lambda: link.receive(Frame(7, 1, 0), True),
        lambda: link.receive(Frame(7, 1, 0), True, "now"),
        lambda: link.take_next(object(), 0.0),
        lambda: link.take_next(Frame(7, 1, 0, BODY), None),
        lambda: link.take_next(Frame(7, cast(int, "one"), 0, BODY), 0.0),
        lambda: link.send(BODY, 1, bytes),
        lambda: link.send_control(None, bytes),
    ):
        with pytest.raises((TypeError, AttributeError)):
            call()
    new: Any = object.__new__
    with pytest.raises(TypeError):
        new(InC)
    assert InC.__new__(InC).take_receipts() == []  # type: ignore[no-untyped-call]


def test_a_link_in_a_circle_is_collected() -> None:
    class Receipt:
        link: Any

    link, receipt = InC(7, 0.0, 4), Receipt()
    receipt.link = link
    link.sent(receipt)
    seen = weakref.ref(receipt)
    del link, receipt
    gc.collect()
    assert seen() is None
