"""The body of a response is that of a chat, in other words."""

from __future__ import annotations

import json
import tracemalloc
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given as examples
from hypothesis import strategies as st
from msgspec import structs
from msgspec.structs import replace
from openai.types.responses import Response
from tests.helpers.fake_worker import MODEL
from tests.helpers.foreign_bodies import recorded_bodies

from slipstream.http.answers.answer_plan import AnswerPlan
from slipstream.http.api_errors import ApiError
from slipstream.http.endpoints import response_endpoints
from slipstream.http.openai.ignored_fields import IgnoredFields
from slipstream.http.planning.chat import plan_chat, read_chat
from slipstream.http.response_encoding import Response as HttpResponse
from slipstream.http.response_encoding import json_response
from slipstream.http.responses.input_items import InputItem
from slipstream.http.responses.response_object import ResponseObject
from slipstream.http.responses.response_plan import (
    MAX_RECALLED_BYTES,
    Named,
    context_of,
    echo_of,
    new_response,
)
from slipstream.http.responses.response_record import (
    KeptInput,
    KeptResponse,
    ResponseRecord,
    shown_item,
)
from slipstream.http.responses.responses_request import ResponsesRequest, read_response_request
from slipstream_ipc.messages import MAX_CHAT_TURNS, End, KeepOptions, KeptAnswer

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
CLOCK = {"type": "function", "name": "clock"}
CALL = {"type": "function_call", "call_id": "c", "name": "clock", "arguments": "{}"}
ALLOWED_TOOLS = {"type": "allowed_tools", "mode": "auto"}
SCHEMA = {"type": "json_schema", "name": "Weather", "strict": True, "schema": PARAMETERS}


def planned(**fields: Any) -> AnswerPlan:
    """The plan of a body in which no field is unknown."""
    body = read_response_request(json.dumps({"input": "x", **fields}).encode())
    return new_response(body, MODEL)[0]


def submitted(plan: AnswerPlan) -> Any:
    [state] = plan.states
    return state.request


def refused(**fields: Any) -> Any:
    """The error of a body."""
    with pytest.raises(ApiError) as raised:
        planned(**fields)
    assert raised.value.status == 400
    return raised.value.body.error


def chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {name: value for name, value in tool.items() if name != "type"},
    }


@pytest.mark.parametrize(
    ("fields", "of_chat"),
    [
        ({}, {}),
        (
            {"instructions": None, "temperature": 0.5, "top_p": 0.9},
            {"temperature": 0.5, "top_p": 0.9},
        ),
        ({"max_output_tokens": 7}, {"max_tokens": 7}),
        ({"top_k": 3, "min_p": 0.1, "seed": 4, "stop": ["a"]}, "same"),
        ({"stop_scope": "all", "ignore_eos": True, "min_tokens": 2}, "same"),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        ({"chat_template_kwargs": {"a": 1}, "enable_thinking": False}, "same"),
        ({"tools": [WEATHER]}, {"tools": [chat_tool(WEATHER)]}),
        ({"tools": [chat_tool(WEATHER)]}, "same"),
        (
            {"tools": [WEATHER], "tool_choice": "none"},
            {"tools": [chat_tool(WEATHER)], "tool_choice": "none"},
        ),
        (
            {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False},
            {
                "tools": [chat_tool(WEATHER)],
                "tool_choice": "required",
                "parallel_tool_calls": False,
            },
        ),
        (
            {"tools": [WEATHER, CLOCK], "tool_choice": {"type": "function", "name": "clock"}},
            {
                "tools": [chat_tool(WEATHER), chat_tool(CLOCK)],
                "tool_choice": {"type": "function", "function": {"name": "clock"}},
            },
        ),
        (
            {
                "tools": [WEATHER, CLOCK],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "clock"}],
                },
            },
            {"tools": [chat_tool(CLOCK)], "tool_choice": "required"},
        ),
        (
            {"text": {"format": SCHEMA, "verbosity": "low"}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "Weather", "strict": True, "schema": PARAMETERS},
                }
            },
        ),
        (
            {"text": {"format": {"type": "json_object"}}},
            {"response_format": {"type": "json_object"}},
        ),
        ({"text": {"format": {"type": "text"}}}, {}),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": True}),
        ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        ({"top_logprobs": 0}, {}),
        ({"stream": True, "stream_options": {"include_obfuscation": False}}, {"stream": True}),
        ({"include": ["reasoning.encrypted_content"], "truncation": "auto"}, {}),
        ({"metadata": {"a": "b"}, "user": "u", "service_tier": "auto", "max_tool_calls": 3}, {}),
        ({"prompt_cache_key": "k", "safety_identifier": "s", "truncation": "disabled"}, {}),
    ],
)
def test_a_response_is_computed_as_a_chat(fields: dict[str, Any], of_chat: Any) -> None:
    of_chat = fields if of_chat == "same" else of_chat
    turns = [{"role": "user", "content": "x"}]
    chat = plan_chat(read_chat(json.dumps({"messages": turns, **of_chat}).encode()), MODEL)
    plan = planned(**fields)
    ours, theirs = submitted(plan), submitted(chat)
    for name in ("params", "messages", "template", "answer"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert plan.num_logprobs == chat.num_logprobs
    assert str(plan.id) == f"resp_{ours.stream_id.hex()}"


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning": {"summary": "x" * 513}},
        {"reasoning": {"effort": "x" * 513}},
        {"text": {"verbosity": "x" * 513}},
        {"text": {"format": {**SCHEMA, "name": "x" * 513}}},
        {"text": {"format": {**SCHEMA, "description": "x" * 65537}}},
        {"user": "x" * 513},
    ],
)
def test_what_is_only_repeated_is_short(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=r"allowed: at most (512|65536) characters"):
        planned(**fields)


def test_of_a_tool_choice_what_is_read_is_repeated() -> None:
    """Else a body of megabytes comes back with each of three events."""
    other = {"type": "function", "name": "other", "parameters": PARAMETERS}
    tools = [CLOCK, other]
    named = {"type": "function", "name": "other"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [named] * 3}

    def repeated(choice: object) -> object:
        body = {"input": "x", "tools": tools, "tool_choice": choice}
        return echo_of(read_response_request(json.dumps(body).encode()), MODEL).tool_choice

    assert repeated("required") == "required"
    assert repeated({**named, "x": "y" * 100}) == named
    assert repeated({**allowed, "x": "y"}) == {**allowed, "tools": [named]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        (
            {
                "tools": [CLOCK],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "weather"}],
                },
            },
            "tool_choice.tools",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"moderation": {"model": "omni"}}, "moderation"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"a" * 65: ""}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"user": "u" * 513}, "user"),
        ({"truncation": "middle"}, "truncation"),
        ({"include": ["message.output_text.logprob"]}, "include"),
        ({"max_tokens": 7}, "max_tokens"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


@pytest.mark.parametrize("program", ["openai_responses", "openai_agents_responses"])
def test_no_field_of_a_recorded_body_is_unknown(program: str) -> None:
    for body in recorded_bodies(program):
        assert len(read_response_request(json.dumps(body).encode()).input) == len(body["input"])


def test_log_probabilities_are_bounded() -> None:
    card = replace(MODEL, max_model_len=2**20)
    for limit, is_refused in ((2**12, False), (2**13, True), (None, True)):
        fields = {"input": "x", "top_logprobs": 20, "max_output_tokens": limit}
        body = read_response_request(json.dumps(fields).encode())
        if not is_refused:
            new_response(body, card)
            continue
        with pytest.raises(ApiError, match="top_logprobs"):
            new_response(body, card)


def test_a_server_that_keeps_no_answers_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ResponseRecord, "packed")  # there is nothing to be made
    card = replace(MODEL, max_kept_bytes=0)
    plan, response = new_response(read_response_request(b'{"input": "x", "store": true}'), card)
    assert response.store is False
    assert plan.states[0].request.keep is None
    body = read_response_request(b'{"input": "x", "background": true}')
    with pytest.raises(ApiError, match="has no room for any") as refusal:
        new_response(body, card)
    assert refusal.value.body.error.param == "background"


def test_a_request_without_room_in_the_store_says_so() -> None:
    body = read_response_request(json.dumps({"input": "x" * 2000}).encode())
    for most, is_kept in ((2**12, True), (2**11, False)):
        plan, response = new_response(body, replace(MODEL, max_kept_bytes=most))
        assert response.store is is_kept
        assert (plan.states[0].request.keep is not None) == is_kept


def test_unknown_fields_are_ignored_and_named() -> None:
    ignored = IgnoredFields()
    body = {
        "input": [{"role": "user", "content": "x", "colour": 1}],
        "include": ["message.output_text.logprob"],
        "max_tokens": 7,
    }
    read_response_request(json.dumps(body).encode(), ignored)
    for name in ("max_tokens", "input.colour", "include.message.output_text.logprob"):
        assert name in str(ignored)


def test_the_response_repeats_the_request() -> None:
    fields = {
        "instructions": "Be brief.",
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "name": "weather"},
        "text": {"format": SCHEMA},
        "metadata": {"a": "b"},
        "reasoning": {"effort": "low"},
        "temperature": 0.5,
        "max_output_tokens": 9,
        "user": "u",
        "parallel_tool_calls": False,
    }
    body = read_response_request(json.dumps({"input": "x", **fields}).encode())
    found = json.loads(json_response(200, echo_of(body, MODEL)).body)
    for name, value in fields.items():
        if isinstance(value, dict) and name not in ("metadata", "tool_choice"):
            assert found[name] | value == found[name] or name == "text"
        else:
            assert found[name] == value, name
    assert found["text"]["format"] == SCHEMA
    Response.model_validate(found)


def test_a_tool_as_chats_have_it_is_repeated_as_responses_do() -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    body = read_response_request(json.dumps({"input": "x", "tools": [tool]}).encode())
    [echoed] = msgspec.json.decode(echo_of(body, MODEL).tools)
    assert echoed == {"type": "function", "name": "weather", "parameters": {}}


# what agents' libraries send, written down from what they do
AGENTS: dict[str, dict[str, Any]] = {
    "openai-agents": {
        "model": "fake",
        "instructions": "You look things up.",
        "input": [
            {"role": "user", "content": "x"},
            {
                "id": "rs_1",
                "summary": [],
                "type": "reasoning",
                "content": [{"text": "hm", "type": "reasoning_text"}],
                "encrypted_content": None,
                "status": "completed",
            },
            {
                "arguments": "{}",
                "call_id": "call_1",
                "name": "weather",
                "type": "function_call",
                "id": "fc_1",
                "status": "completed",
            },
            {"call_id": "call_1", "output": "snow", "type": "function_call_output"},
        ],
        "include": [],
        "tools": [{**WEATHER, "description": "Tells the weather."}],
        "parallel_tool_calls": True,
        "stream": True,
        "store": True,
        "metadata": {"run": "1"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "low"},
        "truncation": "auto",
        "prompt_cache_retention": "24h",
    },
    "codex": {
        "model": "fake",
        "instructions": "You write code.",
        "input": [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "Rules."}],
            },
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "Go."}],
            },
        ],
        "tools": [WEATHER],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "text": {"verbosity": "medium"},
    },
    "ai": {
        "model": "fake",
        "input": [
            {"role": "developer", "content": "Rules."},
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {
                "role": "assistant",
                "content": [{"type": "output_text", "text": "So"}],
                "id": "msg_1",
            },
            {
                "type": "function_call",
                "call_id": "call_1",
                "name": "weather",
                "arguments": "{}",
                "id": "fc_1",
            },
            {
                "type": "function_call_output",
                "call_id": "call_1",
                "output": [{"type": "input_text", "text": "snow"}],
            },
        ],
        "temperature": 0,
        "max_output_tokens": 64,
        "text": {"format": {**SCHEMA, "description": "A place."}},
        "tools": [WEATHER],
        "tool_choice": "auto",
        "user": "u",
    },
}


@pytest.mark.parametrize("name", AGENTS)
def test_no_field_of_an_agents_body_is_unknown(name: str) -> None:
    body = read_response_request(json.dumps(AGENTS[name]).encode())
    plan, response = new_response(body, MODEL)
    assert plan.is_stream == AGENTS[name].get("stream", False)
    assert response.store == AGENTS[name].get("store", True)
    turns = submitted(plan).messages
    assert [turn.tool_call_id for turn in turns if turn.role == "tool"] == ["call_1"] * (
        name != "codex"
    )


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_output_tokens": 2**64}, "max_output_tokens"),
        ({"input": [{"role": "user", "content": "x"}] * 16385}, "input"),
        ({"input": [{"role": "user", "content": "x"}, *[CALL] * 1025]}, "input[1025]"),
    ],
)
def test_a_responses_own_field_is_named(fields: dict[str, Any], field: str) -> None:
    body = read_response_request(json.dumps({"input": "hi", **fields}).encode())
    with pytest.raises(ApiError) as caught:
        new_response(body, MODEL)
    error = caught.value.body.error
    assert error.param == field
    assert error.message.startswith(field)


def test_what_the_engine_finds_wrong_is_named_as_the_response_has_it() -> None:
    body = read_response_request(json.dumps({"input": "hi", "text": {"format": SCHEMA}}).encode())
    plan, _ = new_response(body, MODEL)
    assert plan.param_names["structured_outputs"] == "text.format"
    assert plan.param_names["max_tokens"] == "max_output_tokens"
    assert plan.param_names["messages"] == "input"


def test_of_a_wrong_choice_only_its_beginning_is_quoted() -> None:
    """All of it was written, which took a third of a second."""
    large = [[]] * 100_000
    for fields in (
        {"tool_choice": {"type": large}},
        {"tools": [{"type": large}]},
        {"tools": [WEATHER], "tool_choice": {**ALLOWED_TOOLS, "tools": [large]}},
    ):
        assert "..., allowed: " in refused(**fields).message


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1])
def test_numbers_beyond_64_bits_are_kept_as_they_are(number: int) -> None:
    tool = {**WEATHER, "parameters": {**PARAMETERS, "maximum": number}}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": {"a": number}}
    given = [{"role": "user", "content": "hi"}, call]
    body = read_response_request(json.dumps({"input": given, "tools": [tool]}).encode())
    _, response = new_response(body, MODEL)
    assert response.store is True
    kept = kept_of(response, body)
    [echoed] = json.loads(bytes(kept.begun.tools))
    assert echoed["parameters"]["maximum"] == number
    assert kept.input_items()[1].arguments == {"a": number}


def kept_of(response: ResponseObject, body: ResponsesRequest, text: str = "") -> KeptResponse:
    """What is kept of a response whose answer is `text`."""
    assert isinstance(body.input, tuple)
    record = ResponseRecord(response, body.input).packed()
    assert record is not None
    end = End("stop", 1) if text else None
    return KeptResponse(KeptAnswer(KeepOptions(record, b""), 1, end, text))


def test_arguments_are_shown_as_text() -> None:
    items = [
        {"role": "user", "content": "x"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": {"a": 1}},
        {"type": "function_call_output", "call_id": "c", "output": "y"},
        {"type": "function_call", "call_id": "d", "name": "f"},
    ]
    body = read_response_request(json.dumps({"input": items}).encode())
    _, response = new_response(body, MODEL)
    kept = kept_of(response, body).input()
    found = [kept.item(at) for at in range(len(kept))]
    shown = [shown_item(item, item_id) for item_id, item in found]
    calls = [each["arguments"] for each in shown if each["type"] == "function_call"]
    assert calls == ['{"a":1}', "{}"]


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_a_page_of_the_input_costs_what_it_shows(
    monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """All items were made for each page, of thousands, while all streams waited."""
    items = [{"role": "user", "content": f"{number}"} for number in range(250)]
    body = read_response_request(json.dumps({"input": items}).encode())
    _, response = new_response(body, MODEL)
    kept = kept_of(response, body)
    made: list[str] = []

    def shown(item: Any, item_id: str) -> dict[str, Any]:
        made.append(item_id)
        return shown_item(item, item_id)

    monkeypatch.setattr(response_endpoints, "shown_item", shown)
    read: list[int] = []
    item_of = KeptInput.item

    def item(self: KeptInput, index: int) -> tuple[str, InputItem]:
        read.append(index)
        return item_of(self, index)

    monkeypatch.setattr(KeptInput, "item", item)
    texts: list[str] = []
    query, has_more = {"limit": "100", "order": order}, True
    while has_more:
        num_read = len(read)
        answers: list[HttpResponse] = []
        exchange: Any = SimpleNamespace(respond=answers.append)
        response_endpoints._list_items(kept, query, exchange)
        page = json.loads(answers[0].body)
        assert len(page["data"]) == len(made) <= 100
        assert len(read) - num_read <= len(made) + 2
        assert (page["first_id"], page["last_id"]) == (made[0], made[-1])
        texts += [item["content"][0]["text"] for item in page["data"]]
        query, has_more = {**query, "after": page["last_id"]}, page["has_more"]
        made.clear()
    expected = [item["content"] for item in items]
    assert texts == (expected if order == "asc" else expected[::-1])


OURS = [f"msg_{key * 32}{place}" for key in "12" for place in ("i0000", "0000")]


@examples(given=st.lists(st.sampled_from(["", "x", *OURS, 'q"\\', "é"]), max_size=6))
def test_an_item_of_the_input_is_found_by_the_id_that_is_shown(given: list[str]) -> None:
    items = [{"role": "user", "content": "x", **({"id": each} if each else {})} for each in given]
    body = read_response_request(json.dumps({"input": items}).encode())
    kept = kept_of(structs.replace(echo_of(body, MODEL), id="resp_" + "1" * 32), body).input()
    shown = [kept.item(at)[0] for at in range(len(kept))]
    for item_id in {*shown, "nothing", "msg_" + "1" * 32 + "i00ff", "i0000"}:
        found = kept.find(item_id)
        if item_id in shown:
            assert found is not None
            assert shown[found] == item_id
        else:
            assert found is None


def test_references_hold_what_they_name_and_nothing_else() -> None:
    """32 references of 2.5 KB in all held 350 MiB: all items of the inputs of 32 responses."""
    items = [{"type": "reasoning"}] * 10_000 + [{"role": "user", "content": "x"}]
    body = read_response_request(json.dumps({"input": items}).encode())
    references, answers = [], {}
    for number in range(32):
        stream_id = f"{number:032x}"
        answers[stream_id] = kept_of(
            structs.replace(echo_of(body, MODEL), id=f"resp_{stream_id}"), body, "a text"
        )
        references.append({"type": "item_reference", "id": f"msg_{stream_id}0000"})
    naming = read_response_request(json.dumps({"input": references}).encode())
    named = Named(naming)
    assert named.stream_ids == tuple(answers)
    tracemalloc.start()
    try:
        for stream_id, kept in answers.items():
            named.add(stream_id, kept)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 2**17
    assert peak < 2**18
    assert [item.content[0].text for item in context_of(naming, named)] == ["a text"] * 32
    with pytest.raises(ApiError, match="one before names it"):
        context_of(naming, named)


def test_what_a_request_names_is_bounded_in_bytes() -> None:
    body = read_response_request(b'{"input": [{"role": "user", "content": "x"}]}')
    references = [{"type": "item_reference", "id": f"msg_{n:032x}0000"} for n in range(3)]
    named = Named(read_response_request(json.dumps({"input": references}).encode()))
    text = "x" * (MAX_RECALLED_BYTES // 2 - 200)
    for number, stream_id in enumerate(named.stream_ids):
        begun = structs.replace(echo_of(body, MODEL), id=f"resp_{stream_id}")
        if number < 2:
            named.add(stream_id, kept_of(begun, body, text))
            continue
        with pytest.raises(ApiError, match=f"takes more than {MAX_RECALLED_BYTES} bytes"):
            named.add(stream_id, kept_of(begun, body, text))


def test_a_context_has_as_many_items_as_a_chat_has_turns() -> None:
    items = [{"type": "reasoning"}] * MAX_CHAT_TURNS + [{"role": "user", "content": "x"}]
    body = read_response_request(json.dumps({"input": items}).encode())
    with pytest.raises(ApiError, match=f"got {MAX_CHAT_TURNS + 1} items, allowed: at most"):
        new_response(body, MODEL)
