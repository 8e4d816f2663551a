"""Chats with a model that reasons, over HTTP: budgets, and grammars of what follows reasoning."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from tests.helpers.http_front import Raw
from tests.helpers.patience import PATIENCE_S
from tests.helpers.stacks import spareless_stack
from tokenizers import AddedToken, Tokenizer

from slipstream import BadRequestError, Stack
from slipstream.demo_model import MODEL_PATH

pytestmark = pytest.mark.process

THOUGHT = "I think about it for a long while, and then about something else"
OBJECT = '{"name": "Ada"}'
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
ASTRAY = (
    '<tool_call>\n{"name": "look", "arguments": {"at": "up", "far": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {"when": [1]}}\n</tool_call>'
)
ANSWERS = [
    {"when": "astray", "text": f"<think>{THOUGHT}</think>\nLet me see: <[{{ \n{ASTRAY}"},
    {"when": "object", "text": f"<think>{THOUGHT}</think>\n\n{OBJECT}"},
    {"when": "call", "text": f"<think>{THOUGHT}</think>\n{CALL}"},
    {"when": "two", "text": f"<think>{THOUGHT}</think>\n{CALL}\n{CALL}"},
    {"when": "behind a line", "text": f"\n<think>{THOUGHT}</think>\n{CALL}"},
    {"when": "at once", "text": OBJECT},
    {"when": "cut", "text": f"<think>{THOUGHT}"},
]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: "
    "{% if thinking is defined and thinking %}<think>{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}}}
SCHEMA |= {"required": ["name"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "now"}}]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("model")
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copy(MODEL_PATH / name, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    literals = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    tokenizer.add_tokens([AddedToken(each, special=False) for each in literals])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "answers.jsonl").write_text("\n".join(map(json.dumps, ANSWERS)))
    with spareless_stack(
        f"simulated:step_ms=2,answers={folder}/answers.jsonl",
        tokenizer=str(folder),
        http_port=0,
        max_restarts=100,
        served_model_name="demo",
        reasoning_format="qwen3",
        tool_format="hermes",
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{stack.http_address}/v1", api_key="x", max_retries=0, timeout=PATIENCE_S
    ) as one:
        yield one


def ask(client: OpenAI, what: str, **options: Any) -> Any:
    extra = {
        name: options.pop(name)
        for name in ("thinking_token_budget", "thinking", "enable_thinking", "top_k")
        if name in options
    }
    return client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": what}],
        max_tokens=200,
        extra_body=extra,
        **options,
    )


def streamed(client: OpenAI, what: str, pid: int | None = None, **options: Any) -> tuple[str, str]:
    """Reasoning and content; process `pid` is killed when reasoning has begun."""
    reasoning = content = ""
    for chunk in ask(client, what, stream=True, **options):
        [choice] = chunk.choices
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        content += choice.delta.content or ""
        if pid is not None and len(reasoning) > 10:
            os.kill(pid, signal.SIGKILL)
            pid = None
    assert pid is None
    return reasoning, content


@pytest.mark.parametrize("budget", [0, 1, 5, 1000, -1])
def test_a_budget_bounds_reasoning(client: OpenAI, budget: int) -> None:
    whole = ask(client, "object")
    num = whole.usage.completion_tokens_details.reasoning_tokens
    assert num > 5
    answer = ask(client, "object", thinking_token_budget=budget)
    limited = answer.choices[0].message
    reasoning = getattr(limited, "reasoning_content", None) or ""
    within = min(num, budget) if budget >= 0 else num
    assert answer.usage.completion_tokens_details.reasoning_tokens == within
    assert THOUGHT.startswith(reasoning)
    assert (reasoning == THOUGHT) == (within == num)
    assert limited.content


@pytest.mark.parametrize("path", ["chat", "messages"])
def test_a_target_of_other_apis_is_a_budget(stack: Stack, client: OpenAI, path: str) -> None:
    thinking = {"type": "enabled", "budget_tokens": 3}
    if path == "chat":
        message = ask(client, "object", thinking=thinking).choices[0].message
        reasoning = message.reasoning_content
    else:
        body = {"model": "demo", "max_tokens": 200, "thinking": thinking, "temperature": 0}
        body["messages"] = [{"role": "user", "content": "object"}]
        with Raw(int(stack.http_address.rpartition(":")[2])) as raw:
            raw.post("/v1/messages", body)
            reasoning = raw.read().json["content"][0]["thinking"]
    limited = ask(client, "object", thinking=True, thinking_token_budget=3).choices[0].message
    assert reasoning == limited.reasoning_content != THOUGHT


def test_a_schema_is_of_what_follows_reasoning(stack: Stack, client: OpenAI) -> None:
    whole = ask(client, "object", response_format=FORMAT).choices[0].message
    assert whole.reasoning_content == THOUGHT
    assert json.loads(whole.content) == {"name": "Ada"}
    expected = (whole.reasoning_content, whole.content)
    for role in ("core", "worker"):
        assert streamed(client, "object", stack.pids[role], response_format=FORMAT) == expected


def test_a_schema_holds_behind_a_budget(client: OpenAI) -> None:
    whole = ask(client, "object", response_format=FORMAT, thinking_token_budget=2)
    assert whole.usage.completion_tokens_details.reasoning_tokens == 2
    assert json.loads(whole.choices[0].message.content).keys() == {"name"}


def test_reasoning_that_would_stop_goes_on_to_its_end(client: OpenAI) -> None:
    """The end of the answer is not allowed before the object."""
    options: dict[str, Any] = {"response_format": FORMAT, "thinking_token_budget": 60}
    whole = ask(client, "cut", **options)
    assert whole.usage.completion_tokens_details.reasoning_tokens <= 60
    assert whole.choices[0].message.reasoning_content.startswith(THOUGHT)
    assert json.loads(whole.choices[0].message.content).keys() == {"name"}


def test_a_schema_applies_at_once_where_nothing_is_reasoned(client: OpenAI) -> None:
    for options in ({}, {"enable_thinking": False}, {"thinking_token_budget": 0}):
        whole = ask(client, "at once", response_format=FORMAT, **options).choices[0].message
        assert not getattr(whole, "reasoning_content", None)
        assert whole.content == OBJECT
    closed = ask(client, "object", response_format=FORMAT, enable_thinking=False).choices[0]
    assert not getattr(closed.message, "reasoning_content", None)
    assert json.loads(closed.message.content).keys() == {"name"}


def test_a_prompt_may_open_reasoning(client: OpenAI) -> None:
    whole = ask(client, "at once", response_format=FORMAT, thinking=True, thinking_token_budget=3)
    assert whole.usage.completion_tokens_details.reasoning_tokens == 3
    assert OBJECT.startswith(whole.choices[0].message.reasoning_content)
    assert json.loads(whole.choices[0].message.content).keys() == {"name"}


@pytest.mark.parametrize("budget", [None, 4])
def test_a_forced_call_follows_reasoning(client: OpenAI, budget: int | None) -> None:
    options: dict[str, Any] = {} if budget is None else {"thinking_token_budget": budget}
    [choice] = ask(client, "call", tools=TOOLS, tool_choice="required", **options).choices
    assert THOUGHT.startswith(choice.message.reasoning_content)
    assert (choice.message.reasoning_content == THOUGHT) == (budget is None)
    assert not choice.message.content
    assert [each.function.name for each in choice.message.tool_calls] == ["now"]
    assert choice.finish_reason == "tool_calls"


def test_a_budget_is_refused_where_it_cannot_be_kept(stack: Stack, client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="without messages") as caught:
        client.completions.create(
            model="demo", prompt="object", extra_body={"thinking_token_budget": 3}
        )
    assert caught.value.param == "thinking_token_budget"
    with pytest.raises(openai.BadRequestError, match="-2") as caught:
        ask(client, "object", thinking_token_budget=-2)
    assert caught.value.param == "thinking_token_budget"
    with stack.client() as native:
        turns = [{"role": "user", "content": "object"}]
        answer = native.generate(turns, max_tokens=50, thinking_token_budget=2)
        assert answer.choices[0].reasoning
        with pytest.raises(BadRequestError, match="allowed_token_ids") as ours:
            native.generate(turns, thinking_token_budget=2, allowed_token_ids=[5])
        assert ours.value.field == "thinking_token_budget"


LOOK = {"type": "object", "properties": {"at": {"enum": ["north", "south"]}}, "required": ["at"]}
LOOK |= {"additionalProperties": False}


def tools(*, is_strict: bool) -> list[dict[str, Any]]:
    look = {"name": "look", "parameters": LOOK, "strict": is_strict}
    return [*TOOLS, {"type": "function", "function": look}]


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(it.function.name, it.function.arguments) for it in message.tool_calls or ()]


def test_a_strict_function_is_called_by_its_schema(stack: Stack, client: OpenAI) -> None:
    """The model writes arguments that the schema does not allow."""
    free = ask(client, "astray", tools=tools(is_strict=False)).choices[0].message
    assert calls_of(free) == [("look", '{"at": "up", "far": 1}'), ("now", '{"when": [1]}')]
    assert free.content.startswith("Let me see: <[{")
    strict = ask(client, "astray", tools=tools(is_strict=True)).choices[0].message
    assert strict.reasoning_content == THOUGHT
    assert strict.content.startswith("Let me see: <[{")
    name, arguments = calls_of(strict)[0]
    assert name == "look"
    assert json.loads(arguments) in ({"at": "north"}, {"at": "south"})


def test_one_call_at_most(stack: Stack, client: OpenAI) -> None:
    options: dict[str, Any] = {"tools": tools(is_strict=False), "parallel_tool_calls": False}
    one = ask(client, "astray", **options).choices[0].message
    assert [name for name, _ in calls_of(one)] == ["look"]
    assert one.content.startswith("Let me see: <[{")
    with pytest.raises(openai.BadRequestError, match="parallel_tool_calls"):
        client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "astray"}],
            extra_body={"min_tokens": 3},
            **options,
        )


@pytest.mark.parametrize("role", ["core", "worker"])
@pytest.mark.parametrize("options", [{}, {"parallel_tool_calls": False}])
def test_a_death_in_a_strict_call_changes_nothing(
    stack: Stack, client: OpenAI, role: str, options: dict[str, Any]
) -> None:
    options = {"tools": tools(is_strict=True), **options}
    expected = calls_of(ask(client, "astray", **options).choices[0].message)
    pid: int | None = stack.pids[role]
    found: list[tuple[str, str]] = []
    for chunk in ask(client, "astray", stream=True, **options):
        for part in chunk.choices[0].delta.tool_calls or ():
            if part.index == len(found):
                found.append((part.function.name, ""))
            name, arguments = found[part.index]
            found[part.index] = name, arguments + (part.function.arguments or "")
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                pid = None
    assert pid is None
    assert found == expected


@pytest.mark.parametrize("is_parallel", [True, False])
def test_a_schema_beside_tools_leaves_the_choice_to_the_model(
    client: OpenAI, is_parallel: bool
) -> None:
    """An agent's request: it calls its tools until it knows what to answer."""
    options: dict[str, Any] = {"response_format": FORMAT, "tools": tools(is_strict=False)}
    options["parallel_tool_calls"] = is_parallel
    [choice] = ask(client, "call", **options).choices
    assert choice.message.reasoning_content == THOUGHT
    assert calls_of(choice.message) == [("now", "{}")]
    assert not choice.message.content
    assert choice.finish_reason == "tool_calls"
    for what in ("object", "at once"):
        [choice] = ask(client, what, **options).choices
        assert not choice.message.tool_calls
        assert json.loads(choice.message.content) == {"name": "Ada"}
        assert choice.finish_reason == "stop"
    message = ask(client, "behind a line", **options).choices[0].message  # as GLM 4.5 writes
    assert message.reasoning_content == THOUGHT
    assert calls_of(message) == [("now", "{}")]
    message = ask(client, "two", **options).choices[0].message
    assert calls_of(message) == [("now", "{}")] * (2 if is_parallel else 1)
    assert not message.content


@pytest.mark.parametrize("role", ["core", "worker"])
@pytest.mark.parametrize("what", ["call", "object"])
def test_a_death_changes_neither_calls_nor_the_schema(
    stack: Stack, client: OpenAI, role: str, what: str
) -> None:
    options: dict[str, Any] = {"response_format": FORMAT, "tools": tools(is_strict=True)}
    message = ask(client, what, **options).choices[0].message
    expected = message.reasoning_content, message.content or "", calls_of(message)
    pid: int | None = stack.pids[role]
    reasoning, content, found = "", "", []
    for chunk in ask(client, what, stream=True, **options):
        delta = chunk.choices[0].delta
        reasoning += getattr(delta, "reasoning_content", None) or ""
        content += delta.content or ""
        found += [(it.function.name, it.function.arguments) for it in delta.tool_calls or ()]
        if pid is not None and reasoning == THOUGHT:
            os.kill(pid, signal.SIGKILL)
            pid = None
    assert pid is None
    names = [name for name, _ in found if name]
    arguments = "".join(part or "" for _, part in found)
    calls = [(name, arguments) for name in names]
    assert (reasoning, content, calls) == expected


def test_a_choice_beside_tools_is_the_whole_content(client: OpenAI) -> None:
    """Blanks before it would be content. The device may choose a call, too, as a model may."""
    extra = {"structured_outputs": {"choice": ["yes", "no"]}}
    found = set()
    for each in ANSWERS:
        answer = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": each["when"]}],
            max_tokens=200,
            tools=TOOLS,
            extra_body=extra,
        )
        found.add(answer.choices[0].message.content or None)
    assert found - {None}
    assert found <= {None, "yes", "no"}


def test_what_cannot_be_kept_to_is_named(client: OpenAI) -> None:
    """The tools, or the form of the answer."""
    wrong = {"type": "object", "properties": {"at": {"type": "array", "uniqueItems": True}}}
    strict = {"name": "now", "strict": True, "parameters": wrong}
    given = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": wrong}}
    for options, field in (
        ({"tools": [{"type": "function", "function": strict}], "response_format": FORMAT}, "tools"),
        ({"tools": TOOLS, "response_format": given}, "response_format"),
    ):
        with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
            ask(client, "call", **options)
        assert caught.value.param == field
