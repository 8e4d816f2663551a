"""Requests over HTTP that ask for much or for nothing; `slipstream bench fuzz --http` is longer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.cli.main import main
from slipstream_verify.fuzz.http_requests import HTTP_KINDS, HttpFuzzRequest, http_request
from slipstream_verify.fuzz.http_run import wrong_with

IDS = ("resp_" + "a" * 32, "resp_" + "b" * 32)
CHAT = HttpFuzzRequest("POST", "/v1/chat/completions", b"", (), is_streamed=True)
RESPONSE = HttpFuzzRequest("POST", "/v1/responses", b"", (), is_streamed=True)
JSON, EVENTS = "application/json; charset=utf-8", "text/event-stream"
ERROR = b'{"error":{"message":"no","code":"overloaded"}}'


def test_requests_follow_from_seed_and_number_and_are_of_all_kinds() -> None:
    requests = [http_request(3, number, IDS) for number in range(600)]
    assert requests == [http_request(3, number, IDS) for number in range(600)]
    assert requests != [http_request(4, number, IDS) for number in range(600)]
    assert {kind for each in requests for kind in each.kinds} == set(HTTP_KINDS)
    assert {each.path for each in requests} >= {
        "/metrics?replicas=all",
        "/v1/messages",
        "/tokenize",
    }
    assert max(len(each.body) for each in requests) > 500_000


@pytest.mark.parametrize(
    ("request_", "status", "kind", "body", "is_wrong"),
    [
        (CHAT, 200, JSON, b"{}", False),
        (CHAT, 400, JSON, ERROR, False),
        (CHAT, 503, JSON, ERROR, False),
        (CHAT, 500, JSON, ERROR, True),
        (CHAT, 503, JSON, b'{"error":{"message":"no","code":"engine"}}', True),
        (CHAT, 400, JSON, b"{}", True),
        (CHAT, 200, JSON, b'{"a', True),
        (CHAT, 200, EVENTS, b"data: {}\n\ndata: [DONE]\n\n", False),
        (CHAT, 200, EVENTS, b'data: {}\n\ndata: {"error":{}}\n\n', False),
        (CHAT, 200, EVENTS, b"data: {}\n\n", True),
        (CHAT, 200, EVENTS, b"data: {}\n\ndata: [DO", True),
        (RESPONSE, 200, EVENTS, b"event: response.completed\ndata: {}\n\n", False),
        (RESPONSE, 200, EVENTS, b"event: response.created\ndata: {}\n\n", True),
    ],
)
def test_answers_that_a_server_may_give(
    request_: HttpFuzzRequest, status: int, kind: str, body: bytes, is_wrong: bool
) -> None:
    assert bool(wrong_with(request_, status, kind, body)) == is_wrong


@pytest.mark.process
def test_hundreds_of_requests_harm_no_front(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "fuzz.json"
    options = ["--http", "250", "--seed", "1", "--json", str(file)]
    code = main(["bench", "fuzz", *options])
    told = json.loads(file.read_text())
    assert told["wrong"] == []
    assert code == 0
    assert told["requests"] == 250
    classes = {status[0] for status in told["statuses"]}
    assert classes >= {"2", "4"}
    assert "250 requests" in capsys.readouterr().out
