"""Pages of other origins: what a browser is told, and that by default it is told nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.helpers.fake_worker import Entry, FakeWorker, deltas
from tests.helpers.http_front import Front, Raw

from slipstream.errors import BadRequestError
from slipstream.http.exchange import HttpRequest
from slipstream.http.server.cors import Cors
from slipstream.stack.plan.front_plan import allowed_origins
from slipstream.stack.settings import settings_from
from slipstream_ipc.messages import End

PAGE = "https://app.example:8443"
ASKS = {"prompt": "hi", "max_tokens": 5}
PREFLIGHT = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization")


def request(method: str = "GET", **headers: str) -> HttpRequest:
    found = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return HttpRequest(method, "/v1/models", headers=found)


def test_nothing_is_said_by_default():
    cors = Cors(())
    assert cors.headers(request(origin=PAGE)) == ()
    asks = request("OPTIONS", origin=PAGE, access_control_request_method="POST")
    assert not cors.is_preflight(asks)


def test_an_origin_is_named_to_itself_alone():
    cors = Cors((PAGE, "http://localhost:3000"))
    allowed = dict(cors.headers(request(origin=PAGE)))
    assert allowed[b"access-control-allow-origin"] == PAGE.encode()
    assert allowed[b"vary"] == b"Origin"
    for other in ("https://app.example", "https://evil.example", "null", PAGE.upper(), PAGE + "/"):
        assert cors.headers(request(origin=other)) == ((b"vary", b"Origin"),)
    assert cors.headers(request()) == ((b"vary", b"Origin"),)


@pytest.mark.parametrize("origins", [("*",), (PAGE,), ("*", PAGE)])
def test_no_answer_allows_credentials(origins):
    cors = Cors(origins)
    asks = request(origin=PAGE)
    said = (*cors.headers(asks), *cors.preflight(asks, b"POST").headers)
    assert b"access-control-allow-credentials" not in dict(said)


def headers_allowed(cors: Cors, asked: str, origin: str = PAGE) -> list[str]:
    asks = request("OPTIONS", origin=origin, access_control_request_headers=asked)
    said = dict(cors.preflight(asks, b"POST").headers)
    assert said[b"vary"] == b"Access-Control-Request-Headers"
    return [name.strip() for name in said[b"access-control-allow-headers"].decode().split(",")]


@pytest.mark.parametrize("origins", [("*",), (PAGE,)])
def test_an_allowed_page_may_send_the_headers_it_asks_for(origins):
    cors = Cors(origins)
    for asked in ("x-stainless-lang", "authorization,content-type, x-stainless-retry-count", "*"):
        assert headers_allowed(cors, asked) == [name.strip() for name in asked.split(",")]


def test_what_is_no_list_of_names_or_from_elsewhere_is_told_those_that_mean_something():
    cors, usual = Cors((PAGE,)), headers_allowed(Cors((PAGE,)), "")
    assert "authorization" in usual
    for wrong in ("a b", "x:y", "a,,b", ",a", "a\r\nb: c", "a" * 4097):
        assert headers_allowed(cors, wrong) == usual
    assert headers_allowed(cors, "x-own", "https://evil.example") == usual


def test_an_origin_is_a_scheme_and_a_host():
    given = settings_from({"allowed_origins": [PAGE, "*", "http://[::1]:80"]})
    assert allowed_origins(given) == (PAGE, "*", "http://[::1]:80")
    assert allowed_origins(settings_from({"allowed_origins": PAGE})) == (PAGE,)
    for wrong in ("app.example", "https://a.example/", "https://a.example/x", "ftp://a", "a\r\nb"):
        with pytest.raises(BadRequestError, match="allowed_origins: got"):
            allowed_origins(settings_from({"allowed_origins": wrong}))


@pytest.fixture
def open_front(worker: FakeWorker) -> Iterator[Front]:
    front = Front(worker.address, api_keys=("key",), allowed_origins=(PAGE,))
    yield front
    front.stop()


def preflight(raw: Raw, path: str, origin: str = PAGE) -> dict[str, str]:
    raw.send("\r\n".join([f"OPTIONS {path} HTTP/1.1", "Host: localhost", f"Origin: {origin}", ""]))
    raw.send("\r\n".join([*PREFLIGHT, "\r\n"]))
    answer = raw.read(with_body=False)
    assert answer.status == 204
    assert "content-length" not in answer.headers
    return answer.headers


def test_a_page_asks_beforehand_without_a_key(open_front):
    with Raw(open_front.port) as raw:
        for path in ("/v1/completions", "/generate", "/v1/models/x"):
            said = preflight(raw, path)
            assert said["access-control-allow-origin"] == PAGE
            assert "authorization" in said["access-control-allow-headers"]
            assert "OPTIONS" in said["access-control-allow-methods"]
        assert "POST" in preflight(raw, "/abort")["access-control-allow-methods"]
        said = preflight(raw, "/v1/completions", "https://evil.example")
        assert "access-control-allow-origin" not in said


def test_an_allowed_page_may_read_every_answer(open_front, worker):
    key, page = "Authorization: Bearer key", f"Origin: {PAGE}"
    with Raw(open_front.port) as raw:
        models = raw.get("/v1/models", page, key)
        assert models.headers["access-control-allow-origin"] == PAGE
        raw.post("/v1/completions", {**ASKS, "stream": True}, page, key)
        handle = worker.expect_and_accept()
        worker.send(deltas(Entry(handle, "a", end=End("stop", 1))))
        streamed = raw.read()
        assert streamed.headers["access-control-allow-origin"] == PAGE
        assert streamed.headers["vary"] == "Origin"
        raw.post("/v1/completions", {"prompt": 1}, page, key)
        refused = raw.read()
        assert (refused.status, refused.headers["access-control-allow-origin"]) == (400, PAGE)
        no_key = raw.get("/v1/models", page)
        assert (no_key.status, no_key.headers["access-control-allow-origin"]) == (401, PAGE)


def test_other_pages_may_read_none(open_front):
    with Raw(open_front.port) as raw:
        answer = raw.get("/health", "Origin: https://evil.example")
        assert answer.status == 200
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_front_that_was_not_asked_to_says_nothing(raw):
    answer = raw.get("/v1/models", f"Origin: {PAGE}")
    assert answer.status == 200
    assert not {"vary", "access-control-allow-origin"} & set(answer.headers)
    raw.send(f"OPTIONS /v1/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: {PAGE}\r\n")
    raw.send("\r\n".join([*PREFLIGHT, "\r\n"]))
    asked = raw.read(with_body=False)
    assert (asked.status, asked.headers["allow"]) == (204, "POST, OPTIONS")
    assert not [name for name in asked.headers if name.startswith("access-control")]
