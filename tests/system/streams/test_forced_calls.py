"""Forced calls of a real model over HTTP: whole, streamed, and with a death in their middle."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from tests.helpers.patience import PATIENCE_S
from tests.helpers.stacks import spareless_stack
from tokenizers import Tokenizer

from slipstream import BadRequestError, Stack
from slipstream_lab.formats.rendering import SampleCall, render
from slipstream_verify.chaos.workload.played_formats import PLAYED_FORMATS, write_tokenizer

NOTE = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "minLength": 60, "maxLength": 80},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["text", "count"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "write_note", "parameters": NOTE}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "write_note"}}
AS_TEXT = {"type": "text"}
HEADER = "x-slipstream-ignored-fields"
TURNS = [{"role": "user", "content": "What is a list?"}]
CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": TURNS,
    "tools": TOOLS,
    "max_tokens": 400,
    "temperature": 1,
    "seed": 5,
}
Calls = tuple[list[tuple[str, str]], str | None, str | None]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    settings: dict[str, Any] = {"tool_format": "hermes", "reasoning_format": "none"}
    with spareless_stack(
        http_port=0, max_restarts=100, served_model_name="demo", **settings
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{stack.http_address}/v1", api_key="x", max_retries=0, timeout=PATIENCE_S
    ) as one:
        yield one


def whole(client: OpenAI, **options: Any) -> Calls:
    [choice] = client.chat.completions.create(**{**CHAT, **options}).choices
    calls = [(it.function.name, it.function.arguments) for it in choice.message.tool_calls or ()]
    return calls, choice.message.content, choice.finish_reason


def streamed(client: OpenAI, pid: int | None = None, **options: Any) -> Calls:
    """The same from deltas; process `pid` is killed when arguments have begun."""
    calls: list[tuple[str, str]] = []
    content, reason = "", None
    with client.chat.completions.create(**{**CHAT, **options}, stream=True) as stream:
        for chunk in stream:
            [choice] = chunk.choices
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for part in choice.delta.tool_calls or ():
                if part.index == len(calls):
                    calls.append((part.function.name, ""))
                name, arguments = calls[part.index]
                calls[part.index] = name, arguments + (part.function.arguments or "")
                if pid is not None and len(calls[part.index][1]) > 20:
                    os.kill(pid, signal.SIGKILL)
                    pid = None
    assert pid is None
    return calls, content or None, reason


@pytest.mark.process
def test_a_named_function_is_called_whatever_dies(stack: Stack, client: OpenAI) -> None:
    expected = whole(client, tool_choice=NAMED)
    [(name, arguments)], content, reason = expected
    assert (name, content, reason) == ("write_note", None, "tool_calls")
    note = json.loads(arguments)
    assert note.keys() == {"text", "count"}
    assert 60 <= len(note["text"]) <= 80
    assert streamed(client, tool_choice=NAMED) == expected
    assert streamed(client, stack.pids["core"], tool_choice=NAMED) == expected
    assert streamed(client, stack.pids["worker"], tool_choice=NAMED) == expected


@pytest.mark.process
def test_the_input_of_a_custom_tool_keeps_to_its_pattern(client: OpenAI) -> None:
    pattern = "[a-z]{3}-[0-9]{2,4}"
    grammar = {"syntax": "regex", "definition": pattern}
    tool = {"name": "note_it", "format": {"type": "grammar", "grammar": grammar}}
    options: dict[str, Any] = {
        "tools": [{"type": "custom", "custom": tool}],
        "tool_choice": {"type": "custom", "custom": {"name": "note_it"}},
    }
    response = client.chat.completions.with_raw_response.create(**{**CHAT, **options})
    assert "x-slipstream-ignored-fields" not in response.headers
    [choice] = response.parse().choices
    [call] = choice.message.tool_calls or ()
    assert (call.type, choice.finish_reason) == ("custom", "tool_calls")
    assert call.custom.name == "note_it"
    assert re.fullmatch(pattern, call.custom.input)
    pieces: list[Any] = []
    for chunk in client.chat.completions.create(**{**CHAT, **options}, stream=True):
        pieces += chunk.choices[0].delta.tool_calls or ()
    assert "".join([piece.custom["input"] for piece in pieces]) == call.custom.input
    answered: Any = client.responses.create(
        model="demo",
        input=TURNS,  # type: ignore[arg-type]
        tools=[{"type": "custom", "name": "note_it", "format": {"type": "grammar", **grammar}}],  # type: ignore[list-item]
        tool_choice={"type": "custom", "name": "note_it"},
        max_output_tokens=400,
    )
    [item] = answered.output
    assert (item.type, item.name) == ("custom_tool_call", "note_it")
    assert re.fullmatch(pattern, item.input)


COSTLY = "(?:[^\\n]{0,3000}\\n)+"
COMBINED = {"allOf": [{"anyOf": [{"required": [f"{n}{m}"]} for m in "abcde"]} for n in range(9)]}
OF_COMBINED = {"type": "object", "properties": {"x": COMBINED}}


def costly_tool(kind: str, *, is_chat: bool) -> dict[str, Any]:
    """A tool whose grammar costs too much, as chats or as responses have it."""
    if kind == "function":
        given: dict[str, Any] = {"name": "costs", "parameters": OF_COMBINED, "strict": False}
    else:
        grammar = {"syntax": "regex", "definition": COSTLY}
        of_format = {"grammar": grammar} if is_chat else grammar
        given = {"name": "costs", "format": {"type": "grammar", **of_format}}
    return {"type": kind, kind: given} if is_chat else {"type": kind, **given}


@pytest.mark.process
@pytest.mark.parametrize(
    ("format_name", "kind"),
    [("qwen3_coder", "custom"), ("hermes", "custom"), ("hermes", "function")],
)
def test_what_costs_too_much_of_a_tool_is_left_out_and_named(
    tmp_path: Path, format_name: str, kind: str
) -> None:
    """A custom tool's format where the model may call it, and a function's schema where it has to:
    in chats and responses, whole and streamed.
    """
    write_tokenizer(tmp_path / "model", PLAYED_FORMATS[format_name])
    model = f"simulated:step_ms=1,mode=chain,tokenizer={tmp_path / 'model'}"
    forced = {"tool_choice": "required", "extra_body": {"stop_token_ids": [0]}}
    kinds: dict[str, tuple[dict[str, Any], str]] = {
        "custom": ({}, "tools.costs.parameters.properties.input.pattern"),
        "function": (forced, "tools.costs.parameters"),
    }
    fields, path = kinds[kind]
    with (
        spareless_stack(
            model, http_port=0, served_model_name="demo", tool_format=format_name
        ) as stack,
        OpenAI(
            base_url=f"{stack.http_address}/v1", api_key="x", max_retries=0, timeout=PATIENCE_S
        ) as client,
    ):
        chats = client.chat.completions.with_streaming_response
        responses = client.responses.with_streaming_response
        for is_stream in (False, True):
            options: dict[str, Any] = {"model": "demo", "stream": is_stream, **fields}
            tools: Any = [costly_tool(kind, is_chat=True)]
            with chats.create(messages=TURNS, tools=tools, max_tokens=8, **options) as chat:  # type: ignore[arg-type]
                assert chat.headers.get(HEADER) == path
            tools = [costly_tool(kind, is_chat=False)]
            with responses.create(
                input="What is a list?", tools=tools, max_output_tokens=16, **options
            ) as answered:
                assert answered.headers.get(HEADER) == path
        if kind == "function":
            strict: Any = costly_tool(kind, is_chat=True)
            strict["function"]["strict"] = True
            with pytest.raises(openai.BadRequestError, match="schema too large"):
                client.chat.completions.create(
                    model="demo",
                    messages=TURNS,  # type: ignore[arg-type]
                    tools=[strict],
                    **forced,  # type: ignore[call-overload]
                )


@pytest.mark.parametrize("seed", range(3))
def test_a_call_of_any_function_is_required(client: OpenAI, seed: int) -> None:
    options: dict[str, Any] = {
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "seed": seed,
    }
    expected = whole(client, **options)
    [(name, arguments)], content, reason = expected
    assert (content, reason) == (None, "tool_calls")
    assert isinstance(json.loads(arguments), dict)
    assert name in ("write_note", "now")
    assert streamed(client, **options) == expected


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "fields"), [("qwen3_coder", {"stop_token_ids": [0]}), ("harmony", {})]
)
def test_calls_are_forced_in_formats_that_are_not_json(
    name: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    write_tokenizer(tmp_path / "model", PLAYED_FORMATS[name])
    model = f"simulated:step_ms=1,mode=chain,tokenizer={tmp_path / 'model'}"
    with (
        spareless_stack(
            model, http_port=0, served_model_name="demo", tool_format=name, max_restarts=9
        ) as stack,
        OpenAI(
            base_url=f"{stack.http_address}/v1", api_key="x", max_retries=0, timeout=PATIENCE_S
        ) as client,
    ):
        options: dict[str, Any] = {"tool_choice": NAMED, "extra_body": fields}
        for seed in range(3):
            expected = whole(client, seed=seed, **options)
            [(called, arguments)], content, reason = expected
            note = json.loads(arguments)
            assert (called, content, reason) == ("write_note", None, "tool_calls")
            assert note.keys() == {"text", "count"}
            assert 60 <= len(note["text"]) <= 80
            assert note["count"] in range(10)
        city = {"type": "object", "properties": {"city": {"type": "string", "pattern": "^[A-Z]"}}}
        tools = [{"type": "function", "function": {"name": "write_note", "parameters": city}}]
        response = client.chat.completions.with_raw_response.create(
            **{**CHAT, **options, "tools": tools}
        )
        is_json = name == "harmony"
        path = None if is_json else "tools.write_note.parameters.properties.city.pattern"
        assert response.headers.get("x-slipstream-ignored-fields") == path
        assert streamed(client, stack.pids["worker"], seed=seed, **options) == expected


@pytest.mark.process
def test_structured_output_of_channels_is_their_content(tmp_path: Path) -> None:
    """Behind a header, as the model was trained to write."""
    write_tokenizer(tmp_path / "model", PLAYED_FORMATS["harmony"])
    model = f"simulated:step_ms=1,mode=chain,tokenizer={tmp_path / 'model'}"
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    channel = tokenizer.token_to_id("<|channel|>")
    schema = {"type": "json_schema", "json_schema": {"name": "note", "schema": NOTE}}
    options: dict[str, Any] = {"response_format": schema, "tools": [], "max_tokens": 300}
    with (
        spareless_stack(
            model, http_port=0, served_model_name="demo", tool_format="harmony", max_restarts=9
        ) as stack,
        OpenAI(
            base_url=f"{stack.http_address}/v1", api_key="x", max_retries=0, timeout=PATIENCE_S
        ) as client,
    ):
        num_whole = 0
        for seed in range(8):
            [choice] = client.chat.completions.create(
                **{**CHAT, **options, "seed": seed}, extra_body={"return_token_ids": True}
            ).choices
            assert choice.token_ids[0] == channel  # type: ignore[attr-defined]
            calls, content, reason = whole(client, seed=seed, **options)
            assert not calls
            if reason == "stop":  # else it reasons to the end, as a random model may
                assert json.loads(content or "").keys() == {"text", "count"}
                num_whole += 1
                assert streamed(client, seed=seed, **options) == (calls, content, reason)
        assert num_whole


@pytest.mark.process
@pytest.mark.parametrize("what", ["forced", "strict", "structured"])
def test_a_budget_holds_where_all_of_a_channels_answer_is_in_a_grammar(
    tmp_path: Path, what: str
) -> None:
    write_tokenizer(tmp_path / "model", PLAYED_FORMATS["harmony"])
    schema = {"type": "json_schema", "json_schema": {"name": "note", "schema": NOTE}}
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]  # type: ignore[dict-item]
    options: dict[str, Any] = {
        "forced": {"tool_choice": NAMED},
        "strict": {"tools": strict},
        "structured": {"response_format": schema, "tools": []},
    }[what]
    thought = "I think about it for a long while, and then about something else"
    played = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
    (tmp_path / "answers.jsonl").write_text(json.dumps({"when": "list", "text": played}))
    model = f"simulated:step_ms=1,answers={tmp_path / 'answers.jsonl'}"
    with (
        spareless_stack(
            model,
            tokenizer=str(tmp_path / "model"),
            http_port=0,
            served_model_name="demo",
            tool_format="harmony",
        ) as stack,
        OpenAI(
            base_url=f"{stack.http_address}/v1", api_key="x", max_retries=0, timeout=PATIENCE_S
        ) as client,
    ):

        def ask(budget: int) -> Any:
            extra = {"thinking_token_budget": budget}
            fields = {**CHAT, **options, "temperature": 0, "extra_body": extra}
            return client.chat.completions.create(**fields)

        for budget in (0, 1, 5, -1):
            answer = ask(budget)
            [choice] = answer.choices
            num = answer.usage.completion_tokens_details.reasoning_tokens
            assert num == budget if budget >= 0 else num > 5
            reasoning = getattr(choice.message, "reasoning_content", None) or ""
            assert thought.startswith(reasoning[: len(thought)])
            if what == "structured" and choice.finish_reason == "stop":
                assert json.loads(choice.message.content).keys() == {"text", "count"}
            elif what == "forced":
                assert [it.function.name for it in choice.message.tool_calls] == ["write_note"]


EDITS = 'start: line+\nline: ("+" | "-") /[a-z]{1,9}/ LF\n%import common.LF\n'
WRONG = "+a\n*b\n-c\n"


@pytest.mark.parametrize(
    ("name", "reasoning"), [("hermes", "qwen3"), ("qwen3_coder", "none"), ("hermes", "none")]
)
@pytest.mark.process
def test_a_custom_tools_format_is_enforced_where_the_model_calls_it(
    tmp_path: Path, name: str, reasoning: str
) -> None:
    """The device plays a call that is wrong, but for what it may not sample. The bundled vocabulary
    has the delimiters as text: calls within it begin with text, reasoning is followed by tokens.
    """
    written = render(name, (SampleCall("edit", {"input": WRONG}),))
    if reasoning != "none":
        write_tokenizer(tmp_path / "model", PLAYED_FORMATS["hermes"])
    played = f"A line is wrong: *b\n{written}"
    (tmp_path / "answers.jsonl").write_text(json.dumps({"text": played}))
    lark = {"type": "grammar", "syntax": "lark", "definition": EDITS}
    with (
        spareless_stack(
            f"simulated:step_ms=1,answers={tmp_path / 'answers.jsonl'}",
            http_port=0,
            served_model_name="demo",
            tool_format=name,
            reasoning_format=reasoning,
            **({} if reasoning == "none" else {"tokenizer": str(tmp_path / "model")}),
        ) as stack,
        OpenAI(
            base_url=f"{stack.http_address}/v1", api_key="x", max_retries=0, timeout=PATIENCE_S
        ) as client,
    ):
        inputs = []
        for given in ({}, {"format": lark}):
            tools: Any = [
                {"type": "custom", "name": "edit", **given},
                {"type": "function", "name": "now"},
            ]
            raw = client.responses.with_raw_response.create(
                model="demo", input="Edit it.", tools=tools, max_output_tokens=400
            )
            assert raw.headers.get("x-slipstream-ignored-fields") is None
            text, call, *_ = raw.parse().output
            assert text.content[0].text == "A line is wrong: *b"
            assert (call.type, call.name) == ("custom_tool_call", "edit")
            inputs.append(call.input)
    free, kept = inputs
    assert free == WRONG
    assert re.fullmatch(r"([+-][a-z]{1,9}\n)+", kept)
    assert kept.startswith("+a\n")


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_response_format_is_of_content_which_forced_calls_have_not(
    client: OpenAI, choice: Any
) -> None:
    """Agents with a typed result send it with every request, the first one's choice is required."""
    schema = {"type": "json_schema", "json_schema": {"name": "note", "schema": NOTE}}
    expected = whole(client, tool_choice=choice, seed=3)
    assert expected[0]
    assert whole(client, tool_choice=choice, seed=3, response_format=schema) == expected


def test_the_native_client_forces_calls(stack: Stack) -> None:
    with stack.client() as native:
        answer = native.generate(TURNS, tools=TOOLS, tool_choice=NAMED, max_tokens=400)
        [call] = answer.choices[0].tool_calls
        assert (call.name, call.status) == ("write_note", "complete")
        with pytest.raises(BadRequestError, match="without tools") as caught:
            native.generate(TURNS, tool_choice="required")
        assert caught.value.field == "tool_choice"


@pytest.mark.parametrize(
    ("options", "param", "why"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice", "'no'"),
        ({"tools": []}, "tool_choice", "without tools"),
        (
            {"extra_body": {"structured_outputs": {"json_object": True}}},
            "tool_choice",
            "structured_outputs",
        ),
        (
            {"extra_body": {"structured_outputs": {"regex": "a"}}, "response_format": AS_TEXT},
            "tool_choice",
            "structured_outputs",
        ),
        ({"extra_body": {"min_tokens": 1}}, "tool_choice", "min_tokens"),
        (
            {"messages": [*TURNS, {"role": "assistant", "content": '<tool_call>{"name": "now"'}]}
            | {"extra_body": {"continue_final_message": True, "add_generation_prompt": False}},
            "tool_choice",
            "begun a call",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "strict": True, "parameters": {"$ref": "#/no"}},
                    }
                ]
            },
            "tools",
            "cannot be forced",
        ),
    ],
)
def test_what_cannot_be_forced_is_refused(
    client: OpenAI, options: dict[str, Any], param: str, why: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=why) as caught:
        whole(client, **{"tool_choice": "required", **options})
    assert caught.value.param == param
