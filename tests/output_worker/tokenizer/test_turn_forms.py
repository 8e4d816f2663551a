"""Chats in the form that a template takes, against what templates do with the chats as they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import chat_templates
from tests.helpers.chat_templates import (
    ALTERNATING,
    ALTERNATING_BUT_FOR_CALLS,
    ANY_ROLE,
    LATE_SYSTEM_IS_LOST,
    NO_SYSTEM,
    SYSTEM_FIRST,
    SYSTEM_IS_LOST,
    tokenizer_with,
)

from slipstream_ipc.columns import u32
from slipstream_ipc.messages import (
    ChatMessage,
    ChatToolCall,
    FunctionCall,
    Render,
    Rendered,
    TemplateOptions,
)
from slipstream_ipc.validation.chat_template import template_options
from slipstream_worker.tokenizer.prompt_rendering import ChatTraits, render
from slipstream_worker.tokenizer.template_dialect import find_dialect, find_refused_shapes
from slipstream_worker.tokenizer.turn_forms import FORMS, RenderChat, fit, shapes_of, with_form

TEMPLATES = {
    name: getattr(chat_templates, name)
    for name in (
        "ANY_ROLE",
        "SYSTEM_FIRST",
        "ALTERNATING",
        "ALTERNATING_BUT_FOR_CALLS",
        "NO_SYSTEM",
        "LATE_SYSTEM_IS_LOST",
        "SYSTEM_IS_LOST",
    )
}
WITH_TOOLS = {"ANY_ROLE", "SYSTEM_FIRST", "ALTERNATING_BUT_FOR_CALLS", "LATE_SYSTEM_IS_LOST"}
CALLS = (ChatToolCall(FunctionCall("look", "{}"), "abcdefghi", "function"),)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
SYSTEM = ("system", "developer")


@lru_cache
def tokenizer_of(template: str) -> Any:
    return tokenizer_with(template)


@lru_cache
def traits_of(template: str) -> ChatTraits:
    tokenizer = tokenizer_of(template)
    dialect = find_dialect(tokenizer)
    return ChatTraits(dialect, None, find_refused_shapes(tokenizer, dialect))


def chat(turns: str) -> list[ChatMessage]:
    """Of a word such as "sua" a chat of system, user and assistant; "c" is a call, "t" its answer,
    "d" a developer. Each has a text of its own.
    """
    names = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    found = []
    for index, letter in enumerate(turns):
        if letter == "c":
            found.append(ChatMessage("assistant", f"<{index}c>", tool_calls=CALLS))
        else:
            call_id = "abcdefghi" if letter == "t" else None
            found.append(ChatMessage(names[letter], f"<{index}{letter}>", tool_call_id=call_id))
    return found


def as_is_by(template: str) -> RenderChat:
    """What the template makes of a chat as it is."""
    tokenizer, dialect = tokenizer_of(template), traits_of(template).dialect

    def as_is(messages: Sequence[ChatMessage]) -> str:
        text: str = tokenizer.apply_chat_template(
            dialect.turns(messages), tokenize=False, add_generation_prompt=True
        )
        return text

    return as_is


def rendered(template: str, messages: Sequence[ChatMessage], /, **options: Any) -> Rendered:
    request = Render(1, messages=tuple(messages), **options)
    return render(tokenizer_of(template), request, traits_of(template))


def shown(template: str, messages: Sequence[ChatMessage], /, **options: Any) -> str:
    answer = rendered(template, messages, **options)
    assert answer.fault is None, answer.fault
    text: str = tokenizer_of(template).decode(u32(answer.token_ids).tolist())
    return text


@pytest.mark.parametrize(
    ("template", "turns", "text", "changes"),
    [
        (ANY_ROLE, "usu", "[user]<0u>[end][system]<1s>[end][user]<2u>[end]", ()),
        (SYSTEM_FIRST, "su", "[system]<0s>[end][user]<1u>[end]", ()),
        (SYSTEM_FIRST, "us", "[system]<1s>[end][user]<0u>[end]", ("system-first",)),
        (SYSTEM_FIRST, "ssu", "[system]<0s>\n\n<1s>[end][user]<2u>[end]", ("system-first",)),
        (SYSTEM_FIRST, "sdu", "[system]<0s>\n\n<1d>[end][user]<2u>[end]", ("system-first",)),
        (
            SYSTEM_FIRST,
            "sucts",
            "[system]<0s>\n\n<4s>[end][user]<1u>[end][assistant]<2c>[call]look[end][tool]<3t>[end]",
            ("system-first",),
        ),
        (ALTERNATING, "uu", "[user]<0u>\n\n<1u>[end]", ("users-joined",)),
        (
            ALTERNATING,
            "suas",
            "[user]<0s>\n\n<3s>\n\n<1u>[end][assistant]<2a>[end]",
            ("system-first",),
        ),
        (
            ALTERNATING,
            "suuasu",
            "[user]<0s>\n\n<4s>\n\n<1u>\n\n<2u>[end][assistant]<3a>[end][user]<5u>[end]",
            ("system-first", "users-joined"),
        ),
        (ALTERNATING, "s", "[user]<0s>[end]", ("system-in-user",)),
        (NO_SYSTEM, "su", "[user]<0s>\n\n<1u>[end]", ("system-in-user",)),
        (
            NO_SYSTEM,
            "susaa",
            "[user]<0s>\n\n<2s>\n\n<1u>[end][assistant]<3a>\n\n<4a>[end]",
            ("system-in-user", "assistants-joined"),
        ),
        (
            ALTERNATING_BUT_FOR_CALLS,
            "suctu",
            "[system]<0s>[end][user]<1u>[end][assistant]<2c>[call]look[end][tool]<3t>\n\n<4u>[end]",
            ("user-in-tool",),
        ),
        (  # a call does not count as a turn: what it takes as it is stays so
            ALTERNATING_BUT_FOR_CALLS,
            "uact",
            "[user]<0u>[end][assistant]<1a>[end][assistant]<2c>[call]look[end][tool]<3t>[end]",
            (),
        ),
        (LATE_SYSTEM_IS_LOST, "su", "[system]<0s>[end][user]<1u>[end]", ()),
        (LATE_SYSTEM_IS_LOST, "us", "[system]<1s>[end][user]<0u>[end]", ("system-first",)),
        (LATE_SYSTEM_IS_LOST, "sdu", "[system]<0s>\n\n<1d>[end][user]<2u>[end]", ("system-first",)),
        (SYSTEM_IS_LOST, "su", "[user]<0s>\n\n<1u>[end]", ("system-in-user",)),
    ],
)
def test_a_chat_is_rendered_in_the_form_that_the_template_takes(template, turns, text, changes):
    assert shown(template, chat(turns)) == text + "[assistant]"
    assert rendered(template, chat(turns)).changed_turns == changes


def texts(messages: Sequence[ChatMessage], *roles: str) -> list[str]:
    return [each.content for each in messages if each.role in roles]


def in_order(text: str, parts: Sequence[str]) -> bool:
    return [each for each in re.findall(r"<\d+[a-z]>", text) if each in parts] == list(parts)


PARTS = st.sampled_from(["s", "d", "u", "a", "u", "ct"])


@given(
    st.sampled_from(sorted(TEMPLATES)),
    st.lists(PARTS, max_size=7).map("".join),
)
def test_no_text_is_lost_and_each_role_keeps_its_order(name, turns):
    template = TEMPLATES[name]
    messages = chat("u" + turns if name in WITH_TOOLS else "u" + turns.replace("ct", ""))
    as_is = as_is_by(template)
    found = fit(messages, as_is, traits_of(template).refused[False])
    assert in_order(found.text, texts(messages, *SYSTEM))
    assert in_order(found.text, texts(messages, "user", "assistant", "tool"))
    try:
        expected = as_is(messages)
    except Exception:
        expected = ""
    if expected and in_order(expected, texts(messages, *SYSTEM)):
        assert (found.text, found.changes) == (expected, ())
    else:
        assert found.changes
    assert "system-not-shown" not in found.changes


@given(
    st.sampled_from(sorted(TEMPLATES)),
    st.sampled_from(["u", "su", "us"]),
    st.lists(PARTS, max_size=6).map("".join),
)
def test_what_is_known_of_a_template_changes_no_result(name, first, turns):
    as_is = as_is_by(TEMPLATES[name])
    messages = chat(first + turns)
    refused = traits_of(TEMPLATES[name]).refused[False]
    tried = 0

    def counted(some: Sequence[ChatMessage]) -> str:
        nonlocal tried
        tried += 1
        return as_is(some)

    def result(known: Any) -> Any:
        nonlocal tried
        tried = 0
        try:
            return fit(messages, counted, known), tried
        except Exception as error:
            return str(error), tried

    blind, num_blind = result(frozenset())
    known, num_known = result(refused)
    assert known == blind
    assert num_known <= num_blind + 1
    assert num_blind <= 2 * len(FORMS)


@pytest.mark.parametrize(
    ("template", "turns"),
    [
        (SYSTEM_FIRST, "usu"),
        (ALTERNATING, "uu"),
        (NO_SYSTEM, "su"),
        (LATE_SYSTEM_IS_LOST, "sus"),
    ],
)
def test_what_a_template_never_takes_is_not_tried_with_each_chat(template, turns):
    as_is = as_is_by(template)
    num_rendered = 0

    def counted(messages: Sequence[ChatMessage]) -> str:
        nonlocal num_rendered
        num_rendered += 1
        return as_is(messages)

    assert fit(chat(turns), counted, traits_of(template).refused[False]).changes
    assert num_rendered == 1


def test_a_chat_that_a_template_takes_is_rendered_once():
    num_rendered = 0

    def counted(messages: Sequence[ChatMessage]) -> str:
        nonlocal num_rendered
        num_rendered += 1
        return "".join([each.content for each in messages])

    for turns in ("u", "su", "suau", "suctau", "susu"):
        assert fit(chat(turns), counted).changes == ()
    assert num_rendered == 5


def test_text_that_a_template_writes_in_another_spelling_is_not_lost():
    said = ChatMessage("system", "Be /think brief.")
    assert shown(LATE_SYSTEM_IS_LOST, [said, *chat("u")]).startswith("[system]Be  brief.[end]")
    assert rendered(LATE_SYSTEM_IS_LOST, [said, *chat("u")]).changed_turns == ()


def test_what_no_form_shows_is_named():
    template = "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{% endif %}"
    found = rendered(template + "{% endfor %}", chat("sua"))
    assert found.changed_turns == ("system-not-shown",)


def test_a_template_that_takes_no_form_says_what_it_says_of_the_chat_as_it_is():
    template = "{{ raise_exception('turn ' + messages | length | string) }}"
    fault = rendered(template, chat("usu")).fault
    assert fault is not None
    assert (fault.code, fault.field, fault.message) == (
        "bad_request",
        "messages",
        "messages: turn 3",
    )


def test_a_chat_that_is_continued_keeps_its_last_turn():
    options = TemplateOptions(add_generation_prompt=False, continue_final_message=True)
    assert (
        shown(SYSTEM_FIRST, chat("usa"), template=options)
        == "[system]<1s>[end][user]<0u>[end][assistant]<2a>"
    )
    assert rendered(SYSTEM_FIRST, chat("uas"), template=options).fault is not None


def test_a_chat_with_tools_takes_the_form_too():
    found = shown(SYSTEM_FIRST, chat("us"), template=template_options(TOOLS))
    assert found == "[system]<1s>[end][tool]look[end][user]<0u>[end][assistant]"


def test_joined_turns_keep_reasoning_calls_and_a_name_that_is_theirs():
    turns = [
        ChatMessage("user", "a", name="ana"),
        ChatMessage("user", "b", name="ana"),
        ChatMessage("assistant", "c", reasoning_content="r"),
        ChatMessage("assistant", "d", reasoning_content="s", tool_calls=CALLS),
        ChatMessage("assistant", "e"),
        ChatMessage("user", "f", name="ana"),
        ChatMessage("user", "g", name="bob"),
    ]
    found, changes = with_form(turns, FORMS[1])
    assert list(found) == [
        ChatMessage("user", "a\n\nb", name="ana"),
        ChatMessage("assistant", "c\n\nd", reasoning_content="r\n\ns", tool_calls=CALLS),
        ChatMessage("assistant", "e"),
        ChatMessage("user", "f\n\ng"),
    ]
    assert changes == ("users-joined", "assistants-joined")


def test_shapes_of_chats():
    assert shapes_of(chat("u")) == set()
    assert shapes_of(chat("suau")) == {"system"}
    assert shapes_of(chat("uact")) == {"assistant_before_call"}
    assert shapes_of(chat("sductusuuaas")) == {
        "system",
        "systems",
        "user_after_tool",
        "system_between",
        "users",
        "assistants",
        "system_last",
    }


def test_joining_many_turns_takes_time_that_grows_with_their_number():
    turns = [ChatMessage("user", "x" * 100)] * 16384
    found, _ = with_form(turns, FORMS[1])
    assert len(found) == 1
    assert len(found[0].content) == 16384 * 102 - 2
