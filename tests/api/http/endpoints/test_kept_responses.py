"""Responses that are kept: read again, gone on from, ended and forgotten."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from tests.helpers.fake_worker import FakeWorker
from tests.helpers.http_front import Front, Raw
from tests.helpers.patience import Patience
from tests.helpers.played_responses import (
    ACCEPT,
    ARGUMENTS,
    BODY,
    PATH,
    USER,
    WEATHER,
    openai_client,
    playing_stack,
    port_of,
)
from tests.helpers.response_events import response_events, with_joined_deltas

from slipstream import Stack
from slipstream.http.config import Limits
from slipstream.http.responses.response_object import ResponseObject
from slipstream.http.responses.response_record import ResponseRecord
from slipstream_ipc.messages import End, KeepOptions, KeptAnswer, Recall, Recalled

KEYS = ("first-key-of-the-test", "second-key-of-the-test")
TOOLS: dict[str, Any] = {"model": "played", "tools": [WEATHER], "max_output_tokens": 400}
UNKNOWN = "resp_" + "0" * 32


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with playing_stack(tmp_path_factory.mktemp("answers"), api_key=list(KEYS)) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[OpenAI]:
    with openai_client(stack, KEYS[0]) as client:
        yield client


def key_line(number: int = 0) -> str:
    return f"Authorization: Bearer {KEYS[number]}"


def got(stack: Stack, path: str, *headers: str) -> Any:
    """The answer to a GET."""
    with Raw(port_of(stack)) as raw:
        return raw.get(path, key_line(), *headers)


def streamed(stack: Stack, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    """The events of a streamed response."""
    with Raw(port_of(stack)) as raw:
        raw.post(PATH, {**BODY, "stream": True, **fields}, key_line())
        return response_events(raw.read().body)


def outputs(response: Any) -> list[dict[str, str]]:
    """What the tools say to each call of a response."""
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": "snow"}
        for item in response.output
        if item.type == "function_call"
    ]


def ended(client: OpenAI, response: Any) -> Any:
    """The response once it has ended."""
    patience = Patience()
    while response.status in ("queued", "in_progress"):
        patience.wait()
        response = client.responses.retrieve(response.id)
    return response


def test_a_tool_loop_from_response_to_response(client: OpenAI) -> None:
    first = client.responses.create(input=[USER], **TOOLS)
    assert first.store is True
    second: Any = client.responses.create(
        input=outputs(first), previous_response_id=first.id, **TOOLS
    )
    assert (second.output_text, second.previous_response_id) == ("It snows in both.", first.id)
    items = client.responses.input_items.list(second.id, order="asc")
    kinds = ["message", "reasoning", "function_call", "function_call"]
    assert [item.type for item in items] == [*kinds, *["function_call_output"] * 2]
    third = client.responses.create(input="as JSON", previous_response_id=second.id, model="played")
    assert json.loads(third.output_text)["city"] == "Oslo"


def test_the_tokens_of_a_response_are_counted_ahead(client: OpenAI) -> None:
    shared: Any = {"model": "played", "tools": [WEATHER], "instructions": "Be short."}
    counted = client.responses.input_tokens.count(input=[USER], **shared)
    first = client.responses.create(input=[USER], max_output_tokens=400, **shared)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == first.usage.input_tokens
    following: Any = {"input": outputs(first), "previous_response_id": first.id, **shared}
    counted = client.responses.input_tokens.count(**following)
    second = client.responses.create(**following)
    assert counted.input_tokens == second.usage.input_tokens
    with pytest.raises(NotFoundError):
        client.responses.input_tokens.count(input="x", previous_response_id=UNKNOWN)


def test_references_to_items_stand_for_them(client: OpenAI) -> None:
    first = client.responses.create(input=[USER], **TOOLS)
    references: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
    items: Any = [USER, *references, *outputs(first)]
    second = client.responses.create(input=items, **TOOLS)
    assert second.output_text == "It snows in both."
    shown = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.id for item in shown[1:4]] == [item.id for item in first.output]
    arguments = [json.loads(item.arguments) for item in shown if item.type == "function_call"]
    assert arguments == ARGUMENTS


def test_an_item_is_named_once(client: OpenAI) -> None:
    first = client.responses.create(input="hi", **TOOLS)
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    with pytest.raises(BadRequestError) as raised:
        client.responses.create(input=[reference, reference, USER], **TOOLS)
    assert raised.value.param == "input[1].id"


def test_many_items_of_reasoning_take_no_front_along(stack: Stack) -> None:
    """Sent as bytes: openai's client takes 12 s of CPU time to make this body."""
    summary = [{"type": "summary_text", "text": "x" * 450}]
    items: Any = [{"type": "reasoning", "id": "rs_1", "summary": summary}] * 8000
    with Raw(port_of(stack)) as raw:
        raw.post(PATH, {"input": [*items, USER], **TOOLS}, key_line())
        response = raw.read().json
    assert (response["status"], response["store"]) == ("completed", False)


def test_a_response_is_read_again(stack: Stack, client: OpenAI) -> None:
    """Whole, and as the same events after any of them."""
    events = streamed(stack)
    whole = with_joined_deltas(events)
    response = whole[-1]["response"]
    assert client.responses.retrieve(response["id"]).to_dict() == response
    path = f"{PATH}/{response['id']}?stream=true"
    assert with_joined_deltas(response_events(got(stack, path).body)) == whole
    for number in range(0, len(events), 5):
        after = events[number][1]["sequence_number"]
        rest = response_events(got(stack, f"{path}&starting_after={after}").body)
        assert with_joined_deltas(events[: number + 1] + rest) == whole


def test_who_has_all_events_gets_none_and_the_connection_is_good_for_more(stack: Stack) -> None:
    events = streamed(stack)
    response = events[-1][1]["response"]
    path = f"{PATH}/{response['id']}"
    last = events[-1][1]["sequence_number"]
    with Raw(port_of(stack)) as raw:
        nothing = raw.get(f"{path}?stream=true&starting_after={last}", key_line())
        assert (nothing.status, nothing.body) == (200, b"")
        assert raw.get(path, key_line()).json == response


def test_the_path_of_all_streams_prints_the_same(stack: Stack) -> None:
    events = with_joined_deltas(streamed(stack, instructions="Be brief.", metadata={"a": "b"}))
    path = f"/v1/streams/{events[0]['response']['id']}"
    assert with_joined_deltas(response_events(got(stack, path).body)) == events


def test_a_reader_there_ends_no_response_in_the_background(stack: Stack, client: OpenAI) -> None:
    front = Front(stack.address, api_keys=KEYS, limits=Limits(resume_s=0.01))
    try:
        response = client.responses.create(input=[USER], background=True, **TOOLS)
        with Raw(front.port) as raw:
            path = f"/v1/streams/{response.id}"
            raw.send(f"GET {path} HTTP/1.1\r\nHost: x\r\n{key_line()}\r\n\r\n".encode())
            raw.read(with_body=False)
        assert ended(client, response).status == "completed"
    finally:
        front.stop()


def test_the_client_goes_on_after_an_event(client: OpenAI) -> None:
    first = client.responses.create(input=[USER], **TOOLS)
    events = list(client.responses.retrieve(first.id, stream=True))
    rest = list(client.responses.retrieve(first.id, stream=True, starting_after=20))
    assert rest[-1] == events[-1]
    assert all(event.sequence_number > 20 for event in rest)
    with client.responses.stream(response_id=first.id) as stream:
        found = stream.get_final_response()
    assert [item.id for item in found.output] == [item.id for item in first.output]


def test_a_response_in_the_background(stack: Stack, client: OpenAI) -> None:
    response = client.responses.create(input=[USER], background=True, **TOOLS)
    assert response.status in ("queued", "in_progress")
    assert (response.background, response.output) == (True, [])
    path = f"{PATH}/{response.id}?stream=true"
    events = with_joined_deltas(response_events(got(stack, path).body))
    response = ended(client, response)
    assert response.status == "completed"
    assert response.to_dict() == events[-1]["response"]
    assert with_joined_deltas(response_events(got(stack, path).body)) == events


def test_its_readers_come_and_go(stack: Stack, client: OpenAI) -> None:
    """In the background: the client that asked for the stream has gone, and the next one."""
    body = {**BODY, "stream": True, "background": True}
    with Raw(port_of(stack)) as raw:
        raw.post(PATH, body, key_line())
        raw.read(with_body=False)
        events = response_events(raw.read_chunk())
    response_id = events[0][1]["response"]["id"]
    path = f"{PATH}/{response_id}?stream=true"
    with Raw(port_of(stack)) as raw:
        raw.send(f"GET {path} HTTP/1.1\r\nHost: x\r\n{key_line()}\r\n\r\n".encode())
        raw.read(with_body=False)
        raw.read_chunk()
    response = ended(client, client.responses.retrieve(response_id))
    assert response.status == "completed"
    assert [json.loads(item.arguments) for item in response.output[1:]] == ARGUMENTS  # type: ignore[union-attr]


def test_a_response_has_begun_while_it_waits_for_a_place(tmp_path: Path) -> None:
    """Its client is cut before its turn comes, and knows its id."""
    lines = [{"text": "first " * 2000, "when": "long"}, {"text": "second"}]
    with playing_stack(tmp_path, lines=lines, max_num_seqs=1) as stack, openai_client(stack) as ai:
        first = ai.responses.create(model="played", input="long", background=True)
        with Raw(port_of(stack)) as raw:
            raw.post(PATH, {"input": "short", "stream": True, "background": True})
            raw.read(with_body=False)
            (_, created), *_ = response_events(raw.read_chunk())
        assert created["type"] == "response.created"
        assert ai.responses.retrieve(first.id).status == "in_progress"
        ai.responses.cancel(first.id)
        second = ended(ai, ai.responses.retrieve(created["response"]["id"]))
        assert (second.status, second.output_text) == ("completed", "second")


def test_the_id_of_an_event_is_enough_to_go_on(stack: Stack, client: OpenAI) -> None:
    """Of a response that still runs, without an Accept that names event streams."""
    with Raw(port_of(stack)) as raw:
        raw.post(PATH, {**BODY, "stream": True, "background": True}, key_line(), ACCEPT)
        raw.read(with_body=False)
        said = b""
        while said.count(b".delta") < 4:
            said += raw.read_chunk()
    os.kill(stack.pids["core"], signal.SIGSTOP)  # or it may end before it is asked for
    try:
        events = response_events(said)
        response_id = events[0][1]["response"]["id"]
        with Raw(port_of(stack)) as raw:
            path = f"{PATH}/{response_id}?stream=true"
            last = f"Last-Event-ID: {events[-1][0]}"
            raw.send(f"GET {path} HTTP/1.1\r\nHost: x\r\n{key_line()}\r\n{last}\r\n\r\n")
            os.kill(stack.pids["core"], signal.SIGCONT)
            rest = raw.read()
    finally:
        os.kill(stack.pids["core"], signal.SIGCONT)
    assert rest.status == 200, rest.body
    joined = with_joined_deltas(events + response_events(rest.body))
    whole = client.responses.retrieve(response_id)
    assert joined[-1]["response"] == whole.to_dict()
    assert [data["sequence_number"] for data in joined] == sorted(
        {data["sequence_number"] for data in joined}
    )


def test_a_response_is_cancelled(client: OpenAI) -> None:
    response = client.responses.create(
        input="x", background=True, model="played", extra_body={"ignore_eos": True}
    )
    response = client.responses.cancel(response.id)
    assert response.status == "cancelled"
    assert client.responses.retrieve(response.id).status == "cancelled"
    assert client.responses.cancel(response.id).status == "cancelled"


def test_a_response_that_is_deleted_is_unknown(client: OpenAI) -> None:
    response = client.responses.create(input="snow", model="played")
    client.responses.delete(response.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(NotFoundError, match="is no longer kept"):
            call(response.id)
    with pytest.raises(NotFoundError, match="is no longer kept"):
        client.responses.create(input="x", model="played", previous_response_id=response.id)


def test_a_response_is_of_its_key_alone(stack: Stack, client: OpenAI) -> None:
    response = client.responses.create(input="snow", model="played")
    messages = []
    with openai_client(stack, KEYS[1]) as other:
        for response_id in (response.id, UNKNOWN):
            with pytest.raises(NotFoundError) as raised:
                other.responses.retrieve(response_id)
            messages.append(str(raised.value).replace(response_id, ""))
            with pytest.raises(NotFoundError):
                other.responses.create(input="x", model="played", previous_response_id=response_id)
            with pytest.raises(NotFoundError):
                other.responses.delete(response_id)
    assert messages[0] == messages[1]
    assert client.responses.retrieve(response.id).id == response.id


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_what_a_key_has_asked_for_is_unknown_to_others(stack: Stack, path: str) -> None:
    body = {"messages": [USER], "max_tokens": 60} if path != PATH else {**BODY, "input": "slowly"}
    with Raw(port_of(stack)) as raw:
        raw.post(path, {**body, "stream": True}, key_line(), ACCEPT)
        events = raw.read().body.decode().split("\n\n")
    event_id = events[2].split("\n")[0].removeprefix("id: ")
    [answer_id] = set(re.findall(r'"id": ?"((?:resp|chatcmpl)[^"]*)"', events[0]))
    last = f"Last-Event-ID: {event_id}"
    for number, expected in ((1, 404), (0, 200)):
        with Raw(port_of(stack)) as raw:
            resumed = raw.get(f"/v1/streams/{answer_id}", key_line(number), last)
            assert resumed.status == expected, resumed.body
            whole = raw.get(f"/v1/streams/{answer_id}", key_line(number))
            assert whole.status == expected
            raw.post("/abort", {"request_id": answer_id}, key_line(number))
            assert raw.read().status == expected
            raw.post(path, {**body, "stream": True}, key_line(number), ACCEPT, last)
            assert raw.read().status == (409 if expected == 404 else 200)


def test_a_worker_that_dies_behind_a_deletion_leaves_it_done(tmp_path: Path) -> None:
    """Another one finds nothing to delete, and the client is told that it is deleted."""
    response = ResponseObject(id=UNKNOWN, created_at=1, model="fake")
    record = ResponseRecord(response, ()).packed()
    assert record is not None
    kept = [KeptAnswer(KeepOptions(record), 3, End("stop", 1), "x")]

    def script(worker: FakeWorker, body: Recall) -> None:
        found = kept[0] if kept else None
        if body.forget and kept:
            kept.clear()
            worker.interrupt()
        else:
            worker.post(Recalled(body.number, found))

    worker = FakeWorker(f"ipc://{tmp_path}/w", script)
    front = Front(worker.address)
    try:
        with Raw(front.port) as raw:
            raw.send(f"DELETE {PATH}/{UNKNOWN} HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = raw.read()
            assert (answer.status, answer.json["deleted"]) == (200, True)
            assert raw.get(f"{PATH}/{UNKNOWN}").status == 404
    finally:
        front.stop()
        worker.stop()


def test_a_response_that_is_not_to_be_stored_is_not(client: OpenAI) -> None:
    response = client.responses.create(input="snow", model="played", store=False)
    assert response.store is False
    with pytest.raises(NotFoundError):
        client.responses.retrieve(response.id)


@pytest.mark.process
def test_what_is_stored_is_kept_to_the_byte(tmp_path: Path) -> None:
    """The front says the one, the worker decides the other. Record and text are varied."""
    call = '<think>A city.</think>\n<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>'
    texts = {"first": '{"city": "Oslo"}', "same": '{"city": "Osö"}', "more": '{"city": "Oslö"}'}
    lines = [{"text": call % text, "when": which} for which, text in texts.items()]
    with playing_stack(tmp_path, lines=lines, response_store_mib=2**-6) as stack:

        def is_stored(pad: int, which: str) -> bool:
            given = f"{which:5}{' x' * (pad // 2)}{'.' * (pad % 2)}"
            with Raw(port_of(stack)) as raw:
                raw.post(PATH, {**BODY, "input": given})
                response = raw.read().json
                assert response["output"][1]["arguments"] == texts[which]
                found = raw.get(f"{PATH}/{response['id']}")
            assert found.status == (200 if response["store"] else 404)
            return bool(response["store"])

        least, most = 2**8, 2**12
        while most - least > 1:
            pad = (least + most) // 2
            if is_stored(pad, "first"):
                least = pad
            else:
                most = pad
        found = [is_stored(least, which) for which in texts]
        assert found == [True, True, False]
        assert is_stored(least - 1, "more")


def test_a_response_that_is_too_large_is_not_stored(client: OpenAI) -> None:
    thought = {"type": "reasoning", "summary": [], "encrypted_content": "x" * 2**20}
    given: Any = {"model": "played", "input": [thought, {"role": "user", "content": "snow"}]}
    response = client.responses.create(**given)
    assert (response.store, response.output_text) == (False, "It snows in both.")
    with pytest.raises(BadRequestError, match="too large"):
        client.responses.create(**given, background=True)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("resp_1", 404),
        (f"{UNKNOWN}/nothing", 404),
        (f"{UNKNOWN}?stream=yes", 400),
        (f"{UNKNOWN}?stream=true&starting_after=x", 400),
        (f"{UNKNOWN}?nonsense=1", 400),
        (f"{UNKNOWN}/input_items?limit=1000", 404),
    ],
)
def test_what_is_wrong_is_said(stack: Stack, path: str, status: int) -> None:
    assert got(stack, f"{PATH}/{path}", ACCEPT).status == status


@pytest.mark.parametrize("limit", ["0", "x", "²", "101", "0001999", "1" + "0" * 5000])
def test_a_limit_that_is_none_is_refused(stack: Stack, client: OpenAI, limit: str) -> None:
    response = client.responses.create(input="hi", **TOOLS)
    answer = got(stack, f"{PATH}/{response.id}/input_items?limit={quote(limit)}")
    assert (answer.status, answer.json["error"]["param"]) == (400, "limit")
