"""Rendered prompts: chats with tools and variables, tokens of texts, texts of tokens."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from transformers import AutoTokenizer

from slipstream_ipc.columns import pack_u32, u32
from slipstream_ipc.messages import (
    ChatMessage,
    ChatToolCall,
    FunctionCall,
    Render,
    Rendered,
    TemplateOptions,
)
from slipstream_ipc.validation.chat_template import template_options
from slipstream_worker.tokenizer import prompt_rendering
from slipstream_worker.tokenizer.long_prompts import size_of
from slipstream_worker.tokenizer.prompt_rendering import ChatTraits, render

TEMPLATE = """
{%- if tools %}{% for tool in tools %}T:{{ tool.function.name }};{% endfor %}{% endif %}
{%- for message in messages %}{{ message.role }}={{ message.content }}
{%- for call in message.tool_calls or [] -%}
!{{ call.function.name }}({{ call.function.arguments.x }})
{%- endfor -%}
{%- if message.tool_call_id %}#{{ message.tool_call_id }}{% endif %};{% endfor %}
{%- if mood %}mood={{ mood }};{% endif %}{% if add_generation_prompt %}GO{% endif %}"""
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
HI = (ChatMessage("user", "hi"),)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from slipstream.demo_model import MODEL_PATH

    loaded = AutoTokenizer.from_pretrained(MODEL_PATH)
    loaded.chat_template = TEMPLATE
    return loaded


def shown(tokenizer: Any, messages: Any, template: TemplateOptions) -> str:
    answer = render(tokenizer, Render(1, messages=messages, template=template))
    assert answer.fault is None
    text: str = tokenizer.decode(u32(answer.token_ids).tolist())
    return text


def test_tools_and_variables_reach_the_template(tokenizer):
    options = template_options(TOOLS, {"mood": "good"})
    assert shown(tokenizer, HI, options) == "T:look;user=hi;mood=good;GO"
    assert shown(tokenizer, HI, TemplateOptions()) == "user=hi;GO"
    assert shown(tokenizer, HI, template_options(add_generation_prompt=False)) == "user=hi;"


@pytest.mark.parametrize(("given", "mood"), [({}, "calm"), ({"mood": "good"}, "good")])
def test_variables_of_the_server_stand_where_a_request_sets_none(tokenizer, given, mood):
    traits = ChatTraits(template_kwargs={"mood": "calm"})
    request = Render(1, messages=HI, template=template_options(None, given))
    answer = render(tokenizer, request, traits)
    text = tokenizer.decode(u32(answer.token_ids).tolist())
    assert text == f"user=hi;mood={mood};GO"


def test_a_message_is_gone_on_with(tokenizer):
    turns = (*HI, ChatMessage("assistant", "I am"))
    options = template_options(add_generation_prompt=False, continue_final_message=True)
    assert shown(tokenizer, turns, options) == "user=hi;assistant=I am"


def test_calls_and_their_answers_reach_the_template(tokenizer):
    call = ChatToolCall(FunctionCall("look", '{"x": 7}'), "c1", "function")
    turns = (
        ChatMessage("assistant", "", tool_calls=(call,)),
        ChatMessage("tool", "42", tool_call_id="c1"),
    )
    assert shown(tokenizer, turns, TemplateOptions()) == "assistant=!look(7);tool=42#c1;GO"


def fault_of(tokenizer: Any, request: Render) -> tuple[str | None, str]:
    answer = render(tokenizer, request)
    assert answer.fault is not None
    assert answer.fault.code == "bad_request"
    assert not answer.token_ids
    return answer.fault.field, answer.fault.message


@pytest.mark.parametrize(
    ("template", "field"),
    [
        (TemplateOptions(tools="{}"), "tools"),
        (TemplateOptions(kwargs='{"chat_template": "x"}'), "chat_template_kwargs"),
        (TemplateOptions(continue_final_message=True), "continue_final_message"),
    ],
)
def test_what_a_client_did_not_check_is_refused_here(tokenizer, template, field):
    found, message = fault_of(tokenizer, Render(1, messages=HI, template=template))
    assert found == field
    assert field in message


def asked(tokenizer: Any, text: str, **options: Any) -> Rendered:
    return render(tokenizer, Render(3, text, is_query=True, **options))


def test_tokens_of_a_text(tokenizer):
    text = "Once upon a time, naïve 日本"
    answer = asked(tokenizer, text, with_strings=True)
    ids = u32(answer.token_ids).tolist()
    assert ids == tokenizer(text)["input_ids"]
    assert list(answer.strings) == tokenizer.convert_ids_to_tokens(ids)
    assert asked(tokenizer, text).strings == ()
    back = render(tokenizer, Render(4, token_ids=answer.token_ids))
    assert back.text == tokenizer.decode(ids)


def test_special_tokens_are_put_around_a_text_or_not():
    class Tokenizer:
        chat_template = "x"

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return {"input_ids": [1, *map(ord, text)] if add_special_tokens else [*map(ord, text)]}

        def apply_chat_template(self, turns: Any, **_: Any) -> str:
            return "".join(turn["content"] for turn in turns)

    found = [
        u32(asked(Tokenizer(), "a", add_special_tokens=wanted).token_ids).tolist()
        for wanted in (None, True, False)
    ]
    assert found == [[1, 97], [1, 97], [97]]
    turns = (ChatMessage("user", "a"),)
    found = [
        u32(
            render(Tokenizer(), Render(3, messages=turns, add_special_tokens=wanted)).token_ids
        ).tolist()
        for wanted in (None, True, False)
    ]
    assert found == [[97], [1, 97], [97]]


def test_what_is_too_much_to_be_answered_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(prompt_rendering, "MAX_ANSWER_BYTES", 8)
    num_tokens = len(u32(asked(tokenizer, "a b c d e f g").token_ids))
    assert asked(tokenizer, "a b c d e f g", max_tokens=num_tokens).fault is None
    few = Render(1, "a b c d e f g", is_query=True, max_tokens=num_tokens - 1)
    assert fault_of(tokenizer, few)[0] == "prompt"
    assert fault_of(tokenizer, replace(few, with_strings=True))[0] == "with_strings"
    # a stream's is refused by whoever knows how much its answer is to have
    assert render(tokenizer, replace(few, is_query=False)).fault is None
    ids = tokenizer("some long words here")["input_ids"]
    field, _ = fault_of(tokenizer, Render(1, token_ids=pack_u32(ids)))
    assert field == "token_ids"


def test_a_prediction_is_tokenised_beside_the_prompt_without_special_tokens(tokenizer):
    def ids(request: Render) -> list[int]:
        answer = render(tokenizer, request)
        assert answer.fault is None
        return u32(answer.prediction_ids).tolist()

    text = "def y():\n    return 1\n"
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids(Render(1, "abc", prediction=text)) == plain
    assert ids(Render(1, prediction=text)) == plain  # of a prompt that is ids
    assert ids(Render(1, "abc")) == []


def test_a_long_prediction_is_cut(tokenizer, monkeypatch):
    answer = render(tokenizer, Render(1, "abc", prediction="a name " * 1000, max_tokens=50))
    whole = tokenizer("a name " * 1000, add_special_tokens=False)["input_ids"]
    assert u32(answer.prediction_ids).tolist() == whole[:50]
    monkeypatch.setattr(prompt_rendering, "MAX_PREDICTION_TOKENS", 30)
    answer = render(tokenizer, Render(1, "abc", prediction="a name " * 1000))
    assert u32(answer.prediction_ids).tolist() == whole[:30]
    monkeypatch.setattr(prompt_rendering, "SLICE_CHARS", 7)  # as if each slice were as long
    answer = render(tokenizer, Render(1, "abc", prediction="a name " * 8))
    part = tokenizer("a name ", add_special_tokens=False)["input_ids"]
    assert u32(answer.prediction_ids).tolist() == (part * 8)[:30]


def test_a_prediction_counts_as_text_to_be_tokenised():
    assert size_of(Render(1, "abc", prediction="x" * 100)) == size_of(Render(1, "abc")) + 100
