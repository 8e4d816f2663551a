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

from slipstream_ipc.messages import SamplingParams, StructuredOutputs, ToolCall

Ignored = Any
NotYet = Any


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream holds besides the answer. continuous_usage_stats (vLLM's): with include_usage,
    each chunk tells the usage of its choice so far.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
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
    prompt_logprobs: int | None = None  # of a prompt's tokens, in whole answers
    logprob_token_ids: tuple[int, ...] | None = None  # beside logprobs, whose number does not count
    return_token_ids: bool | None = None  # of answer and prompt; such a stream is not resumable
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
    """One turn of a chat. content: null beside tool calls alone."""

    role: str
    content: str | tuple[TextPart, ...] | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None  # of an assistant's turn
    tool_call_id: str | None = None  # which of them a tool's turn answers

    annotations: Ignored = None
    refusal: NotYet = None
    audio: NotYet = None
    function_call: NotYet = None


class ChatRequest(Request, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: tuple[Message, ...]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    # what the model's chat template is given besides; answers are text, calls are not found in it
    tools: tuple[dict[str, Any], ...] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    parallel_tool_calls: Ignored = None  # what a template says of tools is for it alone

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
    documents: NotYet = None


class GenerateRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /generate. One of the first four is the prompt, `text` or `prompt` as text.

    sampling_params: names and defaults of `SamplingParams`, but for what the model's makers say.
    """

    text: str | None = None
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    sampling_params: SamplingParams | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None


class TokenizeRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize. prompt: text, or messages in its place.

    add_special_tokens: those that the tokenizer puts around a text; null: to `prompt`, not to
    `messages`, whose template has its own. The last four go with messages.
    """

    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    chat_template: NotYet = None


class DetokenizeRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize. Special tokens are a part of the text."""

    tokens: tuple[int, ...]
    model: str | None = None


class AbortRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /abort. request_id: the `id` of an answer, or of its stream's chunks."""

    request_id: str


# What a field that is not supported yet may say, besides null: what is the case without it.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "add_special_tokens": (),
    "echo": (False,),
    "suffix": ("",),
    "refusal": ("",),
    "audio": (),
    "function_call": ("none", "auto"),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "chat_template": (),
    "documents": ([],),
}
