"""openai's client: `create` and the helper for streams, with the message it shows as a turn."""

from __future__ import annotations

from typing import Any

from openai import OpenAI
from scenario import KEY, MODEL, QUESTION, WEATHER, base_url, report, run

TOOLS: Any = [{"type": "function", "function": {**WEATHER, "strict": True}}]


def loop(client: OpenAI, is_stream: bool) -> dict[str, Any]:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    reasons, usage = [], []
    calls, reasoning = [], []
    while True:
        if is_stream:
            options: Any = {"stream_options": {"include_usage": True}}
            with client.chat.completions.stream(
                model=MODEL, messages=messages, tools=TOOLS, **options
            ) as stream:
                done = [event for event in stream if event.type.endswith("function.arguments.done")]
                completion: Any = stream.get_final_completion()
        else:
            completion = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
        [choice] = completion.choices
        message = choice.message
        reasons.append(choice.finish_reason)
        usage.append((completion.usage.prompt_tokens, completion.usage.completion_tokens))
        reasoning.append(message.reasoning_content)
        messages.append(message)
        if is_stream:
            parsed = [call.function.parsed_arguments for call in message.tool_calls or ()]
            assert [event.parsed_arguments for event in done] == parsed
        for call in message.tool_calls or ():
            calls.append((call.function.name, call.function.arguments))
            result = run(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            break
    return {
        "calls": calls,
        "reasoning": reasoning,
        "text": message.content,
        "finish_reasons": reasons,
        "usage": usage,
    }


with OpenAI(base_url=f"{base_url()}/v1", api_key=KEY, max_retries=0) as client:
    report(whole=loop(client, False), streamed=loop(client, True))
