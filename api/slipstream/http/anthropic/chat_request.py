"""Turns a body of the Messages API into that of a chat, which everything else is made of.

- Each `tool_result` becomes a turn of its own. One with `is_error` begins with "Error: ".
  Those that follow one another are in the order of their calls: clients send them as their tools
  end, and many templates show no ids.
- A last turn of the assistant is continued, not repeated; it cannot have a call.
- Search results and documents of text are text, with title and source before it.
- Images are images, also those in a `tool_result`.
- Other documents, and tools that run on Anthropic's servers, are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, assert_never

from msgspec import ValidationError, convert, to_builtins

from slipstream.http.anthropic.request_bodies import (
    ContentBlock,
    DocumentBlock,
    DocumentSource,
    ImageBlock,
    ImageSource,
    MessagesRequest,
    MessagesToolChoice,
    OfferedTool,
    PromptFields,
    RedactedThinkingBlock,
    ResultContent,
    SearchResultBlock,
    TextBlock,
    TextSource,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from slipstream.http.api_errors import ApiError, bad_field
from slipstream.http.openai.request_bodies import (
    Call,
    CalledFunction,
    ChatRequest,
    ContentPart,
    JsonSchema,
    Message,
    PlacedImage,
    ResponseFormat,
    TextContent,
    ThinkingContent,
)
from slipstream_ipc.errors import brief
from slipstream_ipc.messages import MAX_TOOL_CALLS

_ASSISTANT, _SYSTEM, _TOOL = "assistant", "system", "tool"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_CUSTOM = (None, "custom")
_ERROR = "Error: "
# in a refusal it makes anthropic's client send the whole conversation instead
_UNTHREADED = "thread_unsupported_request"
# the caller's name for what a chat's body calls otherwise
PARAM_NAMES = {
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
}


def chat_request(body: PromptFields) -> ChatRequest:
    """The same request as a chat's. Raises: ApiError."""
    choice = body.tool_choice
    is_continued = bool(body.messages) and body.messages[-1].role == _ASSISTANT
    if is_continued and not isinstance(body.messages[-1].content, str):
        _check_continued(body.messages[-1].content, f"messages[{len(body.messages) - 1}].content")
    output = body.output_config
    form = None if output is None or output.format is None else output.format.schema
    sampling: dict[str, Any] = {}
    if isinstance(body, MessagesRequest):
        if body.thread:
            what = "thread: conversations that the server holds are not supported"
            raise bad_field("thread", f"{what}; send all messages", _UNTHREADED)
        sampling = {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "thinking_token_budget": body.thinking_token_budget,
        }
    return ChatRequest(
        model=body.model,
        messages=tuple(_results_in_order(_messages(body))),
        tools=None if body.tools is None else tuple(_tools(body.tools)),
        tool_choice=None if choice is None else _tool_choice(choice),
        parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
        thinking=None if body.thinking is None else to_builtins(body.thinking),
        reasoning_effort=None if output is None else output.effort,
        response_format=(None if form is None else ResponseFormat("json_schema", JsonSchema(form))),
        add_generation_prompt=not is_continued,
        continue_final_message=is_continued,
        **sampling,
    )


def _messages(body: PromptFields) -> Iterator[Message]:
    if not body.messages:
        raise bad_field("messages", "messages: got none, allowed: one or more")
    if isinstance(body.system, str):
        yield Message(role=_SYSTEM, content=body.system)
    elif body.system:
        texts = [TextContent(block.text) for block in body.system]
        yield Message(role=_SYSTEM, content=tuple(texts))
    for index, turn in enumerate(body.messages):
        yield from _turn(turn, f"messages[{index}].content")


def _results_in_order(messages: Iterable[Message]) -> Iterator[Message]:
    places: dict[str | None, int] = {}
    for role, run in groupby(messages, key=lambda each: each.role):
        turns = list(run)
        if role == _TOOL:
            turns.sort(key=lambda each: places.get(each.tool_call_id, len(places)))
        elif role == _ASSISTANT:
            calls = [call for each in turns for call in each.tool_calls or ()]
            places = {call.id: at for at, call in enumerate(calls)}
        yield from turns


def _turn(turn: Turn, field: str) -> Iterator[Message]:
    if isinstance(turn.content, str):
        yield Message(role=turn.role, content=turn.content)
        return
    parts: list[ContentPart] = []
    calls: list[Call] = []
    has_results = False
    for at, block in enumerate(turn.content):
        where = f"{field}[{at}]"
        _check_place(turn, block, where)
        match block:
            case TextBlock() | SearchResultBlock() | ImageBlock() | DocumentBlock():
                parts.append(_part_of(block, where))
            case ThinkingBlock(thinking=thinking):
                parts.append(ThinkingContent(thinking))
            case RedactedThinkingBlock():
                pass
            case ToolUseBlock() if len(calls) == MAX_TOOL_CALLS:
                what = f"{where}: got one call more, allowed: {MAX_TOOL_CALLS} in a turn"
                raise bad_field(where, what)
            case ToolUseBlock(id=call_id, name=name, input=arguments):
                calls.append(Call(CalledFunction(name, arguments), call_id, "function"))
            case ToolResultBlock():
                if parts:
                    yield Message(role=turn.role, content=tuple(parts))
                    parts = []
                has_results = True
                yield _tool_result(block, where)
            case _:
                assert_never(block)
    if parts or calls or not has_results:
        yield Message(role=turn.role, content=tuple(parts), tool_calls=tuple(calls) or None)


def _check_place(turn: Turn, block: ContentBlock, where: str) -> None:
    """Raises ApiError for a block that its turn cannot have."""
    is_own = isinstance(block, ToolUseBlock | ThinkingBlock | RedactedThinkingBlock)
    if is_own and turn.role != _ASSISTANT:
        kind = block.__struct_config__.tag
        raise bad_field(where, f"{where}: got {kind!r}, allowed: only in turns of the assistant")
    if isinstance(block, ToolResultBlock) and turn.role != "user":
        raise bad_field(where, f"{where}: got 'tool_result', allowed: only in turns of the user")


def _check_continued(blocks: Sequence[ContentBlock], field: str) -> None:
    for at, block in enumerate(blocks):
        if isinstance(block, ToolUseBlock):
            what = (
                f"{field}[{at}]: got 'tool_use' in a last turn of the assistant, which is continued"
            )
            raise bad_field(
                field, f"{what}; allowed: a turn of the user with its tool_result behind it"
            )


def _tool_result(block: ToolResultBlock, where: str) -> Message:
    content = block.content or ""
    parts: list[ContentPart] = [TextContent(_ERROR)] if block.is_error else []
    if isinstance(content, str):
        parts.append(TextContent(content))
    else:
        parts += [_part_of(each, f"{where}.content[{at}]") for at, each in enumerate(content)]
    texts = [part.text for part in parts if isinstance(part, TextContent)]
    whole = "".join(texts) if len(texts) == len(parts) else tuple(parts)
    return Message(role=_TOOL, content=whole, tool_call_id=block.tool_use_id)


def _part_of(block: ResultContent, where: str) -> ContentPart:
    if not isinstance(block, ImageBlock):
        return TextContent(_text_of(block, where))
    source = block.source or {}
    try:
        found = convert(source, ImageSource)
    except ValidationError:
        kind = source.get("type")
        given = f"{where}.source: got {brief(repr(kind))}"
        what = f'{given}, allowed: {{"type": "base64", "media_type": …, "data": …}}'
        if kind in ("url", "file"):
            what += ": the server fetches no files"
        url = None
    else:
        return PlacedImage(f"data:;base64,{found.data}", place=where, kind="image")
    return PlacedImage(url, place=where, kind="image", refusal=what)


def _text_of(
    block: TextBlock | SearchResultBlock | ToolReferenceBlock | DocumentBlock, where: str
) -> str:
    """Raises ApiError for a document that is no text."""
    match block:
        case TextBlock(text=text):
            return text
        case ToolReferenceBlock(tool_name=name):
            return f"{name}\n"
        case SearchResultBlock(title=title, source=source, content=content):
            return _titled(title, source, "".join([each.text for each in content]))
        case DocumentBlock(title=title, context=context):
            return _titled(title, context, _document_text(block, where))
        case _:
            assert_never(block)


def _titled(title: str | None, about: str | None, text: str) -> str:
    """A text with what is said of it before it, apart from what follows."""
    return "\n".join([*filter(None, (title, about)), text, "", ""])


def _document_text(block: DocumentBlock, where: str) -> str:
    if block.source is None or block.source.get("type") not in ("text", "content"):
        raise _unsupported(where)
    try:
        source = convert(block.source, DocumentSource)
    except ValidationError as error:
        raise bad_field(where, f"{where}.source: {error}, allowed: a text") from None
    if isinstance(source, TextSource):
        return source.data
    if isinstance(source.content, str):
        return source.content
    return "".join([each.text for each in source.content])


def _tools(tools: tuple[OfferedTool, ...]) -> Iterator[dict[str, Any]]:
    for index, tool in enumerate(tools):
        field = f"tools[{index}]"
        if tool.type not in _CUSTOM:
            got = f"{field}.type: got {str(tool.type)[:100]!r}"
            why = 'allowed: "custom": tools of Anthropic\'s servers are not there'
            raise bad_field(f"{field}.type", f"{got}, {why}")
        if tool.input_schema is None:
            raise bad_field(f"{field}.input_schema", f"{field}.input_schema: required")
        function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
        if tool.description is not None:
            function["description"] = tool.description
        if tool.strict is not None:
            function["strict"] = tool.strict
        yield {"type": "function", "function": function}


def _tool_choice(choice: MessagesToolChoice) -> str | dict[str, Any]:
    if (choice.type == "tool") != (choice.name is not None):
        what = "tool_choice.name: required for type 'tool', not allowed for others"
        raise bad_field("tool_choice.name", what)
    if choice.name is not None:
        return {"type": "function", "function": {"name": choice.name}}
    return _CHOICES[choice.type]


def _unsupported(where: str) -> ApiError:
    what = "documents are not supported yet but for those of text; the model is served as text"
    return bad_field(where, f"{where}: got 'document', allowed: text; {what}")
