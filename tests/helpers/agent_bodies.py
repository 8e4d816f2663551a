"""Bodies of POST /v1/chat/completions as clients of OpenAI's API send them: what each adds of its
own, and how it sends back an assistant's message with tool calls.

Written down from what the named versions of these libraries do; their own examples are not copied.
"""

from __future__ import annotations

from typing import Any

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
STRICT_TOOL = {"type": "function", "function": {**FUNCTION, "strict": True}}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": ARGUMENTS},
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "Weather", "strict": True, "schema": PARAMETERS},
}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}

# fields whose values may be anything: they do not change what is answered
IGNORED: dict[str, Any] = {
    "cache_control": {"type": "ephemeral"},
    "guided_decoding_backend": "xgrammar",
    "include_reasoning": True,
    "metadata": {"team": "search"},
    "parallel_tool_calls": True,
    "prediction": {"type": "content", "content": "It is"},
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "provider": {"order": ["mine"], "allow_fallbacks": False},
    "safety_identifier": "s",
    "service_tier": "auto",
    "store": True,
    "user": "me",
    "verbosity": "low",
}

AGENT_BODIES: dict[str, dict[str, Any]] = {
    # openai 1.x and 2.x: `create`, with the answer's `message.model_dump()` as a turn
    "openai": {
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
    # openai 1.92+: `chat.completions.parse`, and `.stream(...).get_final_completion()` as a turn
    "openai_parse": {
        "model": MODEL,
        "messages": [
            USER,
            {
                "content": None,
                "refusal": None,
                "role": "assistant",
                "annotations": None,
                "audio": None,
                "function_call": None,
                "tool_calls": [
                    {
                        **CALL,
                        "index": 0,
                        "function": {**CALL["function"], "parsed_arguments": {"city": "Oslo"}},
                    }
                ],
                "parsed": None,
            },
            RESULT,
        ],
        "tools": [STRICT_TOOL],
        "response_format": SCHEMA,
        **STREAM,
    },
    # langchain-openai 0.3 and 1.x: ChatOpenAI with bind_tools, messages as it converts them
    "langchain": {
        "model": MODEL,
        "messages": [
            SYSTEM,
            {"role": "user", "content": [{"type": "text", "text": USER["content"]}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {**RESULT, "name": "weather"},
        ],
        "tools": [{"type": "function", "function": {**FUNCTION, "strict": None}}],
        "parallel_tool_calls": False,
        "temperature": 0.0,
        **STREAM,
    },
    # pydantic-ai 1.x: OpenAIChatModel, reasoning sent back as a field
    "pydantic_ai": {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "You look things up."},
            USER,
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "I have to look.",
                "tool_calls": [CALL],
            },
            RESULT,
        ],
        "tools": [STRICT_TOOL],
        "tool_choice": "auto",
        "max_completion_tokens": 64,
        "parallel_tool_calls": True,
        **STREAM,
    },
    # litellm 1.7x: a `Message` of its own as a turn, Anthropic's cache_control passed on
    "litellm": {
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
    # instructor 1.x, JSON_SCHEMA mode, on its second try
    "instructor": {
        "model": MODEL,
        "messages": [
            SYSTEM,
            USER,
            {"role": "assistant", "content": '{"town": "Oslo"}', "annotations": []},
            {"role": "user", "content": "Recall the function correctly, fix the errors: city"},
        ],
        "response_format": SCHEMA,
    },
    # ai 5 with @ai-sdk/openai-compatible 1.x
    "ai_sdk": {
        "model": MODEL,
        "messages": [
            SYSTEM,
            {"role": "user", "content": [{"type": "text", "text": USER["content"]}]},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "I have to look.",
                "tool_calls": [CALL],
            },
            RESULT,
        ],
        "max_tokens": 64,
        "reasoning_effort": "medium",
        "verbosity": "low",
        "tools": [TOOL],
        "tool_choice": "auto",
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
