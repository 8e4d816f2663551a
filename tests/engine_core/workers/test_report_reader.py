"""Reports that are taken from the bytes, beside frames that are decoded: the same counts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import msgpack

from slipstream_core._native import ReportReader
from slipstream_core.workers.report_reader import report_reader
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import Frame, Ping, Report, UnknownToCore
from slipstream_ipc.transport.codec import core_codec
from slipstream_ipc.transport.link import Link, LinkVerdict

EPOCH = 2**40
NUMBERS = st.integers(0, 6) | st.sampled_from([2**32, 2**63 - 1])


def link_of(num_sent: int) -> Link[Any]:
    link: Link[Any] = Link(EPOCH, 0.0)
    for _ in range(num_sent):
        assert link.send(None, None, msgpack.encode, lambda _data: True)
    return link


def numbers(link: Link[Any]) -> tuple[object, ...]:
    return link.num_unacked, link.num_owed_acks, link.num_heard, link.heard_at, link.num_acked


FRAMES = st.builds(
    Frame[Any],
    st.sampled_from([EPOCH] * 5 + [1]),
    st.integers(0, 12),
    st.integers(0, 6),
    st.builds(Report, NUMBERS)
    | st.builds(Report, NUMBERS, st.just(pack_u32([1])), st.just(pack_u32([1])))
    | st.builds(Report, NUMBERS, st.just(b""), st.just(pack_u32([1])))
    | st.sampled_from([None, None, Ping(), UnknownToCore(())]),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(FRAMES, max_size=20), st.data())
def test_reports_are_taken_as_if_decoded(frames: list[Frame[Any]], data: st.DataObject) -> None:
    links = [link_of(4), link_of(4)]
    reader = report_reader(links[0], 3, is_local=True)
    assert isinstance(reader, ReportReader)
    codec, step = core_codec(), 3
    for at, frame in enumerate(frames):
        if data.draw(st.booleans()):  # mostly they are in order
            seq = links[1].num_owed_acks + (frame.body is not None)
            frame = Frame(frame.epoch, seq, 2, frame.body)
        encoded, before = msgpack.encode(frame), numbers(links[0])
        body = frame.body
        is_taken = reader.take(encoded, float(at))
        if not is_taken:
            assert numbers(links[0]) == before
            assert reader.step == step
            assert not (
                isinstance(body, Report)
                and links[1].take_next(frame, float(at)) is body
                and not body.rows + body.num_tokens
            ), "no reader takes it"
            return
        if body is None:
            assert links[1].receive(frame, False, float(at)) is LinkVerdict.DELIVER
        else:
            assert isinstance(body, Report)
            assert codec.decode(encoded).body == Report(body.step)
            assert links[1].take_next(frame, float(at)) is body
            step = max(step, body.step)
        assert reader.step == step
        assert numbers(links[0]) == numbers(links[1])


@given(st.binary(max_size=6), st.integers(0, 30), st.integers(0, 30))
def test_changed_bytes_have_no_effect_or_are_a_report(more: bytes, at: int, num: int) -> None:
    link = link_of(4)
    reader = report_reader(link, 3, is_local=True)
    data = msgpack.encode(Frame(EPOCH, 1, 2, Report(9)))
    changed = data[:at] + more + data[at + num :]
    before = numbers(link)
    if reader.take(changed, 1.0):
        body = core_codec().decode(changed).body
        assert body is None or (isinstance(body, Report) and not body.rows + body.num_tokens)
    else:
        assert numbers(link) == before


def test_reports_that_are_no_bytes_are_left() -> None:
    link = link_of(4)
    reader = report_reader(link, 3, is_local=False)
    assert not reader.take(msgpack.encode(Frame(EPOCH, 1, 2, Report(9))), 1.0)
    assert reader.take(msgpack.encode(Frame(EPOCH, 0, 2, None)), 1.0)
    assert (link.num_acked, reader.step) == (2, 3)


def test_what_is_wrong_is_refused() -> None:
    with pytest.raises(TypeError):
        ReportReader(None, 1)  # type: ignore[arg-type]
    reader = report_reader(link_of(0), 3, is_local=True)
    for arguments in ((), (b"",), ("", 1.0), (b"", "a")):
        with pytest.raises(TypeError):
            reader.take(*arguments)  # type: ignore[arg-type]
