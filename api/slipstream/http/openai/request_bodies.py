"""Types of request bodies: OpenAI's fields, and those that vLLM adds.

A field is supported, or `Ignored` (any value is accepted and has no effect on the answer), or
`Unsupported` (it would change the answer, so only values that change nothing are accepted, see
`NEUTRAL_VALUES`). Any other field is unknown: ignored and named (`ignored_fields`), or refused.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from slipstream_ipc.messages import RepetitionDetection, SamplingParams, StructuredOutputs

Ignored = Any
Unsupported = Any


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of a stream besides the answer. continuous_usage_stats (vLLM's): with
    include_usage, each chunk has the usage of its choice so far.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Ignored = None


class JsonSchema(Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON Schema that the answer has to match. strict: keywords that cannot be enforced are
    refused; else they are left out, and named.
    """

    schema: dict[str, Any]
    name: Ignored = None
    description: Ignored = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """The format of the answer. json_schema: required for that type, not allowed for others."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class SampledRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that all of OpenAI's endpoints share; null means the default."""

    model: str | None = None
    stream: bool | None = None
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
    prompt_cache_key: str | None = None  # OpenAI's; such requests prefer one replica
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] | None = None
    structured_outputs: StructuredOutputs | None = None
    repetition_detection: RepetitionDetection | None = None
    thinking_token_budget: int | None = None  # of answers with reasoning
    request_id: str | None = None  # as the header X-Request-Id, which goes before it


class OpenAIRequest(SampledRequest, frozen=True, kw_only=True):
    """The fields that completions and chat completions share besides."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    # vLLM's
    prompt_logprobs: int | None = None  # not in streams
    logprob_token_ids: tuple[int, ...] | None = None  # needs logprobs, and replaces their number
    return_token_ids: bool | None = None  # of answer and prompt; such a stream is not resumable
    # OpenAI's form of a part of structured_outputs
    response_format: ResponseFormat | None = None
    # vLLM's former form of structured_outputs; at most one of them
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: tuple[str, ...] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_decoding_backend: Ignored = None

    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_retention: Ignored = None
    cache_control: Ignored = None  # every prompt is cached
    provider: Ignored = None  # OpenRouter's

    length_penalty: Unsupported = None
    use_beam_search: Unsupported = None
    spaces_between_special_tokens: Unsupported = None
    truncate_prompt_tokens: Unsupported = None
    add_special_tokens: Unsupported = None
    echo: Unsupported = None  # a chat has no prompt to repeat


class CompletionRequest(OpenAIRequest, frozen=True, kw_only=True):
    """POST /v1/completions. prompt: text, token ids, or a list of either."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None  # repeats the prompt, with its log-probabilities if asked for

    best_of: Unsupported = None
    suffix: Unsupported = None


class TextContent(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A part of a message's content: text."""

    text: str
    cache_control: Ignored = None
    annotations: Ignored = None
    citations: Ignored = None


class RefusalContent(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="refusal"
):
    """A part of an assistant's content: the text with which it refused to answer."""

    refusal: str


class ThinkingContent(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="thinking"
):
    """A part of an assistant's content: its reasoning."""

    thinking: str
    signature: Ignored = None
    cache_control: Ignored = None


class ImageUrl(Struct, frozen=True, forbid_unknown_fields=True):
    """An image's data URL. detail: `low` for at most 512 x 512 pixels."""

    url: str
    detail: str | None = None


class ImageContent(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="image_url"
):
    """A part of a message's content: an image."""

    image_url: str | ImageUrl | None = None
    cache_control: Ignored = None
    uuid: Ignored = None  # vLLM's key of its cache: here an image is known by its content


class PlacedImage(ImageContent, frozen=True, tag="image_url"):
    """An image of another API's body. place, kind: its place there, and its type's name. refusal:
    why it is refused where the model takes images; empty: it is not.
    """

    place: str = ""
    kind: str = ""
    refusal: str = ""


ContentPart = TextContent | RefusalContent | ThinkingContent | ImageContent


class PredictedOutput(Struct, frozen=True, forbid_unknown_fields=True):
    """The text that the answer will probably say, also as parts, which are joined."""

    type: Literal["content"]
    content: str | tuple[TextContent, ...]

    @property
    def text(self) -> str:
        """All of it."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class CalledFunction(Struct, frozen=True, forbid_unknown_fields=True):
    """A function and its arguments: a JSON object, usually as text."""

    name: str
    arguments: str | dict[str, Any] | None = None

    parsed_arguments: Ignored = None  # of a message that openai's client has parsed


class CalledCustom(Struct, frozen=True, forbid_unknown_fields=True):
    """A custom tool and its input."""

    name: str
    input: str


class Call(Struct, frozen=True, forbid_unknown_fields=True):
    """A tool call in an assistant's message: of a function, or of a custom tool."""

    function: CalledFunction | None = None
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    custom: CalledCustom | None = None

    index: Ignored = None  # of a call that was put together from a stream


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn of a chat. content: may be null in an assistant's turn alone; its `refusal` stands
    for it then.
    """

    role: str
    content: str | tuple[ContentPart, ...] | None = None
    name: str | None = None
    tool_calls: tuple[Call, ...] | None = None  # of an assistant's turn
    tool_call_id: str | None = None  # of a tool's turn: the call that it answers
    reasoning_content: str | None = None  # of an assistant's turn
    reasoning: str | None = None  # another name for it
    refusal: str | None = None

    annotations: Ignored = None
    cache_control: Ignored = None
    parsed: Ignored = None  # content that openai's client has parsed
    provider_specific_fields: Ignored = None  # litellm's
    reasoning_details: Ignored = None  # OpenRouter's
    thinking_blocks: Ignored = None  # litellm's

    audio: Unsupported = None
    function_call: Unsupported = None


class ChatRequest(OpenAIRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: tuple[Message, ...]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    # passed to the chat template
    tools: tuple[dict[str, Any], ...] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    thinking: Any = None  # true, false, or an object with `type`: enabled or disabled
    enable_thinking: bool | None = None
    reasoning: Any = None  # OpenRouter's: an object with `effort` or `enabled`

    # how the answer is read
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    stop_scope: Literal["content", "all"] | None = None  # where stop strings are looked for
    logprobs_scope: Literal["content", "all"] | None = None  # whose tokens `logprobs` has

    prediction: PredictedOutput | None = None  # saves steps where answers are drafted

    include_reasoning: Ignored = None  # reasoning is in a field of its own
    verbosity: Ignored = None

    functions: Unsupported = None
    function_call: Unsupported = None
    modalities: Unsupported = None
    audio: Unsupported = None
    web_search_options: Unsupported = None
    chat_template: Unsupported = None
    documents: Unsupported = None
    mm_processor_kwargs: Unsupported = None
    media_io_kwargs: Unsupported = None
    moderation: Unsupported = None


class GenerateRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /generate. Exactly one of the first four fields holds the prompt.

    sampling_params: as `SamplingParams`; fields that it leaves out take the model's own defaults.
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
    prediction: str | None = None
    prompt_cache_key: str | None = None


class TokenizeRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize. Either prompt, as text, or messages.

    add_special_tokens: those that the tokenizer puts around a text. null adds them to `prompt` and
    not to `messages`, whose template has them. The fields from `tools` on require messages.
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

    chat_template: Unsupported = None


class DetokenizeRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize. Special tokens are kept in the text."""

    tokens: tuple[int, ...]
    model: str | None = None


class EmbeddingRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings. input: text, token ids, or a list of either.

    truncate_prompt_tokens: tokens that longer inputs are cut to; -1: as many as the model takes.
    prompt_name: of the model's own prompt in front of each text. normalize: null: as the model's
    files say; use_activation is vLLM's name for it.
    """

    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    # vLLM's
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    use_activation: bool | None = None
    # ours, with sentence-transformers' names
    prompt_name: str | None = None
    normalize: bool | None = None

    user: Ignored = None
    priority: Ignored = None
    cache_salt: Ignored = None
    request_id: str | None = None


class ClassificationRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /classify, with vLLM's fields; those of /v1/embeddings have their meaning here."""

    input: str | list[Any]
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    use_activation: bool | None = None

    user: Ignored = None
    priority: Ignored = None
    cache_salt: Ignored = None
    request_id: str | None = None


class ScoreRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /score, with vLLM's fields. Pairs are text_1 and text_2, queries and documents, queries
    and items, or data_1 and data_2: one with each of several, or as many of both.

    max_tokens_per_query, max_tokens_per_doc: that first and second texts are cut to.
    """

    text_1: Any = None
    text_2: Any = None
    queries: Any = None
    documents: Any = None
    items: Any = None
    data_1: Any = None
    data_2: Any = None
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    use_activation: bool | None = None
    instruction: str | None = None

    user: Ignored = None
    priority: Ignored = None
    cache_salt: Ignored = None
    request_id: str | None = None


class RerankRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /rerank, with the fields of Jina, Cohere and vLLM. documents: texts, or objects with a
    text. top_n: how many are answered; null and 0: all. return_documents: with their texts.
    """

    query: Any
    documents: list[Any]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    use_activation: bool | None = None
    instruction: str | None = None

    user: Ignored = None
    priority: Ignored = None
    cache_salt: Ignored = None
    request_id: str | None = None


class LoadLoraRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/load_lora_adapter. lora_path: a folder of the server's. load_inplace: what requests
    find under a name that is taken is replaced.
    """

    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False


class UnloadLoraRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/unload_lora_adapter. lora_int_id: without meaning here."""

    lora_name: str = ""
    lora_int_id: int | None = None


class AbortRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /abort. request_id: the `id` in the answer or in the chunks of its stream."""

    request_id: str


# Accepted values of `Unsupported` fields, besides null: those that change nothing.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "add_special_tokens": (),
    "echo": (False,),
    "suffix": ("",),
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "web_search_options": (),
    "mcp_servers": ([],),
    "container": (),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "moderation": (),
}

# Further ones, of the fields of one type.
OWN_NEUTRAL_VALUES: dict[tuple[type, str], tuple[Any, ...]] = {
    (ChatRequest, "add_special_tokens"): (False,),  # the chat template has them
    (CompletionRequest, "add_special_tokens"): (True,),
}
