"""Bodies of the Messages API as those of a chat."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.foreign_bodies import recorded_bodies

from slipstream.http.anthropic.chat_request import chat_request
from slipstream.http.anthropic.message_printer import whole_members
from slipstream.http.anthropic.messages import read_count_tokens, read_messages
from slipstream.http.api_errors import ApiError, ErrorShape
from slipstream.http.openai.chat_turns import chat_of_turns, template_variables
from slipstream.http.openai.ignored_fields import IgnoredFields
from slipstream.http.openai.request_bodies import ChatRequest
from slipstream.http.planning.chat import answer_options_of_body

BODY: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "hi"}],
}


def chat_of(**fields: Any) -> ChatRequest:
    return chat_request(read_messages(json.dumps({**BODY, **fields}).encode()))


def turns_of(*messages: dict[str, Any], **fields: Any) -> list[tuple[Any, ...]]:
    """Role, content, reasoning, calls and answered call of each turn."""
    chat = chat_of(messages=messages, **fields)
    return [
        (
            each.role,
            each.content,
            each.reasoning_content,
            [
                (call.id, call.function.name, json.loads(call.function.arguments))
                for call in each.tool_calls or ()
            ],
            each.tool_call_id,
        )
        for each in chat_of_turns(chat.messages, None)[0].messages
    ]


def refusal(**fields: Any) -> str:
    with pytest.raises(ApiError) as caught:
        chat_of(**fields)
    assert caught.value.status == 400
    return str(caught.value)


def test_a_tool_loop() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    assert turns_of(
        {"role": "user", "content": [{"type": "text", "text": "Look", **cached}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Let me"},
                {"type": "text", "text": " see."},
                {"type": "tool_use", "id": "a", "name": "f", "input": {"x": [1]}},
                {"type": "tool_use", "id": "b", "name": "g", "input": {}, **cached},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "12", **cached},
                {
                    "type": "tool_result",
                    "tool_use_id": "b",
                    "is_error": True,
                    "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "pe"}],
                },
                {"type": "tool_result", "tool_use_id": "c"},
                {"type": "text", "text": "And?"},
            ],
        },
        system=[{"type": "text", "text": "You "}, {"type": "text", "text": "look.", **cached}],
    ) == [
        ("system", "You look.", None, [], None),
        ("user", "Look", None, [], None),
        ("assistant", "Let me see.", "hm", [("a", "f", {"x": [1]}), ("b", "g", {})], None),
        ("tool", "12", None, [], "a"),
        ("tool", "Error: nope", None, [], "b"),
        ("tool", "", None, [], "c"),
        ("user", "And?", None, [], None),
    ]


@given(st.permutations(range(4)), st.integers(0, 4))
def test_results_are_in_the_order_of_their_calls(order: list[int], num_known: int) -> None:
    """Results of calls that are not there stay behind them, as they came."""
    calls = [{"type": "tool_use", "id": f"c{at}", "name": "f", "input": {}} for at in range(4)]
    results = [{"type": "tool_result", "tool_use_id": f"c{at}", "content": str(at)} for at in order]
    asked = {"role": "assistant", "content": [{"type": "text", "text": "t"}, *calls[:num_known]]}
    turns = turns_of(asked, {"role": "user", "content": results})
    unknown = [at for at in order if at >= num_known]
    expected = [*range(num_known), *unknown]
    assert [(turn[1], turn[4]) for turn in turns[1:]] == [(str(at), f"c{at}") for at in expected]


def test_a_last_turn_of_the_assistant_is_continued() -> None:
    chat = chat_of(messages=[*BODY["messages"], {"role": "assistant", "content": "It is"}])
    assert (chat.continue_final_message, chat.add_generation_prompt) == (True, False)
    chat = chat_of()
    assert (chat.continue_final_message, chat.add_generation_prompt) == (False, True)


def test_a_last_turn_of_the_assistant_has_no_call() -> None:
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    blocks = [{"type": "text", "text": "ok"}, call]
    with pytest.raises(ApiError, match=r"messages\[1\].content\[1\]: got 'tool_use'") as caught:
        chat_of(messages=[*BODY["messages"], {"role": "assistant", "content": blocks}])
    assert caught.value.status == 400


def test_options() -> None:
    schema = {"type": "object"}
    chat = chat_of(
        system="Be short.",
        stop_sequences=["a", "b"],
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        stream=True,
        metadata={"user_id": "u"},
        service_tier="auto",
        thinking_token_budget=9,
        tools=[
            {"name": "f", "description": "d", "input_schema": schema, "type": "custom"},
            {"name": "g", "input_schema": schema, "strict": True, "cache_control": {}},
        ],
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}},
    )
    assert (chat.max_tokens, chat.stop, chat.stream) == (5, ("a", "b"), True)
    assert (chat.temperature, chat.top_p, chat.top_k) == (0.5, 0.9, 4)
    assert chat.tools == (
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}},
        {"type": "function", "function": {"name": "g", "parameters": schema, "strict": True}},
    )
    assert (chat.reasoning_effort, chat.thinking_token_budget) == ("low", 9)
    assert chat.response_format is not None
    assert chat.response_format.json_schema is not None
    assert chat.response_format.json_schema.schema == schema


@pytest.mark.parametrize(
    ("given", "choice", "parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", None),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}, None),
        (None, None, None),
    ],
)
def test_tool_choices(given: Any, choice: Any, parallel: bool | None) -> None:
    chat = chat_of(tool_choice=given)
    assert (chat.tool_choice, chat.parallel_tool_calls) == (choice, parallel)


@pytest.mark.parametrize(
    ("thinking", "enabled"),
    [
        ({"type": "enabled", "budget_tokens": 2000}, True),
        ({"type": "adaptive"}, True),
        ({"type": "disabled"}, False),
        ({"type": "between_tools"}, False),
    ],
)
def test_thinking_is_a_variable_of_the_template(thinking: Any, enabled: bool) -> None:
    variables = template_variables(chat_of(thinking=thinking)) or {}
    assert variables == {"enable_thinking": enabled, "thinking": enabled}
    assert template_variables(chat_of()) is None


def test_a_budget_of_thinking_is_a_target() -> None:
    def target(**fields: Any) -> int | None:
        return answer_options_of_body(chat_of(**fields)).reasoning_target

    assert target(thinking={"type": "enabled", "budget_tokens": 2000}) == 2000
    assert target(thinking={"type": "enabled", "budget_tokens": 0}) is None
    assert target(thinking={"type": "adaptive"}) is None
    assert target() is None


def message(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": blocks}]}


USER = {"role": "user", "content": "x"}
TOOL_USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}


def test_what_was_found_is_text() -> None:
    found = {"type": "search_result", "source": "http://x", "title": "Timeouts"}
    found |= {"content": [{"type": "text", "text": "10 "}, {"type": "text", "text": "s"}]}
    plain = {"type": "text", "media_type": "text/plain", "data": "All of it."}
    parts = {"type": "content", "content": [{"type": "text", "text": "A part."}]}
    more = {"title": "Guide", "context": "of 2026", "citations": {"enabled": True}}
    asked = {"type": "text", "text": "So?"}
    named = {"type": "tool_reference", "tool_name": "look"}
    given = [found, found, named, {"type": "document", "source": parts}]
    assert turns_of(
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": given},
                found,
                {"type": "document", "source": plain, **more},
                {"type": "document", "source": {"type": "content", "content": "Or this."}},
                asked,
            ],
        }
    ) == [
        ("tool", "Timeouts\nhttp://x\n10 s\n\n" * 2 + "look\nA part.\n\n", None, [], "a"),
        (
            "user",
            "Timeouts\nhttp://x\n10 s\n\nGuide\nof 2026\nAll of it.\n\nOr this.\n\nSo?",
            None,
            [],
            None,
        ),
    ]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            message("user", {"type": "document", "source": {"type": "text", "data": 1}}),
            "messages[0].content[0].source: Expected `str`",
        ),
        (
            message("user", {"type": "document", "source": {"type": "base64", "data": "JVBE"}}),
            "documents are not supported yet but for those of text",
        ),
        (message("user", {"type": "search_result", "title": "x"}), "messages[0].content[0]"),
        (message("user", {"type": "document", "source": {}}), "documents are not supported"),
        (
            message("user", TOOL_USE),
            "only in turns of the assistant",
        ),
        (message("assistant", {"type": "tool_result", "tool_use_id": "a"}), "turns of the user"),
        (message("user", {"type": "video"}), "messages[0].content[0]"),
        (
            {"messages": [{"role": "assistant", "content": [TOOL_USE] * 1025}, USER]},
            "messages[0].content[1024]: got one call more",
        ),
        ({"messages": []}, "messages: got none"),
        ({"max_tokens": None}, "max_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools of Anthropic's"),
        ({"tools": [{"name": "w"}]}, "tools[0].input_schema: required"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"nonsense": 1}, "nonsense: unknown field"),
    ],
)
def test_refusals(fields: dict[str, Any], said: str) -> None:
    assert said in refusal(**fields)


@pytest.mark.parametrize(
    "thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}]
)
def test_a_thread_is_refused_in_words_that_the_client_knows(thread: dict[str, str]) -> None:
    """It sends the whole conversation then; ignored, it would send the last turn alone."""
    assert chat_of(thread=None) == chat_of(thread=False) == chat_of()
    with pytest.raises(ApiError) as caught:
        chat_of(thread=thread)
    body = msgspec.to_builtins(caught.value.body_as(ErrorShape.ANTHROPIC))
    assert body["error"]["details"] == {"error_code": "thread_unsupported_request"}


@pytest.mark.parametrize(
    "program", ["anthropic_messages", "langchain_messages", "pydantic_ai_messages"]
)
def test_no_field_of_an_agents_body_is_unknown(program: str) -> None:
    for body in recorded_bodies(program):
        if "thread" in body:
            continue
        chat = chat_request(read_messages(json.dumps(body).encode()))
        assert len(chat_of_turns(chat.messages, None)[0].messages) >= len(body["messages"])


def test_unknown_fields_are_named() -> None:
    ignored = IgnoredFields()
    body = {**BODY, "top_kk": 3, "tools": [{"name": "f", "input_schema": {}, "x_y": 1}]}
    assert read_messages(json.dumps(body).encode(), ignored).max_tokens == 5
    assert str(ignored) == "top_kk (did you mean top_k?), tools.x_y"


def test_count_tokens_takes_no_max_tokens() -> None:
    body = {name: each for name, each in BODY.items() if name != "max_tokens"}
    assert chat_request(read_count_tokens(json.dumps(body).encode())).max_tokens is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab,"\\{}[]:', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text('a",\\{', max_size=3), JSON, max_size=4), st.data())
def test_what_is_whole_of_a_cut_object(value: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(value)
    cut = text[: data.draw(st.integers(1, len(text)))]
    whole = json.loads(whole_members(cut))
    items = list(value.items())
    assert list(whole.items()) == items[: len(whole)]
    assert len(whole) >= len(json.loads(whole_members(cut[:-1])))
    # all but the member that is cut
    assert len(whole) >= max(
        (n for n in range(len(items)) if cut.startswith(json.dumps(dict(items[:n]))[:-1] + ",")),
        default=0,
    )
