"""Requests of coding agents, recorded by `scripts/foreign-clients --record`.

An agent's prompts and descriptions are its own: what is kept is the structure of its requests, in
which each text that a test did not write is `text`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORDINGS = Path(__file__).parents[1] / "system/foreign_clients/agent_bodies"
_TEXT = "text"
# fields whose values are names of the interface, not texts
_NAMES = frozenset(
    {
        *("type", "role", "name", "model", "status", "tool_choice", "effort", "summary", "mode"),
        *("namespace", "required", "enum", "include", "reasoning_effort", "format"),
        *("keep", "display"),
    }
)
_IDS = frozenset({"id", "call_id", "tool_call_id", "tool_use_id", "prompt_cache_key"})
_MAX_NAME_CHARS = 48


@dataclass(frozen=True)
class Request:
    """path: without its query."""

    path: str
    body: Any


def as_lines(requests: Iterable[Request], own: Collection[str]) -> str:
    """JSON lines of requests. own: texts that the test wrote; a text that has them is kept as
    these alone.
    """
    ids: dict[str, str] = {}

    def kept(value: Any, name: str) -> Any:
        match value:
            case dict():
                return {key: kept(each, key) for key, each in value.items()}
            case list():
                return [kept(each, name) for each in value]
            case str() if name in _IDS:
                return ids.setdefault(value, f"id_{len(ids)}")
            case str() if name in _NAMES and len(value) <= _MAX_NAME_CHARS:
                return value
            case str() if name in ("arguments", "input") and any(each in value for each in own):
                return value
            case str():
                return " ".join([each for each in own if each in value]) or _TEXT
            case _:
                return value

    lines = [{"path": each.path, "body": kept(each.body, "")} for each in requests]
    return "".join(json.dumps(each, ensure_ascii=False, sort_keys=True) + "\n" for each in lines)


def recorded_requests(agent: str) -> list[Request]:
    """What an agent has sent, in turn."""
    lines = (RECORDINGS / f"{agent}.jsonl").read_text().splitlines()
    return [Request(**json.loads(line)) for line in lines]
