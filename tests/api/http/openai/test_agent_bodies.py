"""What agents' libraries send is taken: used, handed to the chat template, or ignored by a list."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from tests.helpers.agent_bodies import AGENT_BODIES, ARGUMENTS, CALL, IGNORED, RESULT, USER
from tests.helpers.fake_worker import MODEL

from slipstream.http.answers.answer_plan import AnswerPlan
from slipstream.http.api_errors import ApiError
from slipstream.http.openai.ignored_fields import IgnoredFields
from slipstream.http.planning.chat import plan_chat, read_chat
from slipstream.http.planning.completions import plan_completion, read_completion
from slipstream_ipc.messages import ChatMessage, ChatToolCall, FunctionCall, StructuredOutputs
from slipstream_ipc.transport.codec import decode_params

TOOL_CALL = ChatToolCall(FunctionCall("weather", ARGUMENTS), "call_1", "function")


def planned(body: dict[str, Any]) -> AnswerPlan:
    """The plan of a body in which no field is unknown."""
    return plan_chat(read_chat(json.dumps(body).encode()), MODEL)


def chat(**fields: Any) -> AnswerPlan:
    return planned({"messages": [USER], **fields})


def turns(*messages: dict[str, Any]) -> tuple[ChatMessage, ...]:
    return chat(messages=list(messages)).states[0].request.messages


def variables(**fields: Any) -> dict[str, Any]:
    kwargs = chat(**fields).states[0].request.template.kwargs
    return json.loads(kwargs) if kwargs else {}


def structured(**fields: Any) -> StructuredOutputs | None:
    return decode_params(chat(**fields).states[0].request.params).structured_outputs


@pytest.mark.parametrize("name", AGENT_BODIES)
def test_no_field_of_an_agents_body_is_unknown(name: str) -> None:
    body = AGENT_BODIES[name]
    ignored = IgnoredFields()
    plan = plan_chat(read_chat(json.dumps(body).encode(), ignored), MODEL)
    assert not ignored
    assert planned(body).is_stream == bool(body.get("stream"))
    assert len(plan.states[0].request.messages) == len(body["messages"])


@pytest.mark.parametrize("name", AGENT_BODIES)
def test_an_agents_calls_and_reasoning_reach_the_template(name: str) -> None:
    body = AGENT_BODIES[name]
    given = [turn for turn in body["messages"] if turn.get("tool_calls")]
    found = [turn for turn in planned(body).states[0].request.messages if turn.tool_calls]
    for turn, said in zip(found, given, strict=True):
        assert turn.content == ""
        calls = [(it["id"], it["type"], it["function"]) for it in said["tool_calls"]]
        assert turn.tool_calls == tuple(
            ChatToolCall(FunctionCall(function["name"], function["arguments"]), call_id, kind)
            for call_id, kind, function in calls
        )
        reasoning = said.get("reasoning_content") or said.get("reasoning")
        assert turn.reasoning_content == reasoning


@pytest.mark.parametrize("name", IGNORED)
def test_fields_that_change_nothing_have_any_value(name: str) -> None:
    plain = chat().states[0].request
    for value in (IGNORED[name], 7, "x", [{}], None):
        if name == "parallel_tool_calls" and not isinstance(value, bool):
            continue
        request = chat(**{name: value}).states[0].request
        assert request.params == plain.params
        assert request.template == plain.template


# ---- messages --------------------------------------------------------------------------------


def test_reasoning_of_a_turn_has_two_names_as_vllm_38488_asks() -> None:
    for name in ("reasoning_content", "reasoning"):
        _, turn = turns(USER, {"role": "assistant", "content": "12", name: "Hm."})
        assert (turn.content, turn.reasoning_content) == ("12", "Hm.")


def test_reasoning_may_be_a_part() -> None:
    parts = [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "text", "text": "12"},
    ]
    _, turn = turns(USER, {"role": "assistant", "content": parts})
    assert (turn.content, turn.reasoning_content) == ("12", "Hm.")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"content": None},
        {"content": []},
        {"content": None, "tool_calls": [CALL]},
        {"content": None, "tool_calls": []},
        {"content": None, "reasoning_content": "Hm."},
        {"tool_calls": [CALL], "content": []},
    ],
)
def test_an_assistant_may_have_said_nothing(fields: dict[str, Any]) -> None:
    _, turn = turns(USER, {"role": "assistant", **fields})
    assert turn.content == ""
    assert turn.tool_calls == ((TOOL_CALL,) if fields.get("tool_calls") else None)


def test_others_have_said_something() -> None:
    for role in ("user", "system", "tool"):
        with pytest.raises(ApiError, match=r"messages\[1\].content: got null, allowed: text"):
            turns(USER, {**RESULT, "role": role, "content": None})


def test_a_refusal_stands_for_content() -> None:
    refusal = {"role": "assistant", "content": None, "refusal": "No."}
    parts = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    other = {"role": "assistant", "content": "Yes.", "refusal": "No."}
    assert [turn.content for turn in turns(refusal, parts, other)] == ["No.", "No.", "Yes."]


@pytest.mark.parametrize(
    ("given", "arguments"),
    [({"city": "Oslo"}, '{"city":"Oslo"}'), (None, "{}"), ({}, "{}"), ("", "")],
)
def test_arguments_are_text_in_the_end(given: Any, arguments: str) -> None:
    call = {**CALL, "function": {"name": "weather", "arguments": given}}
    _, turn = turns(USER, {"role": "assistant", "tool_calls": [call]})
    assert turn.tool_calls[0].function.arguments == arguments


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {}},
        {"type": "video_url"},
        {"type": 7},
    ],
)
def test_what_changes_the_answer_and_is_not_supported_is_refused(part: dict[str, Any]) -> None:
    """Also beside unknown fields, and where those are ignored."""
    for more in ({}, {"unheard": 1}):
        body = {"messages": [{"role": "user", "content": [{**part, **more}]}], **more}
        with pytest.raises(ApiError) as caught:
            read_chat(json.dumps(body).encode(), IgnoredFields())
        assert caught.value.status == 400
        assert caught.value.body.error.param == "messages[0].content[0].type"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("web_search_options", {}),
        ("moderation", {"model": "omni"}),
        ("chat_template", "x"),
        ("truncate_prompt_tokens", 5),
        ("add_special_tokens", True),
    ],
)
def test_options_that_change_the_answer_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ApiError, match=f"{name}: not supported yet") as caught:
        read_chat(json.dumps({"messages": [USER], name: value, "x": 1}).encode(), IgnoredFields())
    assert caught.value.status == 400


# ---- variables of the template ---------------------------------------------------------------

ON = {"enable_thinking": True, "thinking": True}
OFF = {"enable_thinking": False, "thinking": False}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", **OFF}),
        ({"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}),
        ({"reasoning": {"effort": 1}}, {}),
        ({"reasoning": {"enabled": False}}, OFF),
        ({"reasoning": {"max_tokens": 9}}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, ON),
        ({"thinking": {"type": "disabled"}}, OFF),
        ({"thinking": {"type": []}}, {}),
        ({"thinking": False}, OFF),
        ({"thinking": "yes"}, {}),
        ({"enable_thinking": True, "thinking": False}, ON),
        ({"enable_thinking": True, "reasoning_effort": "none"}, {"reasoning_effort": "none", **ON}),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False, "x": 1}},
            {"enable_thinking": False, "thinking": True, "x": 1},
        ),
        ({"chat_template_kwargs": {"x": 1}}, {"x": 1}),
    ],
)
def test_the_template_hears_of_reasoning(fields, expected) -> None:
    assert variables(**fields) == expected


# ---- vLLM's former fields --------------------------------------------------------------------

SCHEMA = {"type": "object"}
AS_TEXT = msgspec.json.encode(SCHEMA).decode()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"guided_json": SCHEMA}, StructuredOutputs(json=AS_TEXT)),
        ({"guided_json": AS_TEXT}, StructuredOutputs(json=AS_TEXT)),
        ({"guided_regex": "a+"}, StructuredOutputs(regex="a+")),
        ({"guided_choice": ["a", "b"]}, StructuredOutputs(choice=("a", "b"))),
        ({"guided_grammar": 'start: "a"'}, StructuredOutputs(grammar='start: "a"')),
        ({"guided_json_object": True}, StructuredOutputs(json_object=True)),
        ({"guided_json_object": False}, None),
        ({"guided_regex": "a", "response_format": {"type": "text"}}, StructuredOutputs(regex="a")),
    ],
)
def test_guided_fields_are_structured_outputs(fields, expected) -> None:
    assert structured(**fields) == expected
    body = json.dumps({"prompt": "x", **fields}).encode()
    params = plan_completion(read_completion(body), MODEL).states[0].request.params
    assert decode_params(params).structured_outputs == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "guided_json": SCHEMA}, "guided_regex"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_regex": 1}, "guided_regex"),
    ],
)
def test_only_one_form_is_given(fields, param) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.body.error.param == param


def test_errors_of_the_engine_name_the_guided_field() -> None:
    names = chat(guided_regex="a").param_names
    assert names["structured_outputs"] == names["structured_outputs.regex"] == "guided_regex"


# ---- histories that were cut off -------------------------------------------------------------


@pytest.mark.parametrize("arguments", ['{"city": "Os', "[1]", "Oslo", "null", "{'city': 1}"])
def test_malformed_arguments_are_taken_as_vllm_43995_asks(arguments: str) -> None:
    """They are in each later request of the conversation, which a 400 would end."""
    call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
    _, turn, _ = turns(USER, {"role": "assistant", "tool_calls": [call]}, RESULT)
    assert turn.tool_calls[0].function.arguments == arguments
