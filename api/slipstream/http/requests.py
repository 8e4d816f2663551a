"""What clients may send, as types: OpenAI's fields, and some that vLLM has beside them.

Owns: the fields' names and types. Does not know: what they become (`completions`, `chat`), how they
are read (`decoding`).

Rules:
- Three kinds of fields: those that do something; those that may say anything, because nothing
  depends on them; and those that are not supported yet, which may only say what is the case anyway
  (`NEUTRAL`). A field that is none of these is refused by name.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from slipstream_ipc.messages import StructuredOutputs

Ignored = Any
NotYet = Any


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream holds besides the answer."""

    include_usage: bool | None = None
    include_obfuscation: Ignored = None


class JsonSchema(Struct, frozen=True, forbid_unknown_fields=True):
    """A schema that an answer is made to keep to, strictly, whatever `strict` says."""

    schema: dict[str, Any]
    name: Ignored = None
    description: Ignored = None
    strict: Ignored = None


class ResponseFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """What an answer is made to look like. json_schema: with that type alone."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Request(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both kinds of requests have in common; null stands for the default everywhere."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    stop_token_ids: tuple[int, ...] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    stream_interval: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] | None = None
    structured_outputs: StructuredOutputs | None = None
    # OpenAI's name for a part of that
    response_format: ResponseFormat | None = None

    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None

    length_penalty: NotYet = None
    use_beam_search: NotYet = None
    prompt_logprobs: NotYet = None
    spaces_between_special_tokens: NotYet = None
    truncate_prompt_tokens: NotYet = None
    add_special_tokens: NotYet = None
    echo: NotYet = None  # a chat has no prompt to repeat


class CompletionRequest(Request, frozen=True, kw_only=True):
    """POST /v1/completions. prompt: text, token ids, or a list of several of either."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None  # the prompt in front of the answer, its log-probabilities too

    best_of: NotYet = None
    suffix: NotYet = None


class TextPart(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A piece of a message's content."""

    text: str


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn of a chat."""

    role: str
    content: str | tuple[TextPart, ...] | None = None

    annotations: Ignored = None
    name: NotYet = None
    refusal: NotYet = None
    audio: NotYet = None
    tool_calls: NotYet = None
    tool_call_id: NotYet = None
    function_call: NotYet = None


class ChatRequest(Request, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: tuple[Message, ...]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    parallel_tool_calls: Ignored = None  # there are no tools to call

    tools: NotYet = None
    tool_choice: NotYet = None
    functions: NotYet = None
    function_call: NotYet = None
    modalities: NotYet = None
    audio: NotYet = None
    prediction: NotYet = None
    reasoning_effort: NotYet = None
    verbosity: NotYet = None
    web_search_options: NotYet = None
    chat_template: NotYet = None
    chat_template_kwargs: NotYet = None
    add_generation_prompt: NotYet = None
    continue_final_message: NotYet = None
    documents: NotYet = None


# What a field that is not supported yet may say, besides null: what is the case without it.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "add_special_tokens": (),
    "echo": (False,),
    "suffix": ("",),
    "name": (),
    "refusal": ("",),
    "audio": (),
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": ("none", "auto"),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
}
