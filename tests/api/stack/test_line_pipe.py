"""Lines to a reader who takes its time, or is gone."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from slipstream.stack.children.line_pipe import LineReader, LineWriter

LONG = b"x" * 100_000  # more than a pipe holds


@pytest.fixture
def ends() -> Iterator[tuple[LineReader, LineWriter]]:
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    reader, writer = LineReader(read_fd), LineWriter(write_fd)
    yield reader, writer
    reader.close()
    writer.close()


def test_what_finds_no_room_follows_in_order(ends: tuple[LineReader, LineWriter]) -> None:
    reader, writer = ends
    writer.write(LONG)
    writer.write(b"second")
    found = reader.read()
    writer.write(b"third")
    assert [*found, *reader.read()] == [LONG, b"second", b"third"]


def test_what_is_offered_is_for_who_has_read_all_before(
    ends: tuple[LineReader, LineWriter],
) -> None:
    reader, writer = ends
    writer.offer(b"one")
    writer.offer(b"dropped")
    assert reader.read() == [b"one"]
    writer.offer(b"two")
    assert reader.read() == [b"two"]


def test_nobody_reads_any_more(ends: tuple[LineReader, LineWriter]) -> None:
    reader, writer = ends
    reader.close()
    writer.write(b"to nobody")
    writer.offer(b"to nobody")
