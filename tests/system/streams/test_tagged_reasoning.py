"""Chats with a model whose reasoning and calls stand between tags of several tokens, over HTTP."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from tests.helpers.chat_templates import TAG_TOKENS, TAGS
from tests.helpers.patience import PATIENCE_S
from tests.helpers.stacks import spareless_stack
from tokenizers import AddedToken, Tokenizer

from slipstream import Stack
from slipstream.demo_model import MODEL_PATH

pytestmark = pytest.mark.process

THOUGHT = "I think about it for a long while, and then about something else"
END, RESPONSE = "<|close|>think<|sep|>", "<|open|>response<|sep|>"
OBJECT = '{"name": "Ada"}'
CLOSED = "<|close|>response<|sep|>"


def call(name: str, *arguments: tuple[str, str, str]) -> str:
    """key, type, value of each argument."""
    parts = "".join(
        f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
        for key, kind, value in arguments
    )
    return f'<|open|>call tool="{name}" index="1"<|sep|>{parts}<|close|>call<|sep|>'


ASTRAY = call("look", ("at", "string", "up"), ("far", "number", "1"))
NOW = call("now")
SAYS = f"{THOUGHT}{END}{RESPONSE}Let me see: {CLOSED}"
ANSWERS = [
    {
        "when": "astray",
        "text": f"{SAYS}<|open|>tools<|sep|>{ASTRAY}{NOW}<|close|>tools<|sep|>"
        f"<|open|>tools<|sep|>{NOW}<|close|>tools<|sep|><|close|>message<|sep|>",
    },
    {"when": "object", "text": f"{THOUGHT}{END}{RESPONSE}{OBJECT}{CLOSED}<|close|>message<|sep|>"},
    {"when": "bare", "text": f"{THOUGHT}{END}{OBJECT}"},
    {"when": "call", "text": f"{THOUGHT}{END}<|open|>tools<|sep|>{NOW}<|close|>tools<|sep|>"},
    {"when": "cut", "text": THOUGHT + "<|close|>"},
]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}}}
SCHEMA |= {"required": ["name"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
LOOK = {"type": "object", "properties": {"at": {"enum": ["north", "south"]}}, "required": ["at"]}
LOOK |= {"additionalProperties": False}


def tools(*, is_strict: bool) -> list[dict[str, Any]]:
    look = {"name": "look", "parameters": LOOK, "strict": is_strict}
    functions = [{"name": "now"}, look]
    return [{"type": "function", "function": function} for function in functions]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("model")
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copy(MODEL_PATH / name, folder)
    (folder / "chat_template.jinja").write_text(TAGS)
    tokenizer = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(each, special=True) for each in TAG_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "answers.jsonl").write_text("\n".join(map(json.dumps, ANSWERS)))
    with spareless_stack(
        f"simulated:step_ms=2,answers={folder}/answers.jsonl",
        tokenizer=str(folder),
        http_port=0,
        max_restarts=100,
        served_model_name="demo",
        reasoning_format="kimi_k3",
        tool_format="kimi_k3",
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{stack.http_address}/v1", api_key="x", max_retries=0, timeout=PATIENCE_S
    ) as one:
        yield one


def ask(client: OpenAI, what: str, budget: int | None = None, **options: Any) -> Any:
    return client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": what}],
        max_tokens=200,
        extra_body={} if budget is None else {"thinking_token_budget": budget},
        **options,
    )


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(it.function.name, it.function.arguments) for it in message.tool_calls or ()]


def streamed(
    client: OpenAI, what: str, pid: int | None, **options: Any
) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content and calls; process `pid` is killed when an eleventh character is there."""
    reasoning = content = ""
    calls: list[tuple[str, str]] = []
    for chunk in ask(client, what, stream=True, **options):
        [choice] = chunk.choices
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        content += choice.delta.content or ""
        for part in choice.delta.tool_calls or ():
            if part.index == len(calls):
                calls.append((part.function.name, ""))
            name, arguments = calls[part.index]
            calls[part.index] = name, arguments + (part.function.arguments or "")
        if pid is not None and len(reasoning) > 10:
            os.kill(pid, signal.SIGKILL)
            pid = None
    assert pid is None
    return reasoning, content, calls


@pytest.mark.parametrize("budget", [0, 1, 5, 1000])
def test_a_budget_bounds_reasoning(client: OpenAI, budget: int) -> None:
    num = ask(client, "object").usage.completion_tokens_details.reasoning_tokens
    assert num > 5
    answer = ask(client, "object", budget)
    reasoning = getattr(answer.choices[0].message, "reasoning_content", None) or ""
    assert answer.usage.completion_tokens_details.reasoning_tokens == min(num, budget)
    assert THOUGHT.startswith(reasoning)
    assert (reasoning == THOUGHT) == (budget >= num)
    assert answer.choices[0].message.content


@pytest.mark.parametrize("what", ["object", "bare", "cut"])
@pytest.mark.parametrize("budget", [None, 3])
def test_a_schema_is_of_what_follows_reasoning(
    stack: Stack, client: OpenAI, what: str, budget: int | None
) -> None:
    budget = 60 if what == "cut" and budget is None else budget
    answer = ask(client, what, budget, response_format=FORMAT)
    whole, num = answer.choices[0].message, answer.usage.completion_tokens_details.reasoning_tokens
    assert whole.reasoning_content.startswith(THOUGHT) == (budget != 3)
    assert num == 3 if budget == 3 else num > 5
    assert json.loads(whole.content).keys() == {"name"}
    expected = (whole.reasoning_content, whole.content, [])
    if budget is None:
        assert whole.content == OBJECT
        for role in ("core", "worker"):
            given = streamed(client, what, stack.pids[role], response_format=FORMAT)
            assert given == expected


@pytest.mark.parametrize("budget", [None, 4])
def test_a_forced_call_follows_reasoning(client: OpenAI, budget: int | None) -> None:
    options: dict[str, Any] = {"tools": tools(is_strict=False), "tool_choice": "required"}
    [choice] = ask(client, "call", budget, **options).choices
    assert THOUGHT.startswith(choice.message.reasoning_content)
    assert (choice.message.reasoning_content == THOUGHT) == (budget is None)
    assert calls_of(choice.message)[:1] == [("now", "{}")] or budget is not None
    assert choice.message.tool_calls
    if choice.finish_reason == "tool_calls":  # else a random model calls on and on
        assert not choice.message.content
    assert budget is not None or choice.finish_reason == "tool_calls"


def test_a_strict_function_is_called_by_its_schema(client: OpenAI) -> None:
    """The model writes arguments that the schema does not allow."""
    free = ask(client, "astray", tools=tools(is_strict=False)).choices[0].message
    assert calls_of(free) == [("look", '{"at": "up", "far": 1}'), ("now", "{}"), ("now", "{}")]
    assert free.content == "Let me see:"
    strict = ask(client, "astray", tools=tools(is_strict=True)).choices[0].message
    assert strict.reasoning_content == THOUGHT
    assert strict.content.startswith(free.content)
    name, arguments = calls_of(strict)[0]
    assert name == "look"
    assert json.loads(arguments) in ({"at": "north"}, {"at": "south"})


@pytest.mark.parametrize("role", ["core", "worker"])
def test_one_call_at_most_whatever_dies(stack: Stack, client: OpenAI, role: str) -> None:
    options: dict[str, Any] = {"tools": tools(is_strict=False), "parallel_tool_calls": False}
    one = ask(client, "astray", **options).choices[0].message
    assert [name for name, _ in calls_of(one)] == ["look"]
    expected = (one.reasoning_content, one.content, calls_of(one))
    assert streamed(client, "astray", stack.pids[role], **options) == expected
