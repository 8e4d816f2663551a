"""Bodies of POST /v1/chat/completions as clients of OpenAI's API send them: what each adds of its
own, and how it sends back an assistant's message with tool calls.

Those of whole tool loops are recorded. The others are written down from what the libraries do;
their own examples are not copied.
"""

from __future__ import annotations

from typing import Any

from tests.helpers.foreign_bodies import recorded_bodies

MODEL = "fake"
SYSTEM = {"role": "system", "content": "You look things up."}
USER = {"role": "user", "content": "What is the weather in Oslo?"}
ARGUMENTS = '{"city": "Oslo"}'
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "Tells the weather.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": ARGUMENTS},
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}

# fields whose values may be anything: they do not change what is answered
IGNORED: dict[str, Any] = {
    "cache_control": {"type": "ephemeral"},
    "guided_decoding_backend": "xgrammar",
    "include_reasoning": True,
    "metadata": {"team": "search"},
    "parallel_tool_calls": True,
    "prompt_cache_retention": "24h",
    "provider": {"order": ["mine"], "allow_fallbacks": False},
    "safety_identifier": "s",
    "service_tier": "auto",
    "store": True,
    "user": "me",
    "verbosity": "low",
}

RECORDED = (
    "ai_sdk",
    "instructor_extraction",
    "langchain_chat",
    "litellm_chat",
    "openai_agents_chat",
    "openai_chat",
    "openai_node",
    "pydantic_ai_chat",
    "smolagents_chat",
)
WRITTEN: dict[str, dict[str, Any]] = {
    # openai: every option of `create`, with the answer's `message.model_dump()` as a turn
    "openai_options": {
        "model": MODEL,
        "messages": [
            {"role": "developer", "content": "You look things up."},
            USER,
            {
                "content": None,
                "refusal": None,
                "role": "assistant",
                "annotations": [],
                "audio": None,
                "function_call": None,
                "tool_calls": [CALL],
            },
            RESULT,
        ],
        "tools": [TOOL],
        "tool_choice": "auto",
        "max_completion_tokens": 64,
        "metadata": {"run": "1"},
        "n": 1,
        "parallel_tool_calls": True,
        "prediction": {"type": "content", "content": "It is"},
        "reasoning_effort": "low",
        "safety_identifier": "s",
        "service_tier": "auto",
        "store": False,
        "user": "me",
        "verbosity": "low",
    },
    # litellm: a `Message` that came from Anthropic as a turn, its cache_control passed on
    "litellm_from_anthropic": {
        "model": MODEL,
        "messages": [
            {
                "role": "system",
                "content": [
                    {
                        "type": "text",
                        "text": "You look things up.",
                        "cache_control": {"type": "ephemeral"},
                    }
                ],
                "cache_control": {"type": "ephemeral"},
            },
            USER,
            {
                "content": None,
                "role": "assistant",
                "tool_calls": [{**CALL, "index": 1}],
                "function_call": None,
                "reasoning_content": "I have to look.",
                "thinking_blocks": [
                    {"type": "thinking", "thinking": "I have to look.", "signature": ""}
                ],
                "provider_specific_fields": {"refusal": None},
            },
            {**RESULT, "cache_control": {"type": "ephemeral"}},
        ],
        "tools": [{**TOOL, "cache_control": {"type": "ephemeral"}}],
        "metadata": {"user_api_key": "hashed"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        **STREAM,
    },
    # clients of OpenRouter, coding agents among them
    "openrouter": {
        "model": MODEL,
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Look.", "cache_control": {"type": "ephemeral"}}
                ],
            },
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "reasoning": "I have to look.",
                "reasoning_details": [{"type": "reasoning.text", "text": "I have to look."}],
                "tool_calls": [{**CALL, "index": 0}],
            },
            RESULT,
        ],
        "tools": [TOOL],
        "provider": {"order": ["mine"]},
        "reasoning": {"effort": "high", "exclude": False},
        "include_reasoning": True,
    },
    # openai's client with vLLM's fields as extra_body, as its pages of before 0.12 have them
    "vllm_extra_body": {
        "model": MODEL,
        "messages": [USER],
        "add_special_tokens": False,
        "chat_template_kwargs": {"enable_thinking": False},
        "guided_choice": ["warm", "cold"],
        "guided_decoding_backend": "xgrammar",
        "include_reasoning": False,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "request_id": "mine-1",
        "top_k": 20,
    },
}
AGENT_BODIES: dict[str, dict[str, Any]] = WRITTEN | {
    f"{program}_{number}": {**body, "model": MODEL}
    for program in RECORDED
    for number, body in enumerate(recorded_bodies(program))
}
