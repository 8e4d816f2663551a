"""What every program of this folder plays: a question, two calls of a function, an answer."""

from __future__ import annotations

import json
import sys
from typing import Any

MODEL = "played"
KEY = "none"
QUESTION = "How is the weather in Zürich and Oslo?"
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "Tell the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


def base_url() -> str:
    """The server's address, without `/v1`."""
    return sys.argv[1]


def api() -> str:
    """Which of the server's interfaces is asked, of a program that knows several."""
    return sys.argv[2]


def result_of(city: str, days: int) -> str:
    """What the function returns."""
    return f"sleet for {days} days in {city}"


def run(arguments: str | dict[str, Any]) -> str:
    """Run a call of `weather`."""
    return result_of(**(json.loads(arguments) if isinstance(arguments, str) else arguments))


def report(**runs: dict[str, Any]) -> None:
    """Say what the client has shown, by the name of the run."""
    sys.stdout.write(f"\n{json.dumps(runs)}\n")  # a line of its own, whatever the client prints
