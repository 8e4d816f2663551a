"""How a template reads an assistant's turn, and what it is given for it."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.chat_templates import (
    ALWAYS_REASONS,
    EITHER,
    HYBRID,
    LISTED_ARGUMENTS,
    NULL_CONTENT,
    SHORT_IDS,
    tokenizer_with,
)

from slipstream_ipc.messages import ChatMessage, ChatToolCall, FunctionCall, Render
from slipstream_worker.tokenizer.prompt_rendering import ChatTraits, render
from slipstream_worker.tokenizer.template_dialect import TemplateDialect, find_dialect

PRINTED_ARGUMENTS = """\
{%- for m in messages %}{% for c in m.tool_calls or [] %}
{{- c.function.name }}{{ c.function.arguments }}{% endfor %}{% endfor %}"""
CALL = ChatToolCall(FunctionCall("look", '{"at": [1, "x"]}'), "c1", "function")


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_with(None)


@pytest.mark.parametrize(
    ("template", "dialect"),
    [
        (None, TemplateDialect()),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", TemplateDialect()),
        ("{{ raise_exception('no') }}", TemplateDialect()),
        ("{% nonsense %}", TemplateDialect()),
        (HYBRID, TemplateDialect("reasoning_content")),
        (ALWAYS_REASONS, TemplateDialect()),
        (NULL_CONTENT, TemplateDialect(is_text=True, omits_empty=True)),
        (LISTED_ARGUMENTS, TemplateDialect("reasoning", accepts_text=False)),
        (EITHER, TemplateDialect("thinking", has_reasoning_beside_text=False)),
        (SHORT_IDS, TemplateDialect(has_short_ids=True)),
        (
            PRINTED_ARGUMENTS,
            TemplateDialect(is_text=True),
        ),
    ],
)
def test_dialects_of_templates(tokenizer, template, dialect):
    tokenizer.chat_template = template
    assert find_dialect(tokenizer) == dialect


def test_a_template_of_several_is_probed(tokenizer):
    tokenizer.chat_template = {"default": LISTED_ARGUMENTS, "tool_use": LISTED_ARGUMENTS}
    assert find_dialect(tokenizer).reasoning_name == "reasoning"


def test_arguments_of_calls_are_objects_to_a_template():
    message = ChatMessage("assistant", "", tool_calls=(CALL,))
    function = {"name": "look", "arguments": {"at": [1, "x"]}}
    call = {"function": function, "id": "c1", "type": "function"}
    assert TemplateDialect().turn(message) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [call],
    }
    assert TemplateDialect().turn(ChatMessage("user", "hi")) == {"role": "user", "content": "hi"}
    answer = ChatMessage("tool", "42", tool_call_id="c1")
    assert TemplateDialect().turn(answer)["tool_call_id"] == "c1"
    nameless = ChatMessage("assistant", "", tool_calls=(ChatToolCall(FunctionCall("look", "")),))
    function = {"name": "look", "arguments": {}}
    assert TemplateDialect().turn(nameless)["tool_calls"] == [
        {"function": function, "type": "function"}
    ]


SYSTEM_ONLY = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}"
    "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
FIRST_SYSTEM_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first or m.role == 'developer' %}"
    "{{ raise_exception('no') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
WITH_DEVELOPER = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (SYSTEM_ONLY, "<system>Be brief.\n\nKeep K1.<user>hi"),
        (FIRST_SYSTEM_ONLY, "<system>Be brief.\n\nKeep K1.<user>hi"),
        (WITH_DEVELOPER, "<system>Be brief.<developer>Keep K1.<user>hi"),
        (NO_SYSTEM, "<user>hi"),
    ],
)
def test_what_a_developer_says_reaches_the_model(tokenizer, template, text):
    """A template that does not know the role leaves the turn out, or refuses the chat."""
    tokenizer.chat_template = template
    dialect = find_dialect(tokenizer)
    roles = [("system", "Be brief."), ("developer", "Keep K1."), ("user", "hi")]
    given = [ChatMessage(role, content) for role, content in roles]
    chat = tokenizer.apply_chat_template(dialect.turns(given), tokenize=False)
    assert chat == text
    if dialect.has_developer:
        return
    alone = tokenizer.apply_chat_template(dialect.turns(given[1:]), tokenize=False)
    assert alone == "<system>Keep K1.<user>hi"


def test_reasoning_goes_by_the_templates_name():
    message = ChatMessage("assistant", "so", reasoning_content="why")
    assert TemplateDialect("thinking").turn(message) == {
        "role": "assistant",
        "content": "so",
        "thinking": "why",
    }
    assert "reasoning_content" not in TemplateDialect().turn(ChatMessage("assistant", "so"))


def test_content_goes_before_reasoning_where_a_template_takes_one_of_them():
    dialect = TemplateDialect("thinking", has_reasoning_beside_text=False)
    both = ChatMessage("assistant", "so", tool_calls=(CALL,), reasoning_content="why")
    assert "thinking" not in dialect.turn(both)
    for message in (
        ChatMessage("assistant", "so", reasoning_content="why"),
        ChatMessage("assistant", "", tool_calls=(CALL,), reasoning_content="why"),
    ):
        assert dialect.turn(message)["thinking"] == "why"


@given(st.text() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_no_arguments_are_refused(text):
    message = ChatMessage("assistant", "", tool_calls=(ChatToolCall(FunctionCall("a", text)),))
    for dialect in (
        TemplateDialect(),
        TemplateDialect(accepts_text=False),
        TemplateDialect(is_text=True),
    ):
        (call,) = dialect.turn(message)["tool_calls"]
        found = call["function"]["arguments"]
        if dialect.is_text or not text:
            assert found == (text or ("{}" if dialect.is_text else {}))
        elif dialect.accepts_text:
            assert found == text
        else:
            assert found == {"arguments": text}


@pytest.mark.parametrize("template", [HYBRID, NULL_CONTENT, LISTED_ARGUMENTS, EITHER])
@pytest.mark.parametrize("arguments", ['{"at": "x"}', "", "{", "[]", '"x"', "{'a': 1}"])
def test_any_history_is_rendered(tokenizer, template, arguments):
    """A call with malformed arguments is no error, and its function stays visible."""
    tokenizer.chat_template = template
    call = ChatToolCall(FunctionCall("look", arguments))
    turns = (
        ChatMessage("user", "hi"),
        ChatMessage("assistant", "", tool_calls=(call,), reasoning_content="why"),
        ChatMessage("tool", "42", tool_call_id="c1"),
    )
    traits = ChatTraits(find_dialect(tokenizer))
    answer = render(tokenizer, Render(1, messages=turns), traits)
    assert answer.fault is None
    assert "look" in tokenizer.decode(memoryview(answer.token_ids).cast("I").tolist())


@pytest.mark.parametrize(
    "call_id", ["call_3235550b26f63706a3e766ce", "aB3dEfGh1", "toolu_1", "_" * 9]
)
def test_ids_of_calls_are_as_short_as_a_template_insists(tokenizer, call_id):
    tokenizer.chat_template = SHORT_IDS
    dialect = find_dialect(tokenizer)
    call = ChatToolCall(FunctionCall("look", "{}"), call_id, "function")
    asked = dialect.turn(ChatMessage("assistant", "", tool_calls=(call,)))
    answered = dialect.turn(ChatMessage("tool", "42", tool_call_id=call_id))
    (sent,) = asked["tool_calls"]
    assert sent["id"] == answered["tool_call_id"]
    assert re.fullmatch("[0-9A-Za-z]{9}", sent["id"])
    assert (sent["id"] == call_id) == (call_id == "aB3dEfGh1")
