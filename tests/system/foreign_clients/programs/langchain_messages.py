"""langchain-anthropic: a chat model with a bound tool, invoked and streamed."""

from __future__ import annotations

from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from scenario import KEY, MODEL, QUESTION, base_url, report, result_of


@tool
def weather(city: str, days: int) -> str:
    """Tell the weather of a city."""
    return result_of(city, days)


def loop(is_stream: bool) -> dict[str, Any]:
    model = ChatAnthropic(
        model=MODEL,
        base_url=base_url(),
        api_key=KEY,
        max_retries=0,
        max_tokens=2048,
        thinking={"type": "enabled", "budget_tokens": 1024},
    ).bind_tools([weather])
    messages: list[Any] = [SystemMessage("You look things up."), HumanMessage(QUESTION)]
    reasons, usage, calls, reasoning = [], [], [], []
    while True:
        if is_stream:
            answer: Any = None
            for chunk in model.stream(messages):
                answer = chunk if answer is None else answer + chunk
        else:
            answer = model.invoke(messages)
        messages.append(answer)
        reasons.append(answer.response_metadata["stop_reason"])
        tokens = answer.usage_metadata
        usage.append((tokens["input_tokens"], tokens["output_tokens"]))
        reasoning += [it["reasoning"] for it in answer.content_blocks if it["type"] == "reasoning"]
        assert not answer.invalid_tool_calls
        for call in answer.tool_calls:
            calls.append((call["name"], call["args"]))
            result = weather.invoke(call)
            assert isinstance(result, ToolMessage)
            messages.append(result)
        if not answer.tool_calls:
            break
    return {
        "calls": calls,
        "reasoning": reasoning,
        "text": answer.text,
        "finish_reasons": reasons,
        "usage": usage,
    }


report(whole=loop(False), streamed=loop(True))
