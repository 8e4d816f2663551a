"""Streams with grammars in whole stacks: processes die, answers are identical and keep to them."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from tests.helpers.patience import PATIENCE_S

from slipstream import BadRequestError, SamplingParams, Stack, StructuredOutputs
from slipstream.client.client import Client
from slipstream.demo_model import MODEL_PATH

pytestmark = pytest.mark.process

MODEL = f"simulated:step_ms=5,tokenizer={MODEL_PATH},mode=chain"
END = 1  # the simulated model has no end of its own
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60, "minLength": 50},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 9},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
REGEX = "([a-z]{3}-[0-9]{2} ){20}"
LARK = 'start: (word " "){12}\nword: /[a-z]{4,9}/'
GRAMMARS = [
    StructuredOutputs(json=SCHEMA),
    StructuredOutputs(regex=REGEX),
    StructuredOutputs(grammar=LARK),
]


def answers(client: Client, pid: int | None = None) -> list[tuple[str, str | None]]:
    """Each stream's text and how it ended; process `pid` is killed when all of them have begun."""
    found: list[tuple[str, str | None]] = [("", None)] * 6
    have_begun = threading.Barrier(len(found) + 1)

    def read(index: int) -> None:
        params = SamplingParams(
            temperature=1.0,
            seed=index,
            max_tokens=400,
            stop_token_ids=(END,),
            structured_outputs=GRAMMARS[index % len(GRAMMARS)],
        )
        stream = client.stream(f"Chapter {index}", params)
        delta = next(stream)
        text = delta.text
        have_begun.wait(PATIENCE_S)
        for delta in stream:
            text += delta.text
        found[index] = text, delta.finish_reason

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(found))]
    for thread in threads:
        thread.start()
    have_begun.wait(PATIENCE_S)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    return found


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack(MODEL, max_restarts=1000, http_port=0) as stack:
        yield stack


@pytest.fixture(scope="module")
def plain(stack: Stack) -> list[tuple[str, str | None]]:
    with stack.client() as client:
        return answers(client)


def test_answers_keep_to_their_grammars(plain: list[tuple[str, str | None]]) -> None:
    checks = [json.loads, re.compile(REGEX).fullmatch, re.compile("([a-z]{4,9} ){12}").fullmatch]
    for index, (text, reason) in enumerate(plain):
        assert checks[index % len(checks)](text)
        assert reason == "stop"


@pytest.mark.parametrize("name", ["core", "worker"])
def test_streams_with_grammars_survive_a_death(stack: Stack, plain: object, name: str) -> None:
    with stack.client() as client:
        assert answers(client, stack.pids[name]) == plain


def test_what_does_not_compile_is_the_callers_fault(stack: Stack) -> None:
    with stack.client() as client, pytest.raises(BadRequestError, match="unclosed group") as caught:
        client.generate("x", stop_token_ids=[END], structured_outputs=StructuredOutputs(regex="(a"))
    assert caught.value.field == "structured_outputs"


def ask(stack: Stack, **fields: object) -> tuple[int, dict]:
    address = urlsplit(stack.http_address)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=PATIENCE_S)
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Say something"}],
        "max_tokens": 400,
        "stop_token_ids": [END],
        **fields,
    }
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    found = json.loads(answer.read())
    connection.close()
    return answer.status, found


def test_over_http(stack: Stack) -> None:
    schema = {"name": "thing", "strict": True, "schema": SCHEMA}
    status, answer = ask(stack, response_format={"type": "json_schema", "json_schema": schema})
    assert status == 200, answer
    value = json.loads(answer["choices"][0]["message"]["content"])
    assert set(value) == {"name", "sizes"}
    assert answer["choices"][0]["finish_reason"] == "stop"
    status, answer = ask(stack, structured_outputs={"choice": ["red", "green"]})
    assert answer["choices"][0]["message"]["content"] in ("red", "green")
    wrong = {"name": "thing", "strict": True, "schema": {"type": "nothing"}}
    status, answer = ask(stack, response_format={"type": "json_schema", "json_schema": wrong})
    assert status == 400
    assert answer["error"]["param"] == "response_format"
    assert "there is no such type" in answer["error"]["message"]
