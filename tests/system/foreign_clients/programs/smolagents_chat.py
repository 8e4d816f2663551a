"""smolagents: an agent that calls tools until it calls `final_answer`, forced to call each time."""

from __future__ import annotations

from typing import Any

from scenario import KEY, MODEL, QUESTION, base_url, report
from smolagents import ActionStep, LogLevel, OpenAIModel, ToolCallingAgent, tool

calls: list[Any] = []


@tool
def weather(city: str, days: int) -> str:
    """Tell the weather of a city.

    Args:
        city: where
        days: for how long
    """
    calls.append(("weather", {"city": city, "days": days}))
    return f"Sleet for {days} days in {city}"


def loop(is_stream: bool) -> dict[str, Any]:
    model = OpenAIModel(MODEL, api_base=f"{base_url()}/v1", api_key=KEY)
    agent = ToolCallingAgent(
        [weather], model, stream_outputs=is_stream, verbosity_level=LogLevel.OFF, max_steps=4
    )
    calls.clear()
    result = agent.run(QUESTION, return_full_result=True)
    steps = [step for step in agent.memory.steps if isinstance(step, ActionStep)]
    assert all(step.error is None for step in steps), [step.error for step in steps]
    return {
        "calls": sorted(calls, key=str, reverse=True),  # they run at once
        "text": result.output,
        "usage": [(it.token_usage.input_tokens, it.token_usage.output_tokens) for it in steps],
    }


report(whole=loop(False), streamed=loop(True))
