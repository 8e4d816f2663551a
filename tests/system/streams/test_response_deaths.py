"""Responses whose processes are killed in the middle of a call's arguments."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from tests.helpers.http_front import Answer, Raw
from tests.helpers.patience import Patience
from tests.helpers.played_responses import ACCEPT, PATH, WEATHER, playing_stack, port_of
from tests.helpers.response_events import response_events, with_joined_deltas

from slipstream import Stack

pytestmark = pytest.mark.process

LONG = "It is cold 🏔, and windy. " * 40
NOTE = f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{LONG}"}}}}\n</tool_call>'
BODY: dict[str, Any] = {
    "input": "x",
    "tools": [WEATHER],
    "max_output_tokens": 2000,
    "stream": True,
}
NOT_YET = (404, 503)  # before the worker or the engine has come back


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("answers")
    with playing_stack(folder, lines=[{"text": NOTE}], grace_s=600.0) as running:
        yield running


def kill(stack: Stack, names: list[str]) -> None:
    """Kill processes, and wait for another front if the front is one of them."""
    pids = dict(stack.pids)
    for name in names:
        os.kill(pids[name], signal.SIGKILL)
    patience = Patience()
    while "http" in names and stack.pids.get("http") in (None, pids["http"]):
        patience.wait()


def answered(stack: Stack, path: str, body: dict[str, Any] | None, *headers: str) -> Answer:
    """The answer to a GET, or to a POST with a body, once the stack gives one."""
    patience = Patience()
    while True:
        with Raw(port_of(stack)) as raw:
            if body is None:
                answer = raw.get(path, *headers)
            else:
                raw.post(path, body, *headers)
                answer = raw.read()
        if answer.status not in NOT_YET:
            return answer
        patience.wait(answer.body)


def begun(stack: Stack, raw: Raw, body: dict[str, Any]) -> bytes:
    """The first events of a response, into the arguments of its call."""
    raw.post(PATH, body, ACCEPT)
    raw.read(with_body=False)
    said = b""
    while said.count(b"arguments.delta") < 12:
        said += raw.read_chunk()
    return said


def check(events: list[tuple[str, dict[str, Any]]]) -> None:
    """Nothing is lost or doubled."""
    number = -1
    joined = with_joined_deltas(events)
    for data in joined:
        number += len(data["delta"]) if "delta" in data else 1
        assert data["sequence_number"] == number
    response = joined[-1]["response"]
    assert (joined[-1]["type"], response["status"]) == ("response.completed", "completed")
    [call] = response["output"]
    assert [data["delta"] for data in joined if "delta" in data] == [call["arguments"]]
    assert json.loads(call["arguments"]) == {"city": LONG}


@pytest.mark.parametrize("dead", [["worker"], ["core"], ["http"], ["http", "worker", "core"]])
def test_a_call_survives(stack: Stack, dead: list[str]) -> None:
    with Raw(port_of(stack)) as raw:
        said = begun(stack, raw, BODY)
        kill(stack, dead)
        if "http" not in dead:
            while chunk := raw.read_chunk():
                said += chunk
    events = response_events(said)
    if "http" in dead:
        last = f"Last-Event-ID: {events[-1][0]}"
        events += response_events(answered(stack, PATH, BODY, ACCEPT, last).body)
    check(events)
    response = events[-1][1]["response"]  # computed again, it is kept as what it is
    assert answered(stack, f"{PATH}/{response['id']}", None).json == response


@pytest.mark.parametrize("dead", [["worker"], ["core"], ["http"]])
def test_a_response_in_the_background_survives(stack: Stack, dead: list[str]) -> None:
    with Raw(port_of(stack)) as raw:
        events = response_events(begun(stack, raw, {**BODY, "background": True}))
    response_id, number = events[0][1]["response"]["id"], events[-1][1]["sequence_number"]
    kill(stack, dead)
    path = f"{PATH}/{response_id}?stream=true&starting_after={number}"
    rest = response_events(answered(stack, path, None).body)
    check(events + rest)
    whole = answered(stack, f"{PATH}/{response_id}", None).json
    assert whole == rest[-1][1]["response"]


def test_a_response_in_the_background_is_never_unknown_while_it_runs(stack: Stack) -> None:
    """What is asked about it while worker and core are away is answered once it is back."""
    with Raw(port_of(stack)) as raw:
        events = response_events(begun(stack, raw, {**BODY, "background": True}))
        kill(stack, ["worker", "core"])
    path = f"{PATH}/{events[0][1]['response']['id']}"
    with Raw(port_of(stack)) as raw:
        assert raw.get(path).json["status"] in ("queued", "in_progress")
        kill(stack, ["worker", "core"])
        raw.post(f"{path}/cancel", {})
        answer = raw.read()
        assert answer.status == 200
        patience = Patience()
        while answer.json["status"] in ("queued", "in_progress"):
            patience.wait()
            answer = raw.get(path)
        assert answer.json["status"] == "cancelled"


def test_a_response_in_the_background_that_is_read_survives_worker_and_core(stack: Stack) -> None:
    """The front keeps the request for every later reader."""
    with Raw(port_of(stack)) as raw:
        events = response_events(begun(stack, raw, {**BODY, "background": True}))
    response_id = events[0][1]["response"]["id"]
    with Raw(port_of(stack)) as raw:
        raw.send(f"GET {PATH}/{response_id}?stream=true HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert raw.read(with_body=False).status == 200
        said = raw.read_chunk()
        kill(stack, ["worker", "core"])
        while chunk := raw.read_chunk():
            said += chunk
    check(response_events(said))
