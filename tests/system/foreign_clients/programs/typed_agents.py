"""openai-agents and pydantic-ai: agents with a tool whose final answer is an object of a type, for
which both send a JSON schema beside the tools.
"""

from __future__ import annotations

import asyncio
from typing import Any

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from scenario import KEY, MODEL, base_url, report

QUESTION = "Zürich or Oslo: where is the weather that lasts longest?"

set_tracing_disabled(True)
calls: list[Any] = []


class Longest(BaseModel):
    """Where the weather lasts longest."""

    city: str
    days: int


def weather(city: str, days: int) -> str:
    """Tell the weather of a city."""
    calls.append(("weather", {"city": city, "days": days}))
    return f"hail for {days} days in {city}"


def shown(answer: Longest) -> dict[str, Any]:
    """What a run reports, with its calls."""
    made = sorted(calls, key=str, reverse=True)  # they run at once
    calls.clear()
    return {"calls": made, "answer": answer.model_dump()}


async def openai_agent(model: Any, is_stream: bool) -> dict[str, Any]:
    agent = Agent(
        name="Forecaster",
        instructions="You look things up.",
        model=model,
        tools=[function_tool(weather)],
        output_type=Longest,
    )
    if is_stream:
        result: Any = Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, QUESTION)
    return shown(result.final_output)


async def pydantic_agent() -> dict[str, Any]:
    provider = OpenAIProvider(base_url=f"{base_url()}/v1", api_key=KEY)
    agent = PydanticAgent(
        OpenAIChatModel(MODEL, provider=provider),
        instructions="You look things up.",
        tools=[weather],
        output_type=NativeOutput(Longest),
    )
    return shown((await agent.run(QUESTION)).output)


async def main() -> None:
    async with AsyncOpenAI(base_url=f"{base_url()}/v1", api_key=KEY, max_retries=0) as client:
        chat = OpenAIChatCompletionsModel(MODEL, client)
        responses = OpenAIResponsesModel(MODEL, client)
        report(
            chat=await openai_agent(chat, False),
            chat_streamed=await openai_agent(chat, True),
            responses=await openai_agent(responses, False),
            responses_streamed=await openai_agent(responses, True),
            pydantic_ai=await pydantic_agent(),
        )


asyncio.run(main())
