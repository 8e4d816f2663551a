"""litellm: two of its providers, with the message it shows as a turn."""

from __future__ import annotations

import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # before the import, which downloads it

import litellm
from scenario import KEY, MODEL, QUESTION, WEATHER, base_url, report, run

TOOLS: Any = [{"type": "function", "function": WEATHER}]


def loop(provider: str, is_stream: bool) -> dict[str, Any]:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    reasons, usage, calls, reasoning = [], [], [], []
    while True:
        options: Any = {"stream": is_stream}
        if is_stream:
            options["stream_options"] = {"include_usage": True}
        answer: Any = litellm.completion(
            f"{provider}/{MODEL}",
            messages,
            tools=TOOLS,
            api_base=f"{base_url()}/v1",
            api_key=KEY,
            max_retries=0,
            **options,
        )
        if is_stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        [choice] = answer.choices
        reasons.append(choice.finish_reason)
        usage.append((answer.usage.prompt_tokens, answer.usage.completion_tokens))
        reasoning.append(choice.message.reasoning_content)
        messages.append(choice.message)
        for call in choice.message.tool_calls or ():
            calls.append((call.function.name, call.function.arguments))
            result = run(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not choice.message.tool_calls:
            break
    return {
        "calls": calls,
        "reasoning": reasoning,
        "text": choice.message.content,
        "finish_reasons": reasons,
        "usage": usage,
    }


report(
    whole=loop("openai", False),
    streamed=loop("openai", True),
    whole_vllm=loop("hosted_vllm", False),
    streamed_vllm=loop("hosted_vllm", True),
)
