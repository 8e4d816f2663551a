"""The input of a response: its items, and the turns of a chat that they are.

- An assistant's reasoning, text and calls are items of their own. Those that follow one another as
  an answer has them, reasoning before text before calls, are one turn.
- A call of any tool that a client runs is a call of a function. What OpenAI's servers did, and what
  only they can read, is left out.
- An item that clients put together themselves may leave out its `type`: then it is a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from slipstream.http.api_errors import ApiError, bad_field
from slipstream.http.openai.custom_tools import arguments_of_input
from slipstream.http.openai.ignored_fields import IgnoredFields
from slipstream.http.openai.request_bodies import (
    Call,
    CalledFunction,
    ContentPart,
    Ignored,
    ImageUrl,
    Message,
    PlacedImage,
    TextContent,
)
from slipstream.http.responses.offered_tools import offered_name
from slipstream_ipc.messages import MAX_TOOL_CALLS

_ASSISTANT = "assistant"
_ROLES = ("user", _ASSISTANT, "system", "developer")
# calls that a client answers, and the fields that each needs
_CALLS: dict[str, tuple[str, ...]] = {
    "function_call": ("name", "call_id"),
    "custom_tool_call": ("name", "call_id", "input"),
    "local_shell_call": ("call_id", "action"),
    "shell_call": ("call_id", "action"),
    "apply_patch_call": ("call_id", "operation"),
}
_OUTPUTS: dict[str, tuple[str, ...]] = {
    "function_call_output": ("call_id", "output"),
    "custom_tool_call_output": ("call_id", "output"),
    "local_shell_call_output": ("output",),  # whose id is the call's
    "shell_call_output": ("call_id", "output"),
    "apply_patch_call_output": ("call_id",),
}
_NEEDED = {
    "message": ("content",),
    "reasoning": (),
    "item_reference": ("id",),
    **_CALLS,
    **_OUTPUTS,
}
LEFT_OUT = frozenset(
    {
        "additional_tools",
        "code_interpreter_call",
        "compaction",
        "compaction_summary",
        "compaction_trigger",
        "computer_call",
        "computer_call_output",
        "configuration_update",
        "context_compaction",
        "file_search_call",
        "ghost_snapshot",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)


class InputText(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="input_text"
):
    """A part of a message, or of a function's output."""

    text: str
    cache_control: Ignored = None
    prompt_cache_breakpoint: Ignored = None


class PlainText(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A part as chats have it, which some clients send here too."""

    text: str
    cache_control: Ignored = None


class OutputText(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="output_text"
):
    """A part of an assistant's message."""

    text: str
    annotations: Ignored = None
    logprobs: Ignored = None
    parsed: Ignored = None  # of an answer that openai's client has parsed


class RefusalText(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="refusal"):
    """A part of an assistant's message: the text with which it refused to answer."""

    refusal: str


class ReasoningText(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="reasoning_text"
):
    """A part of an assistant's reasoning."""

    text: str


class SummaryText(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="summary_text"
):
    """A part of a summary of an assistant's reasoning."""

    text: str


class InputImage(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="input_image"
):
    """A part of a message, or of a function's output: an image as a data URL. detail: `low` for at
    most 512 x 512 pixels.
    """

    image_url: str | None = None
    detail: str | None = None
    file_id: str | None = None  # of a file at OpenAI's servers: refused

    cache_control: Ignored = None
    prompt_cache_breakpoint: Ignored = None


InputPart = (
    InputText | PlainText | OutputText | RefusalText | ReasoningText | SummaryText | InputImage
)
Parts = str | tuple[InputPart, ...] | None


class InputItem(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An item of any type; `check_items` says which fields each type has to have.

    call_id: which call this is, or answers. arguments: a JSON object as text. input: of a custom
    tool's call. action, operation: of a call of a shell or of apply_patch. id: of an item_reference
    the item that is meant.
    """

    type: str | None = None
    role: str | None = None
    content: Parts = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None
    output: Parts = None
    summary: tuple[InputPart, ...] | None = None
    id: str | None = None

    status: Any = None  # of an apply_patch_call_output without a text
    phase: Ignored = None
    encrypted_content: Ignored = None
    cache_control: Ignored = None
    caller: Ignored = None
    parsed_arguments: Ignored = None  # of a call that openai's client has parsed
    max_output_length: Ignored = None  # of a shell_call_output

    @property
    def kind(self) -> str:
        """The type, also where it is left out."""
        is_reference = self.id is not None and self.role is None and self.content is None
        return self.type or ("item_reference" if is_reference else "message")


def input_items(given: str | Sequence[InputItem]) -> tuple[InputItem, ...]:
    """The items of an input; text alone is a user's message."""
    if isinstance(given, str):
        return (InputItem(type="message", role="user", content=given),)
    return tuple(given)


def readable_items(body: Any) -> Any:
    """The body with items that an `InputItem` can hold: of what is left out only the type and the
    id, and the output of a shell as one text.
    """
    items = body.get("input") if isinstance(body, dict) else None
    return (
        {**body, "input": [_readable(item) for item in items]} if isinstance(items, list) else body
    )


def name_left_out_items(items: Iterable[InputItem], ignored: IgnoredFields | None) -> None:
    """Add to `ignored` the types of the items that are left out. Raises ApiError where it is None
    and there is one.
    """
    for index, item in enumerate(items):
        if item.kind not in LEFT_OUT:
            continue
        if ignored is None:
            raise _unsupported(item, f"input[{index}]")
        ignored.add("input.", item.kind, {})


def check_items(items: Iterable[InputItem]) -> None:
    """Raises ApiError for an item of a type that is not supported, or one without a field that its
    type needs.
    """
    for index, item in enumerate(items):
        _check_item(item, f"input[{index}]")


def turns_of(
    items: Iterable[InputItem], instructions: str | None = None, num_before: int = 0
) -> list[Message]:
    """The turns of a chat, the instructions first. Items of type item_reference are left out.

    num_before: how many of the items are of the responses before. Raises: ApiError.
    """
    turns = _Turns()
    if instructions is not None:
        turns.add(Message(role="system", content=instructions))
    for index, item in enumerate(items, -num_before):
        kind = item.kind
        where = f"input[{index}]" if index >= 0 else "previous_response_id"
        if kind == "reasoning":
            reasoning = _assistants_text(item.content, f"{where}.content")
            turns.add_reasoning(reasoning or _assistants_text(item.summary, f"{where}.summary"))
        elif kind in _CALLS:
            turns.add_call(_call_of(item), where)
        elif kind in _OUTPUTS:
            call_id = item.call_id or item.id
            output = _output_of(item, f"{where}.output")
            turns.add(Message(role="tool", content=output, tool_call_id=call_id))
        elif kind == "message" and item.role == _ASSISTANT:
            turns.add_content(_assistants_text(item.content, f"{where}.content"))
        elif kind == "message":
            content = _content_of(item.content, f"{where}.content")
            turns.add(Message(role=item.role or "", content=content))
    return turns.whole()


class _Turns:
    """Puts turns together. A turn of the assistant is open until something else follows it."""

    def __init__(self) -> None:
        self._turns: list[Message] = []
        self._reasoning: list[str] = []
        self._content: str | None = None
        self._calls: list[Call] = []

    def add(self, turn: Message) -> None:
        """Add a turn of another role."""
        self._close()
        self._turns.append(turn)

    def add_reasoning(self, text: str) -> None:
        """Add reasoning, which begins a turn of the assistant, or goes on with its reasoning."""
        if self._content is not None or self._calls:
            self._close()
        self._reasoning.append(text)

    def add_content(self, text: str) -> None:
        """Add the text of a turn of the assistant."""
        if self._content is not None or self._calls:
            self._close()
        self._content = text

    def add_call(self, call: Call, where: str) -> None:
        """Add a call to the assistant's turn. Raises ApiError, which names `where`."""
        if len(self._calls) == MAX_TOOL_CALLS:
            what = f"{where}: got one call more, allowed: {MAX_TOOL_CALLS} behind one another"
            raise bad_field(where, what)
        self._calls.append(call)

    def whole(self) -> list[Message]:
        """All turns."""
        self._close()
        return self._turns

    def _close(self) -> None:
        reasoning, content, calls = "".join(self._reasoning), self._content, self._calls
        if reasoning or content is not None or calls:
            turn = Message(
                role=_ASSISTANT,
                content=content or "",
                tool_calls=tuple(calls) or None,
                reasoning_content=reasoning or None,
            )
            self._turns.append(turn)
        self._reasoning, self._content, self._calls = [], None, []


def _check_item(item: InputItem, where: str) -> None:
    kind = item.kind
    if kind in LEFT_OUT:
        return
    needed = _NEEDED.get(kind)
    if needed is None:
        raise _unsupported(item, where)
    if kind == "message" and item.role not in _ROLES:
        what = f"{where}.role: got {_quoted(item.role)}, allowed: {', '.join(_ROLES)}"
        raise bad_field(f"{where}.role", what)
    for name in needed:
        if getattr(item, name) is None:
            what = f"{where}.{name}: missing, an item of type {kind} has it"
            raise bad_field(f"{where}.{name}", what)


def _unsupported(item: InputItem, where: str) -> ApiError:
    allowed = f"allowed: {', '.join(_NEEDED)}"
    return bad_field(f"{where}.type", f"{where}.type: got {_quoted(item.kind)}, {allowed}")


def _readable(item: Any) -> Any:
    kind = item.get("type") if isinstance(item, dict) else None
    if not isinstance(kind, str):
        return item
    if kind in LEFT_OUT:
        return {name: item[name] for name in ("type", "id") if name in item}
    output = item.get("output")
    if kind == "shell_call_output" and isinstance(output, list):
        texts = [
            text
            for each in output
            if isinstance(each, dict)
            for name in ("stdout", "stderr")
            if isinstance(text := each.get(name), str)
        ]
        return {**item, "output": "".join(texts)}
    return item


def _quoted(given: str | None) -> str:
    return "null" if given is None else repr(given[:100])


def _call_of(item: InputItem) -> Call:
    arguments: str | dict[str, Any] | None
    name = item.name or ""
    match item.kind:
        case "function_call":
            arguments = item.arguments
        case "custom_tool_call":
            arguments = arguments_of_input(item.input or "")
        case kind:
            name, arguments = kind.removesuffix("_call"), item.action or item.operation
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments or {}).decode()
    name = offered_name(name, item.namespace)
    return Call(CalledFunction(name, arguments), item.call_id, "function")


def _output_of(item: InputItem, where: str) -> str | tuple[ContentPart, ...]:
    if item.output is None and isinstance(item.status, str):
        return item.status
    return _content_of(item.output, where)


def _content_of(parts: Parts, where: str) -> str | tuple[ContentPart, ...]:
    """A turn's content: a text, or parts where there are images among them."""
    if parts is None or isinstance(parts, str) or not _has_images(parts):
        return _text_of(parts)
    return tuple(
        _image_of(part, f"{where}[{at}]")
        if isinstance(part, InputImage)
        else TextContent(_text_of((part,)))
        for at, part in enumerate(parts)
    )


def _image_of(part: InputImage, place: str) -> PlacedImage:
    refusal = ""
    if part.image_url is None:
        given = "got file_id" if part.file_id else "missing"
        refusal = f"{place}.image_url: {given}, allowed: a data: URL"
    image = None if part.image_url is None else ImageUrl(part.image_url, part.detail)
    return PlacedImage(image, place=place, kind="input_image", refusal=refusal)


def _assistants_text(parts: Parts, where: str) -> str:
    """Raises ApiError for images."""
    if parts is not None and not isinstance(parts, str) and _has_images(parts):
        what = "got 'input_image', allowed: only in turns of the user and in outputs"
        raise bad_field(where, f"{where}: {what}")
    return _text_of(parts)


def _has_images(parts: Sequence[InputPart]) -> bool:
    return any(isinstance(part, InputImage) for part in parts)


def _text_of(parts: Parts) -> str:
    """The texts of parts, without the images among them."""
    if parts is None or isinstance(parts, str):
        return parts or ""
    return "".join(
        [
            part.refusal if isinstance(part, RefusalText) else part.text
            for part in parts
            if not isinstance(part, InputImage)
        ]
    )
