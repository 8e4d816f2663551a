"""What strangers may make a front hold: over the raw socket, whatever serves behind it."""

from __future__ import annotations

import itertools
import select
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from tests.helpers.fake_worker import Entry, FakeWorker, deltas
from tests.helpers.http_front import JSON, Front, Raw
from tests.helpers.patience import PATIENCE_S, Patience

from slipstream.http.config import Limits
from slipstream.http.endpoints.openapi import ENDPOINTS
from slipstream_ipc.messages import End

MIB = 2**20
LARGE = 16 * MIB - 1  # a body that is allowed where one belongs
HOST = "Host: localhost"
COMPLETIONS = "/v1/completions"
WITHOUT_BODY = ["/health", "/ready", "/metrics", "/version", "/live", "/openapi.json", "/"]
TOTAL = 8 * MIB  # of requests that are not complete, in `crowded`


@pytest.fixture(scope="module")
def plain(played: FakeWorker) -> Iterator[Front]:
    """A front with the limits that it has by itself."""
    running = Front(played.address)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def keyed(played: FakeWorker) -> Iterator[Front]:
    running = Front(played.address, api_keys=("right",))
    yield running
    running.stop()


@pytest.fixture
def crowded(worker: FakeWorker) -> Iterator[Front]:
    """A front that holds little."""
    running = Front(worker.address, limits=Limits(requests_bytes=TOTAL))
    yield running
    running.stop()


def head(method: str, path: str, *headers: str) -> str:
    return "\r\n".join([f"{method} {path} HTTP/1.1", HOST, *headers, "\r\n"])


def resident(front: Front) -> int:
    """Bytes of memory."""
    return int(psutil.Process(front.process.pid).memory_info().rss)


def send_all(raw: Raw, data: bytes) -> None:
    """Send until the front takes no more, has answered or has ended the connection."""
    raw.socket.settimeout(0)
    view = memoryview(data)
    while view:
        readable, writable, _ = select.select([raw.socket], [raw.socket], [], PATIENCE_S)
        if readable or not writable:
            break
        try:
            view = view[raw.socket.send(view) :]
        except (BlockingIOError, ConnectionError):
            break
    raw.socket.settimeout(PATIENCE_S)


def seen(front: Front) -> None:
    """The front has had turns since all that was sent before."""
    for _ in range(3):
        with Raw(front.port) as raw:
            raw.get("/version")


def wait_until_read(front: Front, raw: Raw) -> None:
    """The front has taken all that was sent from the kernel."""
    ends = [f"0100007F:{port:04X}" for port in (front.port, raw.socket.getsockname()[1])]
    patience = Patience()
    while True:
        for line in Path("/proc/net/tcp").read_text().splitlines():
            _, local, remote, _, queues, *_ = line.split()
            if [local, remote] == ends:
                break
        else:
            return  # it has ended the connection
        if queues.endswith(":00000000"):
            return
        patience.wait()
        seen(front)


def refused_of(many: list[Raw], least: int) -> list[Raw]:
    """Those that have an answer, once they are so many."""
    patience = Patience()
    while len(found := select.select([raw.socket for raw in many], [], [], 1.0)[0]) < least:
        patience.check(len(found))
    return [raw for raw in many if raw.socket in found]


# ---- bodies where none belongs -----------------------------------------------------------------


@pytest.mark.parametrize("path", WITHOUT_BODY)
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_a_large_body_is_refused_at_the_head_where_none_belongs(plain, method, path):
    with Raw(plain.port) as raw:
        raw.send(head(method, path, f"Content-Length: {LARGE}"))
        assert raw.read(with_body=method != "HEAD").status == 413
        assert raw.read_to_end() == b""


def test_so_is_one_that_does_not_say_how_large_it_is(plain):
    with Raw(plain.port) as raw:
        raw.send(head("GET", "/health", "Transfer-Encoding: chunked"))
        send_all(raw, b"1000\r\n" + 4096 * b"x" + b"\r\n1000\r\n" + 4096 * b"x" + b"\r\n")
        assert raw.read().status == 413


def test_a_small_body_where_none_belongs_is_ignored(plain):
    with Raw(plain.port) as raw:
        raw.send(head("GET", "/health", "Content-Length: 5") + "hello")
        assert raw.read().status == 200
        assert raw.get("/health").status == 200  # it was no part of the next request


@pytest.mark.parametrize("length", [f"Content-Length: {LARGE}", "Transfer-Encoding: chunked"])
def test_many_of_them_take_no_memory(plain, length):
    seen(plain)
    before = resident(plain)
    with ExitStack() as stack:
        for _ in range(20):
            raw = stack.enter_context(Raw(plain.port))
            raw.send(head("GET", "/metrics", length))
            body = 4 * MIB * b"x"
            send_all(raw, body if "Length" in length else b"400000\r\n" + body)
            wait_until_read(plain, raw)
        assert resident(plain) - before < 16 * MIB


# ---- keys --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [(each.method.upper(), path) for path, each in ENDPOINTS.items() if each.has_key],
)
def test_the_key_is_asked_for_before_the_body(keyed, method, path):
    path = path.replace("{id}", "x")
    for asked in {method, "POST", "GET"}:
        for given in ((), ("Authorization: Bearer wrong",), ("Expect: 100-continue",)):
            with Raw(keyed.port) as raw:
                raw.send(head(asked, path, JSON, f"Content-Length: {LARGE}", *given))
                answer = raw.read()
                if path.startswith("/v1/messages"):
                    assert answer.json["error"]["type"] == "authentication_error"
                else:
                    assert answer.error["code"] == "invalid_api_key"
                assert answer.status == 401


# ---- what all of them hold together ------------------------------------------------------------


def unfinished(raw: Raw, num_bytes: int) -> None:
    """Begin a completion's body and send so much of it."""
    raw.send(head("POST", COMPLETIONS, JSON, f"Content-Length: {LARGE}"))
    send_all(raw, b'{"prompt": "' + (num_bytes - 12) * b"x")


def test_bodies_that_do_not_end_are_given_up_before_they_fill_the_memory(crowded, worker):
    seen(crowded)
    before = resident(crowded)
    with ExitStack() as stack:
        many = [stack.enter_context(Raw(crowded.port)) for _ in range(40)]
        for raw in many:
            unfinished(raw, 4 * MIB)
        refused = refused_of(many, len(many) - TOTAL // (4 * MIB))
        assert resident(crowded) - before < 5 * TOTAL
        for raw in refused:
            answer = raw.read()
            assert (answer.status, answer.error["code"]) == (503, "overloaded")
            assert answer.headers["retry-after"]
        with Raw(crowded.port) as one:  # what needs little is served all the while
            one.post(COMPLETIONS, {"prompt": "x" * 100_000})
            handle = worker.expect_and_accept()
            worker.send(deltas(Entry(handle, "a", end=End("stop", 1))))
            assert one.read().status == 200


def test_a_body_has_room_again_when_others_have_gone(crowded, worker):
    for _ in range(3):
        with ExitStack() as stack:
            for _ in range(10):
                raw = stack.enter_context(Raw(crowded.port))
                unfinished(raw, MIB)
                wait_until_read(crowded, raw)
    with Raw(crowded.port) as raw:
        raw.post(COMPLETIONS, {"prompt": "x" * (7 * MIB)})
        handle = worker.expect_and_accept()
        worker.send(deltas(Entry(handle, "a", end=End("stop", 1))))
        assert raw.read().status == 200


def test_what_runs_holds_no_body(crowded, worker):
    """Else few large prompts would leave no room for others, for as long as they run."""
    with ExitStack() as stack:
        for _ in range(4):
            raw = stack.enter_context(Raw(crowded.port))
            raw.post(COMPLETIONS, {"prompt": "x" * (3 * MIB), "stream": True})
            handle = worker.expect_and_accept()
            worker.send(deltas(Entry(handle, "a")))
            assert raw.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 200 OK")


@pytest.mark.process
@pytest.mark.parametrize("piece", [b"2;\r\nxx\r\n", b"2\r\nxx\r\n"])
def test_a_body_of_tiny_chunks_takes_no_more_than_its_bytes(plain, piece):
    seen(plain)
    before = resident(plain)
    with ExitStack() as stack:
        for _ in range(3):
            raw = stack.enter_context(Raw(plain.port))
            raw.send(head("POST", COMPLETIONS, JSON, "Transfer-Encoding: chunked"))
            send_all(raw, 16 * MIB // len(piece) * piece)
            wait_until_read(plain, raw)
        assert resident(plain) - before < 64 * MIB


def test_a_head_of_very_many_headers_is_refused(plain):
    with Raw(plain.port) as raw:
        raw.send("GET /health HTTP/1.1\r\n" + "".join(f"a{n}:\r\n" for n in range(5000)))
        assert raw.read().status == 431


def test_heads_that_do_not_end_are_given_up_before_they_fill_the_memory(crowded):
    seen(crowded)
    before = resident(crowded)
    with ExitStack() as stack:
        many = [stack.enter_context(Raw(crowded.port)) for _ in range(400)]
        for raw in many:
            send_all(raw, b"GET /health HTTP/1.1\r\nX: " + 60_000 * b"x")
        refused_of(many, len(many) - TOTAL // 60_000)
        assert resident(crowded) - before < 5 * TOTAL


def test_who_pipelines_and_reads_no_answers_fills_no_memory(crowded):
    seen(crowded)
    before = resident(crowded)
    asks = head("GET", "/metrics").encode()
    with ExitStack() as stack:
        for _ in range(40):
            raw = stack.enter_context(Raw(crowded.port, receive_buffer=4096))
            raw.socket.settimeout(0)
            sent = 0
            while sent < MIB and select.select([], [raw.socket], [], 0.2)[1]:
                sent += raw.socket.send(asks * 1000)
        seen(crowded)
        assert resident(crowded) - before < 5 * TOTAL


def test_a_body_sent_behind_a_stream_is_left_unread(crowded, worker):
    """It waits for its turn where it is, and is answered then."""
    with Raw(crowded.port) as raw:
        raw.post(COMPLETIONS, {"prompt": "x", "stream": True})
        handle = worker.expect_and_accept()
        worker.send(deltas(Entry(handle, "a")))
        body = b'{"prompt": "' + 6 * MIB * b"x" + b'"}'
        raw.send(head("POST", COMPLETIONS, JSON, f"Content-Length: {len(body)}"))
        raw.socket.settimeout(0)
        sent = 0
        while select.select([], [raw.socket], [], 0.2)[1]:
            sent += raw.socket.send(body[sent:])
            assert sent < len(body), "the front has read all of it"
        raw.socket.settimeout(PATIENCE_S)
        worker.send(deltas(Entry(handle, "b", 1, end=End("stop", 2))))
        raw.send(body[sent:])
        assert raw.read().events[-1] == "[DONE]"
        handle = worker.expect_and_accept()
        worker.send(deltas(Entry(handle, "a", end=End("stop", 1))))
        assert raw.read().status == 200


HALVES = ["", "GET /health HT", head("POST", COMPLETIONS, "Content-Length: 9")]


@pytest.mark.parametrize("sent", HALVES)
def test_who_only_holds_connections_keeps_nobody_away(worker, sent):
    """The one that has asked for nothing for longest makes way; what runs does not."""
    front = Front(worker.address, limits=Limits(connections=4, linger_s=0.1))
    try:
        with ExitStack() as stack:
            running = stack.enter_context(Raw(front.port))
            running.post(COMPLETIONS, {"prompt": "x", "stream": True})
            handle = worker.expect_and_accept()
            worker.send(deltas(Entry(handle, "a")))
            assert running.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 200")
            holders = [stack.enter_context(Raw(front.port)) for _ in range(3)]
            for raw in holders:
                assert raw.get("/health").status == 200
                raw.send(sent)
            for raw in holders:
                late = stack.enter_context(Raw(front.port))
                assert late.get("/health").status == 200
                if sent:
                    assert raw.read().status == 503
                assert raw.read_to_end() == b""
            worker.send(deltas(Entry(handle, "b", 1, end=End("stop", 2))))
            assert [running.read_event()["choices"][0]["text"] for _ in "ab"] == ["a", "b"]
    finally:
        front.stop()


# ---- how long they may take --------------------------------------------------------------------


@pytest.mark.parametrize("said", ["", '{"prompt": '])
def test_a_body_of_which_nothing_more_comes_is_not_waited_for(worker, said):
    """However long a body may take of which something does."""
    limits = Limits(body_stall_s=0.1, body_s=1e6, header_s=1e6, idle_s=1e6, linger_s=0.1)
    front = Front(worker.address, limits=limits)
    try:
        with Raw(front.port) as raw:
            raw.send(head("POST", COMPLETIONS, JSON, "Content-Length: 100") + said)
            assert raw.read().status == 408
            assert raw.read_to_end() == b""
    finally:
        front.stop()


@pytest.mark.parametrize("length", ["Content-Length: 100000", "Transfer-Encoding: chunked"])
def test_a_body_that_comes_byte_by_byte_has_an_end(worker, length):
    front = Front(worker.address, limits=Limits(body_stall_s=1e6, body_s=0.5, linger_s=0.1))
    try:
        with Raw(front.port) as raw:
            raw.send(head("POST", COMPLETIONS, JSON, length))
            byte = "x" if "Length" in length else "1\r\nx\r\n"
            while not select.select([raw.socket], [], [], 0.05)[0]:
                raw.send(byte)
            assert raw.read().status == 408
    finally:
        front.stop()


# ---- what is meant -----------------------------------------------------------------------------

LAST = [
    head("GET", "/version", "Connection: close"),
    "GET /version HTTP/1.0\r\n\r\n",
    head("GET", "/version", "Connection: close, Upgrade", "Upgrade: h2c"),
    head("GET", "/version", "Content-Length: 2", "Connection: close") + "hi",
]
BEHIND = [head("GET", "/health"), "x", "\x16\x03\x01", "\r\n\r\nno HTTP at all", 100_000 * "x"]


@pytest.mark.parametrize(("last", "behind"), list(itertools.product(LAST, BEHIND)))
def test_what_follows_the_last_request_is_ignored_and_that_one_answered(plain, last, behind):
    with Raw(plain.port) as raw:
        send_all(raw, (last + behind).encode())
        answer = raw.read()
        assert (answer.status, set(answer.json)) == (200, {"version"})
        assert answer.headers["connection"] == "close"
        assert raw.read_to_end() == b""


@pytest.mark.parametrize("behind", ["\x16\x03\x01\r\n\r\n", "nonsense\r\n\r\n", "GET\r\n\r\n"])
def test_what_is_wrong_behind_a_request_is_not_that_ones_fault(plain, behind):
    with Raw(plain.port) as raw:
        raw.send(head("GET", "/version") + behind)
        assert raw.read().status == 200
        assert raw.read().status == 400
        assert raw.read_to_end() == b""


TWICE = [
    (HOST, HOST),
    (HOST, "host: evil.example"),
    ("Content-Length: 2", "Content-Length: 3"),
    ("Content-Length: 2", "Transfer-Encoding: chunked"),
]


@pytest.mark.parametrize("twice", TWICE)
@pytest.mark.parametrize(
    "wish", [(), ("Connection: upgrade",), ("Connection: Upgrade", "Upgrade: websocket")]
)
def test_what_may_be_said_once_is_refused_twice_whoever_wants_to_upgrade(plain, twice, wish):
    for order in (twice, twice[::-1]):
        for lines in ((*order, *wish), (*wish, *order), (order[0], *wish, order[1])):
            hosts = () if HOST in twice else (HOST,)
            with Raw(plain.port) as raw:
                start = f"POST {COMPLETIONS} HTTP/1.1"
                raw.send("\r\n".join([start, JSON, *hosts, *lines, "", "{}"]))
                assert raw.read().status == 400
