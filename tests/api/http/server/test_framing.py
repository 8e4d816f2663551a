"""Requests out of bytes, over the socket: however they are cut, and whatever is wrong with them."""

from __future__ import annotations

import pytest
from aiohttp import web
from tests.helpers.fake_worker import Entry, deltas
from tests.helpers.http_front import JSON, Raw

from slipstream.http.server.connection import Connection
from slipstream_ipc.messages import End

POST = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n{JSON}\r\n"
BAD_JSON = POST + "Content-Length: 1\r\n\r\n{"
CHUNKED = POST + "Transfer-Encoding: chunked\r\n\r\n"
GET = "GET /version HTTP/1.1\r\nHost: localhost\r\n"
OLD = "GET /version HTTP/1.0\r\n\r\n"

WRONG = [
    ("nonsense\r\n\r\n", 400),
    ("\x16\x03\x01\x02\x00\x01\x00", 400),  # TLS
    ("GET /version HTTP/1.1\r\n\r\n", 400),  # no Host
    ("GET /version HTTP/1.1\r\nHost: localhost\r\nhost: y\r\n\r\n", 400),
    ("GET /version HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
    (POST + "Content-Length: -1\r\n\r\n", 400),
    (POST + f"Content-Length: {2**64}\r\n\r\n", 400),
    (POST + f"Content-Length: {2**62}\r\n\r\n", 413),
    (POST + "Content-Length: 3\r\nContent-Length: 4\r\n\r\n", 400),
    (POST + "Transfer-Encoding: x, y\r\n\r\n", 400),
    (POST + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    (GET + "X: a\0b\r\n\r\n", 400),
    ("GET /version HTTP/1.1\r\n folded\r\nHost: localhost\r\n\r\n", 400),
    (GET + " folded\r\n\r\n", 400),
    ("GET /a\0b HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    ("BREW / HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    ("GET / HTTP/2.0\r\nHost: localhost\r\n\r\n", 505),
    ("GET / HTTP/9.9\r\nHost: localhost\r\n\r\n", 400),
    (GET + "Expect: miracles\r\n\r\n", 417),
    ("GET http:// HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    ("OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    ("CONNECT localhost:1 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    (GET + "Content-Length: x\r\n\r\n", 400),
    ("GET /version HTTP/1.1\r\nHost : localhost\r\n\r\n", 400),
    (POST + "Content-Length: 100001\r\n\r\n", 413),
    (CHUNKED + "186a1\r\n" + "x" * 100_001, 413),
    (CHUNKED + "no size\r\n", 400),
    (CHUNKED + "2\r\nxxx\r\n", 400),
    (GET + "X: " + "x" * 9000, 431),
    (GET + "X: " + "x" * 9000 + "\r\n\r\n", 431),
    ("GET /" + "x" * 9000, 431),
    ("GET /" + "x" * 9000 + " HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
    (GET + "".join(f"a{n}: x\r\n" for n in range(200)), 431),
    (GET + "".join(f"a{n}: {90 * 'x'}\r\n" for n in range(100)), 431),
]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(("data", "status"), WRONG)
def test_what_is_wrong_is_refused_once_and_nothing_is_read_behind_it(front, data, status, is_first):
    with Raw(front.port) as raw:
        raw.send((b"" if is_first else (GET + "\r\n").encode()) + data.encode("latin-1"))
        if not is_first:
            assert raw.read().status == 200
        answer = raw.read()
        assert (answer.status, answer.version) == (status, "HTTP/1.1")
        assert answer.error["type"] == "invalid_request_error" or status == 505
        assert answer.error["code"] == "request_too_large" or status != 413
        assert answer.headers["connection"] == "close"
        assert answer.headers["x-request-id"]
        assert raw.read_to_end() == b""


def test_a_body_that_is_mostly_extensions_of_chunks_is_too_large(front):
    with Raw(front.port) as raw:
        raw.send(POST + "Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n")
        assert raw.read().status == 100
        raw.send(f"1;{900 * 'x'}\r\nx\r\n" * 1000)
        answer = raw.read()
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("data", [BAD_JSON, CHUNKED + "1;x=y\r\n{\r\n0\r\nTrailer: t\r\n\r\n"])
@pytest.mark.parametrize("size", [1, 7, 60, 10_000])
def test_requests_are_the_same_however_they_are_cut(front, data, size):
    whole = data + GET + "\r\n" + data + GET + "\r\n"
    with Raw(front.port) as raw:
        for begin in range(0, len(whole), size):
            raw.send(whole[begin : begin + size])
        for status in (400, 200) * 2:
            answer = raw.read()
            assert answer.status == status
            if status == 400:
                assert "JSON" in answer.error["message"]


@pytest.mark.parametrize("wish", ["h2c", "websocket", "tcp"])
def test_nothing_is_upgraded_and_the_answer_says_that_it_is_the_last(front, wish):
    """aiohttp loses what follows the body of such a request in the same piece."""
    upgrade = f"Connection: Upgrade\r\nUpgrade: {wish}\r\n"
    with Raw(front.port) as raw:
        raw.send(
            POST + upgrade + "Content-Length: 1\r\n\r\n{" + GET + upgrade + "\r\n" + GET + "\r\n"
        )
        answer = raw.read()
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert raw.read_to_end() == b""
    with Raw(front.port) as raw:
        raw.send(GET + upgrade + "\r\n")
        assert raw.read().status == 200


def test_old_requests_end_the_connection_unless_they_say_otherwise(front):
    with Raw(front.port) as raw:
        raw.send(OLD.replace("\r\n\r\n", "\r\nConnection: keep-alive\r\n\r\n") + OLD + OLD)
        assert [raw.read().headers["connection"] for _ in "ab"] == ["keep-alive", "close"]
        assert raw.read_to_end() == b""


def test_a_target_may_name_the_server(raw):
    raw.send("GET http://localhost/version?x=y HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert raw.read().status == 200


def test_a_head_without_an_end_behind_a_running_stream_is_refused_after_it(played, front):
    with Raw(front.port) as raw:
        raw.post("/v1/completions", {"prompt": "x", "stream": True})
        handle = played.expect_and_accept()
        played.send(deltas(Entry(handle, "a")))
        raw.send("GET /version HTTP/1.1\r\nX: " + 20_000 * "x")
        with Raw(front.port) as other:
            assert other.get("/version").status == 200
        played.send(deltas(Entry(handle, "b", 1, end=End("stop", 2))))
        assert raw.read().events[-1] == "[DONE]"
        assert raw.read().status == 431
        assert raw.read_to_end() == b""


def test_nothing_of_aiohttps_is_replaced_by_accident():
    """Its connections keep their state under short names, too."""
    ours = {name for name in vars(Connection) if not name.startswith("__")}
    names = {each for base in web.RequestHandler.__mro__ for each in vars(base)}
    meant = {"connection_made", "connection_lost", "data_received", "eof_received"}
    meant |= {"pause_writing", "resume_writing", "handle_error", "finish_response"}
    assert ours & names == meant
