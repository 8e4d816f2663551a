"""The input of a response: its items, and the turns of a chat that they are.

- An assistant's reasoning, text and calls are items of their own. Those that follow one another as
  an answer has them, reasoning before text before calls, are one turn.
- An item that clients put together themselves may leave out its `type`: then it is a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from slipstream.http.api_errors import bad_field
from slipstream.http.openai.request_bodies import Call, CalledFunction, Ignored, Message
from slipstream_ipc.messages import MAX_TOOL_CALLS

_ASSISTANT = "assistant"
_ROLES = ("user", _ASSISTANT, "system", "developer")
_TYPES = ("message", "function_call", "function_call_output", "reasoning", "item_reference")


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


InputPart = InputText | PlainText | OutputText | RefusalText | ReasoningText | SummaryText
Parts = str | tuple[InputPart, ...] | None


class InputItem(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An item of any type; `check_items` says which fields each type has to have.

    call_id: which call a function_call is, or a function_call_output answers. arguments: a JSON
    object as text. id: of an item_reference the item that is meant, else ignored.
    """

    type: str | None = None
    role: str | None = None
    content: Parts = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None
    output: Parts = None
    summary: tuple[InputPart, ...] | None = None
    id: str | None = None

    status: Ignored = None
    phase: Ignored = None
    encrypted_content: Ignored = None
    cache_control: Ignored = None
    namespace: Ignored = None
    caller: Ignored = None
    parsed_arguments: Ignored = None  # of a call that openai's client has parsed

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
        match item.kind:
            case "reasoning":
                turns.add_reasoning(_text_of(item.content) or _text_of(item.summary))
            case "function_call":
                where = f"input[{index}]" if index >= 0 else "previous_response_id"
                turns.add_call(_call_of(item), where)
            case "function_call_output":
                turns.add(
                    Message(role="tool", content=_text_of(item.output), tool_call_id=item.call_id)
                )
            case "message" if item.role == _ASSISTANT:
                turns.add_content(_text_of(item.content))
            case "message":
                turns.add(Message(role=item.role or "", content=_text_of(item.content)))
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
    needed: tuple[str, ...] = ()
    match item.kind:
        case "message":
            if item.role not in _ROLES:
                what = f"{where}.role: got {_quoted(item.role)}, allowed: {', '.join(_ROLES)}"
                raise bad_field(f"{where}.role", what)
            needed = ("content",)
        case "function_call":
            needed = ("name", "call_id")
        case "function_call_output":
            needed = ("call_id", "output")
        case "reasoning":
            pass
        case "item_reference":
            needed = ("id",)
        case kind:
            allowed = f"allowed: {', '.join(_TYPES)}"
            raise bad_field(f"{where}.type", f"{where}.type: got {_quoted(kind)}, {allowed}")
    for name in needed:
        if getattr(item, name) is None:
            what = f"{where}.{name}: missing, an item of type {item.kind} has it"
            raise bad_field(f"{where}.{name}", what)


def _quoted(given: str | None) -> str:
    return "null" if given is None else repr(given[:100])


def _call_of(item: InputItem) -> Call:
    arguments = item.arguments
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments or {}).decode()
    return Call(CalledFunction(item.name or "", arguments), item.call_id, "function")


def _text_of(parts: Parts) -> str:
    if parts is None or isinstance(parts, str):
        return parts or ""
    return "".join([part.refusal if isinstance(part, RefusalText) else part.text for part in parts])
