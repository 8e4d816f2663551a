"""The body of POST /v1/responses, and the chat that it asks for.

What a response has in common with a chat, which is all but the names, is planned as one: the chat's
checks hold here too.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from slipstream.http.api_errors import bad_field
from slipstream.http.openai.allowed_tools import tools_of_names
from slipstream.http.openai.body_decoder import BodyDecoder, refuse_unsupported
from slipstream.http.openai.ignored_fields import IgnoredFields
from slipstream.http.openai.request_bodies import (
    ChatRequest,
    Ignored,
    JsonSchema,
    ResponseFormat,
    SampledRequest,
    Unsupported,
)
from slipstream.http.responses.input_items import (
    InputItem,
    input_items,
    name_left_out_items,
    readable_items,
    turns_of,
)
from slipstream.http.responses.offered_tools import OfferedTools, name_left_out, offered_tools
from slipstream_ipc.errors import shown

LOGPROBS = "message.output_text.logprobs"
# what `include` may list: all but the first concern tools that this server does not run, or
# reasoning that it hides
_INCLUDABLE = {
    LOGPROBS: None,
    "reasoning.encrypted_content": None,
    "code_interpreter_call.outputs": None,
    "computer_call_output.output.image_url": None,
    "file_search_call.results": None,
    "message.input_image.image_url": None,
    "web_search_call.action.sources": None,
    "web_search_call.results": None,
}
# param names of the chat -> those of a response
CALLER_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "response_format": "text.format",
}
_MAX_INCLUDED = 64
_MAX_METADATA = 16
_MAX_METADATA_NAME = 64
_MAX_METADATA_VALUE = 512
_MAX_ECHOED = 512  # characters of a field that is only repeated
_MAX_DESCRIPTION = 2**16  # some libraries send a whole docstring
_ECHOED = ("user", "safety_identifier", "prompt_cache_key")
_NOT_KEPT = ("conversation", "prompt")


class ReasoningOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """The amount of reasoning. Reasoning is never summarised: its own text is shown."""

    effort: str | None = None
    summary: str | None = None

    generate_summary: Ignored = None
    context: Ignored = None


class TextFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """The format of the answer; as `ResponseFormat`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """The form of the answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseStreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Options without effect: usage is always in the last event, and nothing is obfuscated."""

    include_obfuscation: Ignored = None
    include_usage: Ignored = None


class ResponsesRequest(SampledRequest, frozen=True, kw_only=True):
    """POST /v1/responses. input: text, or a list of items."""

    input: str | tuple[InputItem, ...] | None = None
    instructions: str | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: Annotated[tuple[str, ...], Meta(max_length=_MAX_INCLUDED)] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    # a prompt that is too long is refused, also with "auto"
    truncation: Literal["auto", "disabled"] | None = None

    # a chat's
    chat_template_kwargs: dict[str, Any] | None = None
    thinking: Any = None
    enable_thinking: bool | None = None
    stop_scope: Literal["content", "all"] | None = None

    # repeated in the response
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    max_tool_calls: int | None = None  # of tools that the server runs, of which there are none

    service_tier: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None
    cache_control: Ignored = None
    provider: Ignored = None
    include_reasoning: Ignored = None
    client_metadata: Ignored = None  # Codex's

    conversation: Unsupported = None
    prompt: Unsupported = None
    context_management: Unsupported = None
    moderation: Unsupported = None


_FROM_BODY = (
    *[each for each in SampledRequest.__struct_fields__ if each in ChatRequest.__struct_fields__],
    *("chat_template_kwargs", "thinking", "enable_thinking", "stop_scope", "parallel_tool_calls"),
)
_decoder = BodyDecoder(ResponsesRequest, readable_items)


def read_response_request(content: bytes, ignored: IgnoredFields | None = None) -> ResponsesRequest:
    """Decode a body and refuse unsupported fields. ignored: see `BodyDecoder`. Raises: ApiError."""
    body = _decoder.decode(content, ignored)
    name_left_out(body.tools or (), ignored)
    name_left_out_items(input_items(body.input or ()), ignored)
    refuse_unsupported(body)
    _check_include(body, ignored)
    _check_echoed(body)
    for name in _NOT_KEPT:
        if getattr(body, name) is not None:
            what = f"{name}: not supported; send the items as input, or previous_response_id"
            raise bad_field(name, what)
    if body.context_management not in (None, []):
        what = "context_management: not supported; nothing is left out of the input"
        raise bad_field("context_management", what)
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        what = f"max_output_tokens: got {body.max_output_tokens}, allowed: 1 or more"
        raise bad_field("max_output_tokens", what)
    return body


def chat_of(body: ResponsesRequest, items: tuple[InputItem, ...]) -> ChatRequest:
    """The chat whose answer is the response. items: all of its context, the body's input last.

    Raises: ApiError.
    """
    turns = tuple(
        turns_of(items, body.instructions, len(items) - len(input_items(body.input or ())))
    )
    if not turns:
        raise bad_field("input", "input: got none, allowed: text, or a list of one or more items")
    tools, choice = _tools_and_choice(body)
    wants_logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    reasoning = body.reasoning or ReasoningOptions()
    shared = {name: getattr(body, name) for name in _FROM_BODY}
    return ChatRequest(
        messages=turns,
        tools=tools,
        tool_choice=choice,
        max_completion_tokens=body.max_output_tokens,
        logprobs=wants_logprobs or None,
        top_logprobs=body.top_logprobs if wants_logprobs else None,
        reasoning_effort=reasoning.effort,
        response_format=_response_format(body.text),
        **shared,
    )


def _tools_and_choice(
    body: ResponsesRequest,
) -> tuple[tuple[dict[str, Any], ...] | None, str | dict[str, Any] | None]:
    """The tools in a chat's form, and which of them the model is to call. Raises: ApiError."""
    offered = offered_tools(body.tools or ())
    tools = tuple(offered.functions)
    choice: str | dict[str, Any] | None
    match body.tool_choice:
        case None | str() as given:
            choice = given
        case {"type": "function" | "custom", "name": str()}:
            [names] = offered.names_of([body.tool_choice])
            if not names:
                what = f"tool_choice: got {shown(body.tool_choice)}, allowed: one of tools"
                raise bad_field("tool_choice", what)
            choice = {"type": "function", "function": {"name": names[0]}}
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(allowed)}:
            choice, tools = mode, _allowed_tools(offered, allowed)
        case _:
            allowed_choices = (
                '"auto", "none", "required", {"type": "function", "name": …}, '
                '{"type": "custom", "name": …} or '
                '{"type": "allowed_tools", "mode": …, "tools": […]}'
            )
            what = f"tool_choice: got {shown(body.tool_choice)}, allowed: {allowed_choices}"
            raise bad_field("tool_choice", what)
    return tools or None, choice


def _allowed_tools(offered: OfferedTools, allowed: list[Any]) -> tuple[dict[str, Any], ...]:
    """The tools that `allowed_tools` lists. Raises: ApiError."""
    field = "tool_choice.tools"
    wanted: set[str] = set()
    namespaces: set[str] = set()
    for each, names in zip(allowed, offered.names_of(allowed), strict=True):
        if not names:
            what = f"{field}: got {shown(each)}, allowed: functions that are in tools"
            raise bad_field(field, what)
        if each["type"] == "namespace":  # a body may name one of thousands ever again
            if each["name"] in namespaces:
                continue
            namespaces.add(each["name"])
        wanted.update(names)
    return tools_of_names(tuple(offered.functions), list(wanted), field)


def _response_format(text: TextOptions | None) -> ResponseFormat | None:
    wanted = None if text is None else text.format
    if wanted is None:
        return None
    if (wanted.type == "json_schema") != (wanted.schema is not None):
        what = "text.format.schema: required for type json_schema, not allowed for others"
        raise bad_field("text.format", what)
    schema = (
        None
        if wanted.schema is None
        else JsonSchema(wanted.schema, wanted.name, strict=wanted.strict)
    )
    return ResponseFormat(wanted.type, schema)


def _check_include(body: ResponsesRequest, ignored: IgnoredFields | None) -> None:
    for each in body.include or ():
        if each in _INCLUDABLE:
            continue
        if ignored is None:
            what = f"include: got {each[:100]!r}, allowed: {', '.join(_INCLUDABLE)}"
            raise bad_field("include", what)
        ignored.add("include.", each, _INCLUDABLE)


def _check_echoed(body: ResponsesRequest) -> None:
    repeated = {name: getattr(body, name) for name in _ECHOED}
    if body.reasoning is not None:
        repeated["reasoning.effort"] = body.reasoning.effort
        repeated["reasoning.summary"] = body.reasoning.summary
    if body.text is not None:
        repeated["text.verbosity"] = body.text.verbosity
        if body.text.format is not None:
            repeated["text.format.name"] = body.text.format.name
            repeated["text.format.description"] = body.text.format.description
    for name, value in repeated.items():
        most = _MAX_DESCRIPTION if name.endswith("description") else _MAX_ECHOED
        if len(value or "") > most:
            what = f"{name}: allowed: at most {most} characters"
            raise bad_field(name, what)
    metadata = body.metadata or {}
    if len(metadata) > _MAX_METADATA or any(
        len(name) > _MAX_METADATA_NAME or len(value) > _MAX_METADATA_VALUE
        for name, value in metadata.items()
    ):
        what = (
            f"metadata: allowed: at most {_MAX_METADATA} entries, names of {_MAX_METADATA_NAME} "
            f"and values of {_MAX_METADATA_VALUE} characters"
        )
        raise bad_field("metadata", what)
