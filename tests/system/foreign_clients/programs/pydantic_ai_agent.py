"""pydantic-ai: an agent with a model of chat completions, or of messages with its own idea of how
long an answer may be.
"""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_ai import Agent, AgentRunResultEvent
from pydantic_ai.messages import ModelResponse, PartDeltaEvent, PartStartEvent, TextPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from scenario import KEY, MODEL, QUESTION, api, base_url, report, result_of

calls: list[Any] = []


def model() -> OpenAIChatModel | AnthropicModel:
    if api() == "messages":
        return AnthropicModel(MODEL, provider=AnthropicProvider(base_url=base_url(), api_key=KEY))
    provider = OpenAIProvider(base_url=f"{base_url()}/v1", api_key=KEY)
    return OpenAIChatModel(MODEL, provider=provider)


def weather(city: str, days: int) -> str:
    """Tell the weather of a city."""
    calls.append(("weather", {"city": city, "days": days}))
    return result_of(city, days)


async def loop(is_stream: bool) -> dict[str, Any]:
    agent = Agent(model(), instructions="You look things up.", tools=[weather])
    calls.clear()
    result: Any = None
    if is_stream:
        pieces = ""
        async with agent.run_stream_events(QUESTION) as events:
            async for event in events:
                if isinstance(event, PartStartEvent) and isinstance(event.part, TextPart):
                    pieces = event.part.content
                elif isinstance(event, PartDeltaEvent) and event.delta.part_delta_kind == "text":
                    pieces += event.delta.content_delta
                elif isinstance(event, AgentRunResultEvent):
                    result = event.result
        assert pieces == result.output
    else:
        result = await agent.run(QUESTION)
    answers = [it for it in result.all_messages() if isinstance(it, ModelResponse)]
    parts = [part for one in answers for part in one.parts]
    return {
        "calls": sorted(calls, key=str, reverse=True),  # they run at once
        "reasoning": [it.content for it in parts if it.part_kind == "thinking"],
        "text": result.output,
        "finish_reasons": [it.provider_details["finish_reason"] for it in answers],
        "usage": [(it.usage.input_tokens, it.usage.output_tokens) for it in answers],
    }


async def main() -> None:
    report(whole=await loop(False), streamed=await loop(True))


asyncio.run(main())
