"""The dialect of turns that a chat template reads, found once by rendering small chats with it.

Templates differ in the name under which they read a turn's reasoning, in whether the arguments of a
call are an object or text, in whether a turn with calls may have empty content, in whether they
know the role `developer` (some leave such a turn out without a word), and in whether they read
content that is a text: some of vision models read lists of parts alone. A template that can tell
none of this apart, or that renders no calls, has the dialect of most: `TemplateDialect()`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from slipstream_ipc.formats.call_ids import written_id
from slipstream_ipc.messages import ChatMessage, ChatToolCall, FunctionCall
from slipstream_worker.formats.call_ids import short_call_id
from slipstream_worker.tokenizer.turn_forms import Shape, find_refused

REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")

_CALL_ID = "abcdefghi"  # some templates insist on nine letters and digits
_LONG_CALL_ID = "call_0123456789abcdef01234567"
_NAME, _KEY = "probe_function", "probe_key"
_ARGUMENTS = f'{{"{_KEY}": "probe_value"}}'
_REASONING, _CONTENT = "probe_reasoning", "probe_content"
# some templates render calls only where there are tools
_TOOLS = [{"type": "function", "function": {"name": "other", "description": "", "parameters": {}}}]
_USER_TURN = ChatMessage("user", "a")
_DEVELOPER, _SYSTEM = "developer", "system"
_IMAGE = {"type": "image"}
_object_decoder = msgspec.json.Decoder(dict[str, Any])


class TemplateDialect(NamedTuple):
    """The form of an assistant's turn that a template expects."""

    reasoning_name: str = "reasoning_content"
    is_text: bool = False  # arguments are given as text, not as objects
    accepts_text: bool = True  # as arguments; those that are no object can be given no other way
    omits_empty: bool = False  # a turn with calls has no content in place of an empty one
    has_reasoning_beside_text: bool = True  # also in a turn with calls
    has_short_ids: bool = False  # ids of calls are nine letters and digits
    has_developer: bool = True  # else what a developer says is the system's
    reads_texts: bool = True  # as content; else parts alone

    def turns(self, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        """Messages as the template expects them."""
        turns = [self.turn(each) for each in messages]
        turns = turns if self.has_developer else _with_system(turns)
        if self.reads_texts:
            return turns
        return [{**turn, "content": _as_parts(turn.get("content") or "")} for turn in turns]

    def turn(self, message: ChatMessage) -> dict[str, Any]:
        """A message as the template expects it."""
        turn: dict[str, Any] = msgspec.to_builtins(message)
        if (parts := turn.pop("parts", None)) is not None:
            turn["content"] = [_text(each) if isinstance(each, str) else _IMAGE for each in parts]
        reasoning = turn.pop("reasoning_content", None)
        calls = turn.pop("tool_calls", None)
        if calls:
            turn["tool_calls"] = list(calls)
            for call in calls:
                call.setdefault("type", "function")
                call["function"]["arguments"] = self._arguments(call["function"]["arguments"])
                if call.get("id"):
                    call["id"] = self._call_id(call["id"])
            if self.omits_empty and not turn["content"]:
                del turn["content"]
        if message.tool_call_id:
            turn["tool_call_id"] = self._call_id(message.tool_call_id)
        if reasoning and (self.has_reasoning_beside_text or not calls or not message.content):
            turn[self.reasoning_name] = reasoning
        return turn

    def _call_id(self, call_id: str) -> str:
        written = written_id(call_id)
        return short_call_id(written) if self.has_short_ids else written

    def _arguments(self, text: str) -> object:
        if self.is_text:
            return text or "{}"
        try:
            return _object_decoder.decode(text or "{}")
        except (msgspec.DecodeError, RecursionError):
            # what a model wrote wrongly it may see, and the request is not refused for it
            return text if self.accepts_text else {"arguments": text}


def _with_system(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turn a developer's turns into the system's: each is joined to a system's turn just before it,
    as many templates take one such turn, at the front.
    """
    found: list[dict[str, Any]] = []
    for turn in turns:
        if turn["role"] != _DEVELOPER:
            found.append(turn)
        elif found and found[-1]["role"] == _SYSTEM:
            found[-1] = {**found[-1], "content": _joined(found[-1]["content"], turn["content"])}
        else:
            found.append({**turn, "role": _SYSTEM})
    return found


def _joined(one: Any, other: Any) -> Any:
    """Two turns' contents as one: texts, or lists of parts."""
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}\n\n{other}"
    return [*_as_parts(one), _text("\n\n"), *_as_parts(other)]


def _as_parts(content: Any) -> list[dict[str, str]]:
    return [_text(content)] if isinstance(content, str) else content


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def find_dialect(tokenizer: Any) -> TemplateDialect:
    """The dialect of a tokenizer's chat template. Errors of the template are findings."""
    if not tokenizer.chat_template:
        return TemplateDialect()
    plain = TemplateDialect(reads_texts=_reads_texts(tokenizer))
    found = _with_calls(tokenizer, plain)
    found = found._replace(has_developer=_has_developer(tokenizer, plain))
    for name in _ordered_names(tokenizer.chat_template):
        named = found._replace(reasoning_name=name)
        if any(
            _REASONING in _rendered(tokenizer, named, turn)
            for turn in (_call_turn("", _REASONING), _answer_turn())
        ):
            both = _rendered(tokenizer, named, _call_turn(_CONTENT, _REASONING))
            is_either = not both and bool(_rendered(tokenizer, named, _call_turn(_CONTENT)))
            return named._replace(has_reasoning_beside_text=not is_either)
    return found


def find_refused_shapes(
    tokenizer: Any, dialect: TemplateDialect
) -> tuple[frozenset[Shape], frozenset[Shape]]:
    """The shapes of chats that the template does not take: without tools, and with tools."""
    if not tokenizer.chat_template:
        return frozenset(), frozenset()

    def refused(tools: list[dict[str, Any]] | None) -> frozenset[Shape]:
        return find_refused(
            lambda chat: tokenizer.apply_chat_template(
                dialect.turns(chat), tools=tools, tokenize=False, add_generation_prompt=True
            )
        )

    return refused(None), refused(_TOOLS)


def _reads_texts(tokenizer: Any) -> bool:
    """True if a user's text is rendered, or is not even as a part."""
    as_text, as_parts = (
        _CONTENT in _chat(tokenizer, dialect, [ChatMessage("user", _CONTENT)])
        for dialect in (TemplateDialect(), TemplateDialect(reads_texts=False))
    )
    return as_text or not as_parts


def _has_developer(tokenizer: Any, plain: TemplateDialect) -> bool:
    """True if a developer's turn is rendered, or no system's is either."""
    as_developer, as_system = (
        _CONTENT in _chat(tokenizer, dialect, [ChatMessage(_DEVELOPER, _CONTENT), _USER_TURN])
        for dialect in (plain, plain._replace(has_developer=False))
    )
    return as_developer or not as_system


def _with_calls(tokenizer: Any, plain: TemplateDialect) -> TemplateDialect:
    """The dialect as far as calls and their arguments are concerned."""
    candidates = [
        plain._replace(is_text=is_text, omits_empty=omits_empty)
        for omits_empty in (False, True)
        for is_text in (False, True)
    ]
    texts = [_rendered(tokenizer, each, _call_turn()) for each in candidates]
    for is_enough in (_has_arguments, _has_name):
        for found, text in zip(candidates, texts, strict=True):
            if is_enough(found, text):
                as_text = _rendered(tokenizer, found._replace(is_text=True), _call_turn())
                long_id = _rendered(tokenizer, found, _call_turn(call_id=_LONG_CALL_ID))
                return found._replace(
                    accepts_text=_NAME in as_text, has_short_ids=_NAME not in long_id
                )
    return candidates[0]


def _has_arguments(dialect: TemplateDialect, text: str) -> bool:
    """True if a call and its arguments are rendered, and objects not as Python prints them."""
    if dialect.is_text:
        return _NAME in text and _ARGUMENTS in text
    return _NAME in text and _KEY in text and f"'{_KEY}'" not in text


def _has_name(_dialect: TemplateDialect, text: str) -> bool:
    return _NAME in text


def _ordered_names(template: str | Mapping[str, str]) -> Sequence[str]:
    """The names of reasoning, those first that the template mentions."""
    text = template if isinstance(template, str) else "\n".join(template.values())
    return sorted(
        REASONING_NAMES, key=lambda name: re.search(rf"\b{name}\b", text) is None
    )  # stable


def _call_turn(
    content: str = "", reasoning: str | None = None, call_id: str = _CALL_ID
) -> ChatMessage:
    call = ChatToolCall(FunctionCall(_NAME, _ARGUMENTS), call_id, "function")
    return ChatMessage("assistant", content, tool_calls=(call,), reasoning_content=reasoning)


def _answer_turn() -> ChatMessage:
    return ChatMessage("assistant", _CONTENT, reasoning_content=_REASONING)


def _rendered(tokenizer: Any, dialect: TemplateDialect, turn: ChatMessage) -> str:
    """A chat that ends with this turn, or with the answer to its call; empty if it is refused."""
    turns = [_USER_TURN, turn]
    if turn.tool_calls:
        turns.append(ChatMessage("tool", "b", tool_call_id=turn.tool_calls[0].id))
    return _chat(tokenizer, dialect, turns)


def _chat(tokenizer: Any, dialect: TemplateDialect, turns: Sequence[ChatMessage]) -> str:
    """A chat as it is rendered; empty if it is refused."""
    try:
        text: str = tokenizer.apply_chat_template(
            dialect.turns(turns),
            tools=_TOOLS,
            tokenize=False,
            add_generation_prompt=False,
        )
    except Exception:  # a template raises whatever it likes
        return ""
    return text
