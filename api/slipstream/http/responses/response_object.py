"""The response object and the items of its output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from slipstream.http.openai.response_bodies import TokenLogprob

_TOOLS = Meta(extra_json_schema={"type": "array", "items": {"type": "object"}, "default": []})
_SCHEMA = Meta(extra_json_schema={"type": "object"})


def no_tools() -> Raw:
    """An empty list, as JSON."""
    return Raw(b"[]")


ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputTextPart(Struct, frozen=True, tag_field="type", tag="output_text"):
    """The text of a message. logprobs: empty unless asked for."""

    text: str
    annotations: list[Any] = []
    logprobs: Sequence[TokenLogprob | Raw] = []


class ReasoningTextPart(Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """The text of reasoning."""

    text: str


class OutputMessage(Struct, frozen=True, tag_field="type", tag="message"):
    """A stretch of the answer itself."""

    id: str
    status: ItemStatus
    content: list[OutputTextPart]
    role: str = "assistant"


class ReasoningItem(Struct, frozen=True, tag_field="type", tag="reasoning"):
    """A stretch of the model's reasoning. summary: always empty, as content has all of it."""

    id: str
    status: ItemStatus
    content: list[ReasoningTextPart]
    summary: list[Any] = []


class FunctionCallItem(Struct, frozen=True, tag_field="type", tag="function_call"):
    """A call of a function. arguments: a JSON object as text; the beginning of one, or empty, where
    the call is not complete. call_id: what the function's output refers to. namespace: of the
    function, if it has one.
    """

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class CustomToolCallItem(Struct, frozen=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool. input: free text; the beginning of it where the call is not
    complete. call_id: what the tool's output refers to. namespace: of the tool, if it has one.
    """

    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem | CustomToolCallItem


class InputTokensDetails(Struct, frozen=True):
    """cached_tokens: of the prompt, found in the prefix cache when it was first computed."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, frozen=True):
    """reasoning_tokens: between the delimiters of reasoning."""

    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True):
    """The tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Struct, frozen=True):
    """The reason why an answer is incomplete, in OpenAI's words."""

    reason: Literal["max_output_tokens", "content_filter"]


class FailureDetails(Struct, frozen=True):
    """The reason why a response failed."""

    code: str
    message: str


class EchoedReasoning(Struct, frozen=True):
    """The request's options of reasoning."""

    effort: str | None = None
    summary: str | None = None


class EchoedFormat(Struct, frozen=True, omit_defaults=True):
    """The request's format of the answer."""

    type: str
    name: str | None = None
    # as JSON, which takes a tenth of its objects' memory
    schema: Annotated[Raw, _SCHEMA] | None = None
    description: str | None = None
    strict: bool | None = None


class EchoedText(Struct, frozen=True):
    """The request's options of the answer's text."""

    format: EchoedFormat
    verbosity: str


class ResponseObject(Struct, frozen=True, kw_only=True):
    """A response: the request's fields, and what has been answered. Without the output, the usage
    and its end it is the same for every front, however often it is made.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus = "in_progress"
    background: bool = False
    error: FailureDetails | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: EchoedReasoning = EchoedReasoning()
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = True
    temperature: float | None = None
    text: EchoedText = EchoedText(EchoedFormat("text"), "medium")
    tool_choice: str | dict[str, Any] = "auto"
    # as JSON: see `EchoedFormat.schema`
    tools: Annotated[Raw, _TOOLS] = field(default_factory=no_tools)
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


class DeletedResponse(Struct, frozen=True):
    """A response that is no longer kept."""

    id: str
    object: str = "response"
    deleted: bool = True


class InputItemList(Struct, frozen=True):
    """A part of a response's input. first_id, last_id: null where it is empty."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class InputTokenCount(Struct, frozen=True):
    """The number of tokens that a response's prompt would have."""

    input_tokens: int
    object: str = "response.input_tokens"
