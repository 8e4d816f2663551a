"""openai-agents: an agent whose model is one of chat completions or of responses."""

from __future__ import annotations

import asyncio
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from scenario import KEY, MODEL, QUESTION, api, base_url, report, result_of

MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}

set_tracing_disabled(True)
calls: list[Any] = []


@function_tool
def weather(city: str, days: int) -> str:
    """Tell the weather of a city."""
    calls.append(("weather", {"city": city, "days": days}))
    return result_of(city, days)


async def loop(client: AsyncOpenAI, is_stream: bool) -> dict[str, Any]:
    agent = Agent(
        name="Forecaster",
        instructions="You look things up.",
        model=MODELS[api()](MODEL, client),
        model_settings=ModelSettings(include_usage=True),
        tools=[weather],
    )
    calls.clear()
    pieces = ""
    if is_stream:
        result: Any = Runner.run_streamed(agent, QUESTION)
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type.endswith("output_text.delta"):
                pieces += event.data.delta
        assert pieces == result.final_output
    else:
        result = await Runner.run(agent, QUESTION)
    reasoning = [item.raw_item for item in result.new_items if item.type == "reasoning_item"]
    return {
        "calls": sorted(calls, key=str, reverse=True),  # they run at once
        "reasoning": [(item.content or item.summary)[0].text for item in reasoning],
        "text": result.final_output,
        "usage": [(it.usage.input_tokens, it.usage.output_tokens) for it in result.raw_responses],
    }


async def main() -> None:
    async with AsyncOpenAI(base_url=f"{base_url()}/v1", api_key=KEY, max_retries=0) as client:
        report(whole=await loop(client, False), streamed=await loop(client, True))


asyncio.run(main())
