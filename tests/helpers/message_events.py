"""Streams of /v1/messages as their events say, without a client's help."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tests.helpers.answer_units import AnswerUnit, whole_events
from tests.helpers.http_front import Raw

from slipstream.answers.tool_calls import call_id
from slipstream.http.answers.event_ids import parse_event_id
from slipstream_ipc.messages import EventKind

# type, text (or a tool's input as text), and of a tool its id and name
Content = tuple[str, str, str, str]
_TEXT_OF = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
_DELTA_OF = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}


def named_events(body: bytes) -> list[tuple[str, Any]]:
    """Id ("" without one) and decoded data of each event, whose name is its type."""
    found = []
    for block in body.decode().split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        data = json.loads(lines.pop("data"))
        assert lines.pop("event") == data["type"]
        found.append((lines.pop("id", ""), data))
        assert not lines
    return found


def number_of(event_id: str) -> int:
    """The number in an event's id."""
    [cursor] = parse_event_id(event_id).cursors
    assert cursor.number is not None
    return cursor.number


def by_number(events: Sequence[tuple[str, Any]]) -> dict[int, Any]:
    """What has each number: a character of a text with its block, or another event."""
    found: dict[int, Any] = {}
    for event_id, data in events:
        number = number_of(event_id)
        if data["type"] != "content_block_delta":
            pieces = [data]
        else:
            delta = data["delta"]
            text = delta[_TEXT_OF[delta["type"]]]
            assert text
            pieces = [(data["index"], delta["type"], char) for char in text]
        for at, piece in enumerate(pieces):
            assert number - len(pieces) + 1 + at not in found
            found[number - len(pieces) + 1 + at] = piece
    return found


def content_of(events: Sequence[tuple[str, Any]]) -> tuple[list[Content], dict[str, Any]]:
    """The content that a whole stream adds up to, and the data of its `message_delta`; asserts that
    its events come in Anthropic's order.
    """
    datas = [data for _, data in events]
    assert [data["type"] for data in datas[:2]] == ["message_start", "ping"]
    assert [data["type"] for data in datas[-2:]] == ["message_delta", "message_stop"]
    content: list[Content] = []
    is_open = False
    for data in datas[2:-2]:
        match data["type"]:
            case "content_block_start":
                assert not is_open
                assert data["index"] == len(content)
                block = data["content_block"]
                assert block.get("input", {}) == {}
                assert block.get("signature", "") == ""
                assert block.get("text", "") == block.get("thinking", "") == ""
                content.append((block["type"], "", block.get("id", ""), block.get("name", "")))
                is_open = True
            case "content_block_delta":
                assert is_open
                assert data["index"] == len(content) - 1
                kind, text, *rest = content[-1]
                delta = data["delta"]
                assert delta["type"] == _DELTA_OF[kind]
                content[-1] = (kind, text + delta[_TEXT_OF[delta["type"]]], *rest)  # type: ignore[assignment]
            case "content_block_stop":
                assert is_open
                assert data["index"] == len(content) - 1
                is_open = False
            case other:
                raise AssertionError(other)
    assert not is_open
    return content, datas[-2]


def content_of_units(units: Sequence[AnswerUnit], stream_id: bytes) -> list[Content]:
    """The content of an answer, from its events."""
    written = {
        event.call: event.call_id
        for unit in units
        for event in unit.events
        if event.kind == EventKind.CALL_BEGINS
    }
    content: list[Content] = []
    for kind, text, call in whole_events(units):
        match kind:
            case EventKind.CONTENT:
                content.append(("text", text, "", ""))
            case EventKind.REASONING:
                content.append(("thinking", text, "", ""))
            case EventKind.CALL_BEGINS:
                content.append(("tool_use", "", written[call] or call_id(stream_id, call), text))
            case EventKind.CALL_ARGUMENTS:
                before = content[-1]
                content[-1] = (before[0], before[1] + text, *before[2:])
    return content


def read_into_a_call(raw: Raw, body: dict[str, Any]) -> bytes:
    """The first events of a stream of /v1/messages, to the middle of a tool's input."""
    raw.post("/v1/messages", body, "Accept: text/event-stream")
    raw.read(with_body=False)
    said = b""
    while said.count(b"partial_json") < 12:
        said += raw.read_chunk()
    return said
