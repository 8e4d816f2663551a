"""The calls of a local connection, in Python and in C: the same bytes, messages and errors."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.oracles import local_io

from slipstream_ipc import _native
from slipstream_ipc.transport.local_socket import CHUNK_BYTES, PREFIX_BYTES

SendMessage = Callable[[int, bytes], int]
ReadMessages = Callable[[int, Callable[[bytes], object], int], bytes | None]
BOTH = [(each.send_message, each.read_messages) for each in (local_io, _native)]
both = pytest.mark.parametrize(("send", "read"), BOTH, ids=["python", "c"])
MAX_BYTES = 2**20
Ends = tuple[socket.socket, socket.socket]


def pair() -> Ends:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in ends:
        end.setblocking(False)
    return ends


@pytest.fixture
def ends() -> Iterator[Ends]:
    left, right = pair()
    with left, right:
        yield left, right


def framed(messages: list[bytes]) -> bytes:
    return b"".join(len(one).to_bytes(PREFIX_BYTES, "little") + one for one in messages)


@given(
    st.lists(st.binary(max_size=300), max_size=8),
    st.binary(max_size=9),
    st.sampled_from([0, 1, 200, MAX_BYTES]),
)
def test_both_read_the_same_from_any_bytes(
    messages: list[bytes], rest: bytes, max_bytes: int
) -> None:
    stream, results = framed(messages) + rest, []
    for _, read in BOTH:
        left, right = pair()
        with left, right:
            left.sendall(stream)
            got: list[bytes] = []
            results.append((read(right.fileno(), got.append, max_bytes), got))
    assert results[0] == results[1]
    assert all(len(one) <= max_bytes for one in results[0][1])
    assert framed(results[0][1]) + (results[0][0] or b"") == stream


@given(st.lists(st.integers(0, 2 * CHUNK_BYTES), max_size=5))
def test_both_send_the_same(sizes: list[int]) -> None:
    results = []
    for send, _ in BOTH:
        left, right = pair()
        with left, right:
            messages = [bytes([number]) * size for number, size in enumerate(sizes)]
            nums = [send(left.fileno(), message) for message in messages]
            left.close()
            right.setblocking(True)
            with right.makefile("rb") as arrived:
                results.append((nums, arrived.read()))
    assert results[0] == results[1]
    assert results[0][1] == framed([bytes([n]) * size for n, size in enumerate(sizes)])


@both
def test_a_full_kernel_takes_a_part_and_then_nothing(
    ends: Ends, send: SendMessage, read: ReadMessages
) -> None:
    left, _ = ends
    message = bytes(2**20)
    taken = send(left.fileno(), message)
    assert 0 < taken < len(message)
    while send(left.fileno(), message):
        pass
    assert send(left.fileno(), b"small") == 0


@both
def test_nothing_there_is_no_end(ends: Ends, send: SendMessage, read: ReadMessages) -> None:
    left, right = ends
    assert read(right.fileno(), list[bytes]().append, MAX_BYTES) == b""
    assert send(left.fileno(), b"last") == 4 + PREFIX_BYTES
    left.close()
    got: list[bytes] = []
    assert read(right.fileno(), got.append, MAX_BYTES) == b""
    assert got == [b"last"]
    assert read(right.fileno(), got.append, MAX_BYTES) is None


@both
def test_a_peer_that_is_gone_is_an_error_to_send_to(
    ends: Ends, send: SendMessage, read: ReadMessages
) -> None:
    left, right = ends
    right.close()
    with pytest.raises(BrokenPipeError):
        send(left.fileno(), b"lost")


@both
@pytest.mark.parametrize("fd", [-1, 2**31, -(2**70)])
def test_what_is_no_descriptor_is_an_error(fd: int, send: SendMessage, read: ReadMessages) -> None:
    with pytest.raises((OSError, OverflowError)):
        send(fd, b"")
    with contextlib.suppress(OverflowError):
        assert read(fd, list[bytes]().append, MAX_BYTES) is None


@both
def test_a_chunk_at_a_time(ends: Ends, send: SendMessage, read: ReadMessages) -> None:
    left, right = ends
    messages = [os.urandom(CHUNK_BYTES // 4) for _ in range(6)]
    for message in messages:
        send(left.fileno(), message)
    got: list[bytes] = []
    rest = read(right.fileno(), got.append, MAX_BYTES)
    assert rest
    assert framed(got) + rest == framed(messages)[:CHUNK_BYTES]


@both
def test_an_exception_of_append_is_passed_on(
    ends: Ends, send: SendMessage, read: ReadMessages
) -> None:
    left, right = ends
    send(left.fileno(), b"one")

    def refuse(_message: bytes) -> None:
        raise KeyError("no")

    with pytest.raises(KeyError):
        read(right.fileno(), refuse, MAX_BYTES)
