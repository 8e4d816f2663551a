"""What a simulated model plays, with thoughts and calls, and how responses are asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openai import OpenAI
from tests.helpers.patience import PATIENCE_S
from tests.helpers.stacks import spareless_stack

from slipstream import Stack

CALLS = (
    "<think>Two cities: I ask for both.</think>\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🏔", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)
LONG = "It is cold 🏔, and windy. " * 40
NOTE = f'<tool_call>\n{{"name": "note", "arguments": {{"day": 1, "text": "{LONG}"}}}}\n</tool_call>'
PATCH = '<tool_call>\n{"name": "patch", "arguments": {"input": "a\\n\\"b\\" 🏔"}}\n</tool_call>'
LINES = [
    {"text": '{"city": "Oslo", "degrees": -3}', "when": "as JSON"},
    {"text": "<think>Both are here.</think>\nIt snows in both.", "when": "snow"},
    {"text": PATCH, "when": "Patch"},
    {"text": NOTE, "when": "Note"},
    {"text": CALLS},
]
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
USER: Any = {"role": "user", "content": "How is the weather in Zürich and Oslo?"}
ARGUMENTS = [{"city": "Zürich 🏔", "days": 2}, {"city": "Oslo"}]
FORMATS = {"tool_format": "hermes", "reasoning_format": "qwen3"}
PATH = "/v1/responses"
BODY: dict[str, Any] = {"input": [USER], "tools": [WEATHER], "max_output_tokens": 400}
ACCEPT = "Accept: text/event-stream"


def playing_stack(
    folder: Path, *, lines: Sequence[dict[str, str]] = LINES, **settings: Any
) -> Stack:
    """A stack that plays these lines. folder: for a file of them."""
    path = folder / "answers.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    model = f"simulated:step_ms=5,answers={path}"
    return spareless_stack(model, http_port=0, served_model_name="played", **FORMATS, **settings)


def port_of(stack: Stack) -> int:
    """The port of a stack's HTTP front."""
    return int(stack.http_address.rpartition(":")[2])


def openai_client(stack: Stack, api_key: str = "x") -> OpenAI:
    """The official client of a stack."""
    base_url = f"{stack.http_address}/v1"
    return OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=PATIENCE_S)
