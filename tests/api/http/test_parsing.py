"""Requests out of bytes: however they are cut, and whatever is wrong with them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.http.config import Limits
from slipstream.http.errors import ApiError
from slipstream.http.parsing import Request, RequestParser

LIMITS = Limits(header_bytes=1000, body_bytes=100)
WITH_LENGTH = b"POST /a?b=c HTTP/1.1\r\nHost: x\r\nX-One: 1\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"POST /b HTTP/1.1\r\nHOST: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3;x=y\r\nhel\r\n2\r\nlo\r\n0\r\nTrailer: t\r\n\r\n"
)
CHUNKED_TOO = b"Transfer-Encoding: chunked\r\n\r\n"
OLD = b"GET /c HTTP/1.0\r\n\r\n"


def new_parser(refusal: ApiError | None = None) -> RequestParser:
    return RequestParser(LIMITS, lambda _: refusal)


def status(request: Request) -> int | None:
    return request.refusal.status if request.refusal is not None else None


@given(st.lists(st.integers(0, 200), max_size=12), st.booleans())
def test_requests_are_the_same_however_they_are_cut(cuts, byte_by_byte):
    data = WITH_LENGTH + CHUNKED + WITH_LENGTH
    at = range(1, len(data)) if byte_by_byte else sorted({min(cut, len(data)) for cut in cuts})
    edges = [0, *at, len(data)]
    parser = new_parser()
    requests = [
        request for begin, end in pairwise(edges) for request in parser.feed(data[begin:end])
    ]
    assert [(each.method, each.path, each.body) for each in requests] == [
        ("POST", "/a", b"hello"),
        ("POST", "/b", b"hello"),
        ("POST", "/a", b"hello"),
    ]
    assert requests[0].headers[b"x-one"] == b"1"
    assert b"trailer" not in requests[1].headers
    assert all(each.keep_alive and each.refusal is None for each in requests)
    assert parser.phase == "idle"


def test_old_requests_end_the_connection_unless_they_say_otherwise():
    (plain,) = new_parser().feed(OLD)
    assert (plain.version, plain.keep_alive) == ("1.0", False)
    (kept,) = new_parser().feed(OLD.replace(b"\r\n\r\n", b"\r\nConnection: keep-alive\r\n\r\n"))
    assert kept.keep_alive
    (closing,) = new_parser().feed(WITH_LENGTH.replace(b"X-One: 1", b"Connection: close"))
    assert not closing.keep_alive


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),  # TLS
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET / HTTP/1.1\r\nHost: x\r\nhost: y\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % 2**64, 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % 2**62, 413),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: x, y\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: a\0b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n", 400),
        (b"GET /a\0b HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505),
        (b"GET / HTTP/1.1\r\nHost: x\r\nExpect: miracles\r\n\r\n", 417),
        (b"GET http:// HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 101\r\n\r\n", 413),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n65\r\n" + b"x" * 101,
            413,
        ),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n" + CHUNKED_TOO, 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 1000, 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 1000 + b"\r\n\r\n", 431),
        (b"GET /" + b"x" * 1000, 431),
        (b"GET /" + b"x" * 1000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
    ],
)
def test_what_is_wrong_is_refused_once_and_nothing_is_read_behind_it(data, expected):
    parser = new_parser()
    refused = parser.feed(WITH_LENGTH + data)[1:]
    assert [status(each) for each in refused] == [expected]
    assert not refused[0].keep_alive
    assert parser.phase == "over"
    assert parser.feed(WITH_LENGTH) == []


@pytest.mark.parametrize("first", [WITH_LENGTH, CHUNKED, OLD.replace(b"1.0", b"1.1\r\nHost: x")])
@pytest.mark.parametrize("cut", [1, 3, 5, 20, 31])
def test_what_came_before_a_request_does_not_count_as_its_own(first, cut):
    second = b"GET /c HTTP/1.1\r\nHost: x\r\nX: 1\r\n\r\n"
    parser = new_parser()
    num = LIMITS.header_bytes // len(first) + 1
    before = parser.feed(first * num + second[:cut])
    assert [status(each) for each in before] == [None] * num
    (request,) = parser.feed(second[cut:])
    assert (request.path, status(request)) == ("/c", None)


def test_nor_does_it_as_a_bodys():
    head, _, body = CHUNKED.partition(b"3;")
    parser = new_parser()
    num = 2 * (LIMITS.header_bytes + LIMITS.body_bytes) // len(WITH_LENGTH)
    before = parser.feed(WITH_LENGTH * num + head + b"3;")
    assert [status(each) for each in before] == [None] * num
    (request,) = parser.feed(body)
    assert (request.body, status(request)) == (b"hello", None)


@given(st.integers(1, 40), st.integers(0, 30))
def test_a_head_without_an_end_is_refused_wherever_it_begins(size, num_before):
    parser = new_parser()
    head = b"GET /c HTTP/1.1\r\nReferer: /c\r\nX: "
    parser.feed(WITH_LENGTH * num_before + head)
    sent = len(head)
    requests: list[Request] = []
    while not requests:
        requests = parser.feed(b"x" * size)
        sent += size
    assert status(requests[0]) == 431
    assert LIMITS.header_bytes < sent <= LIMITS.header_bytes + len(head) + size


def test_chunks_of_a_byte_each_have_an_end():
    parser = new_parser()
    parser.feed(CHUNKED.partition(b"3;")[0])
    requests = []
    while not requests:
        requests = parser.feed(b"1;" + b"x" * 50 + b"\r\nx\r\n")
    assert status(requests[0]) == 413


def test_a_head_that_is_refused_needs_no_body():
    parser = new_parser(ApiError(401, "no"))
    (request,) = parser.feed(WITH_LENGTH[:-5])
    assert status(request) == 401
    assert request.path == "/a"


def test_who_asks_first_whether_to_go_on_is_told():
    parser = new_parser()
    assert parser.feed(WITH_LENGTH[:-5].replace(b"X-One: 1", b"Expect: 100-continue")) == []
    assert parser.wants_continue
    (request,) = parser.feed(b"hello")
    assert request.body == b"hello"
    assert not parser.wants_continue


def test_upgrades_are_ignored():
    wants = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: x"
    data = WITH_LENGTH.replace(b"X-One: 1", wants)
    requests = new_parser().feed(data + data + OLD.replace(b"1.0", b"1.1\r\nHost: x"))
    assert [each.path for each in requests] == ["/a", "/a", "/c"]
    assert requests[1].body == b"hello"


def test_what_does_not_come_is_refused():
    parser = new_parser()
    parser.feed(WITH_LENGTH[:30])
    (request,) = parser.refuse(ApiError(408, "late"))
    assert status(request) == 408


@given(st.binary(max_size=300))
def test_no_bytes_break_it(data):
    parser = new_parser()
    for request in parser.feed(data) + parser.feed(data):
        assert isinstance(request, Request)
