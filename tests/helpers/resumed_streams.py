"""Streams of HTTP that clients come back to: how they are asked for, and what events say."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any, NamedTuple

from tests.helpers.http_front import Raw

EVENTS = "Accept: text/event-stream"
COMPLETION = {"prompt": "Once", "max_tokens": 24, "temperature": 0, "stream": True}
CHAT = {
    "messages": [{"role": "user", "content": "What is a list?"}],
    "max_tokens": 24,
    "seed": 5,
    "stream": True,
    "stream_options": {"include_usage": True},
}
ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", COMPLETION),
    "completion, logprobs": ("/v1/completions", {**COMPLETION, "logprobs": 2}),
    "completion, many": (
        "/v1/completions",
        {**COMPLETION, "prompt": ["a", "b"], "n": 2, "seed": 1, "logprobs": 1, "stop": ["e "]},
    ),
    "chat": ("/v1/chat/completions", CHAT),
    "chat, usage so far": (
        "/v1/chat/completions",
        {**CHAT, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "chat, logprobs": (
        "/v1/chat/completions",
        {**CHAT, "logprobs": True, "top_logprobs": 2, "n": 2},
    ),
}


class Event(NamedTuple):
    """As it came."""

    id: str
    data: str


def events_of(body: bytes) -> list[Event]:
    """Of a stream whose events have ids."""
    found = []
    for block in body.decode().split("\n\n")[:-1]:
        id_line, data_line = block.split("\n")
        assert id_line.startswith("id: ")
        assert data_line.startswith("data: ")
        found.append(Event(id_line.removeprefix("id: "), data_line.removeprefix("data: ")))
    return found


def told_by(events: list[Event]) -> dict[Any, Any]:
    """What events say, however it is divided: for each choice, usage, the end."""
    said: dict[Any, Any] = defaultdict(list)
    for event in events:
        if event.data == "[DONE]":
            said["done"].append(1)
            continue
        chunk = json.loads(event.data)
        said["head"] = [chunk["id"], chunk["created"], chunk["object"], chunk["model"]]
        if chunk.get("usage") and not chunk["choices"]:
            said["usage"].append(chunk["usage"])
        for choice in chunk["choices"]:
            said[choice["index"], "usage"] = chunk.get("usage")
            delta = choice.get("delta", choice)
            for field, value in {**delta, "content": delta.get("text", "")}.items():
                if field in ("text", "role", "content") and value:
                    said[choice["index"], field] += value
            if delta.get("content"):
                said[choice["index"], "text"] += delta["content"]
            if choice["finish_reason"]:
                said[choice["index"], "end"].append(choice["finish_reason"])
            for field, column in (choice["logprobs"] or {}).items():
                said[choice["index"], "logprobs", field] += column or []
    return said


def read_some(raw: Raw, num: int) -> bytes:
    """The first events of a stream, as they came."""
    raw.read_until(b"\r\n\r\n")
    body = b""
    while body.count(b"\n\n") < num:
        body += raw.read_chunk()
    return body
