"""The events of a streamed response, as its client gets them."""

from __future__ import annotations

import json
from typing import Any


def response_events(body: bytes) -> list[tuple[str, dict[str, Any]]]:
    """The id ("" without one) and the data of each event, checked against its name."""
    found: list[tuple[str, dict[str, Any]]] = []
    blocks = body.decode().split("\n\n")
    for block in blocks[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        data = json.loads(lines.pop("data"))
        assert lines.pop("event") == data["type"]
        found.append((lines.pop("id", ""), data))
        assert not lines
    return found


def with_joined_deltas(events: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The data of events, adjacent deltas of one text joined: the same however it was divided."""
    found: list[dict[str, Any]] = []
    for _, data in events:
        if "delta" in data and found and data["type"] == found[-1]["type"]:
            number = data["sequence_number"]
            found[-1] = data | {"delta": found[-1]["delta"] + data["delta"]}
            found[-1]["sequence_number"] = number
        else:
            found.append(data)
    return found
