"""Chats in the form that a template takes, where it refuses them as they are or loses a turn.

Many templates take a system turn at the beginning only, or none at all, or turns of user and
assistant in alternation; some leave out what they do not take, without an error. Such a chat is
rendered in the first of several forms that the template takes; a chat that it takes stays as it is.

- Texts keep their order within a role, and none is dropped. Calls and the answers to them stay
  where they are, and so does the last turn of a chat that is continued.
- What a template is known not to take, by trials when it is loaded, is not tried with each chat.
- The result is a function of chat and template, so rendering again gives the same.
- A system turn that moves to the front changes the beginning of the prompt: what the prefix cache
  holds of the chat before that turn is not found. It stays there in later chats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from msgspec.structs import replace

from slipstream_ipc.messages import ChatMessage, ChatToolCall, FunctionCall, TurnChange

Shape = Literal[
    "system",
    "systems",
    "system_between",
    "system_last",
    "users",
    "assistants",
    "assistant_before_call",
    "user_after_tool",
]
RenderChat = Callable[[Sequence[ChatMessage]], str]  # raises whatever the template raises

SYSTEM_ROLES = frozenset({"system", "developer"})
_USER, _ASSISTANT, _TOOL = "user", "assistant", "tool"
_GAP = "\n\n"  # between joined texts
_MARK = "turn-of-the-system-"
_find_marks = re.compile(rf"{_MARK}(\d+);").findall


class TurnForm(NamedTuple):
    """A form of a chat's turns.

    system: where what system and developer say goes: nowhere else, into one first turn, or into the
    first turn of the user. alternates: consecutive turns of the user are joined, and those of the
    assistant. after_tool: a turn of the user behind a tool's answer is joined to that.
    """

    system: Literal["kept", "first", "user"] = "kept"
    alternates: bool = False
    after_tool: bool = False


# in the order in which they are tried: the less a form changes, the earlier
FORMS = (
    *(TurnForm(system, joins) for system in ("kept", "first", "user") for joins in (False, True)),
    *(TurnForm(system, True, True) for system in ("kept", "first", "user")),
)


class FittedChat(NamedTuple):
    """A chat as it was rendered. changes: what was done to its turns, and what was lost."""

    messages: Sequence[ChatMessage]
    text: str
    changes: tuple[TurnChange, ...] = ()


def shapes_of(messages: Sequence[ChatMessage]) -> set[Shape]:
    """The shapes of the chat that some templates do not take."""
    found: set[Shape] = set()
    before = ""
    num_leading = 0
    for index, message in enumerate(messages):
        role = "system" if message.role in SYSTEM_ROLES else message.role
        if role == "system":
            if index == num_leading:
                num_leading += 1
                found.add("systems" if index else "system")
            else:
                found.add("system_last" if index == len(messages) - 1 else "system_between")
        elif role == before == _USER:
            found.add("users")
        elif role == before == _ASSISTANT:
            found.add("assistant_before_call" if message.tool_calls else "assistants")
        elif role == _USER and before == _TOOL:
            found.add("user_after_tool")
        before = role
    return found


def with_form(
    messages: Sequence[ChatMessage], form: TurnForm
) -> tuple[Sequence[ChatMessage], tuple[TurnChange, ...]]:
    """The chat in this form, and what that changes; the same list if it has the form."""
    changes: list[TurnChange] = []
    if form.system != "kept":
        moved = _with_first_system(messages) if form.system == "first" else _in_user(messages)
        if moved is not messages:
            changes.append("system-first" if form.system == "first" else "system-in-user")
            messages = moved
    if form.alternates:
        groups: list[list[ChatMessage]] = []
        for message in messages:
            change = None if not groups else _joint(groups[-1], message, form)
            if change is None:
                groups.append([message])
            else:
                groups[-1].append(message)
                changes.append(change)
        if len(groups) < len(messages):
            messages = [_joined(group) for group in groups]
    return messages, tuple(dict.fromkeys(changes))


def fit(
    messages: Sequence[ChatMessage],
    render: RenderChat,
    refused: frozenset[Shape] = frozenset(),
    *,
    is_continued: bool = False,
) -> FittedChat:
    """The chat in the first form that the template takes without losing what the system says.

    refused: shapes that the template is known not to take. is_continued: the last turn is to be
    gone on with. Raises whatever the template raises of the chat as it is, if it takes no form.
    """
    found: FittedChat | None = None
    error: Exception | None = None
    for form, (chat, changes) in _candidates(messages, refused, is_continued=is_continued):
        try:
            text = render(chat)
        except Exception as refusal:  # a template raises whatever it likes
            if form == FORMS[0]:
                error = refusal
            continue
        # a template may take a word out of a text and lose nothing of it (decision 026)
        if _has_system(messages, text) or _has_marks(messages, form, render):
            return FittedChat(chat, text, changes)
        if found is None:  # no other form is better, so far
            found = FittedChat(chat, text, (*changes, "system-not-shown"))
    if found is not None:
        return found
    if error is not None:
        raise error
    return FittedChat(messages, render(messages))  # was not tried: what it raises is the answer


def find_refused(render: RenderChat) -> frozenset[Shape]:
    """The shapes that a template never takes, or of which it loses texts."""
    return frozenset(
        shape
        for shape, (chats, control) in _TRIALS.items()
        if _is_taken(render, control) and not any(_is_taken(render, chat) for chat in chats)
    )


def _candidates(
    messages: Sequence[ChatMessage], refused: frozenset[Shape], *, is_continued: bool
) -> Iterator[tuple[TurnForm, tuple[Sequence[ChatMessage], tuple[TurnChange, ...]]]]:
    """The chat in each form that differs from those before and that the template may take."""
    if not shapes_of(messages):
        yield FORMS[0], (messages, ())
        return
    last, seen = messages[-1], []
    for form in FORMS:
        candidate = with_form(messages, form)
        chat = candidate[0]
        end = chat[-1]
        is_last_kept = end.role == last.role and end.content.endswith(last.content)
        if (is_continued and not is_last_kept) or not refused.isdisjoint(shapes_of(chat)):
            continue
        if chat not in seen:
            seen.append(chat)
            yield form, candidate


def _with_first_system(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    said = [each for each in messages if each.role in SYSTEM_ROLES]
    if not said or (len(said) == 1 and messages[0] is said[0]):
        return messages
    first = _with_contents(said[0], said)
    return [first, *(each for each in messages if each.role not in SYSTEM_ROLES)]


def _in_user(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    said = [each for each in messages if each.role in SYSTEM_ROLES]
    others = [each for each in messages if each.role not in SYSTEM_ROLES]
    if len(others) == len(messages):
        return messages
    for index, each in enumerate(others):
        if each.role == _USER:
            others[index] = _with_contents(each, [*said, each])
            return others
    return [_with_contents(ChatMessage(_USER, ""), said), *others]


def _joint(group: Sequence[ChatMessage], message: ChatMessage, form: TurnForm) -> TurnChange | None:
    """The change that joins a turn to the group of turns before it; None if it is not joined."""
    match group[0].role, message.role:
        case "user", "user":
            return "users-joined"
        case "assistant", "assistant" if not group[-1].tool_calls:
            return "assistants-joined"
        case "tool", "user" if form.after_tool:
            return "user-in-tool"
        case _:
            return None


def _joined(group: Sequence[ChatMessage]) -> ChatMessage:
    """Turns as one; only the last of them has calls."""
    first, names = group[0], {each.name for each in group}
    if len(group) == 1:
        return first
    return replace(
        _with_contents(first, group),
        name=first.name if len(names) == 1 or first.role == _TOOL else None,
        tool_calls=group[-1].tool_calls,
        reasoning_content=_join([each.reasoning_content or "" for each in group]) or None,
    )


def _with_contents(turn: ChatMessage, group: Sequence[ChatMessage]) -> ChatMessage:
    """The turn with the contents of several, texts and items in their order."""
    if all(each.parts is None for each in group):
        return replace(turn, content=_join([each.content for each in group]), parts=None)
    parts: list[str | int] = []
    for each in group:
        own = (each.content,) if each.parts is None else each.parts
        shown = [part for part in own if part != ""]
        parts += [_GAP, *shown] if parts and shown else shown
    content = "".join([part for part in parts if isinstance(part, str)])
    return replace(turn, content=content, parts=tuple(parts))


def _join(texts: Sequence[str]) -> str:
    return _GAP.join([text for text in texts if text])


def _has_system(messages: Sequence[ChatMessage], text: str) -> bool:
    """True if the rendered text has all that the system says, as it is and in its order."""
    end = 0
    for each in messages:
        if each.role in SYSTEM_ROLES:
            said = each.content.strip()
            begin = text.find(said, end)
            if begin < 0:
                return False
            end = begin + len(said)
    return True


def _has_marks(messages: Sequence[ChatMessage], form: TurnForm, render: RenderChat) -> bool:
    """True if the template writes all that the system says, though perhaps in another spelling."""
    marked = [
        replace(each, content=f"{_MARK}{index};", parts=None) if _says(each) else each
        for index, each in enumerate(messages)
    ]
    try:
        text = render(with_form(marked, form)[0])
    except Exception:  # it depends on the content: nothing is known
        return True
    found = set(_find_marks(text))
    return all(str(index) in found for index, each in enumerate(messages) if _says(each))


def _says(message: ChatMessage) -> bool:
    return message.role in SYSTEM_ROLES and bool(message.content.strip())


def _is_taken(render: RenderChat, chat: Sequence[ChatMessage]) -> bool:
    try:
        text = render(chat)
    except Exception:  # a template raises whatever it likes
        return False
    return all(each.content in text for each in chat if each.role in (_USER, *SYSTEM_ROLES))


def _trial(*turns: str) -> list[ChatMessage]:
    """A chat of turns with these roles, whose texts are unlike."""
    calls = (ChatToolCall(FunctionCall("probe", "{}"), "abcdefghi", "function"),)
    chat: list[ChatMessage] = []
    for index, role in enumerate(turns):
        content = f"trial-{index}-of-{role}"
        match role:
            case "call":
                chat.append(ChatMessage(_ASSISTANT, "", tool_calls=calls))
            case "tool":
                chat.append(ChatMessage(_TOOL, content, tool_call_id=calls[0].id))
            case _:
                chat.append(ChatMessage(role, content))
    return chat


# of each shape chats that have it, and one without it that the template has to take
_TRIALS: dict[Shape, tuple[list[list[ChatMessage]], list[ChatMessage]]] = {
    "system": ([_trial("system", _USER)], _trial(_USER)),
    "systems": ([_trial("system", "system", _USER)], _trial("system", _USER)),
    "system_between": (
        [_trial("system", _USER, _ASSISTANT, "system", _USER), _trial(_USER, "system", _USER)],
        _trial(_USER, _ASSISTANT, _USER),
    ),
    "system_last": (
        [_trial(_USER, "system"), _trial(_USER, _ASSISTANT, _USER, _ASSISTANT, "system")],
        _trial(_USER),
    ),
    "users": ([_trial(_USER, _USER)], _trial(_USER)),
    "assistants": (
        [_trial(_USER, _ASSISTANT, _ASSISTANT, _USER)],
        _trial(_USER, _ASSISTANT, _USER),
    ),
    "assistant_before_call": (
        [_trial(_USER, _ASSISTANT, "call", _TOOL)],
        _trial(_USER, "call", _TOOL),
    ),
    "user_after_tool": (
        [
            _trial(_USER, "call", _TOOL, _USER),
            _trial(_USER, _ASSISTANT, "call", _TOOL, _USER),
        ],
        _trial(_USER, "call", _TOOL),
    ),
}
