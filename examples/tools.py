"""A question that a model answers with the help of Python functions, which it calls.

    python examples/tools.py "How many days are there from 2026-11-23 to 2027-01-06?"

It talks to `slipstream serve` on this machine, or to $SLIPSTREAM_ADDRESS. The model there has to be
one that was trained to call tools. Each call is shown with its result before the answer.
"""

from __future__ import annotations

import json
import sys
from datetime import date
from typing import Any

import slipstream

MAX_ROUNDS = 8


def today() -> str:
    """The current date, as YYYY-MM-DD."""
    return date.today().isoformat()


def days_between(begin: str, end: str) -> int:
    """Count the days from one date to another.

    Args:
        begin: the first date, as YYYY-MM-DD
        end: the second date, as YYYY-MM-DD
    """
    return (date.fromisoformat(end) - date.fromisoformat(begin)).days


FUNCTIONS = {function.__name__: function for function in (today, days_between)}


def result_of(call: slipstream.ToolCall) -> str:
    """What the function returns, or its error, from which a model may learn to call it better."""
    try:
        found: Any = FUNCTIONS[call.name](**json.loads(call.arguments))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return json.dumps(found)


def main() -> None:
    turns: list[Any] = [{"role": "user", "content": " ".join(sys.argv[1:])}]
    with slipstream.Client() as client:
        for _ in range(MAX_ROUNDS):
            stream = client.stream(turns, tools=list(FUNCTIONS.values()), max_tokens=1000)
            for delta in stream:
                print(delta.content, end="", flush=True)
            turns.append(stream.message)
            calls = [call for call in stream.tool_calls if call.status == "complete"]
            if not calls:
                break
            for call in calls:
                result = result_of(call)
                print(f"{call.name}({call.arguments}) = {result}")
                turns.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print()


if __name__ == "__main__":
    main()
