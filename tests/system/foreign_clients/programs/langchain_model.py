"""langchain-openai, langchain-anthropic: a chat model with a bound tool, invoked and streamed."""

from __future__ import annotations

from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from scenario import KEY, MODEL, QUESTION, api, base_url, report, result_of


@tool
def weather(city: str, days: int) -> str:
    """Tell the weather of a city."""
    return result_of(city, days)


def chat_model() -> Any:
    options: dict[str, Any] = {"model": MODEL, "api_key": KEY, "max_retries": 0}
    if api() == "messages":
        thinking = {"type": "enabled", "budget_tokens": 1024}
        return ChatAnthropic(base_url=base_url(), max_tokens=2048, thinking=thinking, **options)
    return ChatOpenAI(base_url=f"{base_url()}/v1", stream_usage=True, **options)


def loop(is_stream: bool) -> dict[str, Any]:
    model = chat_model().bind_tools([weather])
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
        told = answer.response_metadata
        reasons.append(told["stop_reason" if api() == "messages" else "finish_reason"])
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
    shown = {"calls": calls, "text": answer.text, "finish_reasons": reasons, "usage": usage}
    return shown | ({"reasoning": reasoning} if api() == "messages" else {})


report(whole=loop(False), streamed=loop(True))
