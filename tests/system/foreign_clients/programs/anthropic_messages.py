"""anthropic's client: `create`, the helper for streams, and the one that runs tools by itself."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic, beta_tool
from scenario import KEY, MODEL, QUESTION, WEATHER, base_url, report, result_of, run

OPTIONS: Any = {
    "model": MODEL,
    "max_tokens": 2048,
    "system": "You look things up.",
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}
TOOLS: Any = [
    {
        "name": WEATHER["name"],
        "description": WEATHER["description"],
        "input_schema": WEATHER["parameters"],
    }
]


def num_input(usage: Any) -> int:
    """Tokens of the prompt, those from the server's cache included."""
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def shown(answers: list[Any]) -> dict[str, Any]:
    blocks = [block for answer in answers for block in answer.content]
    return {
        "calls": [(it.name, it.input) for it in blocks if it.type == "tool_use"],
        "reasoning": [it.thinking for it in blocks if it.type == "thinking"],
        "text": "".join(it.text for it in blocks if it.type == "text"),
        "finish_reasons": [it.stop_reason for it in answers],
        "usage": [(num_input(it.usage), it.usage.output_tokens) for it in answers],
    }


def loop(client: Anthropic, is_stream: bool) -> dict[str, Any]:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    answers: list[Any] = []
    while True:
        if is_stream:
            with client.messages.stream(messages=messages, tools=TOOLS, **OPTIONS) as stream:
                texts = [event.text for event in stream if event.type == "text"]
                answer: Any = stream.get_final_message()
            assert "".join(texts) == shown([answer])["text"]
        else:
            answer = client.messages.create(messages=messages, tools=TOOLS, **OPTIONS)
        answers.append(answer)
        messages.append({"role": "assistant", "content": answer.content})
        results = [
            {"type": "tool_result", "tool_use_id": it.id, "content": run(it.input)}
            for it in answer.content
            if it.type == "tool_use"
        ]
        if not results:
            return shown(answers)
        messages.append({"role": "user", "content": results})


@beta_tool
def weather(city: str, days: int) -> str:
    """Tell the weather of a city."""
    return result_of(city, days)


def with_runner(client: Anthropic, is_stream: bool) -> dict[str, Any]:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    runner: Any = client.beta.messages.tool_runner(
        messages=messages, tools=[weather], stream=is_stream, **OPTIONS
    )
    return shown([it.get_final_message() if is_stream else it for it in runner])


with Anthropic(base_url=base_url(), api_key=KEY, max_retries=0) as client:
    report(
        whole=loop(client, False),
        streamed=loop(client, True),
        whole_runner=with_runner(client, False),
        streamed_runner=with_runner(client, True),
    )
