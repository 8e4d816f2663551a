"""Answers of HTTP/1.1, as http.client reads them, wherever their bytes are cut."""

from __future__ import annotations

import io
from http.client import HTTPResponse
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream_bench.common.load.response_parser import MalformedResponseError, ResponseParser


class Reader:
    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.num_ends = 0

    def on_head(self, status: int) -> None:
        self.status = status

    def on_body(self, piece: bytes) -> None:
        assert piece
        assert not self.num_ends
        self.body += piece

    def on_end(self) -> None:
        self.num_ends += 1


class Played:
    """A socket that http.client reads."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._answer)


def _chunked(pieces: list[bytes], extension: bytes, trailer: bytes) -> bytes:
    chunks = [b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces if piece]
    return b"".join(chunks) + b"0\r\n" + trailer + b"\r\n"


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    """An answer whose end is in it."""
    status = draw(st.sampled_from((200, 204, 304, 404, 503)))
    pieces = draw(st.lists(st.binary(max_size=40), max_size=5))
    before = draw(st.sampled_from((b"", b"HTTP/1.1 100 Continue\r\n\r\n")))
    head = b"HTTP/1.%d %d Any Reason\r\nX-Other:  a: b \r\n" % (draw(st.integers(0, 1)), status)
    head += draw(st.sampled_from((b"", b"Connection: close\r\n", b"connection: Keep-Alive\r\n")))
    if status in (204, 304):
        return before + head + b"\r\n"
    if draw(st.booleans()):
        extension = draw(st.sampled_from((b"", b";a=b", b" ; c")))
        trailer = draw(st.sampled_from((b"", b"X-Sum: 1\r\n")))
        body = _chunked(pieces, extension, trailer)
        return before + head + b"Transfer-Encoding: chunked\r\n\r\n" + body
    body = b"".join(pieces)
    return before + head + b"CONTENT-LENGTH: %d\r\n\r\n" % len(body) + body


def _cut(data: bytes, places: list[int]) -> list[bytes]:
    at = [0, *sorted({min(place, len(data)) for place in places}), len(data)]
    return [data[begin:end] for begin, end in pairwise(at) if begin < end]


@given(answers(), st.lists(st.integers(0, 400), max_size=30))
def test_answers_are_those_of_http_client_however_they_are_cut(answer, places):
    theirs = HTTPResponse(Played(answer))
    theirs.begin()
    body = theirs.read()
    reader = Reader()
    parser = ResponseParser(reader)
    for _ in range(2):  # the second on the connection of the first
        reader.__init__()
        parser.begin()
        for piece in _cut(answer, places):
            assert not reader.num_ends
            parser.feed(piece)
        assert (reader.status, reader.body, reader.num_ends) == (theirs.status, body, 1)
    assert not parser.end()
    if b"HTTP/1.0 " not in answer:  # http.client would ask for a header of HTTP/1.0, too
        assert parser.keeps_alive != theirs.will_close


@given(st.binary(min_size=1, max_size=60), st.lists(st.integers(0, 200), max_size=9))
def test_an_answer_of_no_length_ends_with_the_connection(body, places):
    reader = Reader()
    parser = ResponseParser(reader)
    for piece in _cut(b"HTTP/1.1 200 OK\r\n\r\n" + body, places):
        parser.feed(piece)
    assert (reader.body, reader.num_ends, parser.keeps_alive) == (body, 0, False)
    assert parser.end()
    assert reader.num_ends == 1


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"SSH-2.0-x\r\n", "begins with b'S"),
        (b"HTTP/2 200\r\n\r\n", "begins with b'HTTP/2"),
        (b"HTTP/1.1 999 No\r\n\r\n", "begins with"),
        (OK + b"no header\r\n\r\n", "a header"),
        (OK + b" folded: x\r\n\r\n", "a header"),
        (OK + b"Content-Length: -1\r\n\r\n", "content-length"),
        (OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", "content-length: b'1, 2'"),
        (OK + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", "or a length too"),
        (OK + b"Transfer-Encoding: gzip\r\n\r\n", "transfer-encoding: b'gzip'"),
        (CHUNKED + b"-1\r\n", "a chunk's size: b'-1'"),
        (CHUNKED + b"0x1\r\n", "a chunk's size"),
        (CHUNKED + b"1\r\nab\r\n", "behind a chunk: b'b"),
        (CHUNKED + b"1" * 5000, "a line of more than"),
        (OK + b"x: " + b"y" * 2**17, "a head of more than"),
        (CHUNKED + b"0\r\n\r\nHTTP/1.1", "behind an answer: b'H"),
    ],
)
@pytest.mark.parametrize("size", [1, 10**9])
def test_what_is_not_http_is_refused(sent, said, size):
    parser = ResponseParser(Reader())

    def feed() -> None:
        for at in range(0, len(sent), size):
            parser.feed(sent[at : at + size])

    with pytest.raises(MalformedResponseError, match=said):
        feed()


@pytest.mark.parametrize("sent", [b"", b"HTTP", OK, CHUNKED, CHUNKED + b"1\r\na\r\n0\r\n"])
def test_an_answer_that_is_cut_short_has_no_end(sent):
    reader = Reader()
    parser = ResponseParser(reader)
    parser.feed(sent)
    assert not parser.end()
    assert not reader.num_ends
