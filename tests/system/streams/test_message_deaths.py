"""Answers of /v1/messages whose processes are killed in the middle of a tool's input."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest
from tests.helpers.http_front import Raw
from tests.helpers.message_events import by_number, content_of, named_events, read_into_a_call
from tests.helpers.patience import Patience
from tests.helpers.played_responses import ACCEPT, LONG, playing_stack, port_of

from slipstream import Stack

BODY = {
    "model": "played",
    "max_tokens": 2000,
    "stream": True,
    "messages": [{"role": "user", "content": "Note it."}],
    "tools": [{"name": "note", "input_schema": {}}],
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with playing_stack(tmp_path_factory.mktemp("answers"), grace_s=600.0) as running:
        yield running


def connect(stack: Stack) -> Raw:
    return Raw(port_of(stack))


@pytest.mark.process
@pytest.mark.parametrize("dead", [["worker"], ["core"], ["http"], ["http", "worker", "core"]])
def test_deaths_in_the_middle_of_an_input_change_nothing(stack: Stack, dead: list[str]) -> None:
    with connect(stack) as raw:
        said = read_into_a_call(raw, BODY)
        pids = dict(stack.pids)
        for name in dead:
            os.kill(pids[name], signal.SIGKILL)
        if "http" not in dead:
            while chunk := raw.read_chunk():
                said += chunk
    events = named_events(said)
    if "http" in dead:
        patience = Patience()
        answer = None
        while answer is None or answer.status == 503:
            patience.wait(answer and answer.body)
            if stack.pids.get("http") in (None, pids["http"]):
                continue
            with connect(stack) as raw:
                raw.post(
                    "/v1/messages",
                    BODY,
                    f"Last-Event-ID: {events[-1][0]}",
                    ACCEPT,
                )
                answer = raw.read()
        assert answer.status == 200, answer.body
        events += named_events(answer.body)
    content, _ = content_of(events)
    [(_, text, _, _)] = content
    assert json.loads(text) == {"day": 1, "text": LONG}
    assert list(by_number(events)) == list(range(len(by_number(events))))
