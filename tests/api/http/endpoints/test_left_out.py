"""Keywords of schemas that are not enforced: strictness goes to the worker, names to the client."""

from __future__ import annotations

from typing import Any

import pytest
from tests.helpers.fake_worker import Entry, FakeWorker, deltas, end_of
from tests.helpers.http_front import Raw

import slipstream
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import Accepted, Submit
from slipstream_ipc.transport.codec import decode_params

SCHEMA = {"type": "object", "properties": {"t": {"type": "array", "uniqueItems": True}}}
USER = {"role": "user", "content": "x"}
NAME = "properties.t.uniqueItems"
HEADER = "x-slipstream-ignored-fields"
LEFT_OUT = (f"structured_outputs.json.{NAME}", "tools.f\n.parameters.$defs.x.not")


def chat(strict: bool | None) -> dict[str, Any]:
    given = {"name": "n", "schema": SCHEMA} | ({} if strict is None else {"strict": strict})
    return {"response_format": {"type": "json_schema", "json_schema": given}}


def responses(strict: bool | None) -> dict[str, Any]:
    given = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": strict}
    return {"text": {"format": given}}


FORMS = {
    "chat": ("/v1/chat/completions", {"messages": [USER]}, chat, "response_format"),
    "completion": ("/v1/completions", {"prompt": "x"}, chat, "response_format"),
    "responses": ("/v1/responses", {"input": "x", "store": False}, responses, "text.format"),
    "messages": (
        "/v1/messages",
        {"max_tokens": 5, "messages": [USER]},
        lambda _: {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "output_config.format",
    ),
    "guided_json": (
        "/v1/completions",
        {"prompt": "x"},
        lambda _: {"guided_json": SCHEMA},
        "guided_json",
    ),
    "structured_outputs": (
        "/v1/chat/completions",
        {"messages": [USER]},
        lambda strict: {"structured_outputs": {"json": SCHEMA, "strict": bool(strict)}},
        "structured_outputs.json",
    ),
}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("kind", FORMS)
def test_what_is_left_out_is_named_in_the_header(
    raw: Raw, played: FakeWorker, kind: str, is_stream: bool
) -> None:
    path, body, form, field = FORMS[kind]
    model = {"model": played.model.name}
    raw.post(path, {**body, **model, **form(None), "stream": is_stream, "zzz": 1})
    submit = played.expect(Submit)
    params = decode_params(submit.params)
    assert params.structured_outputs is not None
    assert params.structured_outputs.strict is False
    played.send(Accepted(submit.handle, pack_u32([1]), left_out=LEFT_OUT))
    played.send(deltas(Entry(submit.handle, "{}", end=end_of("{}"))))
    answer = raw.read()
    assert answer.status == 200
    assert answer.headers[HEADER] == f"zzz, {field}.{NAME}, tools.f_.parameters.$defs.x.not"


@pytest.mark.parametrize("kind", ["chat", "completion", "responses", "structured_outputs"])
def test_strictness_goes_to_the_worker(raw: Raw, played: FakeWorker, kind: str) -> None:
    path, body, form, _ = FORMS[kind]
    raw.post(path, {**body, **form(True)})
    submit = played.expect(Submit)
    params = decode_params(submit.params)
    assert params.structured_outputs is not None
    assert params.structured_outputs.strict is True
    played.accept(submit)
    played.send(deltas(Entry(submit.handle, "{}", end=end_of("{}"))))
    answer = raw.read()
    assert answer.status == 200
    assert HEADER not in answer.headers


def test_python_tells_it_with_the_output(played: FakeWorker) -> None:
    with slipstream.Client(played.address) as client:
        stream = client.stream("x", structured_outputs={"json": SCHEMA}, max_tokens=5)
        submit = played.expect(Submit)
        played.send(Accepted(submit.handle, pack_u32([1]), left_out=LEFT_OUT))
        played.send(deltas(Entry(submit.handle, "{}", end=end_of("{}"))))
        assert [delta.text for delta in stream] == ["{}"]
        assert stream.left_out == LEFT_OUT
