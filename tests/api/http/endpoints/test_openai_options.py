"""Every option that the official client has and this server serves, on completions and chats,
synchronous and not, streamed and not, against the native client and a real (bundled) model.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from tests.helpers.patience import PATIENCE_S
from tests.helpers.stacks import spareless_stack

from slipstream import Client, SamplingParams, Stack, StructuredOutputs

pytestmark = pytest.mark.process

PROMPT = "In Python, a list is"
TURNS = [{"role": "user", "content": "What is a list?"}]
SCHEMA = {"enum": ["a statement", "an expression"]}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
NO_ARGUMENTS = [{"type": "function", "function": {"name": "look", "parameters": NOTHING}}]

# what the client is given, and the same for the native one
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "n": ({"n": 3, "seed": 4, "temperature": 1}, {"n": 3, "seed": 4, "temperature": 1}),
    "stop": ({"stop": ["a ", "."]}, {"stop": ("a ", ".")}),
    "seed": ({"seed": 11, "temperature": 1.5}, {"seed": 11, "temperature": 1.5}),
    "top_p": (
        {"top_p": 0.5, "seed": 1, "temperature": 1},
        {"top_p": 0.5, "seed": 1, "temperature": 1},
    ),
    "presence_penalty": ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
    "frequency_penalty": ({"frequency_penalty": 1.9}, {"frequency_penalty": 1.9}),
    "logit_bias": ({"logit_bias": {"300": 100}}, {"logit_bias": {300: 100}}),
    "response_format": (
        {"response_format": AS_SCHEMA},
        {"structured_outputs": StructuredOutputs(json=SCHEMA)},
    ),
    "extra": ({"extra_body": {"repetition_penalty": 1.3}}, {"repetition_penalty": 1.3}),
    "extra_stop": ({"extra_body": {"min_tokens": 3, "top_k": 5}}, {"min_tokens": 3, "top_k": 5}),
}


class Said(NamedTuple):
    texts: list[str]
    reasons: list[str]
    num_prompt: int
    num_output: int


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with spareless_stack(http_port=0) as running:
        yield running


@pytest.fixture(scope="module")
def native(stack: Stack) -> Iterator[Client]:
    with stack.client() as client:
        yield client


def whole_of(answer: Any, is_chat: bool) -> Said:
    texts = [each.message.content if is_chat else each.text for each in answer.choices]
    assert [each.index for each in answer.choices] == list(range(len(texts)))
    reasons = [each.finish_reason for each in answer.choices]
    return Said(texts, reasons, answer.usage.prompt_tokens, answer.usage.completion_tokens)


def streamed_of(chunks: list[Any], is_chat: bool, n: int) -> Said:
    *chunks, last = chunks
    assert last.choices == []
    texts, reasons = [""] * n, [""] * n
    for chunk in chunks:
        assert chunk.usage is None
        for choice in chunk.choices:
            assert not reasons[choice.index]  # nothing comes behind the end
            texts[choice.index] += (choice.delta.content if is_chat else choice.text) or ""
            reasons[choice.index] = choice.finish_reason or ""
    return Said(texts, reasons, last.usage.prompt_tokens, last.usage.completion_tokens)


def expected(native: Client, is_chat: bool, options: dict[str, Any]) -> Said:
    given = {"temperature": 0, "max_tokens": 24, **options}
    params = SamplingParams(**given)
    whole = native.generate(TURNS if is_chat else PROMPT, params)
    choices = whole.choices
    return Said(
        [each.text for each in choices],
        [str(each.finish_reason) for each in choices],
        len(whole.prompt_token_ids),
        sum(each.num_tokens for each in choices),
    )


def call_of(one: Any, is_chat: bool) -> Any:
    return one.chat.completions.create if is_chat else one.completions.create


@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_way_of_asking_says_what_the_native_client_says(stack, native, name, is_chat):
    given, ours = OPTIONS[name]
    n = given.get("n", 1)
    if name == "response_format" and not is_chat:
        given = {"extra_body": given}  # the client's method has no such argument
    prompt = {"messages": TURNS} if is_chat else {"prompt": PROMPT}
    ask = {"model": native.model.name, "temperature": 0, "max_tokens": 24, **prompt, **given}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    truth = expected(native, is_chat, ours)
    url = f"{stack.http_address}/v1"

    async def main() -> tuple[Said, Said]:
        async with AsyncOpenAI(base_url=url, api_key="x", max_retries=0, timeout=PATIENCE_S) as one:
            call = call_of(one, is_chat)
            whole = whole_of(await call(**ask), is_chat)
            chunks = [chunk async for chunk in await call(**ask, **stream)]
            return whole, streamed_of(chunks, is_chat, n)

    with OpenAI(base_url=url, api_key="x", max_retries=0, timeout=PATIENCE_S) as one:
        call = call_of(one, is_chat)
        assert whole_of(call(**ask), is_chat) == truth
        assert streamed_of(list(call(**ask, **stream)), is_chat, n) == truth
    assert asyncio.run(main()) == (truth, truth)
    if name == "response_format":
        assert json.loads(truth.texts[0]) in SCHEMA["enum"]


def test_a_helper_parses_what_was_asked_for(stack, native):
    with OpenAI(
        base_url=f"{stack.http_address}/v1", api_key="x", max_retries=0, timeout=PATIENCE_S
    ) as one:
        options: dict[str, Any] = {"model": native.model.name, "max_tokens": 24}
        answer = one.chat.completions.create(
            messages=TURNS, response_format=AS_SCHEMA, tools=TOOLS, tool_choice="none", **options
        )
        assert json.loads(answer.choices[0].message.content) in SCHEMA["enum"]
        for wanted in ("required", {"type": "function", "function": {"name": "look"}}):
            answer = one.chat.completions.create(
                messages=TURNS,
                tools=NO_ARGUMENTS,
                tool_choice=wanted,
                parallel_tool_calls=False,  # as many as fit into its tokens otherwise
                **options,
            )
            [call] = answer.choices[0].message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("look", {})


# ---- log-probabilities of prompts --------------------------------------------------------------


def check_prompt(shown: Any, found: Any, k: int) -> None:
    assert len(shown) == len(found)
    assert shown[0] is None
    for entry, truth in zip(shown[1:], found[1:], strict=True):
        assert set(entry) == {str(token_id) for token_id in truth}
        assert k <= len(entry) <= k + 1
        for token_id, each in truth.items():
            value = entry[str(token_id)]
            assert value["logprob"] == pytest.approx(each.logprob, abs=1e-4)
            assert value["rank"] == each.rank
            assert isinstance(value["decoded_token"], str)


@pytest.mark.parametrize("k", [0, 3])
def test_log_probabilities_of_prompts(stack, native, k):
    body = {"prompt_logprobs": k}
    options = {"temperature": 0, "max_tokens": 2, "prompt_logprobs": k}
    with OpenAI(
        base_url=f"{stack.http_address}/v1", api_key="x", max_retries=0, timeout=PATIENCE_S
    ) as one:
        given: dict[str, Any] = {"model": native.model.name, "temperature": 0, "max_tokens": 2}
        prompts = [PROMPT, "Lambda"]
        answer = one.completions.create(prompt=prompts, n=2, seed=1, extra_body=body, **given)
        for choice in answer.choices:
            truth = native.generate(prompts[choice.index // 2], **options).prompt_logprobs
            check_prompt(choice.prompt_logprobs, truth, k)
        chat = one.chat.completions.create(messages=TURNS, n=2, extra_body=body, **given)
        truth = native.generate(TURNS, **options).prompt_logprobs
        check_prompt(chat.prompt_logprobs, truth, k)
        assert "prompt_logprobs" not in chat.choices[0].model_dump()
        echoed = one.completions.create(
            prompt=PROMPT, echo=True, logprobs=1, extra_body=body, **given
        ).choices[0]
        truth = native.generate(PROMPT, **options).prompt_logprobs
        check_prompt(echoed.prompt_logprobs, truth, k)
        assert all(len(top) <= 2 for top in echoed.logprobs.top_logprobs[1:])
        plain = one.completions.create(prompt=PROMPT, **given).choices[0]
        assert plain.model_dump()["prompt_logprobs"] is None
        for call, prompt in (
            (one.completions.create, {"prompt": PROMPT}),
            (one.chat.completions.create, {"messages": TURNS}),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                call(**prompt, extra_body={"prompt_logprobs": 21}, **given)
            assert caught.value.param == "prompt_logprobs"
