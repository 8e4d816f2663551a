"""What a child says, whatever that is."""

from __future__ import annotations

import os

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.stack.children.child_status import status_of
from slipstream.stack.children.line_pipe import READ_BYTES, LineReader
from slipstream_ipc.messages import OwnProcess, Status
from slipstream_ipc.telemetry.spans import Spans
from slipstream_ipc.telemetry.statistics import (
    BOUNDS_S,
    CoreCounters,
    CoreGauges,
    CoreNumbers,
    FrontCounters,
    FrontNumbers,
    Histogram,
    WorkerCounters,
    WorkerNumbers,
)

FULL = Histogram((1,) * (len(BOUNDS_S) + 1), 2.5)
GOOD = Status(
    beat=True,
    detail="at your service",
    numbers=CoreNumbers(
        CoreGauges(num_running=3),
        CoreCounters(num_steps=7, device_idle_s=0.5, step_s=FULL),
        Spans(5, b"0123", b"0123", b"4567"),
    ),
)
OTHERS = (
    Status(ready=True),
    Status(beat=True, processes={"tokenizer": OwnProcess("silent", 7)}),
    Status(beat=True, processes={f"rank-{n}": OwnProcess("ready", n) for n in range(1, 64)}),
    Status(beat=True, numbers=WorkerNumbers(counters=WorkerCounters(finished={"stop": 2}))),
    Status(beat=True, numbers=FrontNumbers(counters=FrontCounters({"200 /x": 1}))),
)


def test_what_is_right_is_taken_as_it_is() -> None:
    for status in (GOOD, *OTHERS):
        assert status_of(msgspec.json.encode(status)) == (status, "")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"device_idle_s":0.5', b'"device_idle_s":null'),  # what msgspec makes of a NaN
        (b'"device_idle_s":0.5', b'"device_idle_s":NaN'),
        (b'"device_idle_s":0.5', b'"device_idle_s":-0.001'),  # a clock that went back
        (b'"device_idle_s":0.5', b'"device_idle_s":1e999'),
        (b'"device_idle_s":0.5', b'"device_idle_s":1e300'),
        (b'"num_steps":7', b'"num_steps":-1'),
        (b'"num_steps":7', b'"num_steps":%d' % 2**63),
        (b'"num_steps":7', b'"num_steps":7.5'),
        (b"[1,1,", b"["),  # a histogram of fewer buckets
        (b'"core"', b'"nobody"'),
        (b'"begins":"MDEyMw=="', b'"begins":"MDEy"'),  # three bytes
        (b'"ends":"MDEyMw=="', b'"ends":"MDE="'),  # fewer ends than begins
    ],
)
def test_a_number_that_cannot_be_costs_the_numbers_alone(before: bytes, after: bytes) -> None:
    line = msgspec.json.encode(GOOD)
    assert line.count(before) == 1
    status, why = status_of(line.replace(before, after))
    if b"NaN" in after:  # is no JSON at all
        assert status is None
    else:
        assert status == msgspec.structs.replace(GOOD, numbers=None)
    assert why


@pytest.mark.parametrize(
    "line",
    [b"", b"x", b"{", b"[]", b"null", b'"beat"', b'{"beat":1}', b"\xff", b"[" * 100_000, b"{}x"],
)
def test_what_is_no_status_is_nothing(line: bytes) -> None:
    status, why = status_of(line)
    assert status is None
    assert 0 < len(why) < 400


@given(
    st.sampled_from((GOOD, *OTHERS)),
    st.lists(st.tuples(st.integers(0, 2000), st.binary(max_size=4)), min_size=1, max_size=4),
)
def test_whatever_becomes_of_a_line_raises_nothing(
    status: Status, changes: list[tuple[int, bytes]]
) -> None:
    line = bytearray(msgspec.json.encode(status))
    for at, what in changes:
        line[at : at + len(what)] = what
    found, why = status_of(bytes(line))
    assert found is not None or why
    if found is not None:
        msgspec.json.decode(msgspec.json.encode(found), type=Status)  # it can be told on


class Pipe:
    """Lines that somebody writes."""

    def __init__(self) -> None:
        read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.write_fd, False)
        self.reader = LineReader(read_fd)

    def write(self, data: bytes) -> list[bytes]:
        """All of it, and what is read meanwhile."""
        lines = []
        while data:
            data = data[os.write(self.write_fd, data[:50_000]) :]
            lines += self.reader.read()
        return lines

    def close(self) -> None:
        os.close(self.write_fd)
        assert self.reader.read() == []
        assert self.reader.has_ended()
        self.reader.close()


def test_lines_in_pieces() -> None:
    pipe = Pipe()
    assert pipe.write(b"one\ntw") == [b"one"]
    assert pipe.write(b"") == []
    assert pipe.write(b"o\n\nthree\n") == [b"two", b"", b"three"]
    pipe.close()


def test_of_a_line_without_an_end_nothing_is_kept() -> None:
    pipe = Pipe()
    assert pipe.write(b"one\n" + b"x" * (3 * READ_BYTES)) == [b"one"]
    assert len(pipe.reader._rest) <= READ_BYTES
    assert pipe.write(b"y\ntwo\n") == [b"two"]
    assert pipe.write(b"z" * READ_BYTES + b"\n") == [b"z" * READ_BYTES]
    pipe.close()


def test_a_writer_without_end_keeps_nobody_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Pipe()
    read = 0

    def without_end(_fd: int, num: int) -> bytes:
        nonlocal read
        read += num
        assert read <= 4 * READ_BYTES, "reads for ever"
        return b"x\n" * (num // 2)

    with monkeypatch.context() as patched:
        patched.setattr(os, "read", without_end)
        assert len(pipe.reader.read()) == READ_BYTES // 2
    pipe.close()
